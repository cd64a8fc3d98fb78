"""Make a gated model bilinear without training, or with little: layer by layer, on a text.

Each layer is fitted on the outputs of the layers before it, which have linear gates already. The
target is the output of its own gated MLP at these inputs. No gradient leaves a layer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from bilens.checks import check_weights, checked
from bilens.convert.gates import (
    LINEAR_NAME,
    activation_key,
    find_swish,
    gated_mlps,
    mark_linear,
)
from bilens.errors import BilensError
from bilens.nn.language_settings import LanguageSettings
from bilens.progress import progress_bar
from bilens.residual.layers import MLP
from bilens.residual.parts import working_dtype
from bilens.settings import NotNegative
from bilens.train.layer_fit import BATCH, Fit, FitRows, LayerRuns, fit_mlp
from bilens.train.settings import Distillation

RIDGE = 2.0
"""Ridge towards the original down map, for one hidden unit per calibration token.

With fewer tokens a unit's fitted column is less certain, so the ridge grows in proportion."""
CLOSED_FORM = Distillation(steps=0)


@dataclass(frozen=True)
class Linearised:
    """Loss of a model before and after its gates became linear, in nats a token.

    Losses are those of held-out texts.

    Attributes:
        before: loss of the original model.
        after: loss with the gates of `layers` linear.
        layers: layers with linear gates.
        alone: loss with the gates of a single layer linear, without distillation, by layer; empty
            if it was not measured.
        fits: errors of each of `layers`.
    """

    before: float
    after: float
    layers: tuple[int, ...]
    alone: dict[int, float]
    fits: dict[int, Fit]


@checked
def linearise(
    model: PreTrainedModel,
    texts: Int[Tensor, "texts time"],
    held_out: Int[Tensor, "held_out held_out_time"],
    layers: Sequence[int] | None = None,
    *,
    budget: NotNegative | None = None,
    distillation: Distillation | None = None,
    alone: bool = True,
) -> Linearised:
    """Make the gates of a model linear, in place: bilinear layers, from one text and no labels.

    For each hidden unit a line a g + b replaces the activation. It minimises

        E[(act(g) - a g - b)^2 u^2 / |s|^2],   s: input stream of the layer

    and a is folded into the gate's weights, b into its biases. Then the down map is fitted to the
    gated MLP's outputs by ridge regression.

    Cost: three forward passes over `texts`, and a Gram matrix of the hidden units of each layer.
    `alone` doubles it and adds a pass over `held_out` for each layer.

    Args:
        model: any causal language model whose MLPs are up(x) * activation(gate(x)).
        texts: calibration texts, in the model's tokens.
        held_out: other texts, for the losses.
        layers: layers to make linear; all by default.
        budget: greatest rise of the loss, in nats, before any distillation. Layers are taken in the
            order of their `alone` losses, as many as stay within it together.
        distillation: settings of a training of each layer by itself; none by default.
        alone: measure the loss with each single layer linear, too; a budget needs it.

    Raises:
        BilensError: the model is not gated or not as it was trained, an argument does not fit it,
            or a distillation diverges.
        CheckpointError: a weight is NaN or infinite.
    """
    check_weights(model)
    mlps = gated_mlps(model)
    _check_activation(model)
    selected = sorted(set(range(len(mlps)) if layers is None else layers))
    if not selected or selected[0] < 0 or selected[-1] >= len(mlps):
        raise BilensError(f"layers={layers}, expected some of 0 to {len(mlps) - 1}")
    if isinstance(model.config, LanguageSettings) and (budget or len(selected) < len(mlps)):
        raise BilensError(
            f"layers={layers}, budget={budget}: a model of bilens has one kind of MLP; expected "
            "all layers, without a budget"
        )
    for name, ids in (("texts", texts), ("held_out", held_out)):
        _check_tokens(name, ids, model.config.vocab_size)
    texts, held_out = (ids.to(model.device) for ids in (texts, held_out))
    before = next_token_loss(model, held_out)
    losses: dict[int, float] = {}

    def measure(layer: int) -> None:
        losses[layer] = next_token_loss(model, held_out)

    if alone or budget is not None:
        _fit(model, mlps, texts, selected, CLOSED_FORM, measure)
    if budget is not None:
        order = sorted(selected, key=lambda layer: losses[layer])

        def within(subset: list[int]) -> bool:
            with _restored(mlps, subset):
                _fit(model, mlps, texts, subset, CLOSED_FORM)
                return next_token_loss(model, held_out) <= before + budget

        selected = _most_within(order, within)
    fits = _fit(model, mlps, texts, selected, distillation or CLOSED_FORM)
    if selected:
        mark_linear(model, mlps, selected)
    return Linearised(before, next_token_loss(model, held_out), tuple(selected), losses, fits)


@torch.no_grad()
def next_token_loss(model: PreTrainedModel, texts: Int[Tensor, "texts time"]) -> float:
    """Return the mean loss of the next token over all texts, in nats."""
    total = 0.0
    for batch in texts.split(BATCH):
        logits = model(batch, use_cache=False).logits[:, :-1]
        total += float(
            functional.cross_entropy(
                logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum"
            )
        )
    return total / (texts.numel() - len(texts))


def _fit(
    model: PreTrainedModel,
    mlps: list[MLP],
    texts: Int[Tensor, "texts time"],
    layers: Sequence[int],
    distillation: Distillation,
    alone: Callable[[int], None] | None = None,
) -> dict[int, Fit]:
    """Fit layers in order, each on the outputs of those before it.

    With `alone` each layer is fitted by itself, measured by that function, and restored.
    """
    if not layers:
        return {}
    runs, fits = LayerRuns(model, mlps, texts), {}
    with progress_bar() as bar:
        task = bar.add_task("layers alone" if alone else "layers", total=len(layers), note="")
        for layer in range(max(layers) + 1):
            reads, writes, stream = runs.run(layer)
            if layer in layers:
                dtype = working_dtype(stream.dtype)
                size = stream.to(dtype).square().mean(-1)
                rows = FitRows(reads, writes.to(dtype), 1 / (size + 1e-6 * size.mean()))
                with _restored(mlps, [layer] if alone else []):
                    ridge = RIDGE * mlps[layer].up.n_out / len(reads)
                    fits[layer] = fit_mlp(mlps[layer], rows, ridge, distillation)
                    if alone is not None:
                        alone(layer)
                bar.advance(task)
            runs.advance(layer, changed=layer in fits and alone is None)
    return fits


def _most_within(order: list[int], fits: Callable[[list[int]], bool]) -> list[int]:
    """Return the longest prefix of `order` that fits a budget, sorted; by bisection."""
    within, beyond = 0, len(order) + 1
    while beyond - within > 1:
        count = (within + beyond) // 2
        if fits(order[:count]):
            within = count
        else:
            beyond = count
    return sorted(order[:within])


@contextmanager
def _restored(mlps: list[MLP], layers: Sequence[int]) -> Iterator[None]:
    """Restore the weights, biases and activations of layers at the end of the block."""
    activations = [(mlps[layer], mlps[layer].activation_function()) for layer in layers]
    parts = [part.module for mlp, _ in activations for part in (*mlp.reads, mlp.down)]
    stored = [(module, deepcopy(module._parameters)) for module in parts]
    try:
        yield
    finally:
        for module, parameters in stored:
            module._parameters.update(parameters)
        for mlp, activation in activations:
            setattr(mlp.module, mlp.activation, activation)


def _check_activation(model: PreTrainedModel) -> None:
    key = activation_key(model.config)
    name = getattr(model.config, key)
    if name in (LINEAR_NAME, "linear", "bilinear") or find_swish(model.config) is not None:
        raise BilensError(
            f"{key}={name!r} in the model's configuration: the model is bilinear already, at least "
            "in part; expected a model with the activation that it was trained with"
        )


def _check_tokens(name: str, texts: Int[Tensor, "texts time"], vocab_size: int) -> None:
    if not len(texts) or texts.shape[1] < 2:
        raise BilensError(
            f"{name} has shape {tuple(texts.shape)}, expected at least one text of two tokens"
        )
    least, most = int(texts.min()), int(texts.max())
    if least < 0 or most >= vocab_size:
        raise BilensError(
            f"{name} holds the number {least if least < 0 else most}, expected token ids from 0 to "
            f"{vocab_size - 1}"
        )

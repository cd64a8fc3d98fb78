"""Make a gated model bilinear without training it, or with a little: layer by layer, on a text.

Each layer is fitted on what the layers before it, already linear, hand it, to give there what its
own gated MLP gives. No gradient leaves a layer.
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
from bilens.convert.gated import gated_mlps
from bilens.convert.linear_gates import NAME, mark_linear
from bilens.convert.swish import activation_key, find_swish
from bilens.errors import BilensError
from bilens.progress import progress_bar
from bilens.residual.layers import MLP
from bilens.residual.parts import working_dtype
from bilens.settings import NotNegative
from bilens.train.layer_fit import BATCH, Distillation, Fit, FitRows, LayerRuns, fit_mlp

__all__ = ["Distillation", "Fit", "Linearised", "linearise", "next_token_loss"]

RIDGE = 2.0
"""How strongly down maps are held where they were, times hidden units for each calibration token:
the fewer tokens a hidden unit has, the less its column is to be believed."""
CLOSED_FORM = Distillation(steps=0)


@dataclass(frozen=True)
class Linearised:
    """What making a model's gates linear did to its loss, in nats a token on held-out texts.

    Attributes:
        before: loss of the model as it was.
        after: loss with the gates of `layers` linear.
        layers: whose gates are linear now.
        alone: loss with the gates of one layer linear and all else as it was, for each layer that
            was asked for, fitted without distillation; empty where that was not measured.
        fits: how near each of `layers` is to what it was.
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

    For each hidden unit the line that minimises E[(act(g) - a g - b)^2 u^2 / |s|^2] takes the place
    of the activation, s being the stream in front of the layer; a goes into the gate's weights, b
    into its biases. Then the down map is fitted to the gated MLP's outputs by ridge regression.
    Costs three forward passes over `texts` and one Gram matrix of the hidden units a layer; `alone`
    as much again and a pass over `held_out` for each layer.

    Args:
        model: any causal language model whose MLPs are up(x) * activation(gate(x)).
        texts: calibration texts, in the model's tokens.
        held_out: other texts, for the losses.
        layers: whose gates; all by default.
        budget: nats by which the loss may rise: layers are taken in the order of their loss alone,
            as many as stay within it together before any distillation.
        distillation: how each layer is trained in the end, by itself; by default it is not.
        alone: measure the loss with each layer linear by itself, too; a budget needs it.

    Raises:
        BilensError: the model is not gated or not as it was trained, an argument does not fit it,
            or a distillation diverges.
        CheckpointError: a weight is NaN or infinite.
    """
    check_weights(model)
    mlps = gated_mlps(model)
    _check_activation(model)
    chosen = sorted(set(range(len(mlps)) if layers is None else layers))
    if not chosen or chosen[0] < 0 or chosen[-1] >= len(mlps):
        raise BilensError(f"layers={layers}, expected some of 0 to {len(mlps) - 1}")
    for name, some in (("texts", texts), ("held_out", held_out)):
        _check_tokens(name, some, model.config.vocab_size)
    texts, held_out = (some.to(model.device) for some in (texts, held_out))
    before = next_token_loss(model, held_out)
    losses: dict[int, float] = {}

    def measure(layer: int) -> None:
        losses[layer] = next_token_loss(model, held_out)

    if alone or budget is not None:
        _fit(model, mlps, texts, chosen, CLOSED_FORM, measure)
    if budget is not None:
        order = sorted(chosen, key=lambda layer: losses[layer])

        def within(some: list[int]) -> bool:
            with _as_they_were(mlps, some):
                _fit(model, mlps, texts, some, CLOSED_FORM)
                return next_token_loss(model, held_out) <= before + budget

        chosen = _most_within(order, within)
    fits = _fit(model, mlps, texts, chosen, distillation or CLOSED_FORM)
    if chosen:
        mark_linear(model, mlps, chosen)
    return Linearised(before, next_token_loss(model, held_out), tuple(chosen), losses, fits)


@torch.no_grad()
def next_token_loss(model: PreTrainedModel, texts: Int[Tensor, "texts time"]) -> float:
    """Mean loss of the next token over all texts, in nats."""
    total = 0.0
    for some in texts.split(BATCH):
        logits = model(some, use_cache=False).logits[:, :-1]
        total += float(
            functional.cross_entropy(
                logits.flatten(0, 1).float(), some[:, 1:].flatten(), reduction="sum"
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
    """Fit layers in their order, each on what those before it hand it; or each alone, measured."""
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
                with _as_they_were(mlps, [layer] if alone else []):
                    ridge = RIDGE * mlps[layer].up.n_out / len(reads)
                    fits[layer] = fit_mlp(mlps[layer], rows, ridge, distillation)
                    if alone is not None:
                        alone(layer)
                bar.advance(task)
            runs.go_on(layer, changed=layer in fits and alone is None)
    return fits


def _most_within(order: list[int], fits: Callable[[list[int]], bool]) -> list[int]:
    """As many of some layers, in their order, as fit within a budget; by bisection."""
    within, beyond = 0, len(order) + 1
    while beyond - within > 1:
        count = (within + beyond) // 2
        if fits(order[:count]):
            within = count
        else:
            beyond = count
    return sorted(order[:within])


@contextmanager
def _as_they_were(mlps: list[MLP], layers: Sequence[int]) -> Iterator[None]:
    """Give layers back their weights, biases and activations afterwards."""
    kept = [(mlps[layer], mlps[layer].activation_function()) for layer in layers]
    parts = [part.module for mlp, _ in kept for part in (*mlp.reads, mlp.down)]
    stored = [(module, deepcopy(module._parameters)) for module in parts]
    try:
        yield
    finally:
        for module, parameters in stored:
            module._parameters.update(parameters)
        for mlp, activation in kept:
            setattr(mlp.module, mlp.activation, activation)


def _check_activation(model: PreTrainedModel) -> None:
    key = activation_key(model.config)
    found = getattr(model.config, key)
    if found in (NAME, "linear") or find_swish(model.config) is not None:
        raise BilensError(
            f"{key}={found!r} in the model's configuration: it is bilinear already, or partly; "
            "expected a model with the activation that it was trained with"
        )


def _check_tokens(name: str, texts: Int[Tensor, "texts time"], vocab_size: int) -> None:
    if not len(texts) or texts.shape[1] < 2:
        raise BilensError(
            f"{name} has shape {tuple(texts.shape)}, expected at least one text of two tokens"
        )
    least, most = int(texts.min()), int(texts.max())
    if least < 0 or most >= vocab_size:
        raise BilensError(
            f"{name} holds the number {least if least < 0 else most}, expected 0 to "
            f"{vocab_size - 1}, those of the model's tokens"
        )

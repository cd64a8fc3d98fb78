"""Make a gated model bilinear without training, or with little: layer by layer, on a text.

Each layer is fitted on the outputs of the layers before it, which have linear gates already. The
target is the output y of its own gated MLP at these inputs x. No gradient leaves a layer. A row
counts by w = 1 / |s|^2 with s the layer's input stream. Later norms divide by the size of the
stream, so this measures an error by its effect on later layers. A few tokens have a much larger
stream than the others. In the layer that makes their stream large they count like any token; in
later layers they do not outweigh the others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, TrainerCallback, TrainerState

from bilens.checks import check_numbers, check_weights, checked
from bilens.convert import Swish, gates, give_swish
from bilens.data import Corpus
from bilens.errors import BilensError
from bilens.nn.settings import LanguageSettings
from bilens.progress import progress_bar
from bilens.settings import NotNegative
from bilens.train.layers import (
    BATCH,
    CHUNK,
    LayerStreams,
    TrainingRows,
    learn_layer,
    teach,
    working_folder,
)
from bilens.train.settings import SCHEDULES, AnnealTraining, Distillation
from bilens.train.trainer import Stage, check_vocabulary, shape_of
from bilens.transformer.layers import MLP
from bilens.transformer.maps import working_dtype
from bilens.transformer.tokens import max_tokens

RIDGE = 2.0
"""Ridge towards the original down map, for one hidden unit per calibration token.

With fewer tokens a unit's fitted column is less certain, so the ridge grows in proportion."""
TINY = 1e-30


@dataclass(frozen=True)
class Fit:
    """Errors of a layer with linear gates relative to the gated layer, on the calibration text.

    Attributes:
        lines: share of sum w (u act(g))^2 that the lines leave unexplained.
        distance: sqrt(sum w |y - y'|^2 / sum w |y|^2), of the MLP's output.
    """

    lines: float
    distance: float


@torch.no_grad()
def fit_mlp(mlp: MLP, rows: TrainingRows, ridge: float) -> float:
    """Make an MLP bilinear, in place, and return `Fit.lines`.

    `rows` are inputs x, targets y and weights w. An infinite `ridge` leaves its down map unchanged.
    """
    assert mlp.gate is not None
    device = mlp.down.stored.device
    sums = torch.zeros(6, mlp.gate.n_out, dtype=torch.float64, device=device)
    for x, _, w in rows.chunks(device):
        up, gate = (part.select(part.module(x).mT).mT for part in (mlp.up, mlp.gate))
        sums += gates.gate_sums(up * w[:, None].sqrt(), gate, mlp.act(gate))
    line = gates.best_line(sums)
    gates.set_line(mlp, line)
    if ridge < torch.inf:
        _fit_down(mlp, rows, ridge)
    return line.error


@torch.no_grad()
def weighted_squares(module: Any, rows: TrainingRows) -> tuple[float, float]:
    """Return sum w |y - y'|^2 for the outputs y' of a module, and sum w |y|^2."""
    sums = torch.zeros(2, dtype=torch.float64)
    for x, y, w in rows.chunks(next(module.parameters()).device):
        parts = [w[:, None] * part.square() for part in (module(x) - y, y)]
        sums += torch.stack([part.sum(dtype=torch.float64) for part in parts]).cpu()
    error, energy = sums.tolist()
    return error, max(energy, TINY)


@torch.no_grad()
def _fit_down(mlp: MLP, rows: TrainingRows, ridge: float) -> None:
    """Set the down map D to the minimiser of a sum over the rows.

        sum w |D h + c - y|^2 + ridge sum_i E_i |D_i - D0_i|^2,   E_i = sum w h_i^2

    for the hidden units h = u (a g + b), with D0 the original map and c its bias.
    """
    down = mlp.down
    before, bias = down.weight().double(), down.bias()
    gram = before.new_zeros(before.shape[1], before.shape[1])
    cross = torch.zeros_like(before)
    for x, y, w in rows.chunks(before.device):
        up, gate = (part.select(part.module(x).mT).mT for part in mlp.reads[::-1])
        root = w[:, None].sqrt()
        h = (up * gate).to(root.dtype) * root
        gram += (h.mT @ h).double()
        cross += (((y if bias is None else y - bias) * root).mT @ h).double()
    energy = gram.diagonal()
    keep = ridge * energy + energy.mean() * 1e-9 + TINY
    # Energies of units differ by many orders of magnitude. With unit diagonal the condition number
    # of the Gram matrix is near the least that scaling of rows and columns allows.
    size = (energy + keep).rsqrt()
    matrix = (gram + torch.diag(keep)) * size * size[:, None]
    right_side = (cross + before * keep) * size
    down.set_weight(torch.linalg.solve(matrix, right_side, left=False) * size)


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
    run: Path | None = None,
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
        distillation: settings of a training of each layer by itself; none by default. It is one of
            the Trainer: processes, ctrl-C and checkpoints are as in `train_language`.
        alone: measure the loss with each single layer linear, too; a budget needs it.
        run: folder for the layers that have learned, and for checkpoints. Layers that are there
            already are opened, so a call with the same arguments resumes.

    Raises:
        BilensError: the model is not gated or not as it was trained, an argument does not fit it,
            or a distillation diverges.
        CheckpointError: a weight is NaN or infinite.
    """
    check_weights(model)
    mlps, indices = gated_layers(model, layers, budget)
    for name, ids in (("texts", texts), ("held_out", held_out)):
        _check_tokens(name, ids, model.config)
    held_out = held_out.to(model.device)
    before = next_token_loss(model, held_out)
    losses: dict[int, float] = {}

    def measure(layer: int) -> None:
        losses[layer] = next_token_loss(model, held_out)

    closed_form = Distillation(steps=0)
    if alone or budget is not None:
        name = "each layer alone: fit and loss"
        _fit(model, mlps, texts, indices, closed_form, name=name, alone=measure)
    if budget is not None:
        order = sorted(indices, key=lambda layer: losses[layer])

        def within(subset: list[int]) -> bool:
            with _restored(mlps, subset):
                name = f"{len(subset)} layers within the budget"
                _fit(model, mlps, texts, subset, closed_form, name=name)
                return next_token_loss(model, held_out) <= before + budget

        indices = _most_within(order, within)
    fits = _fit(model, mlps, texts, indices, distillation or closed_form, run, name="linear gates")
    if indices:
        gates.mark_linear(model, mlps, indices)
    return Linearised(before, next_token_loss(model, held_out), tuple(indices), losses, fits)


def gated_layers(
    model: PreTrainedModel, layers: Sequence[int] | None = None, budget: float | None = None
) -> tuple[list[MLP], list[int]]:
    """Return the gated MLPs of a model, and its layers whose gates are to become linear.

    Needs no texts, so that a command refuses before it reads any.

    Raises:
        BilensError: the model is not gated or not as it was trained, or has no such layers.
    """
    mlps = gates.gated_mlps(model)
    _check_activation(model)
    indices = sorted(set(range(len(mlps)) if layers is None else layers))
    if not indices or indices[0] < 0 or indices[-1] >= len(mlps):
        raise BilensError(f"layers={layers}, expected some of 0 to {len(mlps) - 1}")
    is_own = isinstance(model.config, LanguageSettings)
    if is_own and (budget is not None or len(indices) < len(mlps)):
        raise BilensError(
            f"layers={layers}, budget={budget}: a model of bilens has one kind of MLP; expected "
            "all layers, without a budget"
        )
    return mlps, indices


@torch.no_grad()
def next_token_loss(model: PreTrainedModel, texts: Int[Tensor, "texts time"]) -> float:
    """Return the mean loss of the next token over all texts, in nats."""
    total = 0.0
    for batch in progress_bar("loss on held-out texts", texts.split(BATCH)):
        logits = model(batch, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        labels = batch[:, 1:].flatten()
        total += float(functional.cross_entropy(logits, labels, reduction="sum"))
    return total / (texts.numel() - len(texts))


def _fit(
    model: PreTrainedModel,
    mlps: list[MLP],
    texts: Int[Tensor, "texts time"],
    layers: Sequence[int],
    distillation: Distillation,
    run: Path | None = None,
    *,
    name: str,
    alone: Callable[[int], None] | None = None,
) -> dict[int, Fit]:
    """Fit layers in order, each on the outputs of those before it.

    With `alone` each layer is fitted by itself, measured by that function, and restored. Layers
    that learned in `run` before are opened.
    """
    if not layers:
        return {}
    fits: dict[int, Fit] = {}
    blocks = [model.get_submodule(mlp.name.rpartition(".")[0]) for mlp in mlps]
    with working_folder(run) as folder:
        streams = LayerStreams(model, blocks, texts, folder)
        every = range(max(layers) + 1)
        # The Trainer shows the progress of each layer.
        for layer in every if distillation.steps else progress_bar(name, every):
            if layer in layers:
                mlp, name = mlps[layer], f"gates, layer {len(fits) + 1} of {len(layers)}"

                def learn(place: Path, mlp: MLP = mlp, name: str = name) -> dict[str, float]:
                    return _learn(mlp, streams, distillation, place, name)

                with _restored(mlps, [layer] if alone else []):
                    fits[layer] = Fit(**learn_layer(run, folder, layer, mlp.module, learn))
                    gates.drop_activation(mlp)
                    if alone is not None:
                        alone(layer)
            streams.advance()
    return fits


def _learn(
    mlp: MLP, streams: LayerStreams, distillation: Distillation, run: Path, name: str
) -> dict[str, float]:
    """Make the MLP of the current layer bilinear: fit it, train it in `run`, return its `Fit`."""
    x, y = streams.seen(mlp.module)
    stream = streams.stream.flatten(0, 1)
    # By chunks: the streams of all texts may be larger than memory.
    dtype = working_dtype(stream.dtype)
    size = torch.cat([part.to(dtype).square().mean(-1) for part in stream.split(CHUNK)])
    rows = TrainingRows(x, y, 1 / (size + 1e-6 * size.mean()))
    lines = fit_mlp(mlp, rows, RIDGE * mlp.up.n_out / len(x))
    scale = weighted_squares(mlp.module, rows)[1] / y.numel()

    def loss(module: Any, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return (w[:, None] * (module(x.to(w.dtype)) - y).square()).mean() / scale

    teach(mlp.module, loss, rows, distillation, run, name)
    error, energy = weighted_squares(mlp.module, rows)
    return {"lines": lines, "distance": (error / energy) ** 0.5}


def _most_within(order: list[int], fits: Callable[[list[int]], bool]) -> list[int]:
    """Return the longest prefix of `order` that fits a budget, sorted; by bisection."""
    most, beyond = 0, len(order) + 1
    while beyond - most > 1:
        count = (most + beyond) // 2
        if fits(order[:count]):
            most = count
        else:
            beyond = count
    return sorted(order[:most])


@contextmanager
def _restored(mlps: list[MLP], layers: Sequence[int]) -> Iterator[None]:
    """Restore the weights, biases and activations of layers at the end of the block."""
    activations = [(mlps[layer], mlps[layer].activation_function()) for layer in layers]
    parts = [part.module for mlp, _ in activations for part in (*mlp.reads, mlp.down)]
    # A layer learns on copies, so its own weights are as they were.
    pairs = [(module, dict(module.named_parameters(recurse=False))) for module in parts]
    try:
        yield
    finally:
        for module, parameters in pairs:
            # Learning may have added biases.
            for name in [name for name, _ in module.named_parameters(recurse=False)]:
                module.register_parameter(name, parameters.get(name))
        for mlp, activation in activations:
            setattr(mlp.module, mlp.activation, activation)


def _check_activation(model: PreTrainedModel) -> None:
    key = gates.activation_key(model.config)
    name = getattr(model.config, key)
    if (
        name in (gates.LINEAR_NAME, "linear", "bilinear")
        or gates.find_swish(model.config) is not None
    ):
        raise BilensError(
            f"{key}={name!r} in the model's configuration: the model is bilinear already, at least "
            "in part; expected a model with the activation that it was trained with"
        )


def _check_tokens(name: str, texts: Int[Tensor, "texts time"], config: Any) -> None:
    vocab_size, most = config.vocab_size, max_tokens(config)
    if not len(texts) or not 2 <= texts.shape[1] <= most:
        raise BilensError(
            f"{name} has shape {tuple(texts.shape)}, expected at least one text, of 2 to {most} "
            "tokens, the positions of the model"
        )
    check_numbers(name, texts, vocab_size, "token ids")


def anneal(
    model: PreTrainedModel,
    corpus: Corpus,
    training: AnnealTraining,
    run: Path,
    *,
    schedule: Callable[[float], float] | None = None,
    resume: bool = False,
    use_cpu: bool = False,
) -> list[dict[str, Any]]:
    """Train a gated model in place while the beta of its Swish falls to 0, and save it in `run`.

        beta(step) = beta_0 schedule(step / (annealing * steps)),  beta_0 = 1 (SiLU), 1.702 (GELU)

    The beta depends only on the number of the step, so a resumed training has the same values.
    Processes, ctrl-C and finished runs are as in `train_language`.

    Args:
        model: any causal language model whose MLPs are up(x) * activation(gate(x)).
        corpus: texts in its tokens.
        training: settings of the training.
        run: the directory to write to; checkpoints go below it.
        schedule: function from the finished share of the annealing to the remaining share of beta;
            used in place of `training.schedule`.
        resume: resume from the newest intact checkpoint in `run`.
        use_cpu: ignore GPUs.

    Returns:
        The metrics as they were logged: the losses, each with the beta.

    Raises:
        BilensError: the model is not gated, the corpus does not fit it, the batch cannot be shared
            out evenly, or the training diverged.
        CheckpointError: a weight is NaN or infinite; or as `train_language`.
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved.

    Source: Pearce et al. 2024, section 6.3 and appendix D.
    """
    check_weights(model)
    check_vocabulary(corpus, model.config.vocab_size)
    settings: dict[str, Any] = {"model": shape_of(model.config)}
    if schedule is not None:
        settings["schedule"] = getattr(schedule, "__name__", repr(schedule))
    fall = _Fall(give_swish(model), schedule or SCHEDULES[training.schedule], training)
    stage = Stage(
        "annealing",
        model,
        corpus,
        training,
        training.steps,
        arguments={
            "lr_scheduler_type": training.decay.replace("none", "constant_with_warmup"),
            "activation_checkpointing": training.checkpointing,
        },
        settings=settings,
        # The fall of beta comes first, so that whatever follows a step has the next beta.
        options={"extra": lambda: {"beta": fall.swish.beta}, "callbacks": [fall]},
    )
    history = stage.run(run, resume=resume, use_cpu=use_cpu)
    fall.set(training.steps)
    model.eval()
    return history


class _Fall(TrainerCallback):
    """Callback that sets beta for the next step."""

    def __init__(
        self, swish: Swish, schedule: Callable[[float], float], training: AnnealTraining
    ) -> None:
        self.swish, self.schedule = swish, schedule
        self.start, self.steps = swish.beta, training.annealing * training.steps

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        self.set(state.global_step)

    on_step_end = on_train_begin

    def set(self, step: int) -> None:
        self.swish.beta = self.start * self.schedule(min(1.0, step / self.steps))

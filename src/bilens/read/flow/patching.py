"""Measured effects of heads and MLPs between two texts, and their estimates by gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bilens.analysis import Reading
from bilens.checks import checked
from bilens.read.flow.contrast import Against, Other, embedded, other_of
from bilens.read.language.names import TokenDirection
from bilens.residual import ResidualModel
from bilens.residual.running import StopForwardError
from bilens.sections import Fact, signed

Number = Callable[[Float[Tensor, "batch d_model"]], Float[Tensor, " batch"]]
"""A number of the stream after the last layer, at the last position."""
BATCH = 2**19
"""Numbers of the streams of a batch, of about 2 MB, when runs from several layers are joined."""
Hooks = Sequence[tuple[nn.Module, bool, Callable[..., Any]]]
"""Modules, whether their inputs or their outputs are changed, and the hooks that do so."""


@dataclass(frozen=True, eq=False, repr=False)
class Effects(Reading):
    """Effects of every head and MLP, at all positions, on the change of a logit.

    Attributes:
        change: the change of the logit between the texts.
        heads: effect of each head.
        mlps: effect of each MLP.
    """

    change: float
    heads: Float[Tensor, "layers heads"]
    mlps: Float[Tensor, " layers"]

    title: ClassVar[str] = "Effects between two texts"
    axes: ClassVar[dict[str, str]] = {"x": "part", "y": "effect"}

    def facts(self) -> list[Fact]:
        """Return the change of the logit, and the strongest head and MLP."""
        layer, head = divmod(int(self.heads.abs().argmax()), self.heads.shape[1])
        mlp = int(self.mlps.abs().argmax())
        return [
            ("change of the logit", self.change),
            (f"head {layer}.{head}", signed(float(self.heads[layer, head]))),
            (f"MLP {mlp}", signed(float(self.mlps[mlp]))),
        ]

    def frame(self) -> pd.DataFrame:
        """Return a row for each head and MLP, the largest |effect| first."""
        rows = [
            (f"head {layer}.{head}", layer, value)
            for layer, values in enumerate(self.heads.tolist())
            for head, value in enumerate(values)
        ]
        rows += [(f"MLP {layer}", layer, value) for layer, value in enumerate(self.mlps.tolist())]
        frame = pd.DataFrame(rows, columns=["part", "layer", "effect"])
        return frame.sort_values("effect", key=abs, ascending=False, ignore_index=True)


@checked
@torch.no_grad()
def patch(
    model: ResidualModel,
    text: str | Int[Tensor, " time"],
    token: str | TokenDirection,
    position: int = -1,
    *,
    minus: str | Sequence[str] = (),
    against: Against | None = None,
    replace: Mapping[str, str] | None = None,
) -> Effects:
    """Measure the effect of every head and MLP by activation patching, in both directions.

    One part at a time takes its output of the other text at all positions. This is done in the run
    of the text and in that of the other. Its effect is the mean of the logit's fall in the first
    and rise in the second. All parts of a layer run in one batch that starts at that layer.

    Args:
        model: any.
        text: the text.
        token: the token whose logit is taken before a soft cap, by name.
        position: the position whose next token is predicted, counted from the end if negative.
        minus: tokens whose mean logit is subtracted.
        against: the second run; see `flow`.
        replace: words of the text and their replacements in the second run.

    Raises:
        BilensError: the texts or tokens do not fit the model or each other.

    Source:
        Zhang and Nanda 2023, "Towards best practices of activation patching".
    """
    ids = model.ids(text, position)
    other = other_of(model, text, against, replace).cut(len(ids))
    if isinstance(token, str):
        token = TokenDirection(token, (minus,) if isinstance(minus, str) else tuple(minus))
    return patched_effects(stored_runs(model, ids, other), logit_of(model, token))


def logit_of(model: ResidualModel, token: TokenDirection) -> Number:
    """Return the logit, or difference of logits, before a soft cap as a function of the stream."""
    u = token.vector(model)
    return lambda x: model.parts.normalised(x.to(u)) @ u


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A run of a model on one text, from which runs can start at any layer.

    Attributes:
        model: the model.
        ids: its text.
        tokens: the embeddings of its tokens.
        calls: input and other arguments of each layer.
        mixed: mixed values of the heads of each layer, all heads side by side.
        outputs: outputs of the MLP of each layer, before a norm.
        stream: the stream after the last layer at the last position.
        by_position: outputs of the maps and MLPs, which take each position by itself.
    """

    model: ResidualModel
    ids: Int[Tensor, " time"]
    tokens: Float[Tensor, "time d_model"]
    calls: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]]
    mixed: list[Float[Tensor, "time all_heads"]]
    outputs: list[Float[Tensor, "time d_model"]]
    stream: Float[Tensor, " d_model"]
    by_position: dict[nn.Module, Float[Tensor, "time width"]]

    @contextmanager
    def prefix_kept(self, time: int) -> Iterator[None]:
        """Take the first positions of maps and MLPs from this run as long as this runs.

        Those modules compute only the other positions, which is most of a run's time. Hooks before
        a module see the other positions, and hooks after it all of them.
        """

        def cut(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (args[0][:, time:].contiguous(), *args[1:])

        with ExitStack() as stack:
            for module, output in self.by_position.items():
                start = output[:time]

                def join(_: Any, __: Any, y: Tensor, start: Tensor = start) -> Tensor:
                    return torch.cat([start.expand(len(y), -1, -1), y], 1)

                stack.enter_context(module.register_forward_pre_hook(cut))
                stack.enter_context(module.register_forward_hook(join))
            yield

    def run_from(self, layer: int, rows: int, hooks: Hooks) -> Float[Tensor, "rows d_model"]:
        """Return the last streams of a batch that starts at a layer, with outputs changed there."""
        parts = self.model.parts
        x = self.calls[layer][0].expand(rows, -1, -1)
        with ExitStack() as stack:
            for module, before, change in hooks:
                register = (
                    module.register_forward_pre_hook if before else module.register_forward_hook
                )
                stack.enter_context(register(change))
            for number in range(layer, len(parts.layers)):
                _, args, kwargs = self.calls[number]
                output = parts.layers[number].module(x, *args, **kwargs)
                x = output[0] if isinstance(output, tuple) else output
        return x[:, -1]


def stored_runs(
    model: ResidualModel, ids: Int[Tensor, " time"], other: Other
) -> tuple[StoredRun, StoredRun]:
    """Return the runs of a text and of the other."""
    return (
        stored_run(model, ids, model.parts.embed.rows(ids)),
        stored_run(model, other.ids, other.tokens),
    )


def stored_run(
    model: ResidualModel, ids: Int[Tensor, " time"], tokens: Float[Tensor, "time d_model"]
) -> StoredRun:
    """Return the run of a text whose tokens have these embeddings."""
    calls: dict[nn.Module, tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = {}
    by_position: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, _: Any, y: Tensor) -> None:
        by_position[module] = y[0]

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.pop("hidden_states")
        calls[module] = x, args[1:], kwargs

    with embedded(model, tokens), recorded_parts(model) as (mixed, outputs), ExitStack() as stack:
        for layer in model.parts.layers:
            # Queries, keys and values may be one module, whose output is kept once.
            maps = {part.module for part in (*layer.heads.reads, layer.heads.out)}
            for module in (*maps, layer.mlp.module):
                stack.enter_context(module.register_forward_hook(keep))
            stack.enter_context(layer.module.register_forward_pre_hook(record, with_kwargs=True))
        stream = last_stream(model, ids[None])
    layers = model.parts.layers
    return StoredRun(
        model=model,
        ids=ids,
        tokens=tokens,
        calls=[calls[layer.module] for layer in layers],
        mixed=[x[0] for x in mixed],
        outputs=[x[0] for x in outputs],
        stream=stream[0],
        by_position=by_position,
    )


@contextmanager
def recorded_parts(model: ResidualModel) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Collect the heads' mixed values and the MLPs' outputs of each layer, as they are computed."""
    mixed: list[Tensor] = []
    outputs: list[Tensor] = []
    with ExitStack() as stack:
        for layer in model.parts.layers:
            stack.enter_context(
                layer.heads.out.module.register_forward_pre_hook(
                    lambda _, args: mixed.append(args[0])
                )
            )
            stack.enter_context(
                layer.mlp.module.register_forward_hook(lambda _, __, y: outputs.append(y))
            )
        yield mixed, outputs


def last_stream(model: ResidualModel, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch d"]:
    """Return the streams after the last layer at the last position."""
    streams: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Any, ...]) -> None:
        streams.append(args[0][:, -1])
        # Logits of all positions would take longer than the layers of a small model.
        raise StopForwardError

    hook = model.parts.norm_or_module.register_forward_pre_hook(keep)
    with hook, suppress(StopForwardError):
        model.model(ids, use_cache=False)
    return streams[0]


def patched_effects(runs: tuple[StoredRun, StoredRun], number: Number) -> Effects:
    """Return the effects of all heads and MLPs, the mean of both directions."""
    model, width = runs[0].model, runs[0].model.n_heads + 1
    ends = [float(number(run.stream[None])[0]) for run in runs]
    total = torch.zeros(model.n_layers, width, dtype=torch.float64)
    group = max(1, BATCH // (width * runs[0].tokens.numel()))
    for run, other, end, sign in ((*runs, ends[0], 1), (*runs[::-1], ends[1], -1)):
        for first in range(0, model.n_layers, group):
            layers = range(first, min(first + group, model.n_layers))
            change = end - number(_patched_streams(run, other, layers)).double().cpu()
            total[layers.start : layers.stop] += sign / 2 * change.reshape(-1, width)
    return Effects(ends[0] - ends[1], total[:, :-1], total[:, -1])


def _patched_streams(
    run: StoredRun, other: StoredRun, layers: range
) -> Float[Tensor, "rows d_model"]:
    """Return the last streams of runs that each have a head or MLP of these layers of the other.

    A row is added for every head and for the MLP when the batch comes to its layer.
    """
    parts, n_heads = run.model.parts, run.model.n_heads
    # Texts are equal up to their first different token, and so is everything computed there.
    start = int((run.tokens != other.tokens).any(-1).int().argmax())
    x = run.calls[layers.start][0][:0]
    with run.prefix_kept(start):
        for number in range(layers.start, len(parts.layers)):
            layer, (stream, args, kwargs) = parts.layers[number], run.calls[number]
            with ExitStack() as stack:
                if number in layers:
                    mixed, output = other.mixed[number][start:], other.outputs[number]

                    # Row i of the new rows takes head i of the other run: a diagonal of the array
                    # (row, position, head, d_head) is exchanged at once.
                    def give_heads(_: Any, args: Any, mixed: Tensor = mixed) -> Any:
                        y = args[0].clone()
                        by_head = y[-n_heads - 1 : -1].unflatten(-1, (n_heads, -1))
                        by_head.diagonal(0, 0, 2)[:] = mixed.unflatten(-1, (n_heads, -1)).mT
                        return (y, *args[1:])

                    def give_mlp(_: Any, __: Any, y: Tensor, output: Tensor = output) -> Tensor:
                        y = y.clone()
                        y[-1] = output
                        return y

                    x = torch.cat([x, stream.expand(n_heads + 1, -1, -1)])
                    out = layer.heads.out.module
                    stack.enter_context(out.register_forward_pre_hook(give_heads))
                    stack.enter_context(layer.mlp.module.register_forward_hook(give_mlp))
                result = layer.module(x, *args, **kwargs)
                x = result[0] if isinstance(result, tuple) else result
    return x[:, -1]


def gradient_effects(
    runs: tuple[StoredRun, StoredRun], number: Number, points: Sequence[float]
) -> Effects:
    """Return the change of each head and MLP times the mean gradient at some points.

    A point is a share of the way of the embeddings from the second text (0) to the first (1). The
    point 1 is attribution patching; the points 1/8, 2/8, ... 1 are EAP-IG of 8 steps.

    Source:
        Nanda 2023, "Attribution patching"; Hanna et al. 2024 (arXiv 2403.17806).
    """
    first, second = runs
    model = first.model
    shares = torch.tensor(points, device=model.device, dtype=model.parts.dtype)[:, None, None]
    tokens = second.tokens + shares * (first.tokens - second.tokens)
    with (
        torch.enable_grad(),
        embedded(model, tokens.requires_grad_()),
        recorded_parts(model) as (mixed, outputs),
    ):
        streams = last_stream(model, first.ids.expand(len(points), -1))
        slopes = torch.autograd.grad(number(streams).sum() / len(points), [*mixed, *outputs])
    n = model.n_layers
    heads = [
        ((a - b) * slope.sum(0)).unflatten(1, (model.n_heads, -1)).sum((0, 2))
        for a, b, slope in zip(first.mixed, second.mixed, slopes[:n], strict=True)
    ]
    mlps = [
        ((a - b) * slope.sum(0)).sum()
        for a, b, slope in zip(first.outputs, second.outputs, slopes[n:], strict=True)
    ]
    with torch.no_grad():
        change = float(number(first.stream[None])[0] - number(second.stream[None])[0])
    return Effects(change, torch.stack(heads).double().cpu(), torch.stack(mlps).double().cpu())

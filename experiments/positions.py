"""Patching by position: effects of the stream, of attention and of MLPs at one block and position.

As in `patching`, between two texts and in both directions. One position of the stream before a
block, of a block's attention output or of its MLP output takes its value of the other text. Only
positions from the first different token on are compared, since earlier ones have no effect.

Source: Rezaei Jafari et al. 2025 (arXiv 2508.21258), figure 2.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bilens.read.flow.ablation import writer_of
from bilens.read.flow.contrast import Other, embedded
from bilens.read.flow.patching import Number, StoredRun, last_stream, logit_of, stored_runs
from bilens.read.flow.split import Split, split
from bilens.read.language import TokenDirection
from bilens.residual import Moment, ResidualModel
from bilens.residual.layers import MLP, Heads, Layer
from experiments.edges import EdgeGraph
from experiments.pairs import Pair

POINTS = 8
GRADIENTS = {
    "gradient (AtP)": (1.0,),
    "mean gradient": (0.0, 1.0),
    "EAP-IG inputs": tuple((i + 1) / POINTS for i in range(POINTS)),
    "integrated gradients": tuple((i + 0.5) / POINTS for i in range(POINTS)),
}
"""Attributions by gradients, with the points between the other text and the text."""
KINDS = ("residual", "attention", "MLP")

Outputs = Float[Tensor, "kinds layers time d_model"]
"""Outputs at the stream before a block, and at outputs of its attention and of its MLP."""


def by_position(model: ResidualModel, pair: Pair) -> dict[str, dict[str, list[float]]]:
    """Return effects and attributions of each kind, over layers and positions."""
    direction = TokenDirection(pair.token, pair.minus)
    ids, number = model.ids(pair.text), logit_of(model, direction)
    with torch.no_grad():
        runs = stored_runs(model, ids, Other(model, ids, pair.against))
        change = outputs(runs[0]) - outputs(runs[1])
        attributed = {"patching": effects(runs, change, number)}
        through = split(model, pair.text, direction, against=pair.against)
        attributed["contrastive flow"] = (_adjoints(through) * change).sum(-1)
        through = split(model, pair.text, direction)
        adjoints = _adjoints(through)
        attributed["frozen flow (LRP)"] = (adjoints * change).sum(-1)
        last = torch.zeros_like(adjoints)
        last[:, :, -1] = through.root
        attributed["direct logit attribution"] = (last * change).sum(-1)
    for name, at in GRADIENTS.items():
        attributed[name] = (gradients(runs, number, at) * change).sum(-1)
    start = _start(runs)
    return {
        kind: {name: rows[i, :, start:].flatten().tolist() for name, rows in attributed.items()}
        for i, kind in enumerate(KINDS)
    }


def _start(runs: tuple[StoredRun, StoredRun]) -> int:
    return int((runs[0].tokens != runs[1].tokens).any(-1).int().argmax())


def outputs(run: StoredRun) -> Outputs:
    """Return the stream before each block, and its attention's and MLP's outputs to the stream."""
    graph, layers = EdgeGraph(run.model), range(run.model.n_layers)
    kinds = (
        [run.calls[layer][0][0] for layer in layers],
        [graph.head_outputs(layer, run.mixed[layer]).sum(0) for layer in layers],
        [graph.mlp_output(layer, run.outputs[layer]) for layer in layers],
    )
    return torch.stack([torch.stack(rows) for rows in kinds])


def effects(
    runs: tuple[StoredRun, StoredRun], change: Outputs, number: Number
) -> Float[Tensor, "kinds layers time"]:
    """Return the effect of each position by patching, the mean of both directions."""
    model, start = runs[0].model, _start(runs)
    total = change.new_zeros(change.shape[:3])
    for run, sign in ((runs[0], -1), (runs[1], 1)):
        end = number(run.stream[None])[0]
        with run.prefix_kept(start):
            for layer, of_layer in enumerate(model.parts.layers):
                rows = sign * _one_by_one(change[:, layer, start:], change.shape[2])
                hooks: list[Any] = [(of_layer.module, True, partial(_add_first, rows[0]))]
                for i, part in enumerate(_parts(of_layer), 1):
                    added = rows[i] / part.residual_scale
                    hooks.append((writer_of(part), False, partial(_add, i, added)))
                streams = run.run_from(layer, len(rows.flatten(0, 1)), hooks)
                falls = sign * (number(streams) - end)
                total[:, layer, start:] += falls.reshape(len(KINDS), -1) / 2
    return total


def _parts(layer: Layer) -> tuple[Heads | MLP, ...]:
    return (layer.heads, layer.mlp)


def _one_by_one(rows: Float[Tensor, "kinds t d"], time: int) -> Float[Tensor, "kinds t time d"]:
    kinds, t, d = rows.shape
    separate = rows.new_zeros(kinds, t, time, d)
    separate[:, :, time - t :].diagonal(0, 1, 2)[:] = rows.mT
    return separate


def _add_first(rows: Tensor, _: nn.Module, args: Any) -> Any:
    return (_sum(args[0], 0, rows), *args[1:])


def _add(kind: int, rows: Tensor, _: nn.Module, __: Any, y: Tensor) -> Tensor:
    return _sum(y, kind, rows)


def _sum(x: Tensor, kind: int, rows: Tensor) -> Tensor:
    """Add rows to those of a kind; modules within an MLP see only the last positions."""
    x = x.clone()
    x[kind * len(rows) : (kind + 1) * len(rows)] += rows[:, -x.shape[1] :]
    return x


def _adjoints(through: Split) -> Outputs:
    layers = range(through.model.n_layers)
    moments = (Moment.input, Moment.attention, Moment.mlp)
    return torch.stack(
        [torch.stack([through.above[moment(layer)] for layer in layers]) for moment in moments]
    )


def gradients(
    runs: tuple[StoredRun, StoredRun], number: Number, points: Sequence[float]
) -> Outputs:
    """Return the mean gradient by the same vectors at points between the embeddings."""
    first, second = runs
    model = first.model
    shares = first.tokens.new_tensor(points)[:, None, None]
    tokens = second.tokens + shares * (first.tokens - second.tokens)
    kinds: list[list[Tensor]] = [[] for _ in KINDS]

    def keep_input(_: Any, args: Any, kwargs: Any) -> None:
        kinds[0].append(args[0] if args else kwargs["hidden_states"])

    def keep(kind: int, _: Any, __: Any, y: Tensor) -> None:
        kinds[kind].append(y)

    with torch.enable_grad(), embedded(model, tokens.requires_grad_()), ExitStack() as stack:
        for layer in model.parts.layers:
            hook = layer.module.register_forward_pre_hook(keep_input, with_kwargs=True)
            stack.enter_context(hook)
            for i, part in enumerate(_parts(layer), 1):
                stack.enter_context(writer_of(part).register_forward_hook(partial(keep, i)))
        streams = last_stream(model, first.ids.expand(len(points), -1))
        value = number(streams).sum() / len(points)
        slopes = torch.autograd.grad(value, [*kinds[0], *kinds[1], *kinds[2]])
    rows = torch.stack([slope.sum(0) for slope in slopes]).unflatten(0, (len(KINDS), -1))
    scales = [1.0, *(part.residual_scale for part in (layer.heads, layer.mlp))]
    return rows / rows.new_tensor(scales)[:, None, None, None]

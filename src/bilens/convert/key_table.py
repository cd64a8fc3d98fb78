"""Other people's weights under the names of bilens, each of them accounted for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor, nn

from bilens.checks import check_weights
from bilens.errors import CheckpointError

__all__ = ["Row", "fill"]


@dataclass(frozen=True)
class Row:
    """A row of a key table.

    Attributes:
        theirs: name of one of their weights.
        ours: names of its parts in bilens, which stand in it one above the other.
        change: what becomes of each part, its shape aside.
    """

    theirs: str
    ours: tuple[str, ...]
    change: Callable[[Tensor], Tensor] = lambda weight: weight


def fill(
    model: nn.Module, weights: Mapping[str, Tensor], rows: Sequence[Row], source: str | Path
) -> None:
    """Give a model other people's weights, all of them and nothing else.

    The model is on the meta device. What they have not does nothing here: gains of norms are 1,
    biases 0. All are in the widest dtype among them.

    Raises:
        CheckpointError: a weight is missing, unknown, of another shape, NaN or infinite.
    """
    known = {row.theirs for row in rows}
    for complaint, names in (
        ("unknown", weights.keys() - known),
        ("missing", known - weights.keys()),
    ):
        if names:
            raise CheckpointError(
                f"{source}: {complaint} weights: {', '.join(sorted(names))}. They do not fit "
                "config.json, or the model is of another kind."
            )
    dtype = reduce(torch.promote_types, (weight.dtype for weight in weights.values()))
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    state = {
        name: part
        for row in rows
        for name, part in _parts(row, weights[row.theirs].to(dtype), shapes, source).items()
    }
    for name in shapes.keys() - state.keys():
        if name.endswith(("norm.weight", ".bias")):
            value = 0.0 if name.endswith("bias") else 1.0
            state[name] = torch.full(shapes[name], value, dtype=dtype)
    model.load_state_dict(state, assign=True)
    check_weights(model)


def _parts(
    row: Row, weight: Tensor, shapes: Mapping[str, torch.Size], source: str | Path
) -> dict[str, Tensor]:
    # A number of its own is saved without an axis.
    whole = weight[None] if weight.ndim == 0 else weight
    first, rows = shapes[row.ours[0]], [shapes[name][0] for name in row.ours]
    if whole.shape != (sum(rows), *first[1:]):
        raise CheckpointError(
            f"{source}: {row.theirs} has shape {tuple(weight.shape)}, expected "
            f"{(sum(rows), *first[1:])}"
        )
    # Parts of one matrix are copied, so that no two weights share their memory.
    parts = [part.clone() for part in whole.split(rows)] if len(rows) > 1 else [whole]
    return {name: row.change(part) for name, part in zip(row.ours, parts, strict=True)}

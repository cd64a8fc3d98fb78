"""Which heads and which directions of MLPs carry the flows of many prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import pandas as pd
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import full_precision
from bilens.errors import BilensError
from bilens.read.flow.ablation import StreamDirection
from bilens.read.flow.graph import Flow
from bilens.read.flow.split import flow
from bilens.read.language.names import TokenDirection
from bilens.residual import ResidualModel
from bilens.tensor.clusters import cluster

COLUMNS = ["prompt", "kind", "layer", "number", "flow", "vector"]


@dataclass(frozen=True)
class RecurringHead:
    """A head in the flows of many prompts.

    Attributes:
        layer: its layer.
        head: its number there.
        mean: of what flows through it, over all prompts.
        absolute: mean of the sum of |flow| over its pairs of positions.
        prompts: in how many prompts some pair of positions was split off.
    """

    layer: int
    head: int
    mean: float
    absolute: float
    prompts: int


@dataclass(frozen=True, eq=False)
class RecurringDirection:
    """Eigenvectors of one layer's MLP that are the same direction in many prompts, up to sign.

    Attributes:
        layer: their layer.
        vector: of unit length: the direction of their largest weighted sum of squares.
        mean: of what flows through them, over all prompts.
        absolute: mean of the sum of their |flow|.
        prompts: in how many prompts there is one.
        agreement: the least |cosine| of one of them with the vector.
    """

    layer: int
    vector: Float[Tensor, " d_model_and_1"]
    mean: float
    absolute: float
    prompts: int
    agreement: float

    @property
    def direction(self) -> StreamDirection:
        """For `ablate`."""
        return StreamDirection(self.layer, self.vector)


@dataclass(frozen=True, eq=False)
class RecurringFlows:
    """What many flows have in common.

    Attributes:
        values: the logits, or differences, that were split.
        heads: those of largest |mean| first.
        directions: likewise.
    """

    values: tuple[float, ...]
    heads: tuple[RecurringHead, ...]
    directions: tuple[RecurringDirection, ...]


@full_precision
def flows(
    model: ResidualModel,
    prompts: Sequence[Int[Tensor, " _"]],
    directions: TokenDirection | Sequence[TokenDirection],
    *,
    m: int | None = 4,
    threshold: float = 1e-3,
    similarity: float = 0.9,
    progress: Callable[[Flow], None] | None = None,
) -> RecurringFlows:
    """Flows of many prompts: what recurs, by its mean over all of them.

    For contrasting prompts give each the difference that is right there, such as `are` minus `is`
    behind a plural and `is` minus `are` behind a singular: what raises one of them always has a
    mean near 0, and what tells the two apart does not. Eigenvectors of one layer are one
    direction where their |cosine| reaches `similarity` (`bilens.tensor.cluster`).

    Where several processes run, as under `torchrun`, all of them call it; they share the prompts
    out, and each returns what all have in common.

    Args:
        model: any.
        prompts: texts.
        directions: what is split at the last position, one for all prompts or one for each.
        m: as for `flow`.
        threshold: as for `flow`.
        similarity: least |cosine| within a direction, above 0 and at most 1.
        progress: called with each flow as it is found, in the process that finds it.

    Raises:
        BilensError: there are no prompts, there is not one direction for each, or one of them
            cannot be split.
    """
    each = [directions] * len(prompts) if isinstance(directions, TokenDirection) else directions
    if not prompts or len(each) != len(prompts):
        raise BilensError(
            f"prompts holds {len(prompts)} texts and directions {len(each)}, expected at least "
            "one text, and one direction for each or for all"
        )
    state = PartialState()
    own = []
    for number in range(len(prompts))[state.process_index :: state.num_processes]:
        found = flow(model, prompts[number], each[number], m=m, threshold=threshold)
        own.append((number, found.value, _rows(number, found)))
        if progress is not None:
            progress(found)
    # In the order of the prompts, so that sums round as in one process.
    every = sorted(gather_object(own), key=itemgetter(0))
    rows = pd.DataFrame([row for _, _, some in every for row in some], columns=COLUMNS)

    def shares(some: pd.DataFrame) -> dict[str, Any]:
        through = some["flow"]
        return {
            "mean": float(through.sum()) / len(prompts),
            "absolute": float(through.abs().sum()) / len(prompts),
            "prompts": some["prompt"].nunique(),
        }

    heads = [
        RecurringHead(int(layer), int(head), **shares(some))
        for (layer, head), some in rows[rows["kind"] == "head"].groupby(["layer", "number"])
    ]
    recurring = []
    for layer, some in rows[rows["kind"] == "direction"].groupby("layer"):
        weights = torch.tensor(some["flow"].abs().to_numpy())
        alike = cluster(torch.stack(list(some["vector"])), weights, similarity)
        recurring += [
            RecurringDirection(
                int(layer),
                vector.to(model.device),
                agreement=float(agreement),
                **shares(some.iloc[members.tolist()]),
            )
            for vector, members, agreement in zip(
                alike.vectors, alike.members, alike.agreement, strict=True
            )
        ]
    return RecurringFlows(
        tuple(value for _, value, _ in every),
        tuple(sorted(heads, key=lambda head: -abs(head.mean))),
        tuple(sorted(recurring, key=lambda direction: -abs(direction.mean))),
    )


def _rows(number: int, found: Flow) -> list[tuple[Any, ...]]:
    """What is kept of the flow of one prompt, on the CPU, for other processes to have."""
    vectors = iter(found.vectors.cpu())
    return [
        (
            *(number, node.kind, node.layer, node.number, node.flow),
            next(vectors) if node.kind == "direction" else None,
        )
        for node in found.nodes
        if node.kind in ("head", "direction")
    ]

"""Heads and directions of MLPs that carry the flows of many prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import full_precision
from bilens.errors import BilensError
from bilens.lazy_imports import accelerate
from bilens.read.flow.ablation import StreamDirection
from bilens.read.flow.contrast import Against
from bilens.read.flow.graph import Flow
from bilens.read.flow.split import flow
from bilens.read.language.names import TokenDirection
from bilens.reading import Fact, Reading
from bilens.residual import ResidualModel
from bilens.tensor.similarity import cluster

COLUMNS = ["prompt", "kind", "layer", "number", "flow", "vector"]


@dataclass(frozen=True)
class RecurringHead:
    """A head in the flows of many prompts.

    Attributes:
        layer: its layer.
        head: its number there.
        mean: mean flow over all prompts.
        absolute: mean over all prompts of the sum of |flow| over its nodes.
        prompts: number of prompts in which it has a node.
    """

    layer: int
    head: int
    mean: float
    absolute: float
    prompts: int


@dataclass(frozen=True, eq=False)
class RecurringDirection:
    """Directions of one layer's MLP that are the same in many prompts, up to sign.

    Attributes:
        layer: their layer.
        vector: of unit length: the direction of their largest weighted sum of squares.
        mean: mean flow over all prompts.
        absolute: mean over all prompts of the sum of their |flow|.
        prompts: number of prompts that have one.
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
        """The direction at all positions, for `ablate`."""
        return StreamDirection(self.layer, self.vector)


@dataclass(frozen=True, eq=False, repr=False)
class RecurringFlows(Reading):
    """The heads and directions that many flows have in common.

    Attributes:
        values: the logits, or their changes, that were split.
        heads: the heads, the largest |mean| first.
        directions: the directions, the largest |mean| first.
    """

    values: tuple[float, ...]
    heads: tuple[RecurringHead, ...]
    directions: tuple[RecurringDirection, ...]

    title: ClassVar[str] = "Recurring flows"
    axes: ClassVar[dict[str, str]] = {"x": "part", "y": "mean"}

    def facts(self) -> list[Fact]:
        """Return the number of prompts, and the mean of the logits that were split."""
        return [
            ("prompts", len(self.values)),
            ("mean of the logits", sum(self.values) / len(self.values)),
            ("positive", sum(value > 0 for value in self.values)),
        ]

    def frame(self) -> pd.DataFrame:
        """Return a row for each head and direction, the largest |mean| first."""
        rows = [
            (f"head {head.layer}.{head.head}", head.mean, head.absolute, head.prompts)
            for head in self.heads
        ]
        rows += [
            (f"MLP {part.layer} direction {number}", part.mean, part.absolute, part.prompts)
            for number, part in enumerate(self.directions, 1)
        ]
        frame = pd.DataFrame(rows, columns=["part", "mean", "mean of |flow|", "prompts"])
        return frame.sort_values("mean", key=abs, ascending=False, ignore_index=True)


@full_precision
def flows(
    model: ResidualModel,
    prompts: Sequence[str | Int[Tensor, " _"]],
    directions: TokenDirection | Sequence[TokenDirection],
    *,
    against: Sequence[Against] | None = None,
    m: int | None = 4,
    threshold: float = 1e-3,
    similarity: float = 0.9,
    progress: Callable[[Flow], None] | None = None,
) -> RecurringFlows:
    """Return the heads and directions that recur in the flows of many prompts, by their mean.

    For contrasting prompts use the right answer minus the wrong one: `are` minus `is` after a
    plural, `is` minus `are` after a singular. Parts that raise one of them always have a
    mean near 0. Parts that tell the two apart do not. Directions of one layer are one direction if
    their |cosine| reaches `similarity` (`bilens.tensor.cluster`).

    In several processes, as under `torchrun`, all of them call it. They share the prompts, and each
    returns the result of all.

    Args:
        model: any.
        prompts: texts.
        directions: tokens whose logits are split at the last position, one for all prompts or one
            for each.
        against: a second run for each prompt; None for flows on one text.
        m: as for `flow`.
        threshold: as for `flow`.
        similarity: least |cosine| within a direction, above 0 and at most 1.
        progress: called with each flow, in the process that computes it.

    Raises:
        BilensError: prompts is empty, directions or against do not have one entry for each, or one
            of them cannot be split.
    """
    count = len(prompts)
    tokens = [directions] * count if isinstance(directions, TokenDirection) else directions
    seconds = [None] * count if against is None else against
    if not count or len(tokens) != count or len(seconds) != count:
        raise BilensError(
            f"prompts holds {count} texts, directions {len(tokens)} and against {len(seconds)}, "
            "expected at least one text, and one direction and second run for each or for all"
        )
    state = accelerate.PartialState()
    of_process = []
    for i in range(count)[state.process_index :: state.num_processes]:
        split = flow(model, prompts[i], tokens[i], against=seconds[i], m=m, threshold=threshold)
        of_process.append((i, split.value, _rows(i, split)))
        if progress is not None:
            progress(split)
    # In the order of the prompts, so that sums round as in one process.
    gathered = sorted(accelerate.utils.gather_object(of_process), key=itemgetter(0))
    rows = pd.DataFrame([row for _, _, rows in gathered for row in rows], columns=COLUMNS)

    def shares(group: pd.DataFrame) -> dict[str, Any]:
        through = group["flow"]
        return {
            "mean": float(through.sum()) / count,
            "absolute": float(through.abs().sum()) / count,
            "prompts": group["prompt"].nunique(),
        }

    heads = [
        RecurringHead(int(layer), int(head), **shares(group))
        for (layer, head), group in rows[rows["kind"] == "head"].groupby(["layer", "number"])
    ]
    recurring = []
    for layer, group in rows[rows["kind"] == "direction"].groupby("layer"):
        weights = torch.tensor(group["flow"].abs().to_numpy())
        alike = cluster(torch.stack(list(group["vector"])), weights, similarity)
        recurring += [
            RecurringDirection(
                int(layer),
                vector.to(model.device),
                agreement=float(agreement),
                **shares(group.iloc[members.tolist()]),
            )
            for vector, members, agreement in zip(
                alike.vectors, alike.members, alike.agreement, strict=True
            )
        ]
    return RecurringFlows(
        tuple(value for _, value, _ in gathered),
        tuple(sorted(heads, key=lambda head: -abs(head.mean))),
        tuple(sorted(recurring, key=lambda direction: -abs(direction.mean))),
    )


def _rows(number: int, split: Flow) -> list[tuple[Any, ...]]:
    """Return the heads and directions of a prompt's flow, on the CPU, for other processes."""
    vectors = iter(split.vectors.cpu())
    return [
        (
            *(number, node.kind, node.layer, node.number, node.flow),
            next(vectors) if node.kind == "direction" else None,
        )
        for node in split.nodes
        if node.kind in ("head", "direction")
    ]

"""Which heads and which directions of MLPs carry the flows of many prompts."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from jaxtyping import Float, Int
from torch import Tensor

from bilens.errors import BilensError
from bilens.read.flow.ablation import Direction
from bilens.read.flow.graph import Flow
from bilens.read.flow.split import flow
from bilens.read.language.names import TokenDirection
from bilens.residual import ResidualModel
from bilens.tensor.clusters import cluster
from bilens.tensor.exact import exact

__all__ = ["RecurringDirection", "RecurringFlows", "RecurringHead", "flows"]


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
    def direction(self) -> Direction:
        """For `ablate`."""
        return Direction(self.layer, self.vector)


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


@exact
def flows(
    model: ResidualModel,
    prompts: Sequence[Int[Tensor, " _"]],
    directions: TokenDirection | Sequence[TokenDirection],
    *,
    k: int = 20,
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
        k: as for `flow`.
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
        found = flow(model, prompts[number], each[number], k=k, threshold=threshold)
        own.append(_Summary.of(number, found))
        if progress is not None:
            progress(found)
    # In the order of the prompts, so that sums round as in one process.
    every = sorted(gather_object(own), key=lambda one: one.number)
    through: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
    vectors: dict[int, list[Tensor]] = defaultdict(list)
    rows: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for one in every:
        for key, mine in one.heads.items():
            through[key].append(torch.tensor(mine))
        for layer, carried, vector in one.eigenvectors:
            vectors[layer].append(vector.to(model.device))
            rows[layer].append((one.number, carried))
    return RecurringFlows(
        tuple(one.value for one in every),
        _heads(through, len(prompts)),
        tuple(
            sorted(
                (
                    part
                    for layer in vectors
                    for part in _directions(
                        layer, torch.stack(vectors[layer]), rows[layer], len(prompts), similarity
                    )
                ),
                key=lambda part: -abs(part.mean),
            )
        ),
    )


@dataclass(frozen=True, eq=False)
class _Summary:
    """What is kept of the flow of one prompt, on the CPU, for other processes to have."""

    number: int
    value: float
    heads: dict[tuple[int, int], list[float]]
    eigenvectors: list[tuple[int, float, Tensor]]

    @classmethod
    def of(cls, number: int, found: Flow) -> "_Summary":
        heads: dict[tuple[int, int], list[float]] = defaultdict(list)
        eigenvectors: list[tuple[int, float, Tensor]] = []
        for node in found.nodes:
            if node.kind == "head":
                assert node.layer is not None
                assert node.number is not None
                heads[node.layer, node.number].append(node.flow)
            elif node.kind == "eigenvector":
                assert node.layer is not None
                vector = found.vectors[len(eigenvectors)].cpu()
                eigenvectors.append((node.layer, node.flow, vector))
        return cls(number, found.value, dict(heads), eigenvectors)


def _heads(through: dict[tuple[int, int], list[Tensor]], n: int) -> tuple[RecurringHead, ...]:
    found = [
        RecurringHead(
            layer,
            head,
            mean=sum(float(x.sum()) for x in mine) / n,
            absolute=sum(float(x.abs().sum()) for x in mine) / n,
            prompts=len(mine),
        )
        for (layer, head), mine in through.items()
    ]
    return tuple(sorted(found, key=lambda head: -abs(head.mean)))


def _directions(
    layer: int, vectors: Tensor, rows: list[tuple[int, float]], n: int, similarity: float
) -> list[RecurringDirection]:
    prompt = torch.tensor([number for number, _ in rows])
    flows = torch.tensor([through for _, through in rows], dtype=torch.float64)
    features = cluster(vectors.cpu(), flows.abs(), similarity)
    return [
        RecurringDirection(
            layer,
            vector.to(vectors),
            mean=float(flows[members].sum()) / n,
            absolute=float(flows[members].abs().sum()) / n,
            prompts=len(prompt[members].unique()),
            agreement=agreement,
        )
        for vector, members, agreement in zip(
            features.vectors, features.members, features.agreement.tolist(), strict=True
        )
    ]

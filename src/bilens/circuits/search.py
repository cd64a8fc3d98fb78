"""Circuits of parts: the fewest that answer questions, ordered by gradients and measured.

For masks, f and the roles of questions see `bilens.circuits.cases`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bilens.circuits.cases import Cases
from bilens.errors import BilensError

LARGEST = 60
"""Parts of the largest circuit."""
HIGHEST = 1.15
"""Least and largest f of a circuit. Above it parts are missing that oppose the answer."""
SLACK = 0.05
"""By how much f may miss its bounds where no size holds twice."""

Scores = Callable[[Cases, Bool[Tensor, " *shape"]], Float[Tensor, " *shape"]]
"""What each part of a mask is worth to some questions, as a share of the change."""


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The parts of a circuit, and how they were found.

    Attributes:
        mask: the parts, with those that are always in place.
        order: the numbers of all parts that may be in it, the best first.
        holds: whether f is in bounds, on the questions that decide the size, or misses them by at
            most 0.05; True for a size that was given.
        sizes: numbers of parts that were tried, and f of each on every template there.
    """

    mask: Bool[Tensor, " *shape"] = field(repr=False)
    order: Int[Tensor, " parts"] = field(repr=False)
    holds: bool
    sizes: dict[int, tuple[float, ...]]


def search_circuit(
    ordering: Sequence[Cases],
    deciding: Cases,
    keep: float,
    scores: Scores = Cases.scores,
    *,
    size: int | None = None,
    live: Bool[Tensor, " *shape"] | None = None,
) -> SearchResult:
    """Return the smallest circuit whose mean f over templates lies between `keep` and 1.15.

    Parts are ordered by their `scores` on some questions of each template, the largest over
    templates, and f is measured on others. Parts that oppose the answer have negative scores and
    come last; at sizes at which f is too large without them, they are ordered by their size like
    all others. f has to hold at the next size too: what holds at one alone is chance. Sizes are
    doubled up to one that holds, and the smallest is found between it and the one before, by
    bisection. If none of at most 60 holds, the one that misses the bounds least is returned, and
    holds if that is by at most 0.05.

    Args:
        ordering: the questions that order, of each template.
        deciding: those that decide the size.
        keep: least f.
        scores: of parts, by default integrated gradients.
        size: the number of parts, which is then not searched.
        live: parts that are always in place, and do not count.

    Raises:
        BilensError: `ordering` is empty, or there are fewer parts than `size`.
    """
    if not ordering:
        raise BilensError("ordering is empty, expected the cases of a template or more")
    everything = ordering[0].everything
    start = torch.zeros_like(everything) if live is None else live & everything
    free = (everything & ~start).flatten()
    count = int(free.sum())
    if size is not None and size > count:
        raise BilensError(f"size={size}, expected at most {count}, the parts of the model")
    worth = torch.stack([scores(cases, everything).flatten() for cases in ordering])
    orders = [_order(worths, free) for worths in (worth.amax(0), worth.abs().amax(0))]
    trials: dict[int, tuple[float, ...]] = {}
    masks: dict[int, Tensor] = {}

    def miss(of_size: int) -> float:
        """Return by how much f of a size misses its bounds; at most 0 if it does not."""
        if of_size not in trials:
            for order in orders:
                mask = start.clone()
                mask.view(-1)[order[:of_size]] = True
                shares = deciding.shares(mask.cpu().double()[None])[0].tolist()
                if max(shares) <= HIGHEST:
                    break
            trials[of_size], masks[of_size] = tuple(shares), mask
        mean = sum(trials[of_size]) / len(trials[of_size])
        # All parts keep 1 up to rounding.
        return max(keep - 1e-4 - mean, mean - HIGHEST)

    def holds(of_size: int) -> bool:
        return miss(of_size) <= 0 and miss(min(of_size + 1, count)) <= 0

    if size is not None:
        miss(size)
        return SearchResult(masks[size], orders[0], True, trials)
    largest = min(count, LARGEST)
    best = _first_found(holds, largest)
    if best is None:
        best = min((x for x in trials if x <= largest), key=miss)
    return SearchResult(masks[best], orders[0], miss(best) <= SLACK, trials)


def _order(worths: Float[Tensor, " parts"], free: Bool[Tensor, " parts"]) -> Int[Tensor, " free"]:
    """Return the numbers of parts that are free, those of largest worth first."""
    scores = worths.masked_fill(~free, -torch.inf)
    return scores.argsort(descending=True, stable=True)[: int(free.sum())]


def _first_found(holds: Callable[[int], bool], largest: int) -> int | None:
    """Return a size that holds while the one before it does not, or None if no size was found.

    Sizes are doubled until one holds, which bisection then makes smaller.
    """
    low, high = 0, 1
    while not holds(high):
        if high >= largest:
            return None
        low, high = high, min(2 * high, largest)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high

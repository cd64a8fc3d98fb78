"""The rule for the size of a circuit of several templates, for scores of any kind.

Parts are ordered on some questions of each template, by scores that are a share of the change, the
largest over templates. The circuit is the smallest whose f lies between 1 and 1.5 on other
questions of *every* template. Then parts are added until at most a tenth is left without it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bilens.read.flow.circuit_search import Cases
from bilens.read.flow.interval import Interval

SIZES = (12, 16, 20, 25, 30, 40, 60)
"""Numbers of parts that are tried first; the last is that of the largest circuit."""
KEEP, HIGHEST, LEFT = 1.0, 1.5, 0.1


class Split(NamedTuple):
    """The questions of a template: some order parts, some decide the size, others measure."""

    template: str
    ordering: Cases
    deciding: Cases
    measuring: Cases

    @classmethod
    def of(cls, cases: Cases, numbers: Sequence[int], template: str) -> "Split":
        """Return a split: a third orders, at most 8 questions; a quarter decides, at most 6."""
        ordering = min(8, max(1, len(numbers) // 3))
        deciding = ordering + min(6, max(1, len(numbers) // 4))
        parts = numbers[:ordering], numbers[ordering:deciding], numbers[deciding:]
        return cls(template, *map(cases.some, parts))


class Found(NamedTuple):
    """A circuit, whether f is in bounds on every template, and the parts that any circuit needs."""

    mask: Tensor
    holds: bool
    needed: Tensor

    @property
    def others(self) -> Tensor:
        """The mask of all parts that are not in it, and of those that any circuit needs."""
        return ~self.mask | self.needed


def mask_gradients(cases: Cases) -> Tensor:
    """Return the integrated gradients of f by the mask of all parts, by two points."""
    points, weights = np.polynomial.legendre.leggauss(2)
    masks = torch.from_numpy((points + 1) / 2)[:, None, None] * cases.everything
    return cases.gradient(masks, (weights / 2).tolist())


def found_parts(splits: Sequence[Split], scores: Callable[[Split], Tensor]) -> Found:
    """Return the circuit of some templates, by scores of the questions that order."""
    order = torch.stack([scores(split).flatten() for split in splits]).amax(0)
    places = order.argsort(descending=True, stable=True)
    deciding, shape = [split.deciding for split in splits], splits[0].ordering.shape

    def first(count: int) -> Tensor:
        mask = torch.zeros(shape, dtype=torch.bool)
        mask.view(-1)[places[:count]] = True
        return mask

    tried: dict[int, tuple[float, ...]] = {}

    def measure(counts: Sequence[int]) -> None:
        if counts:
            masks = torch.stack([first(count) for count in counts]).double()
            shares = torch.stack([cases.faithfulness(masks) for cases in deciding], 1)
            tried.update(zip(counts, map(tuple, shares.tolist()), strict=True))

    def miss(count: int) -> float:
        """Return by how much f is out of bounds on the worst template."""
        return max(KEEP - 1e-4 - min(tried[count]), max(tried[count]) - HIGHEST)

    measure(SIZES)
    enough = [i for i, count in enumerate(SIZES) if min(tried[count]) >= KEEP - 1e-4]
    holding = [i for i, count in enumerate(SIZES) if miss(count) <= 0]
    for i in dict.fromkeys(enough[:1] + holding[:1]):
        failed = SIZES[i - 1] if i else 0
        measure(range(failed + 1, SIZES[i], max(1, (SIZES[i] - failed) // 20)))
        if any(miss(count) <= 0 for count in tried):
            break
    held = [count for count in sorted(tried) if miss(count) <= 0]
    mask = first(held[0] if held else min(tried, key=miss))
    needed = needed_parts(mask, deciding)
    return Found(necessary(mask, needed, deciding), bool(held), needed)


def needed_parts(mask: Tensor, deciding: Sequence[Cases]) -> Tensor:
    """Return the parts of the first half of the layers that any circuit needs.

    Without one, more than three quarters of the change are lost on every template, in the circuit
    and in the whole model.
    """
    needed = mask.clone()
    needed[(len(mask) + 1) // 2 :] = False
    # The circuit and one question tell for most that they are not.
    of_one = [deciding[0].some([0])]
    for whole, measuring in ((mask, of_one), (mask, deciding), (torch.ones_like(mask), deciding)):
        places = needed.flatten().nonzero().flatten()
        if len(places):
            trials = whole.flatten().repeat(len(places), 1)
            trials[torch.arange(len(places)), places] = False
            masks = trials.reshape(-1, *mask.shape).double()
            shares = torch.stack([cases.faithfulness(masks) for cases in measuring])
            needed.view(-1)[places[shares.amax(0) >= 0.25]] = False
    return needed


def necessary(mask: Tensor, needed: Tensor, deciding: Sequence[Cases]) -> Tensor:
    """Return a circuit with further parts, without which at most a tenth of the change is left."""
    while int(mask.sum()) < SIZES[-1]:
        others = (~mask | needed).double()[None]
        remains = [float(cases.faithfulness(others)[0]) for cases in deciding]
        worst = deciding[remains.index(max(remains))]
        if max(remains) <= LEFT:
            break
        slopes = worst.gradient(others, [1.0]).masked_fill(mask | (others[0] == 0), -torch.inf)
        trials = slopes.flatten().argsort(descending=True)[:16]
        trials = trials[slopes.flatten()[trials] > -torch.inf]
        without = others.flatten().repeat(len(trials), 1)
        without[torch.arange(len(trials)), trials] = 0
        values = worst.faithfulness(without.reshape(-1, *mask.shape))
        if float(values.min()) >= max(remains):
            break
        mask = mask.clone()
        mask.view(-1)[trials[values.argmin()]] = True
    return mask


def measured(found: Found, cases: Cases) -> dict[str, object]:
    """Return what a circuit does on questions that did not find it.

    These are f with its interval, what is left without the circuit, the number of questions whose
    number is positive with the circuit alone, and closeness: 1 minus the mean of |1 - f|.
    """
    values = cases.values(torch.stack([found.mask, found.others]).double())
    changes = cases.changes
    numbers = values[0] + torch.tensor([case.ends[1] for case in cases.cases])
    return {
        "restored": vars(Interval.of(values[0], changes)),
        "left": vars(Interval.of(values[1], changes)),
        "right": int((numbers > 0).sum()),
        "questions": len(cases),
        "closeness": float(1 - (1 - values[0] / changes).abs().mean()),
    }

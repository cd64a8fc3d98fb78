"""Circuits: the few parts of a model that answer questions, ordered by gradients and measured.

A mask m in [0, 1] keeps a share of each head and MLP in the run of the first text and takes the
other share from the run of the second. f(m) is the number of that run on a scale where the second
text has 0 and the first 1. Over several questions it is a share of the absolute change: each counts
by its own, whether the first text raises its number or lowers it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bilens.checks import check_finite, check_index
from bilens.circuits.case import Case, make_cases
from bilens.errors import BilensError
from bilens.flows.question import Question
from bilens.transformer import ResidualModel
from bilens.transformer.exchanges import mixture
from bilens.transformer.passes import Pass, first_change

SIZES = (1, 2, 4, 6, 9, 13, 18, 24, 30, 40, 50, 60)
"""Numbers of parts that are tried; the last is that of the largest circuit."""
KEEP, HIGHEST = 0.95, 1.15
"""Least and largest f of a circuit. Above it parts are missing that oppose the answer."""
SLACK = 0.05
"""By how much f may miss its bounds where no size holds twice."""


class Cases:
    """Questions about a model, on which masks of parts are measured: (layers, heads + 1).

    With `by_position`, for a single question, masks have a share of each position: (layers, time,
    heads + 1).
    """

    def __init__(
        self, model: ResidualModel, cases: Sequence[Case], *, by_position: bool = False
    ) -> None:
        self.model, self.cases, self.by_position = model, cases, by_position
        self._scores: dict[bytes, Tensor] = {}  # by the mask of a circuit

    @classmethod
    def of(
        cls,
        model: ResidualModel,
        questions: Sequence[Question],
        *,
        by_position: bool = False,
        any_length: bool = False,
    ) -> "Cases":
        """Run a model on both texts of each question; see `make_cases`."""
        cases = make_cases(model, questions, any_length=any_length)
        return cls(model, cases, by_position=by_position)

    def some(self, numbers: Iterable[int], *, by_position: bool | None = None) -> "Cases":
        """Return the cases with some numbers, which may repeat; their masks are as here."""
        cases = [self.cases[check_index("numbers", i, len(self))] for i in numbers]
        if by_position is None:
            by_position = self.by_position
        return Cases(self.model, cases, by_position=by_position)

    @classmethod
    def joined(cls, several: Sequence["Cases"]) -> "Cases":
        """Return the cases of several as one."""
        if not several:
            raise BilensError("there are no cases, expected those of a template or more")
        cases = [case for of_one in several for case in of_one.cases]
        return cls(several[0].model, cases, by_position=several[0].by_position)

    def asking(self, answer: tuple[str, str]) -> "Cases":
        """Return the cases of the same texts with another answer: a token and one to subtract."""
        token, minus = ((self.model.token(name),) for name in answer)
        number = {"vector": None, "target": "logit"}
        cases = []
        for case in self.cases:
            asked = replace(case.question, token=answer[0], minus=answer[1], **number)
            fitted = replace(
                case.fitted, question=asked, tokens=token, minus=minus, spoken=(), **number
            )
            cases.append(Case.of(fitted, case.passes, case.row))
        return Cases(self.model, cases, by_position=self.by_position)

    def __len__(self) -> int:
        return len(self.cases)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a mask."""
        return tuple(self.everything.shape)

    @property
    def changes(self) -> Float[Tensor, " cases"]:
        """The absolute change of each question's number."""
        return torch.tensor([abs(case.change) for case in self.cases], dtype=torch.float64)

    @cached_property
    def templates(self) -> dict[str, list[int]]:
        """Numbers of the questions of each template."""
        templates: dict[str, list[int]] = defaultdict(list)
        for number, case in enumerate(self.cases):
            templates[case.question.template].append(number)
        return templates

    def check_masks(self, masks: Float[Tensor, "n *shape"]) -> None:
        """Raise unless masks are of this model, by their shape."""
        if masks.shape[1:] != self.shape:
            raise BilensError(
                f"a mask has shape {tuple(masks.shape[1:])}, expected {self.shape}, that of the "
                "parts of this model"
            )

    def rises(self, group: int, masks: Float[Tensor, "n *shape"]) -> Float[Tensor, "n texts"]:
        """Return how far each number of a group rises from its second text, for each mask."""
        self.check_masks(masks)
        streams, numbers = self.streams(group, masks).unbind(1), self.groups[group]
        return torch.stack(
            [self.cases[i].rise(x) for i, x in zip(numbers, streams, strict=True)], 1
        )

    @torch.no_grad()
    def values(self, masks: Float[Tensor, "n *shape"]) -> Float[Tensor, "n cases"]:
        """Return how far each question's number rises from its second text, for each mask."""
        values = torch.zeros(len(masks), len(self), dtype=torch.float64)
        for group, numbers in enumerate(self.groups):
            values[:, numbers] = self.rises(group, masks).cpu().double()
        check_finite(number=values)
        return values

    @torch.no_grad()
    def measured(
        self, masks: Float[Tensor, "n *shape"]
    ) -> tuple[Float[Tensor, "n cases"], list[bool | None]]:
        """Return the values of some masks, and whether each question is answered with the first."""
        self.check_masks(masks)
        values = torch.zeros(len(masks), len(self), dtype=torch.float64)
        answered: list[bool | None] = [None] * len(self)
        for group, numbers in enumerate(self.groups):
            streams = self.streams(group, masks).unbind(1)
            for number, of_masks in zip(numbers, streams, strict=True):
                case = self.cases[number]
                values[:, number] = case.rise(of_masks).cpu().double()
                answered[number] = case.score.is_answer(of_masks[0])
        check_finite(number=values)
        return values, answered

    @property
    def answers(self) -> list[bool | None]:
        """Whether the model itself answers each question; None for vectors."""
        return [case.answers[0] for case in self.cases]

    def faithfulness(self, masks: Float[Tensor, "n *shape"]) -> Float[Tensor, " n"]:
        """Return f of each mask: the mean rise over the mean absolute change."""
        return self.values(masks).mean(1) / self.changes.mean()

    def shares(self, masks: Float[Tensor, "n *shape"]) -> Float[Tensor, "n templates"]:
        """Return f of each mask on the questions of each template."""
        values, changes = self.values(masks), self.changes
        columns = [values[:, x].mean(1) / changes[x].mean() for x in self.templates.values()]
        return torch.stack(columns, 1)

    def gradient(
        self, masks: Float[Tensor, "n *shape"], weights: Sequence[float]
    ) -> Float[Tensor, " *shape"]:
        """Return the weighted sum of the gradients of f at some masks."""
        total = torch.zeros(self.shape, dtype=torch.float64)
        like = self.cases[0].passes[0].stream
        for group in range(len(self.groups)):
            for mask, weight in zip(masks, weights, strict=True):
                with torch.enable_grad():
                    given = mask.to(like).requires_grad_()
                    rise = weight * self.rises(group, given[None]).sum()
                    (slope,) = torch.autograd.grad(rise, given)
                total += slope.cpu().double()
        check_finite(gradient=total)
        return total / self.changes.sum()

    def scores(self, mask: Bool[Tensor, " *shape"]) -> Float[Tensor, " *shape"]:
        """Return the integrated gradients of f by the mask, on the way to the mask of a circuit.

        All parts of the circuit grow from 0 to 1 together, so that the integrated gradients add up
        to its f, up to the error of Gauss-Legendre quadrature with two points. The gradient at the
        circuit itself is near 0 for parts that saturate, such as the first MLP of many models,
        without which nothing is left.

        Source: Sundararajan et al. 2017 (arXiv 1703.01365), by the parts of a circuit.
        """
        key = mask.numpy().tobytes()
        if key not in self._scores:
            self._scores[key] = self._integrated(mask)
        return self._scores[key]

    def _integrated(self, mask: Bool[Tensor, " *shape"]) -> Float[Tensor, " *shape"]:
        points, weights = np.polynomial.legendre.leggauss(2)
        # From [-1, 1] to [0, 1].
        shares = torch.from_numpy((points + 1) / 2)
        masks = shares.reshape(-1, *[1] * mask.dim()) * mask
        return self.gradient(masks, (weights / 2).tolist())

    @property
    def everything(self) -> Bool[Tensor, " *shape"]:
        """The mask of all parts that the model has."""
        exist = self.model.places.exist
        if not self.by_position:
            return exist.clone()
        time = self.cases[0].passes[0].ids.shape[1]
        return exist[:, None].repeat(1, time, 1)

    @cached_property
    def groups(self) -> list[list[int]]:
        """Numbers of questions that share passes, and run side by side."""
        of_passes: dict[tuple[int, int], list[int]] = defaultdict(list)
        repeats: Counter[tuple[int, int]] = Counter()
        for number, case in enumerate(self.cases):
            place = id(case.passes[0]), case.row
            of_passes[place[0], repeats[place]].append(number)
            repeats[place] += 1
        return [sorted(group, key=lambda i: self.cases[i].row) for group in of_passes.values()]

    @cached_property
    def _passes(self) -> list[tuple[Pass, Pass]]:
        passes = []
        for group in self.groups:
            first, second = self.cases[group[0]].passes
            rows = [self.cases[number].row for number in group]
            first, second = first.some(rows), second.some(rows)
            passes.append((first, second.in_place_of(first)))
        return passes

    def streams(
        self, group: int, masks: Float[Tensor, "n *shape"]
    ) -> Float[Tensor, "n texts time d_model"]:
        """Return the last streams of a group's texts, for each mask."""
        first, second = self._passes[group]
        sets = [mixture(second, mask) for mask in masks]
        return first.changed(sets, kept=first_change((first, second)))


Scores = Callable[[Cases, Bool[Tensor, " *shape"]], Float[Tensor, " *shape"]]
"""What each part of a mask is worth to some questions, as a share of the change."""


@dataclass(frozen=True, eq=False)
class Found:
    """The parts of a circuit, and how they were found.

    Attributes:
        mask: the parts.
        order: the numbers of all parts that may be in it, the best first.
        holds: whether f is in bounds on every template, on the questions that decide the size, or
            misses them by at most 0.05.
        sizes: numbers of parts that were tried, and f of each on every template there.
    """

    mask: Bool[Tensor, " *shape"]
    order: Int[Tensor, " parts"]
    holds: bool
    sizes: dict[int, tuple[float, ...]]


def search_circuit(
    ordering: Sequence[Cases],
    deciding: Cases,
    keep: float,
    start: Bool[Tensor, " *shape"] | None = None,
    sizes: Sequence[int] = SIZES,
    scores: Scores = Cases.scores,
) -> Found:
    """Return the smallest circuit whose f lies between `keep` and 1.15 on every template.

    Parts are ordered by their `scores` on some questions of each template, the largest over
    templates, and f is measured on others. Parts that oppose the answer have negative scores and
    come last; at sizes at which f is too large without them, they are ordered by their size like
    all others. f has to hold at the next size too: what holds at one alone is chance. If no size
    does, that which misses the bounds least is returned, and holds if that is by at most 0.05.
    Parts are those of `start`, by default all.
    """
    if not ordering:
        raise BilensError("ordering is empty, expected the cases of a template or more")
    everything = ordering[0].everything if start is None else start
    worth = torch.stack([scores(cases, everything).flatten() for cases in ordering])
    orders = []
    for worths in (worth.amax(0), worth.abs().amax(0)):
        ranked = worths.masked_fill(~everything.flatten(), -torch.inf)
        orders.append(ranked.argsort(descending=True, stable=True)[: int(everything.sum())])
    tried: dict[int, tuple[float, ...]] = {}
    used, misses = dict[int, Tensor](), dict[int, float]()
    held: list[int] = []
    for size in sorted({min(size, len(orders[0])) for size in sizes}):
        for order in orders:
            given = _first(order, size, everything.shape).cpu().double()[None]
            shares = deciding.shares(given)[0].tolist()
            if max(shares) <= HIGHEST:
                break
        tried[size], used[size] = tuple(shares), order
        # All parts keep 1 up to rounding.
        misses[size] = max(keep - 1e-4 - min(shares), max(shares) - HIGHEST)
        held = [*held, size] if misses[size] <= 0 else []
        if len(held) > 1:
            break
    size = held[0] if held else min(misses, key=misses.__getitem__)
    mask = _first(used[size], size, everything.shape)
    return Found(mask, used[size], misses[size] <= SLACK, tried)


def _first(
    order: Int[Tensor, " parts"], count: int, shape: Sequence[int]
) -> Bool[Tensor, " *shape"]:
    mask = torch.zeros(*shape, dtype=torch.bool)
    mask.view(-1)[order[:count]] = True
    return mask


def necessary(
    mask: Bool[Tensor, " *shape"],
    needed: Bool[Tensor, " *shape"],
    deciding: Cases,
    left: float,
    largest: int = SIZES[-1],
) -> Bool[Tensor, " *shape"]:
    """Return a circuit with further parts, without which at most `left` of the change is left.

    While more is left on a template, the part with the largest measured effect in the run without
    the circuit is added. Measured are the sixteen of the largest gradients there.
    """
    while int(mask.sum()) < largest:
        others = (~mask | needed).cpu().double()[None]
        remains = deciding.shares(others)[0].tolist()
        if max(remains) <= left or not others.any():
            break
        worst = deciding.some([*deciding.templates.values()][remains.index(max(remains))])
        slopes = worst.gradient(others, [1.0]).masked_fill(mask | (others[0] == 0), -torch.inf)
        trials = slopes.flatten().argsort(descending=True)[:16]
        trials = trials[slopes.flatten()[trials] > -torch.inf]
        if not len(trials):
            break
        without = others.flatten().repeat(len(trials), 1)
        without[torch.arange(len(trials)), trials] = 0
        values = worst.faithfulness(without.reshape(-1, *mask.shape))
        if float(values.min()) >= max(remains):
            break
        mask = mask.clone()
        mask.view(-1)[trials[values.argmin()]] = True
    return mask

"""Circuits: the few parts of a model that answer questions, found by gradients and measured.

A mask m in [0, 1] keeps a share of each head and MLP in the run of the first text and takes the
other share from the run of the second. f(m) is the number of that run on a scale where the second
text has 0 and the first 1. Over several questions it is a share of the absolute change: each counts
by its own, whether the first text raises its number or lowers it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from itertools import combinations

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bilens.checks import check_finite
from bilens.errors import BilensError
from bilens.read.flow.case import Case, make_cases
from bilens.read.flow.interval import Interval
from bilens.read.flow.labels import token_scores
from bilens.read.flow.patching import parts_in
from bilens.read.flow.question import Question
from bilens.read.language.names import shown_tokens
from bilens.residual import ResidualModel
from bilens.residual.changes import Part
from bilens.residual.exchanges import exchanged, mixture
from bilens.residual.passes import Pass, first_change


class Cases:
    """Questions about a model, on which masks are measured.

    With `by_position`, for a single question, masks have a share of each position.
    """

    def __init__(
        self, model: ResidualModel, cases: Sequence[Case], *, by_position: bool = False
    ) -> None:
        self.model, self.by_position, self.cases = model, by_position, cases

    @classmethod
    def of(
        cls, model: ResidualModel, questions: Sequence[Question], *, by_position: bool = False
    ) -> "Cases":
        """Run a model on both texts of each question; see `make_cases`."""
        return cls(model, make_cases(model, questions), by_position=by_position)

    def some(self, numbers: Iterable[int], *, by_position: bool = False) -> "Cases":
        """Return the cases with some numbers, which may repeat."""
        cases = [self.cases[i] for i in numbers]
        return Cases(self.model, cases, by_position=by_position)

    def __len__(self) -> int:
        return len(self.cases)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a mask: (layers, heads + 1), or (layers, time, heads + 1)."""
        time = (self.cases[0].passes[0].ids.shape[1],) if self.by_position else ()
        return (self.model.n_layers, *time, self.model.n_heads + 1)

    @property
    def everything(self) -> Bool[Tensor, " *shape"]:
        """The mask of all parts that the model has."""
        exist = self.model.places.exist
        return (exist[:, None] if self.by_position else exist).expand(self.shape).clone()

    @property
    def changes(self) -> Float[Tensor, " cases"]:
        """The absolute change of each question's number."""
        return torch.tensor([abs(case.change) for case in self.cases], dtype=torch.float64)

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
            passes.append((first.some(rows), second.some(rows)))
        return passes

    def rises(self, group: int, masks: Float[Tensor, "n *shape"]) -> Float[Tensor, "n texts"]:
        """Return how far each number of a group rises from its second text, for each mask."""
        first, second = self._passes[group]
        sets = [mixture(second, mask) for mask in masks]
        streams = first.changed(sets, kept=first_change((first, second)))
        numbers = self.groups[group]
        rises = [self.cases[i].rise(x) for i, x in zip(numbers, streams.unbind(1), strict=True)]
        return torch.stack(rises, 1)

    @torch.no_grad()
    def values(self, masks: Float[Tensor, "n *shape"]) -> Float[Tensor, "n cases"]:
        """Return how far each question's number rises from its second text, for each mask."""
        values = torch.zeros(len(masks), len(self), dtype=torch.float64)
        for group, numbers in enumerate(self.groups):
            values[:, numbers] = self.rises(group, masks).double().cpu()
        check_finite(number=values)
        return values

    def faithfulness(self, masks: Float[Tensor, "n *shape"]) -> Float[Tensor, " n"]:
        """Return f of each mask: the mean rise over the mean absolute change."""
        return self.values(masks).mean(1) / self.changes.mean()

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
                total += slope.double().cpu()
        check_finite(gradient=total)
        return total / self.changes.sum()


def integrated_gradients(cases: Cases, mask: Bool[Tensor, " *shape"]) -> Float[Tensor, " *shape"]:
    """Return the integrated gradients of f by the mask, on the way to the mask of a circuit.

    All parts of the circuit grow from 0 to 1 together, so that the integrated gradients add up to
    f, up to the error of Gauss-Legendre quadrature with three points. The gradient at the circuit
    itself is near 0 for parts that saturate, such as the first MLP of many models, without which
    nothing is left.

    Source: Sundararajan et al. 2017 (arXiv 1703.01365), by the parts of a circuit.
    """
    points, weights = np.polynomial.legendre.leggauss(3)
    # From [-1, 1] to [0, 1].
    shares = torch.from_numpy((points + 1) / 2)
    masks = shares.reshape(-1, *[1] * mask.dim()) * mask
    return cases.gradient(masks, (weights / 2).tolist())


def search(
    cases: Cases, keep: float, start: Bool[Tensor, " *shape"] | None = None
) -> list[Bool[Tensor, " *shape"]]:
    """Return masks of fewer and fewer parts that keep f, the last one the smallest.

    The parts of the smallest integrated gradients are dropped: half of all, or the largest of some
    smaller shares that keeps f. Where not even one can go by that order, each of the smallest 24 is
    tried alone. The search begins with the parts `start`, by default all.
    """
    trail: list[Tensor] = []
    everything = cases.everything
    smaller: Tensor | None = everything if start is None else start
    while smaller is not None:
        trail.append(smaller)
        smaller = _smaller(cases, smaller, keep)
    return trail


def _smaller(
    cases: Cases, mask: Bool[Tensor, " *shape"], keep: float
) -> Bool[Tensor, " *shape"] | None:
    """Return a mask of fewer parts that keeps f; None if there is none."""
    if (size := int(mask.sum())) == 1:
        return None
    order = integrated_gradients(cases, mask).masked_fill(~mask, torch.inf).flatten().argsort()
    for count in sorted({max(1, size // share) for share in (2, 3, 6, 12, 24, size)}, reverse=True):
        trial = without(mask, order[:count])
        if float(cases.faithfulness(trial[None].double())[0]) >= keep:
            return trial
    # The order does not lead on: some parts are tried alone.
    trials = [without(mask, place) for place in order[: min(size, 24)]]
    values = cases.faithfulness(torch.stack(trials).double()).tolist()
    best = values.index(max(values))
    return trials[best] if values[best] >= keep else None


def resampled(count: int, samples: int = 2000) -> np.ndarray:
    """Return the numbers of bootstrap samples of questions, (samples, count)."""
    return np.random.default_rng(0).integers(count, size=(samples, count))


def jaccards(cases: Cases, keep: float, samples: int) -> list[float]:
    """Return the Jaccard index of circuits of bootstraps of the questions, of every two circuits.

    It is the number of parts that two circuits share over that of all their parts.
    """
    masks = []
    for of_sample in resampled(len(cases), samples):
        masks.append(search(cases.some(of_sample), keep)[-1])
    return [float((a & b).sum() / (a | b).sum()) for a, b in combinations(masks, 2)]


def without(mask: Bool[Tensor, " *shape"], places: Tensor) -> Bool[Tensor, " *shape"]:
    """Return a mask without some of its entries, by their numbers."""
    smaller = mask.flatten().clone()
    smaller[places] = False
    return smaller.reshape(mask.shape)


@dataclass(frozen=True)
class PartEffect:
    """What one part of a circuit does, on the questions that measure."""

    part: Part
    # Share of the change that is lost when the part alone is that of the second text.
    noising: float
    denoising: float  # share that is gained when the part alone is that of the first text
    raises: tuple[str, ...]  # tokens that become less probable without it
    lowers: tuple[str, ...]  # tokens that become more probable without it


@dataclass(frozen=True, eq=False)
class Circuit:
    """The parts that answer the questions of a task.

    Attributes:
        task: its name.
        mask: the parts.
        effects: what each part does, the largest first.
        needed: parts of the first half of the layers without which more than three quarters of the
            change are lost, whatever else the model does.
        ordering: f on the questions that found it.
        restored: f on the questions that measure.
        left: f of everything else there, with the needed parts in place.
        curve: numbers of parts of larger circuits on the way, and f on the questions that measure.
        questions: number of questions that found it, and of others that measure; 0 if a single
            question measures itself.
        right: number of those that measure whose answer the model itself gives; None for vectors.
        opposite: number of those whose number the first text lowers.
        familiar: number of those of a template that found it; see `is_similar`.
        repeated: number of questions that were left out, since they repeat others.
        similar: Jaccard index of every two circuits of bootstraps of the questions that find.
    """

    task: str
    mask: Bool[Tensor, " *shape"]
    effects: tuple[PartEffect, ...]
    needed: tuple[Part, ...]
    ordering: float
    restored: Interval
    left: Interval
    curve: tuple[tuple[int, float], ...]
    questions: tuple[int, int]
    right: int | None
    opposite: int
    familiar: int
    repeated: int = 0
    similar: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """Number of parts."""
        return int(self.mask.sum())


def found_circuit(finding: Cases, measuring: Cases, keep: float, bootstraps: int = 0) -> Circuit:
    """Return the circuit that some cases find, measured on others, and how stable it is."""
    trail = search(finding, keep)
    mask = trail[-1]
    ordering = float(finding.faithfulness(mask[None].double())[0])
    # All parts together keep 1, up to rounding.
    if keep > 1 and ordering < keep:
        raise BilensError(
            f"keep={keep}, and the parts that were found keep {ordering:.3g}; ask for up to 1, as "
            "all parts together keep"
        )
    effects = part_effects(measuring, mask)
    # Such parts of early layers encode the tokens themselves, for whatever is asked about them.
    early = [x for x in effects if (x.part.layer or 0) < finding.model.n_layers / 2]
    # Without a part that any circuit needs, most of the change is lost.
    needed = tuple(effect.part for effect in early if effect.noising > 0.75)
    masks = torch.stack([*trail, _complement(mask, needed)]).double()
    values, changes = measuring.values(masks), measuring.changes
    right = [case.answers[0] for case in measuring.cases]
    return Circuit(
        task=finding.cases[0].question.task,
        mask=mask,
        effects=effects,
        needed=needed,
        ordering=ordering,
        restored=Interval.of(values[-2], changes),
        left=Interval.of(values[-1], changes),
        curve=tuple(
            (int(of_size.sum()), float(rises.mean() / changes.mean()))
            for of_size, rises in zip(trail, values[:-1], strict=True)
        ),
        questions=(len(finding), 0 if finding is measuring else len(measuring)),
        right=None if None in right else sum(map(bool, right)),
        opposite=sum(case.change < 0 for case in measuring.cases),
        familiar=sum(
            any(is_similar(case, of_finding) for of_finding in finding.cases)
            for case in measuring.cases
        ),
        similar=tuple(jaccards(finding, keep, bootstraps)),
    )


def is_similar(a: Case, b: Case) -> bool:
    """Return whether two questions are of one template: half of their tokens agree in order."""
    tokens, others = (case.passes[0].ids[case.row].tolist() for case in (a, b))
    return SequenceMatcher(None, tokens, others, autojunk=False).ratio() >= 0.5


def everything_but(circuit: Circuit) -> Bool[Tensor, " *shape"]:
    """Return the mask of all parts that are not in a circuit, and of those that any needs."""
    return _complement(circuit.mask, circuit.needed)


def _complement(mask: Bool[Tensor, " *shape"], needed: Sequence[Part]) -> Bool[Tensor, " *shape"]:
    others = ~mask
    for part in needed:
        number = mask.shape[-1] - 1 if part.number is None else part.number
        at = () if part.position is None else (part.position,)
        others[(part.layer or 0, *at, number)] = True
    return others


@torch.no_grad()
def part_effects(
    cases: Cases, mask: Bool[Tensor, " *shape"], tokens: int = 3
) -> tuple[PartEffect, ...]:
    """Return the effects of the parts of a mask, each alone, the largest first."""
    model, parts = cases.model, parts_in(mask)
    lost, gained = torch.zeros(2, len(parts), dtype=torch.float64)
    moved = torch.zeros(len(parts), model.vocab_size)
    for case in cases.cases:
        first, second = case.alone
        kept = first_change(case.alone)
        sets = [[], *([exchanged(part, second)] for part in parts)]
        noised = first.changed(sets, kept=kept)[:, 0]
        lost += abs(case.change) - case.rise(noised[1:]).double().cpu()
        denoised = second.changed([[exchanged(part, first)] for part in parts], kept=kept)[:, 0]
        gained += case.rise(denoised).double().cpu()
        ends = noised[:, -1]
        moved += token_scores(model, ends[:1], ends[1:]).cpu() / len(cases)
    total = float(cases.changes.sum())
    effects = []
    for part, loss, gain, scores in zip(parts, lost, gained, moved, strict=True):
        raises, lowers = (named(model, sign * scores, tokens) for sign in (1, -1))
        effects.append(PartEffect(part, float(loss) / total, float(gain) / total, raises, lowers))
    return tuple(sorted(effects, key=lambda effect: -abs(effect.noising + effect.denoising)))


def named(model: ResidualModel, scores: Float[Tensor, " vocab"], count: int = 3) -> tuple[str, ...]:
    """Return the tokens of the largest positive scores as text, the largest first."""
    values, numbers = scores.topk(min(count, len(scores)))
    return tuple(shown_tokens(model, numbers[values > 0]))

"""Circuits that are measured: what their parts restore, and what is left without them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from bilens.circuits.cases import Cases, summed
from bilens.circuits.patching import exchanged_each, parts_in
from bilens.circuits.search import Scores, SearchResult, search_circuit
from bilens.flows.interval import Interval
from bilens.options import KEEP
from bilens.transformer.parts import Part


class Split(NamedTuple):
    """The questions of a template: some order parts, some decide the size, others measure."""

    template: str
    ordering: Cases
    deciding: Cases
    measuring: Cases

    @classmethod
    def of(cls, cases: Cases, numbers: Sequence[int], template: str) -> "Split":
        """Return the split of the questions of a template, by their numbers; see `shares`."""
        return cls(template, *map(cases.some, cls.shares(numbers)))

    @staticmethod
    def shares(numbers: Sequence[int]) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Return the numbers of the questions that order, that decide, and that measure.

        A quarter orders, at most six; a third decides, at most eight. Of many a twentieth and a
        fifteenth are more. A single one does all.
        """
        count = len(numbers)
        if count == 1:
            return numbers, numbers, numbers
        ordering = max(min(6, max(1, count // 4)), count // 20)
        deciding = ordering + max(min(8, max(1, count // 3)), count // 15)
        return numbers[:ordering], numbers[ordering:deciding], numbers[deciding:]


@dataclass(frozen=True)
class PartEffect:
    """What one part of a circuit does, on questions that measure."""

    part: Part
    # Share of the change that is lost when the part alone is that of the second text.
    noising: float
    denoising: float  # share that is gained when the part alone is that of the first text


@dataclass(frozen=True)
class Measured:
    """What a circuit does on questions that did not find it.

    Attributes:
        questions: their number.
        restored: f of the circuit.
        left: f of everything else.
        closeness: 1 minus the mean of |1 - f| over questions.
        right: number of questions whose answer is ahead with the circuit alone; None for vectors.
        answers: number of questions that the model itself answers; None for vectors.
        change: mean absolute change of their number between both texts.
    """

    questions: int
    restored: Interval
    left: Interval
    closeness: float
    right: int | None
    answers: int | None
    change: float


def measured(
    cases: Cases, circuit: Bool[Tensor, " *shape"], others: Bool[Tensor, " *shape"]
) -> tuple[Measured, dict[str, Measured]]:
    """Return what a circuit, and everything else, does on questions, and on each template."""
    rises, right = cases.measured(torch.stack([circuit, others]).cpu().double())
    changes, answers = cases.changes, cases.answers

    def count(answers: Sequence[bool | None], numbers: Sequence[int]) -> int | None:
        values = [x for i in numbers if (x := answers[i]) is not None]
        return sum(values) if values else None

    def of(numbers: Sequence[int]) -> Measured:
        (f, left), of_these = rises[:, list(numbers)], changes[list(numbers)]
        return Measured(
            questions=len(numbers),
            restored=Interval.of(f, of_these),
            left=Interval.of(left, of_these),
            closeness=float(1 - (1 - f / of_these).abs().mean()),
            right=count(right, numbers),
            answers=count(answers, numbers),
            change=float(of_these.mean()),
        )

    by_template = {name: of(numbers) for name, numbers in cases.templates.items()}
    return of(range(len(cases))), by_template


@dataclass(frozen=True, eq=False)
class Circuit:
    """The parts that answer the questions of a task.

    Attributes:
        task: its name.
        search: its result, with the mask of the parts.
        measured: what it does on all questions that measure.
        by_template: the same for each template.
        live: parts that are always in place, and do not count: all MLPs in circuits of heads.
        effects: what each part does, the largest first.
        left_out: of several templates, the circuit of all others, measured on the one.
        control: what the same search finds for an answer that is nonsense.
    """

    task: str
    search: SearchResult
    measured: Measured
    by_template: Mapping[str, Measured]
    live: Bool[Tensor, " *shape"] = field(repr=False)
    effects: tuple[PartEffect, ...] = ()
    left_out: "Mapping[str, Circuit]" = field(default_factory=dict)
    control: "Circuit | None" = None

    @property
    def mask(self) -> Bool[Tensor, " *shape"]:
        """The parts, with those that are always in place."""
        return self.search.mask

    @property
    def parts(self) -> Bool[Tensor, " *shape"]:
        """The mask without the parts that are always in place."""
        return self.mask & ~self.live

    @property
    def size(self) -> int:
        """Number of parts."""
        return int(self.parts.sum())

    @property
    def holds(self) -> bool:
        """Whether f is in bounds, on the questions that decide the size."""
        return self.search.holds

    @property
    def others(self) -> Bool[Tensor, " *shape"]:
        """The mask of all parts that are not in the circuit."""
        return ~self.parts

    def on(self, cases: Cases) -> Measured:
        """Return what it does on other questions."""
        return measured(cases, self.mask, self.others)[0]

    @property
    def core(self) -> Bool[Tensor, " *shape"]:
        """The mask of the parts that are in it whichever template is left out."""
        return torch.stack([self.parts, *(one.mask for one in self.left_out.values())]).all(0)


def find_circuit(
    splits: Sequence[Split],
    keep: float = KEEP,
    *,
    measuring: Cases | None = None,
    scores: Scores = Cases.scores,
    size: int | None = None,
    heads: bool = False,
) -> Circuit:
    """Return the circuit of some templates, measured on questions that did not find it.

    These are by default those of the templates that measure. It is the smallest that
    `search_circuit` finds, or has `size` parts. With `heads` all MLPs are in place, and only heads
    are searched.
    """
    deciding = Cases.joined([split.deciding for split in splits])
    live = torch.zeros_like(deciding.everything)
    live[..., -1] = heads
    live &= deciding.everything
    ordering = [split.ordering for split in splits]
    result = search_circuit(ordering, deciding, keep, scores, size=size, live=live)
    measuring = measuring or Cases.joined([split.measuring for split in splits])
    total, by_template = measured(measuring, result.mask, ~result.mask | live)
    task = measuring.cases[0].question.task
    return Circuit(task, result, total, by_template, live)


@torch.no_grad()
def part_effects(shown: Cases, mask: Bool[Tensor, " *shape"]) -> tuple[PartEffect, ...]:
    """Return the effects of the parts of a mask, each alone, the largest first."""
    parts = parts_in(mask)

    def own() -> Tensor:
        losses, gains = sums = torch.zeros(2, len(parts), dtype=torch.float64)
        for case in (case for case in shown.cases if case.batch.is_own):
            first, second = case.alone
            noising, denoising = (
                exchanged_each(*x, parts) for x in ((first, second), (second, first))
            )
            losses += abs(case.change) - case.rise(noising).cpu().double()
            gains += case.rise(denoising).cpu().double()
        return sums

    part_losses, part_gains = summed(shown, own)
    total = float(shown.changes.sum())
    effects = []
    for part, loss, gain in zip(parts, part_losses.tolist(), part_gains.tolist(), strict=True):
        effects.append(PartEffect(part, loss / total, gain / total))
    return tuple(sorted(effects, key=lambda effect: -abs(effect.noising + effect.denoising)))

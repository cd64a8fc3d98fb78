"""Circuits that are measured: what their parts restore, and what is left without them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bilens.read.flow.circuit_search import Cases, Found, Scores, necessary, search
from bilens.read.flow.edges import EdgeCircuit
from bilens.read.flow.interval import Interval
from bilens.read.flow.labels import token_scores
from bilens.read.flow.patching import parts_in
from bilens.read.language.names import shown_tokens
from bilens.residual import ResidualModel
from bilens.residual.changes import Part
from bilens.residual.exchanges import exchanged
from bilens.residual.passes import first_change

SHOWN = 4
"""Questions on which the effects of single parts are measured, at most."""


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

        A third orders, at most eight; a quarter decides, at most six.
        """
        ordering = min(8, max(1, len(numbers) // 3))
        deciding = ordering + min(6, max(1, len(numbers) // 4))
        return numbers[:ordering], numbers[ordering:deciding], numbers[deciding:]


@dataclass(frozen=True)
class PartEffect:
    """What one part of a circuit does, on questions that measure."""

    part: Part
    # Share of the change that is lost when the part alone is that of the second text.
    noising: float
    denoising: float  # share that is gained when the part alone is that of the first text
    raises: tuple[str, ...]  # tokens that become less probable without it
    lowers: tuple[str, ...]  # tokens that become more probable without it


@dataclass(frozen=True)
class Measured:
    """What a circuit does on questions that did not find it.

    Attributes:
        questions: their number.
        restored: f of the circuit.
        left: f of everything else, with the needed parts in place.
        closeness: 1 minus the mean of |1 - f| over questions.
        right: number of questions whose answer is ahead with the circuit alone; None for vectors.
    """

    questions: int
    restored: Interval
    left: Interval
    closeness: float
    right: int | None

    @classmethod
    def of(
        cls,
        rises: Float[Tensor, "2 cases"],
        changes: Float[Tensor, " cases"],
        right: Sequence[bool | None],
    ) -> "Measured":
        """Return the numbers of the rises of a circuit and of everything else."""
        answered = [x for x in right if x is not None]
        return cls(
            questions=len(changes),
            restored=Interval.of(rises[0], changes),
            left=Interval.of(rises[1], changes),
            closeness=float(1 - (1 - rises[0] / changes).abs().mean()),
            right=sum(answered) if answered else None,
        )


@dataclass(frozen=True, eq=False)
class Circuit:
    """The parts that answer the questions of a task.

    Attributes:
        task: its name.
        found: the search, whose mask may have fewer parts.
        mask: the parts.
        effects: what each part does, the largest first.
        needed: those of them that any circuit needs; see `needed_parts`.
        measured: what it does on all questions that measure.
        by_template: the same for each template.
        questions: number of questions that order parts, that decide the size, and that measure; 0
            at the end if a single question measures itself.
        opposite: number of those that measure whose number the first text lowers.
        left_out: of several templates, the circuits of all but one.
        own: the circuit of each template, if other parts answer one of them.
        exchanged: parts that another can stand for, with that other one.
        controls: what the same search finds where there is nothing to find.
        edges: those between the parts that carry the answer, if they were asked for.
        wrong: first texts of questions that were left out, since the model answers otherwise.
        repeated: number of questions that were left out, since they repeat others.
        of_other_templates: number of questions that measure, of a single name of a template, whose
            sentences are like none that found the circuit.
    """

    task: str
    found: Found
    mask: Bool[Tensor, " *shape"]
    effects: tuple[PartEffect, ...]
    needed: Bool[Tensor, " *shape"]
    measured: Measured
    by_template: Mapping[str, Measured]
    questions: tuple[int, int, int]
    opposite: int
    left_out: "tuple[LeftOut, ...]" = ()
    own: "tuple[Circuit, ...]" = ()
    exchanged: Mapping[Part, Part] = field(default_factory=dict)
    controls: "tuple[ControlCircuit, ...]" = ()
    edges: EdgeCircuit | None = None
    wrong: tuple[str, ...] = ()
    repeated: int = 0
    of_other_templates: int = 0

    @property
    def size(self) -> int:
        """Number of parts."""
        return int(self.mask.sum())

    @property
    def others(self) -> Bool[Tensor, " *shape"]:
        """The mask of all parts that are not in the circuit, and of those that any needs."""
        return ~self.mask | self.needed

    @property
    def core(self) -> Bool[Tensor, " *shape"]:
        """The mask of the parts that are in it whichever template is left out."""
        masks = [self.mask, *(left.found.mask for left in self.left_out)]
        return torch.stack(masks).all(0)

    @property
    def similar(self) -> float | None:
        """Mean Jaccard index of every two circuits of all templates but one; None for one."""
        masks = [left.found.mask for left in self.left_out]
        if not masks:
            return None
        shared = [float((a & b).sum() / (a | b).sum()) for a, b in combinations(masks, 2)]
        return sum(shared) / len(shared)

    @property
    def unlike_templates(self) -> list[str]:
        """Names of the templates of which the circuit of the others restores less than half."""
        return [x.template for x in self.left_out if x.restored[x.template].value < 0.5]


@dataclass(frozen=True)
class ControlCircuit:
    """A circuit that was found where there is nothing to find.

    Attributes:
        name: what was changed.
        size: number of parts.
        holds: whether it restores what was asked for, where it was found; None without a search.
        measured: what it does on the questions that measure.
        answers: number of these questions that the model itself answers; None for vectors.
        change: mean absolute change of their number between both texts.
    """

    name: str
    size: int
    holds: bool | None
    measured: Measured
    answers: int | None
    change: float


@dataclass(frozen=True, eq=False)
class LeftOut:
    """The circuit of all templates but one.

    Attributes:
        template: the one that is left out.
        found: the search on the others.
        restored: f on the questions that measure, by template.
    """

    template: str
    found: Found
    restored: Mapping[str, Interval]


def found_circuit(splits: Sequence[Split], keep: float, left: float) -> Circuit:
    """Return the circuit of some templates, measured on questions that did not find it."""
    found, mask, needed = found_parts(splits, keep, left)
    total, by_template = measured(splits, mask, ~mask | needed)
    shown = []
    for split in splits:
        count = min(len(split.measuring), max(1, SHOWN // len(splits)))
        shown.append(split.measuring.some(range(count)))
    cases = [case for split in splits for case in split.measuring.cases]
    alone = splits[0].measuring is splits[0].ordering
    return Circuit(
        task=cases[0].question.task,
        found=found,
        mask=mask,
        effects=part_effects(shown, mask),
        needed=needed,
        measured=total,
        by_template=by_template,
        questions=(
            sum(len(split.ordering) for split in splits),
            sum(len(split.deciding) for split in splits),
            0 if alone else len(cases),
        ),
        opposite=sum(case.change < 0 for case in cases),
    )


def found_parts(
    splits: Sequence[Split], keep: float, left: float, scores: Scores = Cases.scores
) -> tuple[Found, Bool[Tensor, " *shape"], Bool[Tensor, " *shape"]]:
    """Return a search, the circuit without which at most `left` is left, and its needed parts."""
    deciding = [split.deciding for split in splits]
    found = search([split.ordering for split in splits], deciding, keep, scores=scores)
    needed = needed_parts(found.mask, deciding)
    return found, necessary(found.mask, needed, deciding, left), needed


def measured(
    splits: Sequence[Split], circuit: Bool[Tensor, " *shape"], others: Bool[Tensor, " *shape"]
) -> tuple[Measured, dict[str, Measured]]:
    """Return what a circuit does on all questions that measure, and on those of each template."""
    rises, changes, right = list[Tensor](), list[Tensor](), list[bool | None]()
    by_template = {}
    for split in splits:
        values, answered = split.measuring.measured(torch.stack([circuit, others]).double())
        by_template[split.template] = Measured.of(values, split.measuring.changes, answered)
        rises.append(values)
        changes.append(split.measuring.changes)
        right += answered
    return Measured.of(torch.cat(rises, 1), torch.cat(changes), right), by_template


def left_out(splits: Sequence[Split], keep: float) -> tuple[LeftOut, ...]:
    """Return the circuits of all templates but one, for each of several."""
    circuits = []
    for split in splits if len(splits) > 1 else ():
        others = [other for other in splits if other is not split]
        found = search([x.ordering for x in others], [x.deciding for x in others], keep)
        restored = {}
        for of_template in splits:
            cases = of_template.measuring
            rises = cases.values(found.mask[None].double())[0]
            restored[of_template.template] = Interval.of(rises, cases.changes)
        circuits.append(LeftOut(split.template, found, restored))
    return tuple(circuits)


def needed_parts(
    mask: Bool[Tensor, " *shape"], deciding: Sequence[Cases]
) -> Bool[Tensor, " *shape"]:
    """Return the parts of a circuit that any circuit needs.

    They are in the first half of the layers, and encode the tokens for whatever is asked about
    them: without one, more than three quarters of the change are lost on every template, in the
    circuit and in the whole model.
    """
    needed = mask.clone()
    needed[(len(mask) + 1) // 2 :] = False
    # The circuit and one question tell for most that they are not.
    of_one = [deciding[0].some([0])]
    for whole, measuring in ((mask, of_one), (mask, deciding), (deciding[0].everything, deciding)):
        places = needed.flatten().nonzero().flatten()
        if len(places):
            trials = whole.flatten().repeat(len(places), 1)
            trials[torch.arange(len(places)), places] = False
            masks = trials.reshape(-1, *mask.shape).double()
            shares = torch.stack([cases.faithfulness(masks) for cases in measuring])
            needed.view(-1)[places[shares.amax(0) >= 0.25]] = False
    return needed


def exchanges(
    circuit: Circuit, splits: Sequence[Split], trials: int = 6, change: float = 0.02
) -> dict[Part, Part]:
    """Return parts of a circuit that another can stand for, with that other part.

    The exchange changes f by less than `change` on every template, on three of the questions that
    decide the size. Tried are the parts of the smallest scores, each with one of the next in the
    order, which adds about as much.
    """
    few = []
    for split in splits:
        numbers = range(min(3, len(split.deciding)))
        few.append(split.deciding.some(numbers))
    mask, order = circuit.mask.flatten(), circuit.found.order.tolist()
    inside = [i for i in order if mask[i]][-trials:]
    outside = [i for i in order if not mask[i]][:trials]
    if not outside:
        return {}

    def shares(changed: Sequence[Sequence[int]]) -> Float[Tensor, "n templates"]:
        """Return f of the circuit with some parts turned over."""
        masks = mask.repeat(len(changed), 1)
        for row, places in zip(masks, changed, strict=True):
            row[list(places)] ^= True
        given = masks.reshape(-1, *circuit.mask.shape).double()
        return torch.stack([cases.faithfulness(given) for cases in few], 1)

    whole, *moved = shares([(), *((i,) for i in (*inside, *outside))])
    moves = torch.stack(moved) - whole
    lost, gained = -moves[: len(inside)], moves[len(inside) :]
    best = (lost[:, None] - gained).abs().amax(-1).argmin(1).tolist()
    pairs = [(i, outside[j]) for i, j in zip(inside, best, strict=True)]
    same = (shares(pairs) - whole).abs().amax(1) < change
    parts = parts_in(torch.ones_like(circuit.mask))
    found = {}
    for (part, other), is_same in zip(pairs, same.tolist(), strict=True):
        if is_same:
            found[parts[part]] = parts[other]
    return found


@torch.no_grad()
def part_effects(
    shown: Sequence[Cases], mask: Bool[Tensor, " *shape"], tokens: int = 3
) -> tuple[PartEffect, ...]:
    """Return the effects of the parts of a mask, each alone, the largest first."""
    model, parts = shown[0].model, parts_in(mask)
    lost, gained = torch.zeros(2, len(parts), dtype=torch.float64)
    moved = torch.zeros(len(parts), model.vocab_size)
    cases = [case for of_template in shown for case in of_template.cases]
    for case in cases:
        first, second = case.alone
        kept = first_change(case.alone)
        sets = [[], *([exchanged(part, second)] for part in parts)]
        noised = first.changed(sets, kept=kept)[:, 0]
        lost += abs(case.change) - case.rise(noised[1:]).double().cpu()
        denoised = second.changed([[exchanged(part, first)] for part in parts], kept=kept)[:, 0]
        gained += case.rise(denoised).double().cpu()
        ends = noised[:, -1]
        moved += token_scores(model, ends[:1], ends[1:]).cpu() / len(cases)
    total = sum(abs(case.change) for case in cases)
    effects = []
    for part, loss, gain, scores in zip(parts, lost, gained, moved, strict=True):
        raises, lowers = (named(model, sign * scores, tokens) for sign in (1, -1))
        effects.append(PartEffect(part, float(loss) / total, float(gain) / total, raises, lowers))
    return tuple(sorted(effects, key=lambda effect: -abs(effect.noising + effect.denoising)))


def named(model: ResidualModel, scores: Float[Tensor, " vocab"], count: int = 3) -> tuple[str, ...]:
    """Return the tokens of the largest positive scores as text, the largest first."""
    values, numbers = scores.topk(min(count, len(scores)))
    return tuple(shown_tokens(model, numbers[values > 0]))

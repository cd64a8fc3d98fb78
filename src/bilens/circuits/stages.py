"""Stages: where and when the change of an answer passes, as a few ranges of layers.

A question has places of three roles: the *word*, where its texts differ, the *end*, whose next
token is predicted, and what lies *between*; what stands in front of the first is equal in both.
Words that differ further on, after tokens that are the same again, are a role of their own, *word
2*.
A stage is all heads, or all MLPs, of a range of layers at the places of one role. A mask of roles
keeps the parts of stages as they run on the first text; all others are those of the second.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bilens.circuits.cases import ROLES, Cases, have_roles
from bilens.circuits.cuts import Cuts, last_true
from bilens.circuits.measures import Measured, Split, measured
from bilens.transformer import ResidualModel
from bilens.transformer.parts import Part

TOLERANCES = (0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.035, 0.025, 0.017, 0.012, 0.008, 0.005, 0.003)
"""Shares of the change that each end of a row may lose, the largest first."""
FIRST, LAST = (0.95, 1.15), (0.97, 1.12)
"""Bounds of f while ends are cut by their scores, and while stages are dropped by measurements."""
STEPS = (8, 4, 2, 1)
"""Layers by which ends of stages are dropped."""
STRONGEST = 3
"""Heads of a stage that are named."""

Kind = Literal["heads", "mlps"]
Role = Literal["word", "word 2", "between", "end"]


class Row(NamedTuple):
    """All heads, or all MLPs, at the places of a role: what a stage is a range of."""

    kind: Kind
    role: Role


ROWS = tuple(Row(kind, role) for role in get_args(Role) for kind in get_args(Kind))
Ranges = Mapping[Any, tuple[int, int]]
"""First and last layer of the stage of each row that has one."""


@dataclass(frozen=True)
class StageOfLayers:
    """Heads or MLPs of a range of layers, at the places of a role.

    Attributes:
        kind: heads or MLPs.
        role: the places: at the word that differs, at the end, or between.
        first: the first layer.
        last: the last one.
        without: f of all other stages, on questions that measure.
        strongest: addresses of its heads with the largest scores, and f with each as the only head
            of this stage, the largest first. Single heads often restore more than the whole.
    """

    kind: Kind
    role: Role
    first: int
    last: int
    without: float
    strongest: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        name = {"heads": "heads", "mlps": "MLPs"}[self.kind]
        layers = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"{name} {layers} {place_of(self.role)}"


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages that carry the change of a task's answers, measured on questions beside.

    Attributes:
        task: its name.
        stages: in the order of their layers.
        mask: their parts, by layer and role.
        measured: what they do on all questions that measure, and what is left without them.
        by_template: the same for each template.
        inside: number of parts and places in the stages, and of all.
        cuts: until where the word's stream carries the change alone, and from where the end's does;
            None for the stages of all templates but one.
        left_out: of several templates, the stages of all others, measured on the one.
        control: what the same search finds for an answer that is nonsense.
    """

    task: str
    stages: tuple[StageOfLayers, ...]
    mask: Bool[Tensor, "layers roles parts"] = field(repr=False)
    measured: Measured
    by_template: Mapping[str, Measured]
    inside: tuple[int, int]
    cuts: Cuts | None = None
    left_out: "Mapping[str, Stages]" = field(default_factory=dict)
    control: "Stages | None" = None

    @property
    def size(self) -> int:
        """Number of stages."""
        return len(self.stages)

    def on(self, cases: Cases) -> Measured:
        """Return what they do on other questions."""
        return measured(cases.by("role"), self.mask, ~self.mask)[0]


def find_stages(splits: Sequence[Split], *, measuring: Cases | None = None) -> Stages:
    """Return the stages of some templates, measured on questions that did not find them.

    Each row, of heads or MLPs at a role, has one range of layers. Scores are integrated gradients
    by the mask over rows, the larger of the templates; the ends of each row that sum to at most a
    tolerance are cut. Taken is the largest tolerance whose f lies between 0.95 and 1.15 on every
    template, on the questions that decide, at it and at the next. Then rows, and then ends of
    ranges, are dropped on all questions that find, while f stays between 0.97 and 1.12.
    """
    deciding = Cases.joined([split.deciding for split in splits]).by("role")
    scores = []
    for split in splits:
        ordering = split.ordering.by("role")
        scores.append(ordering.scores(ordering.everything))
    ranges = cut_ends(torch.stack([_worths(x) for x in scores]).amax(0), deciding)
    finding = [Cases.joined([split.ordering, split.deciding]).by("role") for split in splits]
    ranges = drop(ranges, finding)
    if measuring is None:
        measuring = Cases.joined([split.measuring for split in splits])
    return measured_stages(ranges, torch.stack(scores).amax(0), measuring.by("role"))


def mask_of(model: ResidualModel, ranges: Ranges) -> Bool[Tensor, "layers roles parts"]:
    """Return the mask of some stages. A place that is word and end has the parts of both."""
    exist = model.places.exist
    mask = torch.zeros(len(exist), len(ROLES), exist.shape[1], dtype=torch.bool)
    for (kind, role), (first, last) in ranges.items():
        parts = slice(0, -1) if kind == "heads" else slice(-1, None)
        mask[first : last + 1, places_of(role), parts] = True
    return mask & exist[:, None]


def places_of(role: Role) -> list[int]:
    """Return the numbers of the roles of places at which the parts of a role are."""
    return [i for i, name in enumerate(ROLES) if role in name.split(" and ")]


def cut_ends(worths: Float[Tensor, "rows layers"], deciding: Cases) -> Ranges:
    """Return the ranges of the largest tolerance whose f is in bounds on every template.

    It is in bounds at the next tolerance as well. It is found by bisection.
    """
    memo: dict[str, bool] = {}

    def ranges_of(i: int) -> Ranges:
        ranges = {}
        for row, of_row in zip(ROWS, worths, strict=True):
            if (layers := trimmed(of_row, TOLERANCES[i])) is not None:
                ranges[row] = layers
        return ranges

    def is_good(i: int) -> bool:
        if i == len(TOLERANCES):  # all that the model has restores everything
            return True
        ranges = ranges_of(i)
        if (key := str(ranges)) not in memo:
            shares = _shares([ranges], [deciding])
            memo[key] = FIRST[0] <= float(shares.min()) and float(shares.max()) <= FIRST[1]
        return memo[key]

    # The first tolerances that are too large, from the largest on.
    first_good = 1 + last_true(lambda i: not (is_good(i) and is_good(i + 1)), len(TOLERANCES), -1)
    if first_good == len(TOLERANCES):
        whole = (0, worths.shape[1] - 1)
        return {row: whole for row, of_row in zip(ROWS, worths, strict=True) if of_row.any()}
    return ranges_of(first_good)


def trimmed(worths: Float[Tensor, " layers"], tolerance: float) -> tuple[int, int] | None:
    """Return the range without the ends that sum to at most a tolerance each.

    There is none where all layers sum to at most twice the tolerance.
    """
    if float(worths.sum()) <= 2 * tolerance:
        return None
    first = int((worths.cumsum(0) <= tolerance).sum())
    last = len(worths) - 1 - int((worths.flip(0).cumsum(0) <= tolerance).sum())
    return (first, last) if first <= last else None


def drop(ranges: Ranges, finding: Sequence[Cases]) -> Ranges:
    """Return stages without rows, and without ends of ranges, that are not needed.

    Of rows the one that costs least goes first. Of ends, some layers at a time, each is measured
    alone, on the template of the least f; of those that cost least as many go together as stay in
    bounds on all. `finding` are the questions of each template.
    """
    present = _shares([ranges], finding)[0]
    low, high = min(LAST[0], float(present.min())), max(LAST[1], float(present.max()))

    def costs(tries: Sequence[Ranges], cases: Sequence[Cases] = finding) -> list[float]:
        """Return by how much the least f is lower; infinite where f is out of bounds."""
        shares = _shares(tries, cases, (low, high))
        fits = (shares >= low).all(1) & (shares <= high).all(1)
        return torch.where(fits, float(present.min()) - shares.amin(1), torch.inf).tolist()

    ranges = _fewest_rows(ranges, costs)
    worst = [finding[int(present.argmin())]]
    for size in STEPS:
        while (shorter := _shortened(ranges, size, worst, costs)) is not None:
            ranges = shorter
            if size < STEPS[0]:  # twice as many layers were tried before
                break
    return ranges


def _fewest_rows(ranges: Ranges, costs: Callable[..., list[float]]) -> Ranges:
    """Return stages without rows that are not needed; `costs` are those of several tries."""
    essential = set[Row]()
    while len(ranges) > 1 and (rows := [row for row in ranges if row not in essential]):
        tries = [_others(ranges, row) for row in rows]
        of_tries = costs(tries)
        # What is needed beside more stages is needed beside fewer.
        essential |= {row for row, cost in zip(rows, of_tries, strict=True) if cost == torch.inf}
        if min(of_tries) == torch.inf:
            break
        ranges = tries[of_tries.index(min(of_tries))]
    return ranges


def _shortened(
    ranges: Ranges, size: int, worst: Sequence[Cases], costs: Callable[..., list[float]]
) -> Ranges | None:
    """Return stages without some layers at the ends that are not needed; None if all are."""
    ends = [(row, end) for row in ranges for end in (0, 1)]
    ends = [one for one in ends if _shorter(ranges, [one], size)]
    of_ends = costs([_shorter(ranges, [one], size) for one in ends], worst)
    cheap = sorted((c, one) for c, one in zip(of_ends, ends, strict=True) if c < torch.inf)
    # All that are cheap together, or the half of them that is cheapest, ...: side by side, since
    # one mask takes nearly as long as a few.
    counts = [len(cheap) >> halvings for halvings in range(len(cheap).bit_length())]
    tries = [x for n in counts if (x := _shorter(ranges, [one for _, one in cheap[:n]], size))]
    fits = [x for x, cost in zip(tries, costs(tries), strict=True) if cost < torch.inf]
    return fits[0] if fits else None


def _shorter(
    ranges: Ranges, ends: Sequence[tuple[Row, int]], size: int
) -> dict[Row, tuple[int, int]]:
    """Return ranges without some layers at the first (0) or last (1) end of rows, {} if none."""
    shorter = dict(ranges)
    for row, end in ends:
        first, last = shorter[row]
        shorter[row] = (first + size, last) if end == 0 else (first, last - size)
        if shorter[row][0] > shorter[row][1]:
            return {}
    return shorter


def _shares(
    tries: Sequence[Ranges], cases: Sequence[Cases], bounds: tuple[float, float] | None = None
) -> Float[Tensor, "tries templates"]:
    """Return f of several stages on the questions of each template.

    With bounds it is NaN, and not measured, after a template on which it is out of them.
    """
    if not tries:
        return torch.zeros(0, 1, dtype=torch.float64)
    masks = torch.stack([mask_of(cases[0].model, ranges) for ranges in tries]).cpu().double()
    rows, columns = torch.arange(len(tries)), list[Tensor]()
    for of_template in cases:
        shares = of_template.shares(masks[rows])
        column = torch.full((len(tries), shares.shape[1]), torch.nan, dtype=torch.float64)
        column[rows] = shares
        columns.append(column)
        if bounds is not None:
            rows = rows[(shares >= bounds[0]).all(1) & (shares <= bounds[1]).all(1)]
            if not len(rows):
                break
    return torch.cat(columns, 1)


def _worths(scores: Float[Tensor, "layers roles parts"]) -> Float[Tensor, "rows layers"]:
    """Return the size of the summed scores of each row in each layer.

    What stands at a place that is word and end counts for the end.
    """
    rows = []
    for role in get_args(Role):
        of_role = _scores_of(role, scores)
        rows += [of_role[:, :-1].sum(1), of_role[:, -1]]
    return torch.stack(rows).abs()


def _scores_of(
    role: Role, scores: Float[Tensor, "layers roles parts"]
) -> Float[Tensor, "layers parts"]:
    return scores[:, places_of(role)].sum(1) if role == "end" else scores[:, ROLES.index(role)]


def measured_stages(
    ranges: Ranges, scores: Float[Tensor, "layers roles parts"], measuring: Cases
) -> Stages:
    """Return stages with what they do on questions, each of them and all together."""
    mask = mask_of(measuring.model, ranges)
    total, by_template = measured(measuring, mask, ~mask)
    has_second = have_roles(measuring, places_of("word 2"))
    roles = [role for role in get_args(Role) if has_second or role != "word 2"]
    rows = [row for row in ROWS if row in ranges]
    rows.sort(key=lambda row: ranges[row])
    without = [mask_of(measuring.model, _others(ranges, row)) for row in rows]
    alone = _heads_alone(measuring.model, ranges, rows, scores)
    masks = [*without, *alone.values()]
    shares = measuring.faithfulness(torch.stack(masks).cpu().double()).tolist() if masks else []
    heads_of: dict[Row, list[tuple[str, float]]] = {row: [] for row in rows}
    for (row, name), f in zip(alone, shares[len(rows) :], strict=True):
        heads_of[row].append((name, f))
        heads_of[row].sort(key=lambda head: -head[1])
    stages = [
        StageOfLayers(row.kind, row.role, *ranges[row], f, tuple(heads_of[row]))
        for row, f in zip(rows, shares, strict=False)
    ]
    exist = measuring.model.places.exist
    inside = int(mask[:, [ROLES.index(role) for role in roles]].sum())
    every = len(roles) * int(exist.sum())
    task = measuring.cases[0].question.task
    return Stages(task, tuple(stages), mask, total, by_template, (inside, every))


def _others(ranges: Ranges, row: Row) -> Ranges:
    return {other: layers for other, layers in ranges.items() if other != row}


def _heads_alone(
    model: ResidualModel,
    ranges: Ranges,
    rows: Sequence[Row],
    scores: Float[Tensor, "layers roles parts"],
) -> dict[tuple[Row, str], Bool[Tensor, "layers roles parts"]]:
    """Return masks in which one strong head stands for all heads of its stage, by its name."""
    alone = {}
    for row in rows:
        for layer, head in _strongest(row, ranges[row], scores):
            mask = mask_of(model, _others(ranges, row))
            mask[layer, places_of(row.role), head] = True
            alone[row, str(Part("head", layer, head))] = mask
    return alone


def _strongest(
    row: Row, layers: tuple[int, int], scores: Float[Tensor, "layers roles parts"]
) -> list[tuple[int, int]]:
    """Return layers and numbers of the heads of a stage with the largest scores."""
    if row.kind == "mlps":
        return []
    of_role = _scores_of(row.role, scores)[:, :-1]
    first, last = layers
    inside = of_role[first : last + 1]
    largest = inside.flatten().topk(min(STRONGEST, inside.numel()))
    numbers = largest.indices[largest.values > 0].tolist()
    return [(first + i // inside.shape[1], i % inside.shape[1]) for i in numbers]


def place_of(role: str) -> str:
    """Return where a role is, in words."""
    return {"between": role, "word 2": "at word 2"}.get(role, f"at the {role}")

"""Directions of a task: the few of each MLP through which the flows of its questions pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import detached
from bilens.circuits.case import Case, check_apart, different, make_cases
from bilens.errors import BilensError
from bilens.flows.fitted import token_hints
from bilens.flows.labels import token_scores
from bilens.flows.question import Question
from bilens.flows.sources import AnyModel, Questions, as_questions, opened
from bilens.flows.split import adjoints_of
from bilens.language.names import shown_tokens
from bilens.progress import progress_bar
from bilens.sections import Columns, Fact, Percent, by_column
from bilens.settings import Count
from bilens.transformer import ResidualModel
from bilens.transformer.exchange import Change, exchange


class MLPDirections(NamedTuple):
    """Directions of the output of an MLP: pairs of vectors with r_i . t_j = 1 if i = j, else 0."""

    written: Float[Tensor, "k d_model"]  # the vectors t
    # The vectors r that measure how much of t a change of the output has.
    read: Float[Tensor, "k d_model"]

    def flows(
        self, changes: Float[Tensor, "n d_model"], adjoints: Float[Tensor, "n d_model"]
    ) -> Float[Tensor, "n k"]:
        """Return the flow (w . t_i)(r_i . Dy) of each direction at some positions."""
        return (adjoints @ self.written.T) * (changes @ self.read.T)


@dataclass(frozen=True)
class TaskDirection:
    """One direction of a task.

    Attributes:
        number: its number there, from 1 in descending order of singular values.
        flow: its flow on the questions that measure, as a share of the mean |change|.
        effect: the measured change of the logit there, when it is exchanged between both texts.
        raises: tokens that become less probable without it, in the first texts of all questions.
        lowers: tokens that become more probable.
    """

    layer: int
    number: int
    flow: float
    effect: float
    raises: tuple[str, ...]
    lowers: tuple[str, ...]


@dataclass(frozen=True, eq=False, repr=False)
class TaskDirections(Reading):
    """The directions of a task, measured on questions that did not find them.

    Attributes:
        directions: written and read vectors of the MLP of each layer.
        values: their singular values.
        share: share of the flow through MLPs that the directions hold; see `share_held`.
        shares: the same for each layer.
        r2: R2 of measured exchanges by flows, over directions and questions; None if all exchanges
            are equal.
        strongest: the directions of the largest |flow| on the questions that found them.
        questions: number of questions that found them, and of those that measure.
        repeated: number of questions that were left out, since they repeat others.
        notes: warnings about the tokens.
    """

    directions: tuple[MLPDirections, ...]
    values: tuple[Float[Tensor, " k"], ...]
    share: float
    shares: Float[Tensor, " layers"]
    r2: float | None
    strongest: tuple[TaskDirection, ...]
    questions: tuple[int, int]
    repeated: int = 0
    notes: tuple[str, ...] = ()

    title: ClassVar[str] = "Directions of a task"
    formats: ClassVar[dict[str, str]] = {"flow": "+.1%", "measured effect": "+.1%"}
    explanation: ClassVar[str] = (
        "Directions of the outputs of MLPs that recur in the flows of a task. Flow and measured "
        "effect are shares of the change of the logit, on questions that did not find the "
        "directions. A direction is exchanged between the two texts, in both directions."
    )

    def facts(self) -> list[Fact]:
        """Return the numbers of questions, the share of the flow, and R2 of exchanges."""
        learning, measuring = self.questions
        facts: list[Fact] = [
            ("questions that find", learning),
            ("questions that measure", measuring),
            ("share of the flow through MLPs", Percent(self.share)),
        ]
        if self.repeated:
            facts.append(("repeated questions left out", self.repeated))
        if self.r2 is not None:
            facts.append(("R2 of exchanges by flows", self.r2))
        return facts + ([("note", " ".join(self.notes))] if self.notes else [])

    def columns(self) -> Columns:
        """Return a row for each of the strongest directions."""
        rows = [
            (x.layer, x.number, x.flow, x.effect, ", ".join(x.raises), ", ".join(x.lowers))
            for x in self.strongest
        ]
        return by_column(["layer", "number", "flow", "measured effect", "raises", "lowers"], rows)


class Snapshots(NamedTuple):
    """Changes of the outputs of all MLPs between the texts of a question, and their adjoints.

    Outputs are those of the MLPs themselves, before a norm after them. Adjoints are exact between
    the two texts.
    """

    changes: Float[Tensor, "layers time d_model"]
    adjoints: Float[Tensor, "layers time d_model"]

    @classmethod
    def of(cls, model: ResidualModel, question: Question) -> "Snapshots":
        """Return those of a question, scaled to a change of the logit of 1."""
        adjoints = adjoints_of(model, [question])
        changes: list[Tensor] = []
        of_layers: list[Tensor] = []
        for _, layer in adjoints.layers():
            if layer.mlp is None:
                raise BilensError("a layer has no MLP, expected one in each")
            change = adjoints.change(layer.mlp.leaf)[0]
            w = torch.zeros_like(change) if layer.of_mlp is None else layer.of_mlp[0]
            changes.insert(0, change)
            of_layers.insert(0, w)
        first, second = adjoints.numbers.tolist()
        scale = abs(first - second) ** -0.5
        return cls(*(scale * torch.stack(rows).cpu().double() for rows in (changes, of_layers)))


def balance(
    changes: Float[Tensor, "n d_model"],
    adjoints: Float[Tensor, "n d_model"],
    k: int,
    shrink: float = 0.0,
) -> tuple[MLPDirections, Float[Tensor, " k"]]:
    """Return the k directions that balance changes and adjoints, and their singular values.

    P = sum Dy Dy' = L L', A = sum w w' = R R' and L'R = U S V' give t_i = L u_i / sqrt(s_i) and
    r_i = R v_i / sqrt(s_i): both moments are S in these coordinates. There are fewer than k if L'R
    has a lower rank. With `shrink` this share of each moment is added to it as a multiple of the
    identity. Without it small directions of few questions are oblique, and fail on others: 64 hold
    0.30 of the flow of agreement on other questions, with a tenth 0.72.

    Source: Moore 1981, "Principal component analysis in linear systems", square-root form: the
        Gramians of controllability and observability are P and A.
    """
    # The triangular factors have the moments of the rows, without squaring them.
    triangles = []
    for rows in (changes.cpu().double(), adjoints.cpu().double()):
        width = rows.shape[1]
        size = (shrink * rows.square().sum() / width).sqrt()
        spread = size * torch.eye(width, dtype=rows.dtype) if shrink else rows[:0]
        triangles.append(torch.linalg.qr(torch.cat([rows, spread]), mode="r")[1].T)
    L, R = triangles
    U, S, Vh = torch.linalg.svd(L.T @ R)
    # Directions of smaller values are rounding.
    count = min(k, int((S / S[0] > 1e-10).sum()))
    roots = S[:count, None].sqrt()
    writers, readers = (U[:, :count].T @ L.T) / roots, (Vh[:count] @ R.T) / roots
    return MLPDirections(writers, readers), S[:count]


def share_held(
    snapshots: Sequence[Snapshots], directions: Sequence[MLPDirections]
) -> tuple[float, Float[Tensor, " layers"]]:
    """Return the share of the flow through MLPs that directions hold, of all layers and of each.

    It is 1 - sum |remainder| / sum |flow|, over questions and positions. Remainders of two
    positions do not cancel in it, and it is negative where they are larger than the flow. A layer
    without any flow has 0.
    """
    remainder, whole = torch.zeros(2, len(directions), dtype=torch.float64)
    for of_question in snapshots:
        for layer, of_layer in enumerate(directions):
            changes, adjoints = (rows[layer] for rows in of_question)
            flow = (changes * adjoints).sum(-1)
            remainder[layer] += (flow - of_layer.flows(changes, adjoints).sum(-1)).abs().sum()
            whole[layer] += flow.abs().sum()
    shares = torch.where(whole > 0, 1 - remainder / whole.clamp_min(1e-300), 0)
    total = float(whole.sum())
    return 1 - float(remainder.sum()) / total if total else 0.0, shares


@detached
def task_directions(
    model: AnyModel, questions: Questions, k: Count = 8, *, strongest: Count = 20
) -> TaskDirections:
    """Find the k directions of each MLP through which most of the flow of a task passes.

    They are the balanced truncation of changes Dy of its output and adjoints w, over all positions
    of the questions that find, each divided by the root of |change of the logit|. The flow through
    the MLP is the sum of (w . t_i)(r_i . Dy) and a remainder. The first half of the questions of
    each task find, the others measure.

    Questions are a list, a table or a file, see `bilens.flows.as_questions`. Each has a second text
    of as many tokens. Those that repeat others are left out. The `strongest` directions are
    exchanged and named.

    Raises:
        BilensError: there are fewer than two different questions of a task, one of them finds and
            measures in two tasks or has no second text, texts do not fit, the number is the same
            after both, or no flow passes through MLPs.
    """
    model, questions = opened(model), as_questions(questions)
    cases = make_cases(model, questions)
    finding, measuring = list[int](), dict[str, list[int]]()
    for task, numbers in different(cases).items():
        if len(numbers) == 1:
            raise BilensError(
                f"the task {task!r} holds one question, expected at least two different ones: the "
                "first half of them finds directions, and the others measure"
            )
        half = (len(numbers) + 1) // 2
        finding += numbers[:half]
        measuring[task] = numbers[half:]
    check_apart(cases, finding, measuring)
    ids = [*finding, *(i for numbers in measuring.values() for i in numbers)]
    n_repeats = len(cases) - len(ids)
    cases = [cases[i] for i in ids]
    bar = progress_bar("flows of questions", cases)
    snapshots = [Snapshots.of(model, case.question) for case in bar]
    directions, values = find_directions(snapshots[: len(finding)], k)
    counts = len(finding), len(cases) - len(finding)
    share, shares = share_held(snapshots[len(finding) :], directions)
    places = _strongest(cases[: len(finding)], snapshots, directions)[:strongest]
    if not places:
        raise BilensError(
            "no flow between the texts of the questions that find passes through an MLP, expected "
            "texts whose change does; `bilens circuit` finds heads too"
        )
    r2, parts = _measured(cases, snapshots, directions, places, counts[0])
    return TaskDirections(
        tuple(directions),
        tuple(values),
        share,
        shares,
        r2,
        parts,
        counts,
        n_repeats,
        token_hints(model, questions),
    )


def find_directions(
    snapshots: Sequence[Snapshots], k: int
) -> tuple[list[MLPDirections], list[Float[Tensor, " k"]]]:
    """Return the balanced directions of each layer, and their singular values."""
    of_layers, values = [], []
    for layer in range(len(snapshots[0].changes)):
        changes = torch.cat([question.changes[layer] for question in snapshots])
        adjoints = torch.cat([question.adjoints[layer] for question in snapshots])
        directions, of_layer = balance(changes, adjoints, k, shrink=0.1)
        of_layers.append(directions)
        values.append(of_layer)
    return of_layers, values


def _strongest(
    cases: Sequence[Case], snapshots: Sequence[Snapshots], directions: Sequence[MLPDirections]
) -> list[tuple[int, int]]:
    """Return layers and numbers of directions, the largest |mean flow| first."""
    sizes: dict[tuple[int, int], float] = {}
    for layer, of_layer in enumerate(directions):
        total = torch.zeros(len(of_layer.read), dtype=torch.float64)
        for case, (changes, adjoints) in zip(cases, snapshots, strict=False):
            flow = of_layer.flows(changes[layer], adjoints[layer]).sum(0)
            total += flow if case.change > 0 else -flow
        sizes |= {(layer, row): abs(x) for row, x in enumerate(total.tolist())}
    return sorted(sizes, key=lambda place: -sizes[place])


def _measured(
    cases: Sequence[Case],
    snapshots: Sequence[Snapshots],
    directions: Sequence[MLPDirections],
    places: Sequence[tuple[int, int]],
    learning: int,
) -> tuple[float | None, tuple[TaskDirection, ...]]:
    """Exchange directions on the questions after the first `learning`, and name them on all."""
    model = cases[0].batch.model
    flows, effects = torch.zeros(2, len(cases), len(places), dtype=torch.float64)
    score_changes = torch.zeros(len(places), model.vocab_size)
    sides = torch.zeros(len(places), dtype=torch.float64)
    for question, (case, (changes, adjoints)) in enumerate(zip(cases, snapshots, strict=True)):
        removals, additions = [], []
        signs = torch.zeros_like(sides)
        for i, (layer, row) in enumerate(places):
            writer, reader = (rows[row] for rows in directions[layer])
            # Snapshots are scaled to a change of the logit of 1.
            amounts = changes[layer] @ reader * abs(case.change) ** 0.5
            through = amounts * (adjoints[layer] @ writer) * abs(case.change) ** 0.5
            flows[question, i] = through.sum()
            signs[i] = (through.abs() * amounts.sign()).sum().sign()
            module, rows = model.places.layers[layer].mlp, amounts[:, None] * writer
            assert module is not None
            removals.append([Change((module, "output"), layer, partial(_with_added, -rows))])
            additions.append([Change((module, "output"), layer, partial(_with_added, rows))])
        first, second = case.alone
        everything = [model.places.exist] * len(places)
        without = torch.cat([first.stream, exchange(first, second, everything, removals)[:, 0]])
        # A direction that is written from the second text's side snapshots tokens the other way.
        for place in range(-case.score.length, 0):
            logits = model.places.logits(without[:, place])
            score_changes += signs[:, None] * token_scores(logits[:1], logits[1:]).cpu()
        sides += signs
        if question >= learning:
            loss = case.ends[0] - case.score(without[1:])
            restoration = exchange(second, first, everything, additions)[:, 0]
            gain = case.score(restoration) - case.ends[1]
            effects[question] = ((loss + gain) / 2).cpu().double()
    flows, effects = flows[learning:], effects[learning:]
    spread = float((effects - effects.mean()).square().sum())
    r2 = 1 - float((effects - flows).square().sum()) / spread if spread else None
    changes = torch.tensor([case.change for case in cases[learning:]], dtype=torch.float64)
    shares = [changes.sign() @ numbers / changes.abs().sum() for numbers in (flows, effects)]
    parts = []
    for i, (layer, row) in enumerate(places):
        scores = score_changes[i] if sides[i] >= 0 else -score_changes[i]
        raises, lowers = (name_tokens(model, sign * scores) for sign in (1, -1))
        flow, effect = (float(of_all[i]) for of_all in shares)
        parts.append(TaskDirection(layer, row + 1, flow, effect, raises, lowers))
    return r2, tuple(parts)


def _with_added(rows: Float[Tensor, "time d_model"], x: Tensor) -> Tensor:
    return x + rows.to(x)


def name_tokens(
    model: ResidualModel, scores: Float[Tensor, " vocab"], count: int = 3
) -> tuple[str, ...]:
    """Return the tokens of the largest positive scores as text, the largest first."""
    values, numbers = scores.topk(min(count, len(scores)))
    return tuple(shown_tokens(model, numbers[values > 0]))

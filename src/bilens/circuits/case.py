"""A question about a model with both passes: what circuits, patches and directions measure.

Every field of the question is obeyed or refused here, and nowhere else.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.data.texts import write_out
from bilens.errors import BilensError
from bilens.flows.fitted import Fitted, Score, fit
from bilens.flows.question import Question, is_text
from bilens.language.names import shown_tokens
from bilens.memory import available_memory
from bilens.processes import in_all_processes, this_turn
from bilens.transformer import ResidualModel
from bilens.transformer.passes import Pass

TOGETHER = 2**17
"""Most numbers of the streams of questions that run side by side: their graphs are in memory."""
ROOM = 4 * 1024**3
"""Passes are kept up to about so many bytes, and half of the free memory; others run again."""


@dataclass
class Room:
    """Memory for passes that are kept."""

    n_bytes: float

    def has(self, n_bytes: float) -> bool:
        """Return whether there is room for so many bytes, and take them if there is."""
        fits = n_bytes <= self.n_bytes
        self.n_bytes -= n_bytes * fits
        return fits


@dataclass(eq=False)
class Batch:
    """Questions whose texts have one length and run side by side.

    Their passes are kept where there is room, and run again at each use else.

    Attributes:
        model: the model.
        questions: each has a row in both passes.
        room: what the batches of all questions share.
        process: where processes of `torchrun` divide questions, the number of that which runs them.
        ends: the ends of both last streams, of which numbers are read.
    """

    model: ResidualModel
    questions: Sequence[Fitted]
    room: Room
    process: int | None
    ends: Sequence[Float[Tensor, "questions end d_model"]] = ()
    _kept: tuple[Pass, Pass] | None = None
    _n_bytes: int = 0

    @property
    def is_own(self) -> bool:
        """Whether this process runs them."""
        return self.process in (None, this_turn()[0])

    def run(self, *, keep: bool) -> float:
        """Run them for the first time, and return the bytes of a question's passes."""
        passes = both_passes(self.model, self.questions)
        n_scores = max(len(question.spoken) or 1 for question in self.questions)
        # Copies, without which the whole streams stay.
        self.ends = [x.stream[:, -n_scores:].clone() for x in passes]
        self._n_bytes = sum(x.nbytes for x in passes)
        if keep and self.room.has(self._n_bytes):
            self._kept = passes
        return self._n_bytes / len(self.questions)

    def passes(self, rows: Sequence[int]) -> tuple[Pass, Pass]:
        """Return both passes of some of the questions."""
        if self._kept is None and self.room.has(self._n_bytes):
            self._kept = both_passes(self.model, self.questions)
        if self._kept is None:
            return both_passes(self.model, [self.questions[row] for row in rows])
        first, second = self._kept
        return first.some(rows), second.some(rows)


@dataclass(frozen=True, eq=False)
class Case:
    """A question, whose texts have a row in the passes of a batch, and its number after both.

    A second text of another length takes the place of the first from the end; see
    `Pass.in_place_of`.
    """

    fitted: Fitted
    batch: Batch
    row: int
    score: Score
    ends: tuple[float, float]

    @classmethod
    @torch.no_grad()
    def of(cls, fitted: Fitted, batch: Batch, row: int) -> "Case":
        """Return the case of a question that has a row in the passes of a batch.

        Raises:
            BilensError: its tokens do not fit the model, or its number is the same in both.
        """
        score, question = Score(batch.model, fitted), fitted.question
        first, second = (float(score(x[[row]])[0]) for x in batch.ends)
        case = cls(fitted, batch, row, score, (first, second))
        if not abs(first - second) > 1e-6 * (abs(first) + abs(second)):
            metric = question.metric
            raise BilensError(
                f"{' and '.join(case.texts)} have the same "
                f"{f'logit of {metric}' if question.target == 'logit' else metric}, {first:.4g}; "
                "expected texts that change it"
            )
        return case

    @property
    def question(self) -> Question:
        """What is asked."""
        return self.fitted.question

    @property
    def alone(self) -> tuple[Pass, Pass]:
        """Both passes with the texts of this question only."""
        return self.batch.passes([self.row])

    @property
    def tokens(self) -> list[Float[Tensor, "time d_model"]]:
        """The embeddings of the tokens of both runs."""
        return run_tokens(self.batch.model, self.fitted)

    @cached_property
    def answers(self) -> tuple[bool | None, bool | None]:
        """Whether the model itself gives the answer after each text; None for a vector."""
        first, second = (x[self.row] for x in self.batch.ends)
        return self.score.is_answer(first), self.score.is_answer(second)

    @property
    def change(self) -> float:
        """The change of the number from the second text to the first."""
        return self.ends[0] - self.ends[1]

    @property
    def texts(self) -> tuple[str, str]:
        """Both texts for a page, in quotes, up to the token that is predicted."""
        first, second = self.fitted.rows
        against = self.question.against
        first_text = self._quoted(self.question.text, first)
        if is_text(against):
            return first_text, self._quoted(against, second)
        if isinstance(against, Tensor):
            return first_text, "other embeddings"
        return first_text, "the mean of " + ", ".join(f"“{text}”" for text in against)

    def _quoted(self, text: str | Tensor, ids: Tensor) -> str:
        model = self.batch.model
        clean = ids[: len(ids) - len(self.fitted.spoken[:-1])]
        quote = " ".join(shown_tokens(model, clean))
        if isinstance(text, str) and self.question.position == -1:
            quote = text
        elif isinstance(text, str):
            # Up to the position, as it was written.
            starts = (text[:end] for end in range(1, len(text) + 1))
            quote = next((x for x in starts if _has_tokens(model, x, clean)), quote)
        elif model.tokenizer is not None:
            quote = write_out(model.tokenizer, clean)
        return f"“{quote}”"

    @cached_property
    def runs(self) -> tuple[bytes, bytes]:
        """Both runs by the embeddings of their tokens, however their texts are spelled."""
        rows = (x.cpu().contiguous().view(torch.uint8).numpy() for x in self.tokens)
        first, second = (sha256(x.data).digest() for x in rows)
        return first, second

    @property
    def key(self) -> tuple[object, ...]:
        """What is equal for two questions that ask the same, however they are spelled."""
        fitted = self.fitted
        vector = () if fitted.vector is None else tuple(fitted.vector.tolist())
        answer = frozenset(fitted.tokens), frozenset(fitted.minus), fitted.spoken, vector
        return (*self.runs, answer, fitted.target)

    def rise(self, streams: Float[Tensor, "n time d_model"]) -> Float[Tensor, " n"]:
        """Return how far the number is on its way from the second text to the first.

        It is 0 at the second text and |change| at the first.
        The way is down where the number is smaller after the first text.
        """
        change = self.score(streams) - self.ends[1]
        return change if self.change > 0 else -change


def _has_tokens(model: ResidualModel, text: str, ids: Tensor) -> bool:
    try:
        return model.ids(text).equal(ids)
    except BilensError:  # of nothing but spaces
        return False


def make_cases(
    model: ResidualModel,
    questions: Iterable[Question],
    *,
    any_length: bool = False,
    divided: bool = False,
) -> list[Case]:
    """Run a model on both texts of each question, and keep the passes for which there is room.

    With `any_length` both texts of a question may have unlike numbers of tokens. If they are
    `divided`, each process of `torchrun` runs some of them.

    Raises:
        BilensError: there are no questions, one has no second text, texts or tokens do not fit the
            model, or a number is the same after both texts.
    """
    questions = list(questions)
    _check_pairs(questions)
    fitted = [fit(model, question, any_length=any_length) for question in questions]
    numbers = _batches(fitted, this_turn()[1] if divided else 1, model.d_model)
    free = available_memory(model.device)
    room = Room(ROOM if free is None else min(ROOM, free / 2))
    batches = [
        Batch(model, [fitted[i] for i in of_batch], room, owner if divided else None)
        for owner, of_batch in numbers
    ]

    def run_own() -> dict[int, list[Tensor]]:
        """Run the batches of this process, and return the ends of both last streams of each."""
        own = {n: batch for n, batch in enumerate(batches) if batch.is_own}
        n_left, fits = sum(len(batch.questions) for batch in own.values()), True
        for batch in own.values():
            n_left -= len(batch.questions)
            # Where not all fit, the room is for those that are used first, which find.
            fits = batch.run(keep=fits) * n_left <= room.n_bytes
        return {n: [x.cpu() for x in batch.ends] for n, batch in own.items()}

    for of_process in in_all_processes("this circuit", run_own, divided=divided):
        for n, ends in of_process.items():
            batches[n].ends = batches[n].ends or [x.to(model.device) for x in ends]
    cases: dict[int, Case] = {}
    for batch, (_, of_batch) in zip(batches, numbers, strict=True):
        for row, i in enumerate(of_batch):
            cases[i] = Case.of(fitted[i], batch, row)
    return [cases[i] for i in range(len(questions))]


def _check_pairs(questions: Sequence[Question]) -> None:
    for question in questions:
        if not isinstance(question, Question):
            raise BilensError(f"questions holds a {type(question).__name__}, expected Questions")
    if not questions or not all(question.has_two_texts for question in questions):
        raise BilensError(
            "questions need a second text each, and there must be at least one; add the other "
            "text as the fourth column, or as against"
        )


def _batches(fitted: Sequence[Fitted], processes: int, d_model: int) -> list[tuple[int, list[int]]]:
    """Return the numbers of questions that share passes, and the process that runs them."""
    of_length: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, of_question in enumerate(fitted):
        of_length[i % processes, *map(len, of_question.rows)].append(i)
    batches = list[tuple[int, list[int]]]()
    for (owner, *times), numbers in of_length.items():
        count = max(1, TOGETHER // (max(times) * d_model))
        for start in range(0, len(numbers), count):
            batches.append((owner, numbers[start : start + count]))
    return batches


def both_passes(model: ResidualModel, questions: Sequence[Fitted]) -> tuple[Pass, Pass]:
    """Return the passes of the first texts and of the second ones, each of one length."""
    first, second = (torch.stack(rows) for rows in zip(*(x.rows for x in questions), strict=True))
    tokens = model.places.rows(second)
    for i, question in enumerate(questions):
        if question.embeddings is not None:
            tokens[i] = question.embeddings
    return Pass.of(model, first, parts=True), Pass.of(model, second, tokens, parts=True)


def run_tokens(model: ResidualModel, question: Fitted) -> list[Float[Tensor, "time d_model"]]:
    """Return the embeddings of the tokens of both runs of a question."""
    first, second = (model.places.rows(row) for row in question.rows)
    return [first, second if question.embeddings is None else question.embeddings]


def different(cases: Sequence[Case]) -> dict[str, list[int]]:
    """Return the numbers of the questions of each task, without those that repeat others of it."""
    of_tasks: dict[str, list[int]] = defaultdict(list)
    runs_by_task: dict[str, Seen] = defaultdict(Seen)
    for i, case in enumerate(cases):
        if not runs_by_task[case.question.task].has(case):
            runs_by_task[case.question.task].add(case)
            of_tasks[case.question.task].append(i)
    return dict(of_tasks)


class Seen:
    """Questions that were asked, and whether further ones repeat them.

    The same two texts the other way round repeat them too, whatever the token: what is found on a
    pair of texts is not measured on it.
    """

    def __init__(self) -> None:
        self.keys, self.runs = set[object](), set[tuple[bytes, bytes]]()

    def add(self, case: Case) -> None:
        """Remember a question."""
        self.keys.add(case.key)
        self.runs.add(case.runs)

    def has(self, case: Case) -> bool:
        """Return whether a question repeats one that is remembered."""
        return case.key in self.keys or case.runs[::-1] in self.runs


def check_apart(
    cases: Sequence[Case], finding: Iterable[int], measuring: Mapping[str, Iterable[int]]
) -> None:
    """Check that no question that measures, of any task, is one that finds in another.

    Raises:
        BilensError: there is one.
    """
    runs = Seen()
    for i in finding:
        runs.add(cases[i])
    for task, numbers in measuring.items():
        for i in numbers:
            if runs.has(cases[i]):
                raise BilensError(
                    f"the question with {' and '.join(cases[i].texts)} would measure in the "
                    f"task {task!r}, but finds in another task; leave it out of one"
                )

"""A question about a model with both passes: what circuits, patches and directions measure.

Every field of the question is obeyed or refused here, and nowhere else.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.data.texts import write_out
from bilens.errors import BilensError
from bilens.flows.fitted import Fitted, Score, fit
from bilens.flows.question import Question, is_text
from bilens.language.names import shown_tokens
from bilens.memory import check_memory
from bilens.processes import in_all_processes, this_turn
from bilens.transformer import ResidualModel
from bilens.transformer.passes import Pass

TOGETHER = 2**17
"""Most numbers of the streams of questions that run side by side: their graphs are in memory."""


@dataclass(frozen=True, eq=False)
class Case:
    """A question with the passes of its first text and of its second, and its number in both.

    Questions of one length share their passes, in which each has a row. A second text of another
    length takes the place of the first from the end; see `Pass.in_place_of`.

    Where processes of `torchrun` divide questions, `process` is the number of that which has the
    passes of this one. Those of others have the end of the last stream only.
    """

    fitted: Fitted
    passes: tuple[Pass, Pass]
    row: int
    score: Score
    ends: tuple[float, float]
    process: int | None = None

    @classmethod
    @torch.no_grad()
    def of(
        cls, fitted: Fitted, passes: tuple[Pass, Pass], row: int, process: int | None = None
    ) -> "Case":
        """Return the case of a question that has a row in two passes.

        Raises:
            BilensError: its tokens do not fit the model, or its number is the same in both.
        """
        score, question = Score(passes[0].model, fitted), fitted.question
        first, second = (float(score(x.stream[[row]])[0]) for x in passes)
        case = cls(fitted, passes, row, score, (first, second), process)
        if not abs(first - second) > 1e-6 * (abs(first) + abs(second)):
            number = question.number
            raise BilensError(
                f"{' and '.join(case.texts)} have the same "
                f"{f'logit of {number}' if question.target == 'logit' else number}, {first:.4g}; "
                "expected texts that change it"
            )
        return case

    @property
    def question(self) -> Question:
        """What is asked."""
        return self.fitted.question

    @property
    def is_own(self) -> bool:
        """Whether this process has its passes."""
        return self.process in (None, this_turn()[0])

    @cached_property
    def alone(self) -> tuple[Pass, Pass]:
        """Both passes with the texts of this question only."""
        first, second = self.passes
        return first.some([self.row]), second.some([self.row])

    @cached_property
    def answers(self) -> tuple[bool | None, bool | None]:
        """Whether the model itself gives the answer after each text; None for a vector."""
        first, second = (x.stream[self.row] for x in self.passes)
        return self.score.is_answer(first), self.score.is_answer(second)

    @property
    def change(self) -> float:
        """The change of the number from the second text to the first."""
        return self.ends[0] - self.ends[1]

    @property
    def texts(self) -> tuple[str, str]:
        """Both texts for a page, in quotes, up to the token that is predicted."""
        first, second = (x.ids[self.row] for x in self.passes)
        against = self.question.against
        shown = self._quoted(self.question.text, first)
        if is_text(against):
            return shown, self._quoted(against, second)
        if isinstance(against, Tensor):
            return shown, "other embeddings"
        return shown, "the mean of " + ", ".join(f"“{text}”" for text in against)

    def _quoted(self, text: str | Tensor, ids: Tensor) -> str:
        model = self.passes[0].model
        given = ids[: len(ids) - len(self.fitted.spoken[:-1])]
        shown = " ".join(shown_tokens(model, given))
        if isinstance(text, str) and self.question.position == -1:
            shown = text
        elif isinstance(text, str):
            # Up to the position, as it was written.
            starts = (text[:end] for end in range(1, len(text) + 1))
            shown = next((x for x in starts if _has_tokens(model, x, given)), shown)
        elif model.tokenizer is not None:
            shown = write_out(model.tokenizer, given)
        return f"“{shown}”"

    @cached_property
    def runs(self) -> tuple[bytes, bytes]:
        """Both runs by the embeddings of their tokens, however their texts are spelled."""
        first, second = (
            x.tokens[self.row].cpu().contiguous().view(torch.uint8) for x in self.passes
        )
        return first.numpy().tobytes(), second.numpy().tobytes()

    @property
    def key(self) -> tuple[object, ...]:
        """What is equal for two questions that ask the same, however they are spelled."""
        asked = self.fitted
        vector = () if asked.vector is None else tuple(asked.vector.tolist())
        answer = frozenset(asked.tokens), frozenset(asked.minus), asked.spoken, vector
        return (*self.runs, answer, asked.target)

    def rise(self, streams: Float[Tensor, "n time d_model"]) -> Float[Tensor, " n"]:
        """Return how far the number is on its way from the second text to the first.

        It is 0 at the second text and |change| at the first.
        The way is down where the number is smaller after the first text.
        """
        moved = self.score(streams) - self.ends[1]
        return moved if self.change > 0 else -moved


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
    """Run a model on both texts of each question, all of which stay in memory.

    With `any_length` both texts of a question may have unlike numbers of tokens. If they are
    `divided`, each process of `torchrun` runs some of them.

    Raises:
        BilensError: there are no questions, one has no second text, texts or tokens do not fit the
            model, or a number is the same after both texts.
        MemoryLimitError: there is not enough for all of them, by the size of the first.
    """
    questions = list(questions)
    _check_pairs(questions)
    fitted = [fit(model, question, any_length=any_length) for question in questions]
    process, processes = this_turn() if divided else (0, 1)
    groups = _groups(fitted, processes, model.d_model)
    own = {
        n: [fitted[i] for i in numbers]
        for n, (owner, numbers) in enumerate(groups)
        if owner == process
    }
    scored = max(len(of_question.spoken) or 1 for of_question in fitted)
    passes: dict[int, tuple[Pass, Pass]] = {}

    def run_own() -> dict[int, list[Tensor]]:
        """Run the groups of this process, and return the ends of both last streams of each."""
        passes.update(_run(model, own))
        return {n: [x.stream[:, -scored:].cpu() for x in both] for n, both in passes.items()}

    for of_process in in_all_processes("this circuit", run_own, divided=divided):
        for n in of_process.keys() - passes.keys():
            passes[n] = both_passes(model, [fitted[i] for i in groups[n][1]], of_process[n])
    cases: dict[int, Case] = {}
    for n, (owner, numbers) in enumerate(groups):
        for row, i in enumerate(numbers):
            cases[i] = Case.of(fitted[i], passes[n], row, owner if divided else None)
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


def _groups(fitted: Sequence[Fitted], processes: int, d_model: int) -> list[tuple[int, list[int]]]:
    """Return the numbers of questions that share passes, and the process that runs them."""
    of_length: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, of_question in enumerate(fitted):
        of_length[i % processes, *map(len, of_question.rows)].append(i)
    groups = list[tuple[int, list[int]]]()
    for (owner, *times), numbers in of_length.items():
        count = max(1, TOGETHER // (max(times) * d_model))
        for start in range(0, len(numbers), count):
            groups.append((owner, numbers[start : start + count]))
    return groups


def _run(
    model: ResidualModel, groups: Mapping[int, Sequence[Fitted]]
) -> dict[int, tuple[Pass, Pass]]:
    """Run both texts of the questions of each group, if there is memory for all."""
    asked = [of_question for group in groups.values() for of_question in group]
    if len(asked) > 1:
        # Before there are many: by the size of the first.
        size = sum(x.nbytes for x in both_passes(model, asked[:1])) / len(asked[0].clean)
        tokens = sum(len(of_question.clean) for of_question in asked)
        check_memory(int(size * tokens), f"The passes of {len(asked):,} questions", model.device)
    return {n: both_passes(model, group) for n, group in groups.items()}


def both_passes(
    model: ResidualModel, questions: Sequence[Fitted], ends: Sequence[Tensor] = ()
) -> tuple[Pass, Pass]:
    """Return the passes of the first texts and of the second ones, each of one length.

    With the ends of their last streams, which another process has computed, nothing runs.
    """
    first, second = (torch.stack(rows) for rows in zip(*(x.rows for x in questions), strict=True))
    tokens = model.places.rows(second)
    for i, question in enumerate(questions):
        if question.embeddings is not None:
            tokens[i] = question.embeddings
    if ends:
        texts = zip((first, second), (model.places.rows(first), tokens), ends, strict=True)
        one, other = (Pass(model, ids, rows, [x.to(rows.device)]) for ids, rows, x in texts)
        return one, other
    return Pass.of(model, first, parts=True), Pass.of(model, second, tokens, parts=True)


def different(cases: Sequence[Case]) -> dict[str, list[int]]:
    """Return the numbers of the questions of each task, without those that repeat others of it."""
    of_tasks: dict[str, list[int]] = defaultdict(list)
    seen: dict[str, Seen] = defaultdict(Seen)
    for i, case in enumerate(cases):
        if not seen[case.question.task].has(case):
            seen[case.question.task].add(case)
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
    seen = Seen()
    for i in finding:
        seen.add(cases[i])
    for task, numbers in measuring.items():
        for i in numbers:
            if seen.has(cases[i]):
                raise BilensError(
                    f"the question with {' and '.join(cases[i].texts)} would measure in the "
                    f"task {task!r}, but finds in another task; leave it out of one"
                )

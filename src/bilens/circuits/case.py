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
from bilens.flows.question import BothTexts, Question, Score
from bilens.language.names import shown_tokens
from bilens.memory import check_memory
from bilens.transformer import ResidualModel
from bilens.transformer.passes import Pass

TOGETHER = 2**17
"""Most numbers of the streams of questions that run side by side: their graphs are in memory."""


@dataclass(frozen=True, eq=False)
class Case:
    """A question with the passes of its first text and of its second, and its number in both.

    Questions of one length share their passes, in which each has a row. A second text of another
    length takes the place of the first from the end; see `Pass.in_place_of`.
    """

    question: Question
    passes: tuple[Pass, Pass]
    row: int
    score: Score
    ends: tuple[float, float]

    @classmethod
    @torch.no_grad()
    def of(cls, question: Question, passes: tuple[Pass, Pass], row: int) -> "Case":
        """Return the case of a question that has a row in two passes.

        Raises:
            BilensError: its tokens do not fit the model, or its number is the same in both.
        """
        score = Score(passes[0].model, question)
        first, second = (float(score(x.stream[[row]])[0]) for x in passes)
        case = cls(question, passes, row, score, (first, second))
        if not abs(first - second) > 1e-6 * (abs(first) + abs(second)):
            number = question.number
            raise BilensError(
                f"{' and '.join(case.texts)} have the same "
                f"{f'logit of {number}' if question.target == 'logit' else number}, {first:.4g}; "
                "expected texts that change it"
            )
        return case

    @property
    def are_alike(self) -> bool:
        """Whether both texts have as many tokens."""
        return self.passes[0].ids.shape[1] == self.passes[1].ids.shape[1]

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
        if isinstance(against, Tensor) and against.is_floating_point():
            return shown, "other embeddings"
        if isinstance(against, str | Tensor):
            return shown, self._quoted(against, second)
        return shown, "the mean of " + ", ".join(f"“{text}”" for text in against)

    def _quoted(self, text: str | Tensor, ids: Tensor) -> str:
        model = self.passes[0].model
        if isinstance(text, str) and self.question.position == -1:
            shown = text
        elif model.tokenizer is None:
            shown = " ".join(shown_tokens(model, ids))
        else:
            shown = write_out(model.tokenizer, ids)
        return f"“{shown}”"

    @property
    def key(self) -> tuple[object, ...]:
        """What is equal for two questions that ask the same, however they are spelled."""
        asked = self.question
        vector = () if asked.vector is None else tuple(asked.vector.tolist())
        rows = (x.tokens[self.row].cpu().contiguous().view(torch.uint8) for x in self.passes)
        texts = [row.numpy().tobytes() for row in rows]
        return (*texts, asked.token, tuple(sorted(asked.minus)), asked.target, vector)

    def rise(self, streams: Float[Tensor, "n time d_model"]) -> Float[Tensor, " n"]:
        """Return how far the number is on its way from the second text to the first.

        It is 0 at the second text and |change| at the first.
        The way is down where the number is smaller after the first text.
        """
        moved = self.score(streams) - self.ends[1]
        return moved if self.change > 0 else -moved


def make_cases(
    model: ResidualModel, questions: Iterable[Question], *, any_length: bool = False
) -> list[Case]:
    """Run a model on both texts of each question, all of which stay in memory.

    With `any_length` both texts of a question may have unlike numbers of tokens.

    Raises:
        BilensError: there are no questions, one has no second text, texts or tokens do not fit the
            model, or a number is the same after both texts.
        MemoryLimitError: there is not enough for all of them, by the size of the first.
    """
    questions = list(questions)
    for question in questions:
        if not isinstance(question, Question):
            raise BilensError(f"questions holds a {type(question).__name__}, expected Questions")
    if not questions or not all(question.has_two_texts for question in questions):
        raise BilensError(
            "questions need a second text each, and there must be at least one; add the other "
            "text as the fourth column, or as against"
        )
    questions = [question.fitted(model) for question in questions]
    texts = [question.both_texts(model, any_length=any_length) for question in questions]
    of_length: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (ids, other, _) in enumerate(texts):
        of_length[len(ids), len(other)].append(number)
    if len(questions) > 1:
        # Before there are many: by the size of the first.
        size = sum(x.nbytes for x in both_passes(model, texts[:1])) / len(texts[0][0])
        tokens = sum(len(ids) for ids, _, _ in texts)
        name = f"The passes of {len(questions):,} questions"
        check_memory(int(size * tokens), name, model.device)
    cases: dict[int, Case] = {}
    for times, numbers in of_length.items():
        count = max(1, TOGETHER // (max(times) * model.d_model))
        for start in range(0, len(numbers), count):
            group = numbers[start : start + count]
            passes = both_passes(model, [texts[number] for number in group])
            for row, number in enumerate(group):
                cases[number] = Case.of(questions[number], passes, row)
    return [cases[number] for number in range(len(questions))]


def both_passes(model: ResidualModel, texts: Sequence[BothTexts]) -> tuple[Pass, Pass]:
    """Return the passes of the first texts and of the second ones, each of one length."""
    first, second, tokens = [], [], []
    for ids, other, embeddings in texts:
        first.append(ids)
        second.append(other)
        tokens.append(model.places.rows(other) if embeddings is None else embeddings)
    return (
        Pass.of(model, torch.stack(first), parts=True),
        Pass.of(model, torch.stack(second), torch.stack(tokens), parts=True),
    )


def different(cases: Sequence[Case]) -> dict[str, list[int]]:
    """Return the numbers of the questions of each task, without those that repeat others of it."""
    of_tasks: dict[str, dict[object, int]] = defaultdict(dict)
    for number, case in enumerate(cases):
        of_tasks[case.question.task].setdefault(case.key, number)
    return {task: [*numbers.values()] for task, numbers in of_tasks.items()}


def check_apart(
    cases: Sequence[Case], finding: Iterable[int], measuring: Mapping[str, Iterable[int]]
) -> None:
    """Check that no question that measures, of any task, is one that finds in another.

    Raises:
        BilensError: there is one.
    """
    keys = {cases[number].key for number in finding}
    for task, numbers in measuring.items():
        for number in numbers:
            if cases[number].key in keys:
                raise BilensError(
                    f"the question with {' and '.join(cases[number].texts)} would measure in the "
                    f"task {task!r}, but finds in another task; leave it out of one"
                )

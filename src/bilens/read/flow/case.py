"""A question about a model with both of its runs: what circuits, patches and directions measure.

Every field of the question is obeyed or refused here, and nowhere else.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.errors import BilensError
from bilens.memory import check_memory
from bilens.read.flow.question import Other, Question, Score
from bilens.read.language.names import shown_tokens
from bilens.residual import ResidualModel
from bilens.residual.interventions import Number, Run, mixture


@dataclass(frozen=True, eq=False)
class Case:
    """A question, the runs of its first text and of its second, and its number in both."""

    question: Question
    runs: tuple[Run, Run]
    number: Number
    ends: tuple[float, float]
    # Whether the model itself gives the answer after each text; None for a vector.
    answers: tuple[bool | None, bool | None]

    @classmethod
    @torch.no_grad()
    def of(cls, model: ResidualModel, question: Question) -> "Case":
        """Run a model on both texts of a question.

        Raises:
            BilensError: there is no second text, texts or tokens do not fit the model, or the
                number is the same after both texts.
        """
        score = Score(model, question)
        runs = runs_of(model, *question.both_runs(model))

        def number(x: Tensor) -> Tensor:
            return score(model.parts.normalised(x[:, -1].to(model.parts.dtype)))

        first, second = (float(number(run.stream[None])[0]) for run in runs)
        if not abs(first - second) > 1e-6 * (abs(first) + abs(second)):
            texts = " and ".join(texts_of(runs, question))
            raise BilensError(
                f"{texts} have the same {question.target} of {question.number}, {first:.4g}; "
                "expected texts that change it"
            )
        answers = _is_answer(score, runs[0]), _is_answer(score, runs[1])
        return cls(question, runs, number, (first, second), answers)

    @property
    def change(self) -> float:
        """The change of the number from the second text to the first."""
        return self.ends[0] - self.ends[1]

    @property
    def texts(self) -> tuple[str, str]:
        """Both texts for a page, in quotes, up to the token that is predicted."""
        return texts_of(self.runs, self.question)

    @property
    def key(self) -> tuple[object, ...]:
        """What is equal for two questions that ask the same, however they are spelled."""
        asked = self.question
        vector = () if asked.vector is None else tuple(asked.vector.tolist())
        rows = (run.tokens.cpu().contiguous().view(torch.uint8) for run in self.runs)
        texts = [row.numpy().tobytes() for row in rows]
        return (*texts, asked.token, tuple(sorted(asked.minus)), asked.target, vector)

    def rise(self, streams: Float[Tensor, "n time d_model"]) -> Float[Tensor, " n"]:
        """Return how far the number is on its way from the second text to the first.

        It is 0 at the second text and |change| at the first.
        The way is down where the number is smaller after the first text.
        """
        moved = self.number(streams) - self.ends[1]
        return moved if self.change > 0 else -moved

    def values(self, masks: Float[Tensor, "n *shape"]) -> Float[Tensor, " n"]:
        """Return the rise in the run of each mask."""
        first, second = self.runs
        sets = [mixture(second, mask) for mask in masks]
        return self.rise(first.again(sets, kept=first_change(self.runs)))


def make_cases(model: ResidualModel, questions: Iterable[Question]) -> list[Case]:
    """Run a model on both texts of each question, all of which stay in memory.

    Raises:
        BilensError: there are no questions, or one cannot be asked.
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
    cases = [Case.of(model, questions[0])]
    size = sum(map(_size, cases[0].runs)) / len(cases[0].runs[0].ids)
    tokens = sum(len(model.ids(question.text, question.position)) for question in questions[1:])
    check_memory(int(size * tokens), f"The runs of {len(questions):,} questions", model.device)
    return cases + [Case.of(model, question) for question in questions[1:]]


@dataclass(frozen=True)
class Task:
    """The different questions of a task by their numbers: those that find, and others that measure.

    No question measures if there is only one.
    """

    name: str
    finding: list[int]
    measuring: list[int]
    repeated: int  # number of questions that were left out, since they repeat others of the task


def split_tasks(cases: Sequence[Case], share: Callable[[int], int]) -> list[Task]:
    """Return the tasks of some cases, of which the first `share` of their number find.

    Raises:
        BilensError: one of several tasks holds a single question, or a question that finds, of any
            task, is one that measures.
    """
    keys = [case.key for case in cases]
    of_tasks: dict[str, dict[object, int]] = defaultdict(dict)
    for number, case in enumerate(cases):
        of_tasks[case.question.task].setdefault(keys[number], number)
    tasks = []
    for name, different in of_tasks.items():
        numbers = [*different.values()]
        if len(numbers) == 1 and len(of_tasks) > 1:
            raise BilensError(
                f"task {name!r} holds one question, expected at least two different ones: the "
                "first ones find, and the others measure"
            )
        count = max(1, share(len(numbers)))
        repeated = sum(case.question.task == name for case in cases) - len(numbers)
        tasks.append(Task(name, numbers[:count], numbers[count:], repeated))
    finding = {keys[i] for task in tasks for i in task.finding}
    for task in tasks:
        for number in task.measuring:
            if keys[number] in finding:
                raise BilensError(
                    f"the question with {' and '.join(cases[number].texts)} would measure in the "
                    f"task {task.name!r}, but finds in another task; leave it out of one"
                )
    return tasks


def runs_of(model: ResidualModel, ids: Int[Tensor, " time"], other: Other) -> tuple[Run, Run]:
    """Return the runs of a text and of the other."""
    return Run.of(model, ids), Run.of(model, other.ids, other.tokens)


def first_change(runs: Sequence[Run]) -> int:
    """Return the first position at which the embeddings of two runs differ."""
    return int((runs[0].tokens != runs[1].tokens).any(-1).int().argmax())


def texts_of(runs: tuple[Run, Run], question: Question) -> tuple[str, str]:
    """Return both texts of a question in quotes, or what the second run has in place of one."""
    model = runs[0].model

    def quoted(text: str | Tensor, run: Run) -> str:
        if isinstance(text, str) and question.position == -1:
            shown = text
        elif model.tokenizer is None:
            shown = " ".join(shown_tokens(model, run.ids))
        else:
            shown = str(model.tokenizer.decode(run.ids))
        return f"“{shown}”"

    first, second = quoted(question.text, runs[0]), question.against
    if isinstance(second, Tensor) and second.is_floating_point():
        return first, "other embeddings"
    if isinstance(second, str | Tensor):
        return first, quoted(second, runs[1])
    return first, "the mean of " + ", ".join(f"“{text}”" for text in second)


def _is_answer(score: Score, run: Run) -> bool | None:
    """Return whether the token is ahead of those to subtract, or of all others without any."""
    if not score.tokens:
        return None
    parts, (token, *minus) = run.model.parts, score.tokens
    W, b = parts.logit_weights()
    logits = parts.normalised(run.stream[-1:].to(parts.dtype))[0] @ W + b
    if not minus:
        return int(logits.argmax()) == token
    return bool(logits[token] > logits[minus].max())


def _size(run: Run) -> int:
    """Return the bytes of the tensors of a run, which share some."""
    tensors = [run.ids, run.tokens, run.stream, *run.mixed, *run.outputs, *run.by_position.values()]
    for x, args, kwargs in run.calls:
        # Positions come as a pair of tensors.
        for value in (x, *args, *kwargs.values()):
            tensors += [part for part in _flat(value) if isinstance(part, Tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def _flat(value: object) -> Sequence[object]:
    return value if isinstance(value, tuple | list) else [value]

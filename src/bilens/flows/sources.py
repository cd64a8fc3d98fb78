"""Questions and models in each of the forms in which people have them."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from torch import nn

from bilens.errors import BilensError
from bilens.flows.fitted import fit
from bilens.flows.question import Question
from bilens.models import load
from bilens.nn import ImageClassifier
from bilens.question_files import QuestionLine, read_lines, read_pair_lines
from bilens.settings import Said
from bilens.transformer import ResidualModel

Questions = Any
"""Questions in each of their forms; see `as_questions`."""
AnyModel = Annotated[
    ResidualModel | nn.Module | str | Path,
    Said("a model of bilens.load, a causal model of transformers, or a name for bilens.load"),
]
"""A model that is opened, or what opens as one."""


def opened(model: AnyModel) -> ResidualModel:
    """Return a model that is given in any form, of transformers without a tokenizer.

    Raises:
        BilensError: it is no model of texts, or cannot be opened.
    """
    found = load(model) if isinstance(model, str | Path) else model
    if isinstance(found, ResidualModel):
        return found
    if not isinstance(found, nn.Module) or isinstance(found, ImageClassifier):
        raise BilensError(f"model is a {type(found).__name__}, expected a model of texts")
    return ResidualModel(found)


def as_questions(questions: Questions) -> list[Question]:
    """Return questions that are given as a list, a table, a file, or one alone.

    Args:
        questions: a `Question`; or several of them; or dictionaries, or a table of pandas, whose
            names are fields of `Question`; or the path of a file, see
            `bilens.question_files.read_lines`, or the name of a task that comes with bilens.

    Raises:
        BilensError: it is none of them, or a field does not fit.
    """
    if isinstance(questions, Question):
        return [questions]
    if isinstance(questions, str | Path):
        return [of_line(line) for line in read_lines(questions)]
    if hasattr(questions, "to_dict"):
        # Empty cells of a table are NaN.
        rows = questions.astype(object).where(questions.notna(), None).to_dict("records")
    elif isinstance(questions, Mapping) or not isinstance(questions, Iterable):
        raise BilensError(f"questions is a {type(questions).__name__}, {EXPECTED}")
    else:
        rows = list(questions)
    return [_of_row(number, row) for number, row in enumerate(rows)]


EXPECTED = (
    "expected Questions, dictionaries or a table with columns text, token, minus and against, or "
    "the path of a file of questions"
)


def _of_row(number: int, row: object) -> Question:
    if isinstance(row, Question):
        return row
    if not isinstance(row, Mapping):
        raise BilensError(f"questions holds a {type(row).__name__}, {EXPECTED}")
    names = [field.name for field in fields(Question)]
    given = {name: value for name, value in row.items() if value is not None}
    unknown = [name for name in given if name not in names]
    if unknown:
        raise BilensError(
            f"question {number} has {unknown[0]!r}, which is no field; expected {', '.join(names)}"
        )
    try:
        return Question(**{"text": None, **given})
    except BilensError as error:
        raise BilensError(f"question {number}: {error}") from None


def read_pairs(
    model: ResidualModel, path: str | Path, *, any_length: bool = False
) -> list[Question]:
    """Read questions from a file, all with a second text, and check that they fit a model.

    Raises:
        BilensError: as `read_lines`; or a second text is missing or has other numbers of tokens, or
            a token is unknown.
    """
    questions = []
    for line in read_pair_lines(path):
        question = of_line(line)
        try:
            fit(model, question, any_length=any_length)
        except BilensError as error:
            raise BilensError(f"{line.place}: {error}") from None
        questions.append(question)
    return questions


def of_line(line: QuestionLine) -> Question:
    """Return the question of a line."""
    return Question(
        line.text, line.token, line.minus, line.against, task=line.task, template=line.template
    )

"""Questions and models in each of the forms in which people have them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from torch import nn

from bilens.errors import BilensError
from bilens.flows.fitted import fit
from bilens.flows.question import Question
from bilens.hub import hub_split
from bilens.lazy_imports import parquet
from bilens.models import load
from bilens.nn import ImageClassifier
from bilens.question_files import (
    QuestionLine,
    find_file,
    has_lines,
    is_hub_name,
    read_pair_lines,
    stream_lines,
    without_errors,
)
from bilens.settings import Said
from bilens.shipped import task_names
from bilens.transformer import ResidualModel

BATCH = 512
"""Rows of a file that are in memory at once."""
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
    view = load(model) if isinstance(model, str | Path) else model
    if isinstance(view, ResidualModel):
        return view
    if not isinstance(view, nn.Module) or isinstance(view, ImageClassifier):
        raise BilensError(f"model is a {type(view).__name__}, expected a model of texts")
    return ResidualModel(view)


def as_questions(questions: Questions) -> list[Question]:
    """Return questions that are given as a list, a table, a file, or one alone.

    Args:
        questions: as in `question_stream`.

    Raises:
        BilensError: it is none of them, or a field does not fit.
    """
    return without_errors(question_stream(questions))


def question_stream(questions: Questions) -> Iterator[Question | BilensError]:
    """Yield questions one after the other; in place of what is none, the error that says why.

    Args:
        questions: a `Question`; or several of them; or dictionaries, or a table of pandas, whose
            names are fields of `Question`; or the path of a file with a dictionary in each line
            (.jsonl) or row (.parquet), or with the lines of `bilens.question_files.stream_lines`;
            or the name of a task that comes with bilens, or that of a data set of the hub, such as
            "owner/name", whose split "train" is read.

    Raises:
        BilensError: it is none of them.
    """
    if isinstance(questions, Question):
        yield questions
    elif isinstance(questions, str | Path) and (reader := READERS.get(Path(questions).suffix)):
        for i, row in enumerate(reader(find_file(questions)), 1):
            yield _read(f"{questions}, row {i}", row)
    elif isinstance(questions, str) and is_hub_name(questions):
        with hub_split(questions, "train", "name a file of questions", streaming=True) as rows:
            yield from (_read(f"question {i}", row) for i, row in enumerate(rows))
    elif isinstance(questions, str | Path):
        for line in stream_lines(questions):
            yield line if isinstance(line, BilensError) else of_line(line)
    else:
        if hasattr(questions, "notna"):
            # Empty cells of a table are NaN.
            questions = questions.astype(object).where(questions.notna(), None).to_dict("records")
        if isinstance(questions, Mapping) or not isinstance(questions, Iterable):
            raise BilensError(f"questions is a {type(questions).__name__}, {EXPECTED}")
        yield from (_read(f"question {i}", row) for i, row in enumerate(questions))


def count_questions(questions: Questions) -> int | None:
    """Return the number of questions, for which a file is read once; None of a stream."""
    if isinstance(questions, Sized) and not isinstance(questions, str):
        return len(questions)
    if not isinstance(questions, str | Path) or is_hub_name(questions):
        return 1 if isinstance(questions, Question) else None
    reader = READERS.get(Path(questions).suffix)
    rows: Iterable[object] = stream_lines(questions)
    return sum(1 for _ in (reader(find_file(questions)) if reader else rows))


def _json_lines(path: Path) -> Iterator[object]:
    with path.open("rb") as file:
        for line in filter(bytes.strip, file):
            try:
                yield json.loads(line)
            except ValueError as error:
                yield BilensError(f"{error}, expected a JSON object")


def _parquet_rows(path: Path) -> Iterator[object]:
    for batch in parquet.ParquetFile(path).iter_batches(BATCH):
        yield from batch.to_pylist()


READERS = {".jsonl": _json_lines, ".parquet": _parquet_rows}
"""Functions from a file of rows to its rows, one after the other, by the ending of its name."""


EXPECTED = (
    "expected Questions, dictionaries or a table with columns text, token, minus and against, or "
    "the path of a file of questions"
)


def _read(place: str, row: object) -> Question | BilensError:
    """Return the question of a row, or the error that says why it has none."""
    try:
        return _of_row(place, row)
    except BilensError as error:
        return error


def _of_row(place: str, row: object) -> Question:
    if isinstance(row, Question):
        return row
    if isinstance(row, BilensError):
        raise BilensError(f"{place}: {row}")
    if not isinstance(row, Mapping):
        raise BilensError(f"questions holds a {type(row).__name__}, {EXPECTED}")
    names = [field.name for field in fields(Question)]
    values = {name: value for name, value in row.items() if value is not None}
    unknown = [name for name in values if name not in names]
    if unknown:
        raise BilensError(
            f"{place} has {unknown[0]!r}, which is no field; expected {', '.join(names)}"
        )
    try:
        return Question(**{"text": None, **values})
    except BilensError as error:
        raise BilensError(f"{place}: {error}") from None


def read_pairs(
    model: ResidualModel, path: str | Path, *, any_length: bool = False
) -> list[Question]:
    """Read questions from a file, all with a second text, and check that they fit a model.

    Raises:
        BilensError: as `read_lines`; or a second text is missing or has other numbers of tokens, or
            a token is unknown.
    """
    if has_lines(path):
        entries = [(line.place, of_line(line)) for line in read_pair_lines(path)]
    else:
        entries = [(f"{path}, row {i}", row) for i, row in enumerate(as_questions(path), 1)]
    for place, question in entries:
        try:
            fit(model, question, any_length=any_length)
        except BilensError as error:
            text = f"{place}: {error}"
            if str(path) in task_names():
                text += (
                    f". The model lacks words of the task {path}; pronouns is for the model story"
                )
            raise BilensError(text) from None
    return [question for _, question in entries]


def of_line(line: QuestionLine) -> Question:
    """Return the question of a line."""
    return Question(
        line.text, line.token, line.minus, line.against, task=line.task, template=line.template
    )

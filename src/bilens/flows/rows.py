"""Flows of any number of questions as rows of Parquet files, which a stopped run goes on with.

A shard is a file of the rows of some questions one after the other. Its name has a digest of the
model and of these questions, so that one that exists is not made again.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilens.data.corpus import batched
from bilens.errors import BilensError
from bilens.files import written_whole
from bilens.flows.fitted import Fitted
from bilens.flows.graph import Flow
from bilens.flows.question import Question
from bilens.flows.secants import UnknownOperationError
from bilens.flows.split import KEPT_BYTES, bytes_of_token, fitted_pair, flows_of_length
from bilens.lazy_imports import arrow, parquet, pd
from bilens.memory import MemoryLimitError
from bilens.progress import progress_bar
from bilens.question_files import written_names
from bilens.transformer import ResidualModel
from bilens.transformer.parts import Part

ASKED = ("text", "token", "minus", "against", "task", "template", "target")
"""Columns of what is asked."""
NUMBERS = ("clean", "corrupt")
"""Columns of the number in both runs."""
FORM = 1
"""Of rows: other columns get another number, and all rows are made anew."""
QuestionOrError = Question | BilensError
"""A question, or why there is none."""


def write_shards(
    model: ResidualModel,
    questions: Iterable[QuestionOrError],
    folder: Path,
    *,
    size: int,
    total: int | None = None,
    turn: tuple[int, int] = (0, 1),
) -> list[Path]:
    """Write shards of `size` questions to a folder, and return the paths of all of them in order.

    `total` is the number of questions, for the time that is left. `turn` are the number of this
    process and that of all: each writes shards of its own.

    Raises:
        BilensError: the folder has rows of another model or other questions.
    """
    write = parquet.write_table  # which says before any work if it is not installed
    paths = {path.name.partition("-")[0]: path for path in folder.glob("[0-9]*-*.parquet")}
    key, shards = _model_digest(model), list[Path]()
    with progress_bar("questions", total=total) as bar:
        for i, of_shard in enumerate(batched(questions, size)):
            path = folder / f"{i:06}-{_digest(key, of_shard)}.parquet"
            _check_own(paths.pop(f"{i:06}", path), path)
            shards.append(path)
            if path.exists():
                # It took no time, of which the time that is left is told.
                if not bar.disable:
                    bar.initial += len(of_shard)
                    bar.n += len(of_shard)
            elif i % turn[1] == turn[0]:
                rows = _rows(model, i * size, of_shard, bar)
                with written_whole(path) as temporary:
                    write(rows, temporary)
            else:
                bar.update(len(of_shard))
    for path in paths.values():
        _check_own(path, None)
    return shards


def _check_own(path: Path, expected: Path | None) -> None:
    if path != expected:
        raise BilensError(
            f"{path} has rows of another model or of other questions; expected a new folder, or "
            "that of the same questions and model"
        )


def _model_digest(model: ResidualModel) -> str:
    """Return a digest of the weights and the configuration of a model."""
    module: Any = model.model
    settings: dict[str, Any] = getattr(getattr(module, "config", None), "to_dict", dict)()
    passing = ("_name_or_path", "transformers_version")
    config = {name: settings[name] for name in sorted(settings) if name not in passing}
    digest = sha256(f"{FORM} {type(module).__name__} {config}".encode())
    for name, x in chain(module.named_parameters(), module.named_buffers()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        # Numbers of any type as bytes: those of numpy have no bfloat16.
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest(key: str, questions: Sequence[QuestionOrError]) -> str:
    digest = sha256(key.encode())
    for question in questions:
        values: list[Any] = [str(question)]
        if isinstance(question, Question):
            values = [getattr(question, field.name) for field in fields(question)]
        plain = [x.tolist() if isinstance(x, Tensor) else x for x in values]
        digest.update(repr(plain).encode(errors="backslashreplace"))
    return digest.hexdigest()[:16]


def _rows(model: ResidualModel, first: int, questions: Sequence[QuestionOrError], bar: Any) -> Any:
    """Return the rows of questions, from that with the number `first` on, as a table of Arrow."""
    parts = [
        str(Part("head", layer, head) if head < model.n_heads else Part("mlp", layer))
        for layer in range(model.n_layers)
        for head in range(model.n_heads + 1)
    ]
    reasons = [""] * len(questions)
    # Without a flow a row has no numbers.
    values = np.full((len(questions), 2), np.nan)
    flows = np.full((len(questions), len(parts)), np.nan, np.float32)
    for row, result in _answers(model, questions):
        if isinstance(result, BilensError):
            reasons[row] = str(result)
        else:
            of_parts = torch.cat([result.heads.sum(-1), result.mlps.sum(-1)[:, None]], 1)
            values[row], flows[row] = result.values, of_parts.flatten().float().cpu().numpy()
        bar.update()
    columns: dict[str, Any] = {"number": range(first, first + len(questions))}
    columns |= {name: [_words(question, name) for question in questions] for name in ASKED}
    columns |= dict(zip(NUMBERS, values.T, strict=True)) | dict(zip(parts, flows.T, strict=True))
    frame = pd.DataFrame({**columns, "reason": reasons})
    return arrow.Table.from_pandas(frame, preserve_index=False)


def _words(question: QuestionOrError, name: str) -> str:
    """Return a field of a question as text."""
    value = getattr(question, name, "")
    if isinstance(value, Tensor):
        return "embeddings" if value.is_floating_point() else " ".join(map(str, value.tolist()))
    return value if isinstance(value, str) else written_names(value)


def _answers(
    model: ResidualModel, questions: Sequence[QuestionOrError]
) -> Iterator[tuple[int, Flow | BilensError]]:
    """Yield the number of each question with its flow, or with the reason why it has none."""
    of_lengths: dict[tuple[int, ...], dict[int, Fitted]] = defaultdict(dict)
    for i, question in enumerate(questions):
        try:
            if isinstance(question, BilensError):
                raise question
            fitted = fitted_pair(model, question)
        except BilensError as error:
            yield i, error
        else:
            of_lengths[tuple(map(len, fitted.rows))][i] = fitted
    for lengths, of_questions in of_lengths.items():
        # A quarter of what one question may take, since larger batches are hardly faster.
        count = max(1, KEPT_BYTES // 4 // (2 * max(lengths) * bytes_of_token(model)))
        for numbers in batched(of_questions, count):
            yield from _together(model, {i: of_questions[i] for i in numbers})


def _together(
    model: ResidualModel, fitted: Mapping[int, Fitted]
) -> Iterator[tuple[int, Flow | BilensError]]:
    """Yield the flows of questions of one length; if they are refused, each runs alone."""
    try:
        flows = flows_of_length(model, [*fitted.values()])
    except MemoryLimitError:
        raise  # for every question
    except BilensError as error:
        is_of_lengths = any(any(of_question.starts) for of_question in fitted.values())
        if isinstance(error, UnknownOperationError) and not is_of_lengths:
            raise  # for every question
        for i, of_question in fitted.items():
            alone = {i: of_question}
            yield from [(i, error)] if len(fitted) == 1 else _together(model, alone)
    else:
        # There is no room for the graph of this pass beside that of the next.
        flows[0].origin.release()
        yield from zip(fitted, flows, strict=True)

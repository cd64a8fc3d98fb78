"""Stories and blocks of tokens as Arrow streams, which data sets open without reading them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

__all__ = ["open_rows", "write_blocks", "write_rows", "write_stories"]


def open_rows(path: Path) -> Any:
    """A file of rows of token ids as a data set of tensors; read where it lies."""
    import datasets  # noqa: PLC0415

    return datasets.Dataset.from_file(str(path)).with_format("torch")


def write_stories(path: Path, batches: Iterable[list[str]]) -> None:
    """Write a column `text`."""
    # pyarrow takes most of a second to import, and images do without it.
    import pyarrow as pa  # noqa: PLC0415

    _write(path, "text", pa.string(), map(pa.array, batches))


def write_blocks(
    path: Path, batches: Iterable[Int32[np.ndarray, "blocks n_ctx"]], n_ctx: int
) -> int:
    """Write a column `input_ids` of blocks of one length; return how many there were."""
    import pyarrow as pa  # noqa: PLC0415

    arrays = (
        pa.FixedSizeListArray.from_arrays(pa.array(batch.ravel()), n_ctx) for batch in batches
    )
    return _write(path, "input_ids", pa.list_(pa.int32(), n_ctx), arrays)


def write_rows(path: Path, batches: Iterable[list[list[int]]]) -> int:
    """Write a column `input_ids` of rows of any length; return how many there were."""
    import pyarrow as pa  # noqa: PLC0415

    kind = pa.list_(pa.int32())
    return _write(path, "input_ids", kind, (pa.array(batch, kind) for batch in batches))


def _write(path: Path, column: str, kind: Any, arrays: Iterable[Any]) -> int:
    import pyarrow as pa  # noqa: PLC0415

    schema = pa.schema({column: kind})
    rows = 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for array in arrays:
            stream.write_batch(pa.record_batch([array], schema=schema))
            rows += len(array)
    return rows

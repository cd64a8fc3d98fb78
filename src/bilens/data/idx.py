"""IDX files, the format in which MNIST is published, gzip or not.

Two zero bytes, the type (8 for bytes), the number of axes, the size of each in 4 bytes, and the
values, last axis fastest.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from bilens.errors import DataError

__all__ = ["read_idx"]

LARGEST = 2**30
"""Bytes of values that a file may hold; as float32 they take four times as much memory."""


def read_idx(path: Path) -> UInt8[np.ndarray, "..."]:
    """Read an IDX file of bytes; never more of it than its header says and `LARGEST` allows.

    Raises:
        DataError: the file cannot be read, is not one, or is too large.

    Source: LeCun, Cortes and Burges, "The MNIST database of handwritten digits", file formats.
    """
    try:
        with path.open("rb") as packed:
            is_gzip = packed.peek(2)[:2] == b"\x1f\x8b"
            with gzip.GzipFile(fileobj=packed) if is_gzip else packed as file:
                kind, axes = struct.unpack(">3sB", file.read(4))
                if kind != b"\0\0\x08" or not 1 <= axes <= 3:
                    raise DataError(
                        f"{path} begins with {kind.hex()} {axes:02x}, expected an IDX file of "
                        "bytes with up to 3 axes, 000008 03"
                    )
                shape = struct.unpack(f">{axes}I", file.read(4 * axes))
                size = math.prod(shape)
                if size > LARGEST:
                    raise DataError(
                        f"{path} says that it holds {size:,} bytes, expected at most {LARGEST:,}"
                    )
                values = file.read(size + 1)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise DataError(
            f"{path} cannot be read as an IDX file: {error}. Fetch it again."
        ) from error
    if len(values) != size:
        found = "more" if len(values) > size else str(len(values))
        raise DataError(f"{path} holds {found} bytes, expected {size} of {shape}. Fetch it again.")
    return np.frombuffer(values, np.uint8).reshape(shape).copy()

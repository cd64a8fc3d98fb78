"""IDX files, the format in which MNIST is published.

    bytes 0, 1      zero
    byte 2          type code; 0x08 is the unsigned byte, the only one read here
    byte 3          number of axes
    4 bytes each    size of every axis, big-endian unsigned
    the rest        the values, last axis fastest

The whole may be wrapped in gzip.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import UInt8

from bilens.errors import DataError

__all__ = ["read_idx"]

_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08
_CHUNK = 1 << 20


def read_idx(path: Path) -> UInt8[np.ndarray, "..."]:
    """Read an IDX file of unsigned bytes, gzip or not.

    Gzip is recognised by the first two bytes, not by the name: an IDX file starts with zeros, so
    the two cannot be confused.

    Returns:
        An array of the shape that the header declares. It is writable and nobody else holds it.

    Raises:
        DataError: The file cannot be read, is no IDX file of unsigned bytes, is cut short, goes on
            after its last value, or its gzip stream is damaged. The message gives the byte, counted
            in the uncompressed stream, what was expected there and what was found.

    Source: LeCun, Cortes and Burges, "The MNIST database of handwritten digits", file formats.
    """
    content = _uncompressed(path)
    shape, start = _header(path, content)
    end = start + math.prod(shape)
    if len(content) < end:
        raise _damage(
            path,
            len(content),
            f"{end - start} bytes of data for shape {shape}",
            f"the end after {len(content) - start}",
        )
    if len(content) > end:
        raise _damage(path, end, "the end of the file", f"{len(content) - end} more bytes")
    try:
        return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
    except ValueError as cause:  # more axes, or larger empty ones, than an array can have
        raise _damage(path, 3, "axes that fit in an array", f"shape {shape}") from cause


def _header(path: Path, content: bytearray) -> tuple[tuple[int, ...], int]:
    """Return the declared shape and the offset of the first value."""
    if len(content) >= 2 and any(content[:2]):
        raise _damage(path, 0, "the bytes 00 00 of an IDX file", content[:2].hex(" "))
    if len(content) < 4:
        raise _damage(path, len(content), "a header of at least 4 bytes", "the end")
    type_code, axes = content[2], content[3]
    if type_code != _UNSIGNED_BYTE:
        raise _damage(
            path, 2, f"the type code 0x{_UNSIGNED_BYTE:02x} (unsigned byte)", f"0x{type_code:02x}"
        )
    start = 4 + 4 * axes
    if len(content) < start:
        raise _damage(path, len(content), f"a header of {start} bytes for {axes} axes", "the end")
    return struct.unpack_from(f">{axes}I", content, 4), start


def _uncompressed(path: Path) -> bytearray:
    """Return the whole content, taken out of gzip where it is in it."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GZIP_MAGIC))
            file.seek(0)
            if magic == _GZIP_MAGIC:
                return _gunzipped(path, file)
            return bytearray(file.read())
    except OSError as cause:
        raise DataError(f"{path}: expected a readable IDX file, found {cause}") from cause


def _gunzipped(path: Path, file: BinaryIO) -> bytearray:
    content = bytearray()
    with gzip.GzipFile(fileobj=file) as stream:
        try:
            # read1 hands over every block before it fails on the next, so that the length of
            # what came is where the damage begins.
            while chunk := stream.read1(_CHUNK):
                content += chunk
        except (EOFError, zlib.error, gzip.BadGzipFile) as cause:
            raise _damage(path, len(content), "a whole gzip stream", str(cause)) from cause
    return content


def _damage(path: Path, offset: int, expected: str, found: str) -> DataError:
    return DataError(f"{path}: at byte {offset}: expected {expected}, found {found}")

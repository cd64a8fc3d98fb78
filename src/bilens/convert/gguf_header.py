"""The header of a GGUF file: its settings and its table of tensors, read within its bounds.

Every count, length and offset is compared with the size of the file before it is used. A damaged
file can thus neither loop nor take memory.

Source: the specification of GGUF (ggml, docs/gguf.md), versions 2 and 3.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from bilens.errors import CheckpointError
from bilens.files import file_errors
from bilens.lazy_imports import lazy_import

gguf = lazy_import("gguf", install="bilens[gguf]")

SCALARS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
}
"""Formats of `struct` by the numbers of GGUF's value types."""
TEXT, LIST = 8, 9
SMALLEST = {TEXT: 8, **{kind: struct.calcsize(form) for kind, form in SCALARS.items()}}
"""Bytes that a value takes at least."""
AXES = 4
ALIGNMENT = 32


@dataclass(frozen=True)
class TensorInfo:
    """An entry of the table of tensors: its shape as torch has it, its format and its bytes."""

    shape: tuple[int, ...]
    kind: Any
    start: int
    size: int


@dataclass(frozen=True)
class Header:
    """The settings of a GGUF file by name, and its tensors."""

    path: Path
    settings: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """Name of the architecture, which all its settings begin with."""
        return str(self.settings.get("general.architecture"))

    def architecture_settings(self) -> dict[str, Any]:
        """Return the settings of the architecture, without its name."""
        prefix = f"{self.architecture}."
        return {
            name.removeprefix(prefix): value
            for name, value in self.settings.items()
            if name.startswith(prefix)
        }


def read_header(path: Path) -> Header:
    """Read the settings and the table of tensors of a GGUF file, each count and offset checked.

    Raises:
        CheckpointError: the file is not there, is not GGUF, or is cut or damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not there; expected a GGUF file")
    with file_errors(path, "read"), path.open("rb") as file:
        size = path.stat().st_size
        if size < 24:
            raise CheckpointError(f"{path} has {size} bytes, and is no complete GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Cursor(path, content).header()


class _Cursor:
    """A place in a GGUF file; each value is read from it and moves it on."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.place = path, content, 0

    def header(self) -> Header:
        """Read the whole header."""
        if self.content[:4] != b"GGUF":
            raise self.damaged("does not begin with GGUF")
        self.place = 4
        version = self.number("I")
        if version not in (2, 3):
            raise self.damaged(
                f"is of version {version}, expected 2 or 3 with little-endian numbers"
            )
        n_tensors, n_settings = self.count(24), self.count(13)
        settings: dict[str, Any] = {}
        for _ in range(n_settings):
            name = self.text()
            if name in settings:
                raise self.damaged(f"has the setting {name!r} twice")
            settings[name] = self.value(self.number("I"))
        table = [self.tensor() for _ in range(n_tensors)]
        return Header(self.path, settings, self.placed(table, settings))

    def placed(
        self, table: list[tuple[str, tuple[int, ...], Any, int]], settings: dict[str, Any]
    ) -> dict[str, TensorInfo]:
        """Return the tensors by name, which lie one after the other up to the end of the file."""
        alignment = settings.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.damaged(f"has alignment {alignment!r}, expected a power of two")
        # Tensors begin at the first aligned byte after the table; -(-a // b) rounds up.
        begin = -(-self.place // alignment) * alignment
        expected, tensors = 0, dict[str, TensorInfo]()
        for name, shape, kind, offset in table:
            if name in tensors:
                raise self.damaged(f"has the tensor {name!r} twice")
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise self.damaged(f"has {name} in rows of {shape[-1]}, expected blocks of {block}")
            size = prod(shape) // block * block_bytes
            # A gap or an overlap would be read as weights without any further sign of damage.
            if offset != expected:
                raise self.damaged(f"has {name} at byte {offset:,}, expected {expected:,}")
            tensors[name] = TensorInfo(shape, kind, begin + offset, size)
            expected = -(-(offset + size) // alignment) * alignment
        end = max((tensor.start + tensor.size for tensor in tensors.values()), default=begin)
        # Writers may or may not pad the last tensor, so both lengths are complete files.
        if not end <= len(self.content) <= -(-end // alignment) * alignment:
            raise self.damaged(f"has {len(self.content):,} bytes, expected {end:,}")
        return tensors

    def tensor(self) -> tuple[str, tuple[int, ...], Any, int]:
        """Read an entry of the table: name, shape, format and offset."""
        name, n_axes = self.text(), self.number("I")
        if not 1 <= n_axes <= AXES:
            raise self.damaged(f"has {name} with {n_axes} axes, expected 1 to {AXES}")
        # GGUF lists the fastest axis first, torch the slowest.
        shape = tuple(self.number("Q") for _ in range(n_axes))[::-1]
        if not all(0 < size < 2**31 for size in shape):
            raise self.damaged(f"has {name} of shape {shape}")
        number = self.number("I")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise self.damaged(f"has {name} in format {number}, which is not known") from None
        return name, shape, kind, self.number("Q")

    def value(self, kind: int) -> Any:
        """Read the value of a setting."""
        if kind == TEXT:
            return self.text()
        if kind != LIST:
            return self.number(self.form(kind))
        item = self.number("I")
        if item == LIST:
            raise self.damaged("has a list of lists")
        n_items = self.count(SMALLEST.get(item, 1))
        if item == TEXT:
            return [self.text() for _ in range(n_items)]
        return list(
            struct.unpack(f"<{n_items}{self.form(item)}", self.take(n_items * SMALLEST[item]))
        )

    def form(self, kind: int) -> str:
        """Return the format of a value type."""
        if kind not in SCALARS:
            raise self.damaged(f"has a value of type {kind}, which is not known")
        return SCALARS[kind]

    def text(self) -> str:
        """Read a text after its length; bytes that are not UTF-8 are replaced."""
        # Tokens of byte-level vocabularies are parts of characters.
        return self.take(self.count(1)).decode("utf-8", errors="replace")

    def count(self, size: int) -> int:
        """Read the number of entries that follow, at least `size` bytes each."""
        number = self.number("Q")
        # Checked before anything is read: a damaged count could ask for all memory.
        if number * size > len(self.content) - self.place:
            raise self.damaged(
                f"announces {number:,} entries at byte {self.place:,}, and ends before"
            )
        return number

    def number(self, form: str) -> Any:
        """Read a number."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(form)))[0]

    def take(self, n_bytes: int) -> bytes:
        """Read bytes."""
        if self.place + n_bytes > len(self.content):
            raise self.damaged("ends within its header")
        taken = self.content[self.place : self.place + n_bytes]
        self.place += n_bytes
        return taken

    def damaged(self, reason: str) -> CheckpointError:
        """Return the error of a file that is damaged."""
        return CheckpointError(
            f"{self.path} {reason}: it is damaged or incomplete, and holds no complete language "
            "model. Fetch it again."
        )

"""The header of a GGUF file: its settings, and where its tensors are.

Every length and offset is compared with the size of the file before it is used. A damaged file can
thus neither loop nor take memory.

Source: the specification of GGUF (ggml, docs/gguf.md), versions 2 and 3.
"""

import struct
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from bilens.errors import CheckpointError
from bilens.files import check_downloaded, file_errors
from bilens.lazy_imports import lazy_import

gguf = lazy_import("gguf", install=".[gguf]")

FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` by the numbers of GGUF's value types."""


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


def has_tokenizer(path: Path) -> bool:
    """Return True if a GGUF file has a tokenizer."""
    return "tokenizer.ggml.tokens" in read_header(path).settings


def read_header(path: Path) -> Header:
    """Read the settings and the table of tensors of a GGUF file, each length and offset checked.

    Raises:
        CheckpointError: the file is not there, is not GGUF, or is cut or damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not there; expected a GGUF file")
    with file_errors(path, "read"), check_downloaded(path).open("rb") as file:
        return _HeaderReader(path, file).header()


class _HeaderReader:
    """The header of a GGUF file, value after value.

    `gguf.GGUFReader` takes 20 to 40 times as long, for vocabularies, and a damaged length of a list
    makes it run for ever.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file, self.size = path, file, path.stat().st_size
        self.place = 0

    def header(self) -> Header:
        if self.take(4) != b"GGUF":
            raise self.damaged("does not begin with GGUF")
        version = self.number("I")
        if version not in (2, 3):
            raise self.damaged(f"is of version {version}, expected 2 or 3, little-endian")
        n_tensors, n_settings = self.number("Q"), self.number("Q")
        settings: dict[str, Any] = {}
        # A damaged count ends with the file, since each entry takes bytes of it.
        for _ in range(n_settings):
            name = self.text()
            if name in settings:
                raise self.damaged(f"has the setting {name!r} twice")
            settings[name] = self.value(self.number("I"))
        alignment = settings.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.damaged(f"has alignment {alignment!r}, expected a power of two")
        tensors: dict[str, TensorInfo] = {}
        expected = 0
        for _ in range(n_tensors):
            name = self.text()
            if name in tensors:
                raise self.damaged(f"has the tensor {name!r} twice")
            tensors[name] = tensor = self.tensor(name)
            # A gap or an overlap would be read as weights without any further sign of damage.
            if tensor.start != expected:
                raise self.damaged(f"has {name} at byte {tensor.start:,}, expected {expected:,}")
            expected = _rounded_up(tensor.start + tensor.size, alignment)
        # Tensors begin at the first aligned byte after the table.
        begin = _rounded_up(self.place, alignment)
        parts = {name: replace(part, start=begin + part.start) for name, part in tensors.items()}
        end = max((part.start + part.size for part in parts.values()), default=begin)
        # Writers may or may not pad the last tensor, so both lengths are complete files.
        if not end <= self.size <= _rounded_up(end, alignment):
            raise self.damaged(f"has {self.size:,} bytes, expected {end:,}")
        return Header(self.path, settings, parts)

    def tensor(self, name: str) -> TensorInfo:
        """Read an entry of the table after its name; its start is after the table."""
        n_axes = self.number("I")
        if not 1 <= n_axes <= 4:
            raise self.damaged(f"has {name} with {n_axes} axes, expected 1 to 4")
        # GGUF lists the fastest axis first, torch the slowest.
        shape = tuple(self.number("Q") for _ in range(n_axes))[::-1]
        if not all(0 < size < 2**31 for size in shape):
            raise self.damaged(f"has {name} of shape {shape}")
        code, start = self.number("I"), self.number("Q")
        if code not in set(gguf.GGMLQuantizationType):
            raise self.damaged(f"has {name} in format {code}, which is not known")
        kind = gguf.GGMLQuantizationType(code)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self.damaged(f"has {name} in rows of {shape[-1]}, expected blocks of {block}")
        return TensorInfo(shape, kind, start, prod(shape) // block * block_bytes)

    def value(self, kind: int) -> Any:
        text, array = 8, 9
        if kind == text:
            return self.text()
        if kind in FORMS:
            return self.number(FORMS[kind])
        item = self.number("I") if kind == array else kind
        if item not in FORMS and item != text:
            raise self.damaged(f"has a value of type {item}, which is not known")
        n_items = self.number("Q")
        if item == text:
            return [self.text() for _ in range(n_items)]
        values = self.take(n_items * struct.calcsize(FORMS[item]))
        return list(struct.unpack(f"<{n_items}{FORMS[item]}", values))

    def text(self) -> str:
        """Read a text after its length; bytes that are not UTF-8 are replaced."""
        # Tokens of byte-level vocabularies are parts of characters.
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(form)))[0]

    def take(self, n_bytes: int) -> bytes:
        # Compared first: a damaged length could ask for all memory.
        self.place += n_bytes
        if self.place > self.size:
            raise self.damaged("ends within its header")
        return self.file.read(n_bytes)

    def damaged(self, reason: str) -> CheckpointError:
        """Return the error of a file that is damaged."""
        return CheckpointError(
            f"{self.path} {reason}: it is damaged or incomplete, and holds no complete language "
            "model. Fetch it again."
        )


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

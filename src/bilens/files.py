"""Files that are whole or not there: written under a temporary name, then renamed."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from errno import EINVAL
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bilens.errors import CheckpointError

__all__ = [
    "UNFINISHED",
    "file_errors",
    "folder_written_whole",
    "only_process_in",
    "read_json",
    "read_json_object",
    "temporary_beside",
    "write_json",
    "write_safetensors",
    "write_text",
    "written_whole",
]

LOCK = ".lock"
UNFINISHED = ".unfinished-"
"""What the names of files and folders begin with that are being written."""


@contextmanager
def file_errors(path: Path | str = "", doing: str = "written") -> Iterator[None]:
    """Say in one way what the system refuses: a full or read-only disk, a folder in the way, ...

    Args:
        path: of the file or folder; by default the one that the system names.
        doing: what could not be done with it, as in "could not be written".

    Raises:
        CheckpointError: in place of an OSError, or of what safetensors makes of one.
    """
    try:
        if "\0" in os.fspath(path):
            raise OSError(EINVAL, "a name cannot hold a zero byte", str(path))
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        file = getattr(error, "filename", None) or "A file"
        raise CheckpointError(
            f"{_short(path or file)} could not be {doing}: {reason}. Check the path, the space on "
            "its disk and whether you may write there."
        ) from error


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; move it there when the block ends without an error.

    Raises:
        CheckpointError: the system refuses.
    """
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Made by the one who writes, with the permissions that the user's umask leaves.
        temporary = temporary_beside(path)
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def folder_written_whole(folder: Path) -> Iterator[Path]:
    """Give a temporary folder beside `folder`; rename it when the block ends without an error.

    Where another process has made `folder` in the meantime, that one stays.

    Raises:
        CheckpointError: the system refuses.
    """
    with file_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_beside(folder)
        temporary.mkdir()
        try:
            yield temporary
            try:
                temporary.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def only_process_in(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run directory as long as the block runs.

    The lock is the system's, so it ends with the process, however that ends. What a process left
    half-written there when it was killed is removed.

    Raises:
        CheckpointError: another process works there, or the system refuses.
    """
    with file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise CheckpointError(
                f"Another process is at work in {_short(folder)}. Wait until it has ended, or "
                "choose another folder."
            ) from error
    try:
        with file_errors(folder):
            for unfinished in folder.glob(f"{UNFINISHED}*"):
                shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()
        yield
    finally:
        lock.release()


def temporary_beside(path: Path) -> Path:
    """A name for what will be `path`: short, since that may be as long as names can be."""
    return path.parent / f"{UNFINISHED}{uuid4().hex}{path.suffix}"


def read_json(path: Path, *, lines: bool = False) -> Any:
    """What a JSON file holds, or a list of what each of its lines holds.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    with file_errors(path, "read"):
        content = path.read_bytes()
    try:
        text = content.decode("utf-8")
        return [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged and cannot be read as JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        CheckpointError: as in `read_json`, or it holds something else.
    """
    found = read_json(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, expected a JSON object")
    return found


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON."""
    write_text(path, json.dumps(content, indent=2, default=lambda number: number.item()) + "\n")


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors, made contiguous, with optional text metadata."""
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with written_whole(path) as temporary:
        save_file(whole, temporary, metadata=dict(metadata) if metadata else None)


def _short(path: Path | str) -> str:
    text = os.fspath(path)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-60:]}"

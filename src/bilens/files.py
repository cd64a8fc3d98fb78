"""Files that are complete or absent: written under a temporary name, then renamed.

Libraries for this, such as atomicwrites, write no folders.
"""

import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from errno import EINVAL
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import uuid4

from safetensors import SafetensorError

from bilens.errors import BilensError, CheckpointError
from bilens.lazy_imports import lazy_import
from bilens.sections import distinct

if TYPE_CHECKING:
    from safetensors import torch as of_torch
    from torch import Tensor
else:  # Commands refuse what they can without torch.
    of_torch = lazy_import("safetensors.torch")

UNFINISHED = ".unfinished-"
"""First part of the names of files and folders that are being written."""


LEFT_BY_SYSTEMS = {"__macosx", "@eadir", "$recycle.bin", "system volume information", "lost+found"}
"""Folders that systems leave among a user's own, in lower case."""


def visible_paths(folder: Path) -> list[Path]:
    """Return what is in a folder, by name, without hidden files and what systems leave there."""
    names = sorted(folder.iterdir())
    return [p for p in names if p.name[0] != "." and p.name.lower() not in LEFT_BY_SYSTEMS]


@contextmanager
def file_errors(path: Path | str = "", doing: str = "written") -> Iterator[None]:
    """Turn errors of the system into one message: a full or read-only disk, a folder, ...

    It names `path`, by default the one that the system names, and what could not be done.

    Raises:
        CheckpointError: in place of an OSError, or of the error that safetensors makes of one.
    """
    try:
        if "\0" in os.fspath(path):
            raise OSError(EINVAL, "a name cannot hold a zero byte", str(path))
        yield
    except (OSError, SafetensorError, UnicodeEncodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        file = getattr(error, "filename", None) or "A file"
        raise CheckpointError(
            f"{_short(path or file)} could not be {doing}: {reason}. Check the path, the space on "
            "its disk and whether you may write there."
        ) from error


def check_target(path: Path) -> Path:
    """Return the path that is written in place of `path`: the end of its symbolic links.

    A rename would replace a device by a file, and a link by its target. So devices, named pipes
    and sockets are refused, and links are followed.

    Raises:
        CheckpointError: the path is no file and no folder, or its links go in a circle.
    """
    special = {"c": "a device", "b": "a device", "p": "a named pipe", "s": "a socket"}
    with file_errors(path):
        try:
            kind = special.get(stat.filemode(path.stat().st_mode)[0])
        except FileNotFoundError:  # a new file, or a link to one
            kind = None
        if kind is not None:
            raise CheckpointError(
                f"{_short(path)} is {kind}, expected a file, a folder or a new name. Choose "
                "another path; --json prints results to standard output."
            )
        return Path(os.path.realpath(path)) if path.is_symlink() else path


def check_writable(path: Path) -> None:
    """Raise CheckpointError unless the nearest folder of a path lets something be made in it."""
    with file_errors(path):
        # A file among the parents is found too, and nothing can be made in it.
        parents = (parent for parent in path.absolute().parents if parent.exists())
        folder = path if path.is_dir() else next(parents)
        TemporaryDirectory(prefix=UNFINISHED, dir=folder).cleanup()


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; move it there if the block ends without an error.

    The block makes a file there, or a folder.

    Raises:
        CheckpointError: the path is a device, a pipe or a socket, or the system refuses.
    """
    with file_errors(path):
        path = check_target(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Made by the code that writes it, with the permissions that the user's umask leaves.
        temporary = temporary_beside(path)
        try:
            yield temporary
            temporary.replace(path)
        finally:
            _remove(temporary)


def remove_unfinished(folder: Path) -> None:
    """Remove what was left unfinished in a folder, which no other process may be using."""
    with file_errors(folder):
        for path in folder.glob(f"{UNFINISHED}*"):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        # Windows does not remove files that are still mapped.
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def file_names(texts: Iterable[str]) -> list[str]:
    """Return texts as names of files in one folder, without endings; no two are equal.

    Spaces become hyphens. Characters that a system may read as part of a path, or refuse, are
    written as in addresses: / is %2F.
    """
    names = []
    for text in texts:
        words = "-".join(text.split()).lstrip(".")
        plain = re.sub(r"[^\w.,+=-]", lambda match: quote(match[0], "", errors="replace"), words)
        # Systems take 255 bytes, and a letter has up to four.
        names.append(plain[:60] or "unnamed")
    return distinct(names, "-")


def temporary_beside(path: Path) -> Path:
    """Return a name next to `path`, a short one: that of `path` may be as long as names can be."""
    return path.parent / f"{UNFINISHED}{uuid4().hex}{path.suffix}"


def read_json(path: Path, *, lines: bool = False) -> Any:
    """Return the value in a JSON file, or with `lines` the list of the values of its lines.

    Raises:
        CheckpointError: the file cannot be read, or is damaged.
    """
    with file_errors(path, "read"):
        content = path.read_bytes()
    try:
        text = content.decode("utf-8")
        return [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged and cannot be read as JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: as in `read_json`, or the value is no object.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


BINARY = (".safetensors", ".bin", ".gguf")
"""Endings of files that do not begin with a text."""


def check_downloaded(
    path: Path, what: str = "a part of a model", error: type[BilensError] = CheckpointError
) -> Path:
    """Return the path of a file of a model or of data, unless another stands in its place.

    A clone without Git LFS leaves a pointer there, a download that was refused a page or a message.

    Raises:
        BilensError: it is one of these, or cannot be read, of the class `error`.
    """
    with file_errors(path, "read"), path.open("rb") as file:
        start = file.read(100)
    text = start.decode("utf-8", errors="replace").strip()
    if text.startswith("version https://git-lfs"):
        content = "a pointer of Git LFS, which `git lfs pull` replaces by the file itself"
    elif text.lower().startswith(("<!doctype", "<html", "<?xml")):
        content = "a web page. Fetch the file itself, by `hf download`"
    elif path.suffix in BINARY and text and text.isprintable():
        content = f"a text, {text!r}. Fetch the file again"
    else:
        return path
    raise error(f"{path} should hold {what}, and holds {content}.")


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON."""
    write_text(path, json.dumps(content, indent=2, default=lambda x: x.item()) + "\n")


def write_safetensors(
    path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors, made contiguous, with optional text metadata."""
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with written_whole(path) as temporary:
        of_torch.save_file(contiguous, temporary, metadata=dict(metadata) if metadata else None)


def _short(path: Path | str) -> str:
    text = os.fspath(path)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-60:]}"

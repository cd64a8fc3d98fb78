"""Names and places of what is kept between two openings of a corpus."""

import hashlib
import json
from pathlib import Path
from typing import Any

__all__ = ["cache_folder", "fingerprint", "identity"]


def identity(path: Path) -> tuple[str, int, int]:
    """What a file is known by: its place, size and time of change."""
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns


def fingerprint(*parts: Any) -> str:
    """A short name for whatever JSON can hold."""
    content = json.dumps(parts, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def cache_folder(cache_dir: str | Path | None) -> Path:
    """The folder that is given, or bilens' own beside what Hugging Face keeps."""
    if cache_dir is not None:
        return Path(cache_dir)
    from huggingface_hub import constants  # noqa: PLC0415

    return Path(constants.HF_HOME) / "bilens"

"""Damaged files of others: what their libraries raise, said in one way."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from bilens.errors import CheckpointError
from bilens.memory import MemoryLimitError
from bilens.progress import no_progress

ERRORS = (
    *(SafetensorError, StrictDataclassError, OSError, RuntimeError, ArithmeticError, ImportError),
    *(ValueError, LookupError, TypeError, AttributeError, AssertionError),
)
"""Errors that transformers lets through if a file is damaged."""
MODEL = "language model, and none could be fetched from the hub by this name"


@contextmanager
def reading_files(source: str | Path, what: str = MODEL) -> Iterator[None]:
    """Say that a file is damaged where transformers fails to read it; only around its calls."""
    try:
        with no_progress():
            yield
    except (CheckpointError, MemoryLimitError):
        raise
    except Exception as error:
        # Errors of the library tokenizers are plain Exceptions.
        damage = isinstance(error, ERRORS) or type(error) is Exception
        if not damage or is_out_of_memory(error):
            raise
        raise CheckpointError(f"{source} holds no complete {what}: {error}") from error


def is_out_of_memory(error: Exception) -> bool:
    """Return True if an error says that memory is short, which is no damage of a file."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)

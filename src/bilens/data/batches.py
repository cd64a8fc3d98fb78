"""Lists of so many items at a time."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

__all__ = ["batched"]

Item = TypeVar("Item")


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The items in lists of `size`, the last of which may be shorter; from any stream."""
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch

"""Lists of so many items at a time."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

__all__ = ["batched"]

Item = TypeVar("Item", bound=Any)


def batched(items: Iterable[Item], size: int, length: int | None = None) -> Iterator[list[Item]]:
    """The items of any stream in lists of `size`, the last of which may be shorter.

    A list also ends where its items, texts or lists, have this `length` together.
    """
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += len(item) if length else 0
        if len(batch) == size or (length and total >= length):
            yield batch
            batch, total = [], 0
    if batch:
        yield batch

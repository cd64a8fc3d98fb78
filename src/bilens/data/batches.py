"""Lists of so many items at a time."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

__all__ = ["batched"]

Item = TypeVar("Item", bound=Any)


def batched(items: Iterable[Item], size: int, length: int | None = None) -> Iterator[list[Item]]:
    """The items in lists of `size`, the last of which may be shorter; from any stream.

    Args:
        items: anything; texts or lists where `length` is given.
        size: of them at once.
        length: a list also ends where its items have this length together.
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

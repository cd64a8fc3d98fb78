"""The guard in front of every dense array."""

import math

from torch import Tensor

from bilens.errors import BilensError

__all__ = ["DENSE_LIMIT", "check_dense_size"]

DENSE_LIMIT = 2 * 1024**3
"""Bytes that `dense()` may take unless the caller says more."""


def check_dense_size(shape: tuple[int, ...], like: Tensor, max_bytes: int) -> None:
    """Refuse to build an array of `shape` that needs more than `max_bytes`.

    Raises:
        BilensError: with the number of bytes that it would need.
    """
    needed = math.prod(shape) * like.element_size()
    if needed > max_bytes:
        raise BilensError(
            f"dense() would build an array of shape {shape} and {needed:,} bytes; the limit is "
            f"max_bytes={max_bytes:,}. Work with the factors, or raise max_bytes."
        )

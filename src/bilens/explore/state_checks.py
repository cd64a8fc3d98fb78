"""What every screen asks of a model and of a state before it shows anything."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from bilens.errors import BilensError

__all__ = ["StateError", "check_ranges", "check_tokens", "said_of"]


class StateError(BilensError):
    """A field of a state holds what the model does not have.

    Args:
        field: name of the field.
        reason: what came and what was expected.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


def check_ranges(state: Any, **ranges: tuple[int, int]) -> None:
    """Raise if a number of a state lies outside of its lowest and highest.

    Raises:
        StateError: it does.
    """
    for name, (lowest, highest) in ranges.items():
        value = getattr(state, name)
        if not lowest <= value <= highest:
            raise StateError(name, f"{value} is not a whole number from {lowest} to {highest}")


def check_tokens(model: Any, **fields: Iterable[str]) -> None:
    """Raise if a field of a state names what is not a token of the model.

    Raises:
        StateError: it does.
    """
    for field, names in fields.items():
        for name in names:
            with said_of(field, f"token={name!r}, "):
                model.token(name)


@contextmanager
def said_of(field: str, prefix: str) -> Iterator[None]:
    """Say an error beside the control of a field, which its text need not name then."""
    try:
        yield
    except BilensError as error:
        raise StateError(field, str(error).removeprefix(prefix)) from error

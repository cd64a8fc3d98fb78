"""What every public computation promises: arrays that fit, and numbers that no autocast changes."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar

import torch

from bilens.checks import checked

Thing = TypeVar("Thing", bound=Callable[..., Any])

OPERATORS = {"__init__", "__call__", "__matmul__", "__mul__", "__add__", "__sub__"}
DEVICES = ("cpu", "cuda", "mps", "xpu")


def exact(thing: Thing) -> Thing:
    """Hold the arrays that are given to annotations, and work outside of any autocast.

    Decorates a function, or every public method of a class. Weights are read in the precision that
    they have, also where a training around the reading computes in less.

    Raises:
        BilensError: (by the function) an array does not fit; see `bilens.checks.checked`.
    """
    if not isinstance(thing, type):
        return _exact(thing)  # type: ignore[return-value]
    for name, member in list(vars(thing).items()):
        if name.startswith("_") and name not in OPERATORS:
            continue
        if isinstance(member, FunctionType):
            setattr(thing, name, _exact(member))
        elif isinstance(member, classmethod):
            setattr(thing, name, classmethod(_exact(member.__func__)))
    return thing


def _exact(function: Callable[..., Any]) -> Callable[..., Any]:
    with_checks = checked(function)

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not (active := [device for device in DEVICES if torch.is_autocast_enabled(device)]):
            return with_checks(*args, **kwargs)
        with ExitStack() as stack:
            for device in active:
                stack.enter_context(torch.autocast(device, enabled=False))
            return with_checks(*args, **kwargs)

    return wrapper

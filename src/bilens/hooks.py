"""Hooks that act only in the forward passes of one block of code."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from torch import nn

_blocks: ContextVar[tuple[object, ...]] = ContextVar("blocks", default=())


class StopForwardError(Exception):
    """Signal that ends a forward pass once enough of it is recorded."""


@contextmanager
def hooked(
    before: Iterable[tuple[nn.Module, Callable[..., Any]]] = (),
    after: Iterable[tuple[nn.Module, Callable[..., Any]]] = (),
) -> Iterator[None]:
    """Let functions see, or exchange, inputs and outputs of modules in passes of this block only.

    PyTorch's own hooks see every run of their module. These do not see the runs in other threads,
    nor those that a hook makes itself.

    Args:
        before: modules, each with a function of module, args and kwargs before it runs. The
            function returns None, or other args and kwargs.
        after: modules, each with a function of module, args, kwargs and output. The function
            returns None, or another output.
    """
    block = object()

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*call: Any) -> Any:
            if block not in _blocks.get():
                return None
            token = _blocks.set(())
            try:
                return function(*call)
            finally:
                _blocks.reset(token)

        return hook

    with ExitStack() as stack:
        for module, function in before:
            hook = module.register_forward_pre_hook(within(function), with_kwargs=True)
            stack.enter_context(hook)
        for module, function in after:
            hook = module.register_forward_hook(within(function), with_kwargs=True)
            stack.enter_context(hook)
        stack.callback(_blocks.reset, _blocks.set((*_blocks.get(), block)))
        yield


def first_call(module: nn.Module, run: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs of the first call of a module in a run, which ends there."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(_: nn.Module, *call: Any) -> None:
        calls.append(call)
        raise StopForwardError

    with hooked(before=[(module, keep)]), suppress(StopForwardError):
        run()
    return calls[0]

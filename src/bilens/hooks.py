"""Hooks and modes of modules that last for one block of code."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from threading import RLock
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_blocks: ContextVar[tuple[object, ...]] = ContextVar("blocks", default=())
# Held while a change is made or undone, never over a pass.
_LOCK = RLock()
_shared: "dict[tuple[Change, int], tuple[dict[Any, None], set[object]]]" = {}


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

    outer = _blocks.get()
    handles: list[RemovableHandle] = []

    def put(hooks: dict[int, Any], with_kwargs: dict[int, bool], hook: Callable[..., Any]) -> None:
        # Ctrl-C inside of torch's own function, which does the same, would lose the handle.
        handle = RemovableHandle(hooks, extra_dict=with_kwargs)
        handles.append(handle)
        with_kwargs[handle.id] = True
        hooks[handle.id] = hook

    def leave() -> None:
        _blocks.set(outer)
        for handle in handles:
            handle.remove()

    try:
        for module, function in before:
            kinds = module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
            put(*kinds, within(function))
        for module, function in after:
            put(module._forward_hooks, module._forward_hooks_with_kwargs, within(function))
        _blocks.set((*outer, block))
        yield
    finally:
        # Ctrl-C may arrive here too, and at each call; to leave twice is to leave once.
        try:
            leave()
        except BaseException:
            leave()
            raise


Change = Callable[[Any, dict[Any, None]], None]
"""A function of what is changed, and of its parts that were changed in the making."""


@contextmanager
def changed(owner: Any, make: Change, undo: Change) -> Iterator[None]:
    """Let the blocks of all threads share a change of something that all of them see.

    Each makes the change where it is not made yet, and the last undoes it. To undo it twice is to
    do it once.
    """
    key, block = (make, id(owner)), object()

    def leave() -> None:
        with _LOCK:
            parts, blocks = _shared.get(key, ({}, set[object]()))
            if blocks == {block}:
                undo(owner, parts)
                del _shared[key]
            blocks.discard(block)

    try:
        with _LOCK:
            parts, blocks = _shared.setdefault(key, ({}, set()))
            blocks.add(block)
            make(owner, parts)
        yield
    finally:
        try:  # as above
            leave()
        except BaseException:
            leave()
            raise


def evaluating(module: nn.Module) -> AbstractContextManager[None]:
    """Keep a module in evaluation mode, without dropout, as long as this runs."""
    return changed(module, _evaluate, _train)


def _evaluate(module: nn.Module, parts_in_training: dict[nn.Module, None]) -> None:
    parts = [part for part in module.modules() if part.training]
    parts_in_training |= dict.fromkeys(parts)
    for part in parts:
        part.training = False


def _train(_: nn.Module, parts_in_training: dict[nn.Module, None]) -> None:
    for part in parts_in_training:
        part.training = True


def first_call(
    module: nn.Module, run: Callable[[], Any], *, skipped: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs of the first call of a module in a run, which ends there.

    Some calls before it may be skipped.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(_: nn.Module, *call: Any) -> None:
        calls.append(call)
        if len(calls) > skipped:
            raise StopForwardError

    with hooked(before=[(module, keep)]), suppress(StopForwardError):
        run()
    return calls[skipped]

"""Hooks and modes of modules that last for one block of code."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from threading import RLock
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

_blocks: ContextVar[tuple[object, ...]] = ContextVar("blocks", default=())
# Held while a change is made or undone, never over a pass.
_LOCK = RLock()
_shared: "dict[tuple[type, int], tuple[SharedChange, set[object]]]" = {}


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

    def remove() -> None:
        for handle in handles:
            handle.remove()

    try:
        for module, function in before:
            hook = within(function)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        for module, function in after:
            hook = within(function)
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        _blocks.set((*outer, block))
        yield
    finally:
        _blocks.set(outer)
        _surely(remove)


def _surely(undo: Callable[[], None]) -> None:
    """Undo something, also if Ctrl-C arrives meanwhile: to do it twice is to do it once."""
    try:
        undo()
    finally:
        undo()


class SharedChange(Protocol):
    """A change of something that all threads see, such as the mode of a module."""

    def __init__(self, owner: Any) -> None: ...

    def make(self) -> None:
        """Make the change where it is not made yet."""

    def undo(self) -> None:
        """Leave all as it was; to do it twice is to do it once."""


@contextmanager
def changed(kind: type[SharedChange], owner: Any) -> Iterator[None]:
    """Let the blocks of all threads share a change: the first makes it, and the last undoes it."""
    key, block = (kind, id(owner)), object()

    def leave() -> None:
        with _LOCK:
            change, blocks = _shared.get(key, (None, set[object]()))
            if change is not None and blocks == {block}:
                change.undo()
                del _shared[key]
            blocks.discard(block)

    try:
        with _LOCK:
            change, blocks = _shared.setdefault(key, (kind(owner), set()))
            blocks.add(block)
            change.make()
        yield
    finally:
        _surely(leave)


class _Evaluation:
    """Evaluation mode of the parts of a module that are in training mode."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.trained = module, dict[nn.Module, None]()

    def make(self) -> None:
        trained = [part for part in self.module.modules() if part.training]
        self.trained |= dict.fromkeys(trained)
        for part in trained:
            part.training = False

    def undo(self) -> None:
        for part in self.trained:
            part.training = True


def evaluating(module: nn.Module) -> AbstractContextManager[None]:
    """Keep a module in evaluation mode, without dropout, as long as this runs."""
    return changed(_Evaluation, module)


def first_call(module: nn.Module, run: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs of the first call of a module in a run, which ends there."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(_: nn.Module, *call: Any) -> None:
        calls.append(call)
        raise StopForwardError

    with hooked(before=[(module, keep)]), suppress(StopForwardError):
        run()
    return calls[0]

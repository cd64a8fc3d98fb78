"""A second device for machines without one: tensors there compute here, and mixing is an error.

Torch's own `meta` lends its name. It refuses the same as a GPU: operands on two
devices, NumPy, and float64 where the device is to be one without.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

ELSEWHERE = torch.device("meta")
# Indices may lie on the CPU, and copies go from one device to another.
MAY_MIX = ("index.Tensor", "index_put", "copy_", "_to_copy", "_index_put_impl_")


class Elsewhere(torch.Tensor):
    """A tensor that says it is on the second device, around one that holds its numbers."""

    inner: torch.Tensor
    wide = True

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Elsewhere":
        if inner.dtype == torch.float64 and not cls.wide:
            raise TypeError("Cannot convert a tensor to float64, which this device does not have")
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=ELSEWHERE
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return _run(function, args, kwargs or {})

    def tolist(self) -> Any:
        return self.inner.tolist()

    def new_tensor(self, data: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=self.dtype).to(ELSEWHERE)

    def __getitem__(self, index: Any) -> torch.Tensor:
        # Torch makes the numbers of a list on meta.
        entries = index if isinstance(index, tuple) else (index,)
        found = tuple(torch.tensor(x) if isinstance(x, list) else x for x in entries)
        return super().__getitem__(found)

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert a tensor elsewhere to numpy; use Tensor.cpu() first")


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return _run(function, args, kwargs or {})


@contextmanager
def second_device(*, wide: bool = True) -> Iterator[torch.device]:
    """Provide a second device within the block, with float64 if `wide`."""

    def mover(make: Any) -> Any:
        # Torch drops the numbers of a tensor that is made on meta before anybody is asked.
        def moved(data: Any, *, device: Any = None, **how: Any) -> torch.Tensor:
            return make(data, **how) if device is None else make(data, **how).to(device)

        return moved

    with pytest.MonkeyPatch.context() as patch, _Mode():
        patch.setattr(Elsewhere, "wide", wide)
        patch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which meta has none of
        for name in ("tensor", "as_tensor"):
            patch.setattr(torch, name, mover(getattr(torch, name)))
        yield ELSEWHERE


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    there = [x for x in tensors if isinstance(x, Elsewhere)]
    here = [tuple(x.shape) for x in tensors if not isinstance(x, Elsewhere) and x.ndim]
    if there and here and not function.__name__.startswith(MAY_MIX):
        raise RuntimeError(f"{function}: expected all tensors on one device; on the CPU are {here}")
    device, plain = kwargs.get("device"), dict(kwargs)
    if device is not None:
        plain["device"] = torch.device("cpu")
    if torch.Tag.inplace_view in function.tags:
        with no_dispatch():
            function(*args, **plain)
    args, plain = tree_map_only(Elsewhere, lambda x: x.inner, (args, plain))
    result = function(*args, **plain)
    if not (there if device is None else torch.device(device) == ELSEWHERE):
        return result
    same = {id(x.inner): x for x in there}

    def move(x: torch.Tensor) -> torch.Tensor:
        # What an operation in place gives back is what it was given.
        return same[id(x)] if id(x) in same else Elsewhere(x)

    return tree_map_only(torch.Tensor, move, result)

"""Attacks on public functions: valid arguments by their annotations, and one of them hostile."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
from jaxtyping import AbstractArray
from PIL import Image
from torch import Tensor

from bilens.nn import ImageClassifier
from bilens.read import read_bonds, spectra
from bilens.residual import ResidualModel
from bilens.tensor import BilinearTensor, bonds, decompile
from tests.language import VOCAB, random_model, small_corpus, toy_tokenizer
from tests.models import digit_model, digits

ROOMS = ("tensor", "kernels", "data", "nn", "residual", "convert", "read", "read.language")
ROOMS += ("read.flow", "report")

SIZES = {
    "batch": 2,
    "heads": 2,
    "kv_heads": 2,
    "time": 6,
    "d_head": 4,
    "d_value": 4,
    "features": 16,
    "n_pixels": 64,
    "pixels": 64,
    "samples": 9,
    "n_classes": 10,
    "classes": 10,
    "d_model": 16,
    "vocab": VOCAB,
    "height": 8,
    "width": 8,
    "k": 3,
}
"""Lengths of the axes that annotations name; any other is 4."""
NUMBERS = count()
"""Numbers of files, so that no attack writes over the file of another."""


def array(hint: Any) -> Tensor | np.ndarray:
    """Return random numbers of an annotated array."""
    shape = [
        SIZES.get(dim.strip("#"), 4)
        for dim in hint.dim_str.split()
        if not dim.startswith(("*", "...", "_")) and dim != "1"
    ]
    generator = torch.Generator().manual_seed(len(shape))
    full = any("int" in name for name in hint.dtypes) and "float32" not in hint.dtypes
    numbers = torch.randn(shape, generator=generator)
    numbers = numbers.abs().long() % 2 if full else numbers
    return numbers.numpy() if hint.array_type is np.ndarray else numbers


@cache
def samples() -> dict[str, Any]:
    """Return an object of each class that annotations name, by the name of the class."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensor = BilinearTensor(normal(5, 4), normal(5, 4), normal(4, 5))
    chain, directions = [tensor, tensor], normal(2, 4)
    model = ResidualModel(random_model(n_layers=2), toy_tokenizer())
    classifier = digit_model()
    made = [
        tensor,
        tensor.interaction(directions),
        tensor.interaction(directions).eigh(),
        tensor.svd(),
        decompile(chain, directions),
        bonds(chain, directions),
        bonds(chain, directions).cut(2),
        model,
        model.model,
        model.tokenizer,
        small_corpus(),
        classifier,
        spectra(classifier),
        digits(),
        Image.new("L", (8, 8), 200),
        read_bonds(digit_model(2), digits()),
    ]
    return {kind.__name__: x for x in made for kind in type(x).__mro__ if kind is not object} | {
        "BilinearTensors": chain
    }


def valid(hint: Any, folder: Path) -> Any:  # noqa: PLR0911
    """Return an argument that fits an annotation.

    Raises:
        LookupError: no sample fits.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return array(hint)
    if origin is Annotated:
        return 1 if parts[0] is int else 0.5
    if origin is Literal:
        return parts[0]
    if hint is Path:
        return folder / f"file-{next(NUMBERS)}"
    simple = {int: 1, float: 0.5, bool: True, str: "t1", type(None): None}
    if hint in simple:
        return simple[hint]
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return {}
    if origin is not None and isinstance(origin, type) and issubclass(origin, Callable):
        return lambda *arguments: arguments[0]
    if isinstance(origin, type) and issubclass(origin, Iterable):
        item = valid(parts[0], folder)
        return (item,) * (len(parts) if origin is tuple and parts[-1] is not Ellipsis else 2)
    if parts:
        return valid(parts[0], folder)
    return samples()[hint.__name__]


def hostile(value: Any, hint: Any) -> Iterator[tuple[str, Any]]:
    """Yield wrong or extreme arguments in place of a valid one, each with its name."""
    yield from (("none", None), ("an object", object()), ("bytes", b"\xff"), ("text", "\x00"))
    yield from (("an empty list", []), ("a list of none", [None]), ("a dictionary", {}))
    yield from (("-1", -1), ("2^70", 2**70), ("nan", math.nan), ("a lone surrogate", "\ud800"))
    if not isinstance(value, Tensor):
        yield from (("a meta tensor", torch.empty(3, 4, device="meta")), ("no text", ""))
        yield from (("0", 0), ("infinity", math.inf), ("a tensor", torch.ones(3, 4)))
        yield "a path that is a device", Path("/dev/null/x")
        yield "long text", "a" * 10_000
    if isinstance(value, Sequence) and len(value) and not isinstance(value, str):
        yield from (("one of the list", value[0]), ("a list of texts", ["x", "y"]))
        yield "the list twice nested", [list(value)]
    if isinstance(value, Tensor):
        yield from (("a meta tensor", value.to("meta")), ("a sparse tensor", value.to_sparse()))
        yield from (("no rows", value[:0] if value.ndim else value), ("text", "text"))
        yield from (("one axis more", value[None]), ("NumPy", value.numpy()))
        yield from (("whole numbers", value.long()), ("float64", value.double()))
        yield from (("half", value.half()), ("true or false", value > 0))
        yield from (("complex", value.to(torch.complex64)), ("a list", value.tolist()))
        if value.is_floating_point():
            yield "NaN in it", torch.full_like(value, math.nan)
            yield "zeros", torch.zeros_like(value)
            yield "large numbers", value * 1e30
        if value.ndim:
            yield from (("one axis less", value.sum(0)), ("one row", value[:1]))
            yield "not contiguous", value.flip(0).T if value.ndim == 2 else value.flip(0)


def functions() -> dict[str, Callable[..., Any]]:
    """Return all public functions of the rooms, constructors, and methods of the samples."""
    attacked: dict[str, Callable[..., Any]] = {}
    for room in ROOMS:
        module = import_module(f"bilens.{room}")
        for name in module.__all__:
            member = getattr(module, name)
            if inspect.isfunction(member) or (
                inspect.isclass(member)
                and member.__module__.startswith("bilens.")
                and not getattr(member, "_is_protocol", False)
            ):
                attacked[f"{room}.{name}"] = member
    for name in ("BilinearTensor", "QuadraticForm", "Spectrum", "TensorSVD", "Paths", "Bonds"):
        attacked |= methods(name)
    return attacked | methods("ResidualModel") | methods("ImageClassifier", ImageClassifier)


def methods(name: str, kind: type | None = None) -> dict[str, Callable[..., Any]]:
    """Return the public methods of a sample."""
    sample = samples()[name]
    return {
        f"{name}.{method}": getattr(sample, method)
        for method, member in vars(kind or type(sample)).items()
        if inspect.isfunction(member) and (not method.startswith("_") or method == "__call__")
    }


def signature(function: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    """Return the annotation of each argument, and whether it has a default."""
    target = function.__init__ if inspect.isclass(function) else function
    hints = get_type_hints(inspect.unwrap(target), include_extras=True)
    return {
        name: (hints.get(name, Any), parameter.default is not parameter.empty)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def attacks(function: Callable[..., Any], folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield arguments with a single hostile one, each with its name."""
    hints = signature(function)
    arguments = {
        name: valid(hint, folder) for name, (hint, optional) in hints.items() if not optional
    }
    yield "valid", arguments
    for name, (hint, _) in hints.items():
        value = valid(hint, folder)
        for title, wrong in hostile(value, hint):
            yield f"{name}: {title}", arguments | {name: wrong}

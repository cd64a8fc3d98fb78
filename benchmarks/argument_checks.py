"""Compare bilens's checks of arguments with those of beartype and jaxtyping.

Both check the same annotations in the same wrong calls. Limits of numbers, `Between`, become
validators of beartype, so that neither knows more. Times are those of the processor.

    python -m benchmarks.argument_checks [--messages]
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from beartype import BeartypeConf, beartype
from beartype.vale import Is
from jaxtyping import Float, Int, jaxtyped
from torch import Tensor

from bilens.checks import checked
from bilens.settings import Between, Place, Size
from bilens.tensor import BilinearTensor

CALLS = 5000


def spectrum(
    direction: Float[Tensor, "*batch n"],
    k: Size | None = None,
    order: Literal["magnitude", "value"] = "magnitude",
) -> int:
    """Have the arguments of a reading of one direction."""
    return direction.ndim


def bonds(
    images: Float[Tensor, "samples pixels"],
    labels: Int[Tensor, " samples"],
    ranks: Sequence[int] = (),
    shape: tuple[int, int] = (1, 1),
) -> int:
    """Have the arguments of a reading of labelled images."""
    return len(images)


def ngrams(
    tensor: BilinearTensor | None, token: str | int, layer: Place = 0, *, share: float = 0.0
) -> int:
    """Have the arguments of a reading of a layer."""
    return layer


def inputs(
    vectors: Int[Tensor, " n"] | Iterable[int], pieces: Sequence[Float[Tensor, " n"]]
) -> int:
    """Have arguments that are lists."""
    return len(pieces)


X, Y = torch.zeros(3, 4), torch.tensor([1, 2, 3])
WRONG: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "array as a list": (spectrum, ([0.5, 1.0],), {}),
    "array of numpy": (spectrum, (np.zeros(4),), {}),
    "integers for floats": (spectrum, (Y,), {}),
    "count 0": (spectrum, (X,), {"k": 0}),
    "count as a float": (spectrum, (X,), {"k": 2.5}),
    "count True": (spectrum, (X,), {"k": True}),
    "an unknown choice": (spectrum, (X,), {"order": "largest"}),
    "axes that differ": (bonds, (X, Y[:2]), {}),
    "one axis too many": (bonds, (X, Y[:, None]), {}),
    "floats for labels": (bonds, (X, Y.float()), {}),
    "images with their channel": (bonds, (X[None], Y), {}),
    "arguments exchanged": (bonds, (Y, X), {}),
    "list with a float": (bonds, (X, Y, [*range(20), 2.5]), {}),
    "a number for a list": (bonds, (X, Y, 3), {}),
    "a shape of one number": (bonds, (X, Y), {"shape": (8,)}),
    "a model for its tensor": (ngrams, (torch.nn.Linear(2, 2), "rice"), {}),
    "a token as a list": (ngrams, (None, ["rice"]), {}),
    "a layer below 0": (ngrams, (None, "rice", -1), {}),
    "a layer as text": (ngrams, (None, "rice", "1"), {}),
    "a share that is NaN": (ngrams, (None, "rice"), {"share": float("nan")}),
    "a matrix for a list of ids": (inputs, (Y[:, None], []), {}),
    "a list with None": (inputs, ([1], [X[0], None]), {}),
}
"""Wrong calls by their mistake."""


def _test(limit: Between) -> Callable[[float], bool]:
    return lambda value: limit.holds(value)  # noqa: PLW0108  beartype takes no methods


def validated(hint: Any) -> Any:
    """Return an annotation with validators of beartype for `Between`."""
    if get_origin(hint) is Annotated:
        kind, *extras = get_args(hint)
        limits = [e for e in extras if isinstance(e, Between)]
        return Annotated[kind, *(Is[_test(limit)] for limit in limits)]
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(validated(part) for part in get_args(hint))]  # noqa: UP007
    return hint


def by_beartype(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that beartype and jaxtyping check."""
    hints = get_type_hints(function, include_extras=True)
    defaults = function.__kwdefaults__
    function = FunctionType(function.__code__, globals(), function.__name__, function.__defaults__)
    function.__kwdefaults__ = defaults
    function.__annotations__ = {name: validated(hint) for name, hint in hints.items()}
    return jaxtyped(typechecker=beartype(conf=BeartypeConf(is_pep484_tower=True)))(function)


def message(function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> str:
    """Return the text of the error of a call, empty if it is accepted."""
    try:
        function(*args, **options)
    except Exception as error:
        return str(error)
    return ""


def microseconds(function: Callable[..., Any], *args: Any) -> float:
    """Return the processor time of a call."""
    function(*args)
    start = time.process_time()
    for _ in range(CALLS):
        function(*args)
    return 1e6 * (time.process_time() - start) / CALLS


def import_seconds(code: str) -> float:
    """Return the least processor time of three runs of a program."""
    times = []
    for _ in range(3):
        program = f"import time; s = time.process_time(); {code}; print(time.process_time() - s)"
        run = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        times.append(float(run.stdout))
    return min(times)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", action="store_true", help="print every message")
    shown = parser.parse_args().messages
    plain = {f: f for f, _, _ in WRONG.values()}
    ours = {f: checked(f) for f in plain}
    theirs = {f: by_beartype(f) for f in plain}
    for name, functions in (("bilens", ours), ("beartype and jaxtyping", theirs)):
        texts = {
            mistake: message(functions[f], args, options)
            for mistake, (f, args, options) in WRONG.items()
        }
        accepted = [mistake for mistake, text in texts.items() if not text]
        lengths = sorted(len(text) for text in texts.values() if text)
        print(f"{name}: accepted {len(accepted)} of {len(WRONG)} wrong calls: {accepted}")
        print(f"  characters: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}")
        if shown:
            for mistake, text in texts.items():
                print(f"--- {mistake}\n{text}")
    print(f"call: plain {microseconds(bonds, X, Y):.1f} us,", end=" ")
    print(f"bilens {microseconds(ours[bonds], X, Y):.1f}, beartype ", end="")
    print(f"{microseconds(theirs[bonds], X, Y):.1f}")
    before = "import torch, jaxtyping; s = time.process_time(); import "
    for module in ("beartype", "bilens.checks"):
        print(f"import {module}: {1000 * import_seconds(before + module):.0f} ms")


if __name__ == "__main__":
    main()

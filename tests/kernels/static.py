"""The Triton kernels without a GPU: launches of attention, and their compiled code for a card.

Launches of bilinear and squared attention, forward and backward, are recorded on tensors without
numbers and compiled with the sizes that ship.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bilens.kernels import triton_chunked
from bilens.kernels.triton_kernels import OTHER, TILES, read_kernel, states_kernel
from bilens.kernels.triton_quadratic import attend_kernel, keys_kernel, queries_kernel

HEADS, LENGTH = 8, 2**16
NUMBERS = {"time", "length", "segments", "heads", "key_heads"} | {
    f"{tensor}_{axis}"
    for tensor in ("qa", "qb", "a", "b", "c", "q1", "k1", "v", "q2", "k2", "dy")
    for axis in ("batch", "head", "time")
}
"""Arguments of the kernels that are numbers at run time."""
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


class Card(NamedTuple):
    """A GPU: its processors, and bytes of shared memory of a block."""

    target: GPUTarget
    processors: int
    shared: int

    @property
    def tiles(self) -> str:
        """Name of the card in the tables of tiles."""
        name = f"sm_{self.target.arch}"
        return name if name in TILES else OTHER


CARDS = {
    "sm_89 (RTX 4090)": Card(GPUTarget("cuda", 89, 32), 128, 99 * 1024),
    "sm_90 (H100)": Card(GPUTarget("cuda", 90, 32), 132, 227 * 1024),
}
"""An L4 takes the code of an RTX 4090, and an H200 that of an H100."""


class Launch(NamedTuple):
    """A launch of a kernel with its arguments."""

    name: str
    kernel: Any
    arguments: dict[str, Any]

    def operations(self) -> float:
        """Multiplications and additions of the products of tiles."""
        of = self.arguments
        if "SQUARED" in of:
            # A product of tiles for each score, for g, and for each output.
            k, v, squared = int(of["DK"]), int(of["DV"]), bool(of["SQUARED"])
            scores = k if squared else 2 * k
            products = {"y": scores + v, "dq": scores + v + scores, "dk, dv": 2 * scores + 2 * v}
            seen = min(of["length"], of["time"])
            return float(HEADS * of["time"] * seen * products[self.name])
        a, b, c = (int(of[name]) for name in ("DA", "DB", "DC"))
        # On and above the diagonal, in tiles.
        columns = of["BJ"] if "BJ" in of else of["BK"]
        part = (1 + columns / b) / 2 if of["HALF"] else 1
        chunks = -(-of["time"] // of["length"])
        state = a * b * c * part * (chunks - 1) / chunks
        return float(2 * HEADS * of["time"] * state)


class Compiled(NamedTuple):
    """Resources of a kernel on a card.

    These are bytes of shared memory of a block, spilled bytes of a thread, and instructions of the
    tensor cores.
    """

    shared: int
    spilled: int
    products: int


def is_number(name: str, value: Any) -> bool:
    """Return True for a number that a compiled kernel takes at run time, such as a stride."""
    return isinstance(value, int) and not isinstance(value, bool) and name in NUMBERS


QUADRATIC = {attend_kernel: "y", queries_kernel: "dq", keys_kernel: "dk, dv"}


def launches(
    width: int, dtype: torch.dtype, *, squared: bool, length: int = LENGTH, card: Card | None = None
) -> list[Launch]:
    """Return all launches of a forward and a backward pass; the forward ones are up to y."""
    recorded: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def record(*arguments: Any, **constants: Any) -> None:
                given = dict(zip(self.kernel.arg_names, arguments, strict=False))
                if "SQUARED" in constants:
                    name = QUADRATIC[self.kernel]
                elif "BK" in constants:
                    name = f"read {names.pop(0)}"
                else:
                    name = "sums" if constants.get("TOTALS") else "states"
                    name = f"d{name}" if constants["REVERSE"] else name
                recorded.append(Launch(name, self.kernel, given | constants))

            return record

    names = ["y", "dq", "dk", "dv"] if squared else ["y", "dq1", "dk1", "dv", "dq2", "dk2"]
    empty = torch.empty(1, HEADS, length, width, device="meta", dtype=dtype)
    q1, k1, v, q2, k2 = (torch.empty_like(empty) for _ in range(5))
    inputs = (q1, k1, v, None, None) if squared else (q1, k1, v, q2, k2)
    tiles, processors = (card.tiles, card.processors) if card else (OTHER, 1)
    kernels = (read_kernel, states_kernel, *QUADRATIC)
    instead: dict[str, Any] = {kernel.__name__: Recorder(kernel) for kernel in kernels}
    instead |= {"card_name": lambda device: tiles, "processors": lambda device: processors}
    with patch.multiple(triton_chunked, **instead):
        y, _ = triton_chunked.triton_chunked.attend(inputs, 1.0, None)
        triton_chunked.triton_chunked.gradients(inputs, None, y, None)
    return recorded


def compiled(launch: Launch, target: GPUTarget) -> Compiled:
    """Compile a launch, without any cache."""
    options = {name: launch.arguments[name] for name in ("num_warps", "num_stages")}
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(launch.kernel.arg_names):
        value, divisible = launch.arguments[name], False
        if isinstance(value, torch.Tensor):
            signature[name], divisible = POINTERS[value.dtype], True
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif is_number(name, value):
            signature[name], divisible = "i32" if value < 2**31 else "i64", value % 16 == 0
        else:
            signature[name], constants[place,] = "constexpr", value
        if divisible:  # as the launcher says of pointers, and of numbers where it is so
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        result = triton.compile(source, target=target, options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(result.asm["cubin"])
        command = [str(tool), "-res-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spilled = re.findall(r"REG:\d+ STACK:(\d+)", shown)[-1]
    products = re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", result.asm["ptx"])
    return Compiled(result.metadata.shared, int(spilled), len(products))

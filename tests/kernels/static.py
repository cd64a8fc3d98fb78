"""The Triton kernels without a GPU: their compiled code for several cards, and their least times.

Launches of bilinear and squared attention, forward and backward, are recorded on tensors without
numbers and compiled with the sizes that ship. The least times are those of the
operations at the rate of the data sheet. The time of the bytes of all tensors is at its bandwidth.
"""

import argparse
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from itertools import product
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
WIDTHS = (32, 64, 128)
NUMBERS = {"time", "length", "segments", "heads", "key_heads"} | {
    f"{tensor}_{axis}"
    for tensor in ("qa", "qb", "a", "b", "c", "q1", "k1", "v", "q2", "k2", "dy")
    for axis in ("batch", "head", "time")
}
"""Arguments of the kernels that are numbers at run time."""
SIZES = ("BT", "BS", "BI", "BJ", "BK", "BN", "num_warps", "num_stages")
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


class Card(NamedTuple):
    """A GPU and its data sheet, dense: FLOP/s in bfloat16 and in float32, and bytes a second.

    A product in float32 is three in tf32, but on gfx942, which has its own.
    """

    target: GPUTarget
    rates: dict[torch.dtype, float]
    bandwidth: float
    processors: int
    shared: int

    @property
    def tiles(self) -> str:
        """Name of the card in the tables of tiles."""
        name = f"sm_{self.target.arch}"
        return name if name in TILES else OTHER


def _card(arch: int | str, tera: tuple[float, float], *limits: Any) -> Card:
    """Return a card; its limits are bytes a second, processors, and bytes of shared memory."""
    rates = dict(zip((torch.bfloat16, torch.float32), (1e12 * x for x in tera), strict=True))
    target = GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, 64)
    return Card(target, rates, *limits)


CARDS = {
    "sm_80 (A100)": _card(80, (312, 156 / 3), 2.04e12, 108, 163 * 1024),
    "sm_89 (RTX 4090)": _card(89, (165, 82.6 / 3), 1.01e12, 128, 99 * 1024),
    "sm_90 (H100)": _card(90, (989, 495 / 3), 3.35e12, 132, 227 * 1024),
    "sm_100 (B200)": _card(100, (2250, 1100 / 3), 8e12, 148, 227 * 1024),
    "gfx942 (MI300X)": _card("gfx942", (1307, 163), 5.3e12, 304, 64 * 1024),
}
"""Shared memory is the limit of a block. An L4 takes the code of an RTX 4090, and an H200 that of
an H100."""


class Launch(NamedTuple):
    """A launch of a kernel with its arguments."""

    name: str
    kernel: Any
    arguments: dict[str, Any]

    def constants(self) -> tuple[tuple[str, Any], ...]:
        """Return the constants of a kernel, whichever its tensors."""
        return tuple(
            (name, value.dtype if isinstance(value, torch.Tensor) else value)
            for name, value in self.arguments.items()
            if name != "scale" and not is_number(name, value)
        )

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

    def moved(self) -> float:
        """Bytes of all tensors."""
        tensors = {id(x): x for x in self.arguments.values() if isinstance(x, torch.Tensor)}
        return float(sum(x.numel() * x.element_size() for x in tensors.values()))


class Compiled(NamedTuple):
    """Resources of a kernel on a card.

    These are bytes of shared memory of a block, registers and spilled bytes of a thread,
    instructions of the tensor cores, those of the shortest loop with the most of them, which is
    that of whole blocks (0 if there is none, or the card is AMD's), and seconds to compile.
    """

    shared: int
    registers: int
    spilled: int
    products: int
    loop: int
    seconds: float


def is_number(name: str, value: Any) -> bool:
    """Return True for a number that a compiled kernel takes at run time, such as a stride."""
    return isinstance(value, int) and not isinstance(value, bool) and name in NUMBERS


QUADRATIC = {attend_kernel: "y", queries_kernel: "dq", keys_kernel: "dk, dv"}


def launches(
    width: int,
    dtype: torch.dtype,
    *,
    squared: bool,
    length: int = LENGTH,
    card: Card | None = None,
    normalised: bool = False,
) -> list[Launch]:
    """Return all launches of a forward and a backward pass; the forward ones are up to y.

    With `normalised` scores have a constant, and rows are divided by their sum, as in the models
    that `bilens tensorise` makes.
    """
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
    constant = torch.empty(HEADS, device="meta") if normalised else None
    tiles, processors = (card.tiles, card.processors) if card else (OTHER, 1)
    kernels = (read_kernel, states_kernel, *QUADRATIC)
    instead: dict[str, Any] = {kernel.__name__: Recorder(kernel) for kernel in kernels}
    instead |= {"card_name": lambda device: tiles, "processors": lambda device: processors}
    with patch.multiple(triton_chunked, **instead):
        y, sums, _ = triton_chunked.attend(inputs, 1.0, constant, None, normalised=normalised)
        triton_chunked.gradients(inputs, y, constant, None, sums)
    return recorded


def compiled(launch: Launch, target: GPUTarget) -> Compiled:
    """Compile a launch, without any cache."""
    options = {name: launch.arguments[name] for name in ("num_warps", "num_stages")}
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(launch.kernel.arg_names):
        value, divisible = launch.arguments[name], False
        if name == "PRECISION" and target.backend == "hip":
            value = "ieee"
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
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        result = triton.compile(source, target=target, options=options)
    seconds = time.perf_counter() - start
    read = _read_cuda if target.backend == "cuda" else _read_hip
    return Compiled(result.metadata.shared, *read(result.asm), seconds)


def _read_cuda(asm: dict[str, Any]) -> tuple[int, int, int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(asm["cubin"])
        command = [str(tool), "-res-usage", "-sass", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, spilled = re.findall(r"REG:(\d+) STACK:(\d+)", shown)[-1]
    products = re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", asm["ptx"])
    return int(registers), int(spilled), len(products), _loop_length(shown)


def _loop_length(sass: str) -> int:
    """Return the instructions of the loop that has the most products for its length."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", sass)
    places = {int(address, 16): number for number, (address, _) in enumerate(lines)}
    loops = []
    for number, (_, text) in enumerate(lines):
        target = re.search(r"\bBRA\S*\s+(?:\S+,\s*)*`?\(?0x([0-9a-f]+)", text)
        start = places.get(int(target[1], 16), number) if target else number
        body = [text for _, text in lines[start : number + 1]]
        products = sum(bool(re.search("HGMMA|HMMA|UTCHMMA|UTCQMMA", text)) for text in body)
        # What waits stands after the end of a kernel, and jumps back over all of it.
        if start < number and products and not any("EXIT" in text for text in body):
            loops.append((-products, len(body)))
    # Loops of masked blocks have as many products and more instructions.
    return min(loops, default=(0, 0))[1]


def _read_hip(asm: dict[str, Any]) -> tuple[int, int, int, int]:
    def number(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s+(\d+)", asm["amdgcn"])[-1])

    return number("vgpr_count"), 4 * number("vgpr_spill_count"), asm["amdgcn"].count("v_mfma"), 0


class Table:
    """Rows of a card, each kernel compiled once."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.seen: dict[tuple[tuple[str, Any], ...], Compiled] = {}

    def show(self, dtype: torch.dtype, width: int, length: int, *, squared: bool) -> None:
        """Print the kernels of one kind of attention, and the least time of both passes."""
        card, sums, backward = self.card, [0.0, 0.0], False
        kind = f"{str(dtype)[6:]:8} {width:4} {length:6} {'squared' if squared else 'bilinear':8}"
        for launch in launches(width, dtype, squared=squared, card=card, length=length):
            work = launch.operations() / card.rates[dtype]
            memory = launch.moved() / card.bandwidth
            sums[backward] += max(work, memory)
            backward |= launch.name == "y"
            constants = launch.constants()
            if constants in self.seen:
                continue
            result = self.seen[constants] = compiled(launch, card.target)
            tiles = [
                f"{name} {launch.arguments[name]}" for name in SIZES if name in launch.arguments
            ]
            print(
                f"{kind} {launch.name:7} {result.shared / 1024:5.0f} kB {result.registers:10}"
                f" {result.spilled:6} B {result.products:9} {result.loop:6} {result.seconds:8.1f} s"
                f" {1e3 * work:8.3f} {1e3 * memory:8.3f}  {' '.join(tiles)}"
                + (" DOES NOT FIT" if result.shared > card.shared else ""),
                flush=True,
            )
        print(f"{kind} forward at least {1e3 * sums[0]:.3f} ms, backward {1e3 * sums[1]:.3f} ms")

    def summary(self) -> str:
        """Return the most of each resource over all kernels, beside the card's limit."""
        numbers = zip(*self.seen.values(), strict=True)
        shared, registers, spilled, *_ = (max(several) for several in numbers)
        limit = self.card.shared / 1024
        return (
            f"{len(self.seen)} kernels: at most {shared / 1024:.0f} of {limit:.0f} kB shared, "
            f"{registers} registers, {spilled} B spilled; tiles: {TILES[self.card.tiles].source}"
        )


def main() -> None:
    """Print every kernel on the cards."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--card", choices=CARDS, help="all by default")
    given = parser.parse_args()
    print(f"triton {triton.__version__}; {HEADS} heads")
    for name in [given.card] if given.card else CARDS:
        table = Table(CARDS[name])
        print(f"\n{name}")
        print(
            "dtype       d tokens attention kernel  shared  registers  spilled  products   loop"
            "  compiled  ms by operations, by bytes"
        )
        for dtype, width, squared in product(POINTERS, WIDTHS, (False, True)):
            # The longest text that is one chunk, and one of many.
            for length in (width**2, LENGTH):
                table.show(dtype, width, length, squared=squared)
        print(table.summary(), flush=True)


if __name__ == "__main__":
    main()

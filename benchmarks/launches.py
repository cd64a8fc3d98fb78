"""Launches and waits of a call, counted without a GPU, where each launch costs the host some 8 us.

A launch is an operation of torch that is no view. A wait is one for whose result the host stops.
`python -m benchmarks.launches` counts those of flows of 8 tokens through a Llama with the 16 layers
and 32 heads of one with 1.24 billion parameters, of width 256, which their number does not depend
on, and writes `results/launches.json`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from experiments.results import Recording, Row
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from bilens.flows import flow
from bilens.transformer import ResidualModel

WAITING = ("_local_scalar_dense", "nonzero", "_linalg_eigh", "linalg_cholesky_ex", "_linalg_svd")
"""Operations that hand numbers to the host, or whose size depends on them."""
HOST = ("empty", "detach", "lift_fresh", "as_strided", "to_mkldnn", "_to_dense")
"""Operations that launch nothing, or that only a CPU does."""


class Counting(TorchDispatchMode):
    """A counter of launches and waits within its context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count an operation and run it."""
        name = func._schema.name.removeprefix("aten::")
        # An index that is a mask is turned into numbers first, whose count the host needs.
        masked = name.startswith(("index", "_index")) and any(
            x is not None and x.dtype == torch.bool
            for x in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        )
        if name in WAITING or masked:
            self.waits[name] += 1
        if not func.is_view and not name.startswith(HOST):
            self.launches[name] += 1
        # An operation that is counted has met the rules of a flow already.
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


def count(call: Callable[[], object]) -> tuple[int, int]:
    """Return the numbers of launches and of waits of a call."""
    counting, to_cpu = Counting(), Tensor.cpu

    def copied(tensor: Tensor) -> Tensor:
        counting.waits["cpu"] += 1
        return to_cpu(tensor)

    with patch.object(Tensor, "cpu", copied), counting:
        call()
    return counting.launches.total(), counting.waits.total()


def main() -> None:
    """Print and write the numbers of a flow of one text and of two."""
    recording, rows = Recording(), []
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    torch.manual_seed(0)
    model = ResidualModel(LlamaForCausalLM(config).requires_grad_(False))
    ids, direction = torch.randint(2000, (8,)), model.direction(5)
    other = ids.clone()
    other[2] = 7
    for name, against in (("one text", None), ("two texts", other)):

        def call(against: Tensor | None = against) -> object:
            return flow(model, ids, direction, against=against, ablate=0)

        # The first flow fills caches.
        call()
        launches, waits = count(call)
        print(f"{name}: {launches:,} launches, {waits:,} waits", flush=True)
        rows += [
            Row(f"flow of {name}: launches", launches, n=1),
            Row(f"flow of {name}: waits", waits, n=1),
        ]
    recording.write(
        "launches",
        title="Launches and waits of flows",
        command="python -m benchmarks.launches",
        rows=rows,
        settings={"tokens": len(ids), "layers": config.num_hidden_layers, "d_model": 256},
    )


if __name__ == "__main__":
    main()

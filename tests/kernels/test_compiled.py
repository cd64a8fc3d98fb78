"""The Triton kernels compiled for two GPUs, which need not be there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import json, sys, torch
from benchmarks.kernels_static import CARDS, compiled, launches

for name, dtype in (("sm_89 (RTX 4090)", torch.float32), ("sm_90 (H100)", torch.bfloat16)):
    kernels = {launch.name: launch for launch in launches(64, dtype, squared=False)}
    for kernel in sys.argv[1:]:
        found = compiled(kernels[kernel], CARDS[name].target)
        print(json.dumps([found.shared, found.spilled, found.products]))
"""


@pytest.mark.parametrize(
    "kernels", [["y"], pytest.param(["states", "y", "dk1"], marks=pytest.mark.slow)]
)
def test_kernels_fit_a_card_and_use_its_tensor_cores(kernels):
    pytest.importorskip("triton")
    # In a process of its own, since here the kernels are Python functions of the interpreter.
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE, *kernels],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = [json.loads(line) for line in shown.splitlines()]
    assert len(found) == 2 * len(kernels)
    for shared, spilled, products in found:
        assert shared <= 99 * 1024
        assert spilled <= 256
        assert products > 0

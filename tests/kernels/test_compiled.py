"""The Triton kernels compiled for two GPUs, which need not be there."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.kernels.inputs import skip_untested_triton
from tests.nightly import nightly

COMPILE = """
import json, sys, torch
from tests.kernels.static import CARDS, compiled, launches

card, dtype = CARDS[sys.argv[1]], getattr(torch, sys.argv[2])
kernels = {launch.name: launch for launch in launches(64, dtype, squared=False, card=card)}
whole = launches(64, dtype, squared=True, normalised=True, length=4096, card=card)
kernels |= {f"whole {launch.name}": launch for launch in whole}
for kernel in sys.argv[3:]:
    needs = compiled(kernels[kernel], card.target)
    print(json.dumps([needs.shared / card.shared, needs.spilled, needs.products]))
"""
SMALL, LARGE = ("sm_89 (RTX 4090)", "float32"), ("sm_90 (H100)", "bfloat16")
KERNELS = ("read y", "states", "read dk1", "whole y", "whole dq", "whole dk, dv")


@pytest.mark.parametrize(
    ("card", "dtype", "kernels"),
    nightly([(*SMALL, KERNELS[:1]), (*SMALL, KERNELS), (*LARGE, KERNELS)], [(*SMALL, KERNELS[:1])]),
)
def test_kernels_fit_a_card_and_use_its_tensor_cores(card, dtype, kernels):
    skip_untested_triton()
    # In a process of its own, since here the kernels are Python functions of the interpreter.
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE, card, dtype, *kernels],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    needs = [json.loads(line) for line in shown.splitlines()]
    assert len(needs) == len(kernels)
    for shared, spilled, products in needs:
        assert shared <= 1
        assert spilled <= 256
        assert products > 0


def test_every_card_has_tiles_for_every_launch():
    """Whatever a card has none of its own for, it has from the tiles that fit any."""
    sizes = pytest.importorskip("bilens.kernels.triton_kernels")
    quadratic = pytest.importorskip("bilens.kernels.triton_quadratic")
    for card in (*sizes.TILES, "sm_75"):
        for itemsize, width, half in product((2, 4), (16, 32, 64, 128), (False, True)):
            widths = (width,) * 3
            read = sizes.tile_sizes("read", widths, itemsize, half=half, card=card)
            assert width % read["BN"] == width % read["BK"] == width % read["BI"] == 0
            # Blocks end where chunks do.
            assert sizes.LENGTHS[width] % read["BT"] == 0
            for gradients in (False, True):
                tiles = quadratic.quadratic_sizes(width, itemsize, gradients=gradients)
                assert sizes.LENGTHS[width] % tiles["BT"] == 0
                assert sizes.LENGTHS[width] % tiles["BS"] == 0
            states = sizes.tile_sizes("states", widths, itemsize, half=half, card=card)
            assert width % states["BI"] == width % states["BJ"] == width % states["BN"] == 0

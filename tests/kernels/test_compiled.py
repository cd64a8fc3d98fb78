"""The Triton kernels compiled for two GPUs, which need not be there."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.kernels.inputs import cases, need_triton

pytestmark = pytest.mark.long

COMPILE = """
import json, sys, torch
from tests.kernels.static import CARDS, compiled, launches

card, dtype = CARDS[sys.argv[1]], getattr(torch, sys.argv[2])
kernels = {launch.name: launch for launch in launches(64, dtype, squared=False, card=card)}
whole = launches(64, dtype, squared=True, length=4096, card=card)
kernels |= {f"whole {launch.name}": launch for launch in whole}
for kernel in sys.argv[3:]:
    needs = compiled(kernels[kernel], card.target)
    print(json.dumps([needs.shared / card.shared, needs.spilled, needs.products]))
"""
KERNELS = ("read y", "states", "read dk1", "whole y", "whole dq", "whole dk, dv")
CASES = [("sm_89 (RTX 4090)", "float32", kernels) for kernels in (KERNELS[:1], KERNELS)]


@cases("card dtype kernels", [*CASES, ("sm_90 (H100)", "bfloat16", KERNELS)], CASES[:1])
def test_kernels_fit_a_card_and_use_its_tensor_cores(card, dtype, kernels):
    need_triton()
    # In a process of its own, since here the kernels are Python functions of the interpreter.
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-W", "ignore", "-c", COMPILE, card, dtype, *kernels]
    shown = subprocess.check_output(words, cwd=Path(__file__).parents[2], env=environment)
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
            read, states = (
                sizes.tile_sizes(name, (width,) * 3, itemsize, half=half, card=card)
                for name in ("read", "states")
            )
            assert width % read["BN"] == width % read["BK"] == width % read["BI"] == 0
            assert width % states["BI"] == width % states["BJ"] == width % states["BN"] == 0
            # Blocks end where chunks do.
            length = sizes.LENGTHS[width]
            assert length % read["BT"] == 0
            for gradients in (False, True):
                tiles = quadratic.quadratic_sizes(width, itemsize, gradients=gradients)
                assert length % tiles["BT"] == length % tiles["BS"] == 0

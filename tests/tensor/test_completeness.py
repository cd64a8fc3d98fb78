"""The top k are the top k: hostile spectra against whole decompositions, none of them missed."""

import math
from itertools import product
from random import Random

import pytest
import torch
from torch import Tensor

from bilens.tensor import QuadraticForm, lanczos
from tests.nightly import nightly

N, TOLERANCE = 600, 1e-4
KINDS = ("repeated", "clustered", "plus and minus", "equal at the k-th", "copies", "symmetric")


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def with_eigenvalues(batch: list[Tensor], generator: torch.Generator) -> QuadraticForm:
    """Forms with these eigenvalues, in a random basis that they share."""
    basis = torch.linalg.qr(random(generator, N, N)).Q
    weights = torch.stack([torch.nn.functional.pad(v[:N], (0, N - len(v[:N]))) for v in batch])
    return QuadraticForm(basis, basis, weights)


def copies_of_one_form(generator: torch.Generator, copies: int) -> QuadraticForm:
    size = N // copies
    blocks = (torch.block_diag(*[random(generator, size, size)] * copies) for _ in range(2))
    return QuadraticForm(*blocks, random(generator, 2, size).repeat(1, copies))


def translated_on_a_torus(generator: torch.Generator) -> QuadraticForm:
    """Return a form that does not change under translations of Z27 x Z27."""
    shifts = list(product(range(27), repeat=2))
    left, right = (
        torch.stack([image.roll(shift, (0, 1)).flatten() for shift in shifts])
        for image in random(generator, 2, 27, 27)
    )
    return QuadraticForm(left, right, torch.ones(1, len(shifts), dtype=torch.float64))


def hostile_form(seed: int, k: int) -> QuadraticForm:
    """Forms whose strongest directions are not all visible from one start."""
    generator, draw = torch.Generator().manual_seed(seed), Random(seed)
    uniform, full = draw.uniform, draw.randint

    def others() -> Tensor:
        draws = torch.rand(full(50, N - 60), generator=generator, dtype=torch.float64)
        end = uniform(0.3, 0.97)
        return [
            torch.linspace(end, -uniform(0.3, 0.97), len(draws), dtype=torch.float64),
            end * (2 * draws - 1),
            end * torch.cos(math.pi * draws) ** 3,
        ][full(0, 2)]

    def repeated() -> Tensor:
        tops: list[float] = []
        while len(tops) < k + 3:
            tops += [uniform(0.9, 1) * (1 if full(0, 1) else -1)] * full(1, 4)
        return torch.cat([torch.tensor(tops).double(), others()])

    def clustered() -> Tensor:
        near = 10 ** uniform(-8, -2) * torch.arange(full(2, k + 2)).double()
        return torch.cat([uniform(0.9, 1) - near, others()])

    def plus_and_minus() -> Tensor:
        tops = torch.tensor([uniform(0.85, 1) for _ in range(full(1, 4))] * full(1, 3)).double()
        return torch.cat([tops, -tops, others()])

    def equal_at_the_kth() -> Tensor:
        level = uniform(0.8, 1)
        tops = [1.0] * full(0, 3) + [level, -level] * full(1, 4)
        return torch.cat([torch.tensor(tops).double(), 0.9 * level * others()])

    kind = seed % len(KINDS)
    if KINDS[kind] == "copies":
        return copies_of_one_form(generator, full(2, 4))
    if KINDS[kind] == "symmetric":
        return translated_on_a_torus(generator)
    make = (repeated, clustered, plus_and_minus, equal_at_the_kth)[kind]
    return with_eigenvalues([make(), make()], generator)


# One of each kind, in float32 and float64.
@pytest.mark.parametrize("seed", nightly(range(len(KINDS) * 2), (0, 7, 2, 9, 4, 11)))
def test_nothing_is_missed(seed):
    k = 1 + 5 * seed % 8
    exact = hostile_form(seed, k)
    expected = torch.linalg.eigvalsh(exact.dense()).abs().sort(-1, descending=True).values[:, :k]
    dtype = torch.float64 if seed // len(KINDS) % 2 else torch.float32
    form = QuadraticForm(*(f.to(dtype) for f in (exact.left, exact.right, exact.weights)))
    spectrum = form.eigh(k, tolerance=TOLERANCE, seed=seed)
    off = (spectrum.values.abs().double() - expected).abs() / expected[:, :1]
    assert off.max() <= TOLERANCE, f"{KINDS[seed % len(KINDS)]}, seed {seed}"
    assert (spectrum.residuals <= TOLERANCE).all()
    assert (spectrum.miss_chance <= lanczos.MISS).all()
    gram = (spectrum.vectors @ spectrum.vectors.mT).double()
    assert (gram - torch.eye(k, dtype=torch.float64)).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 1000, 50))
def test_nothing_is_missed_a_thousand_times(start):
    for seed in range(start, start + 50):
        test_nothing_is_missed(seed)


@pytest.mark.parametrize("seed", nightly(range(3), (0,)))
def test_three_equal_ones_at_the_top(seed):
    values = torch.cat([torch.ones(3), torch.linspace(0.95, -0.95, 597)]).double()
    expected = values.abs().sort(descending=True).values[:8]
    spectrum = with_eigenvalues([values], torch.Generator().manual_seed(seed)).eigh(8)
    assert (spectrum.values[0].abs() - expected).abs().max() <= TOLERANCE
    assert spectrum.miss_chance.tolist() == [lanczos.MISS]

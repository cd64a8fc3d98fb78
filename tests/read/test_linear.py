"""Secants reproduce the change of every operation, and become derivatives for small changes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.errors import BilensError
from bilens.nn.layers import ACTIVATIONS
from bilens.read.linear.mlp import ritz_pairs
from bilens.read.linear.projections import Rotation
from bilens.read.linear.secants import (
    logarithmic_mean,
    mean_square_secant,
    secant_slope,
    softmax_secant,
)


def two(*shape, seed=0, step=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(*shape, generator=generator).to(dtype)
    return first, first + step * torch.randn(*shape, generator=generator).to(dtype)


steps = st.sampled_from([0.0, 1e-14, 1e-9, 1e-4, 1.0, 100.0])


@given(st.sampled_from(sorted(ACTIVATIONS)), steps, st.integers(0, 1000))
def test_activations(name, step, seed):
    act, (x1, x0) = ACTIVATIONS[name], two(50, seed=seed, step=step)
    slope = secant_slope(act, x1, x0)
    torch.testing.assert_close(slope * (x1 - x0), act(x1) - act(x0), rtol=1e-9, atol=1e-13)
    assert slope.isfinite().all()
    if name != "relu2":
        assert (slope.abs() <= 1.2).all()


@given(steps, st.booleans(), st.integers(0, 1000))
def test_norms_and_their_adjoints(step, centres, seed):
    x1, x0 = two(4, 9, seed=seed, step=step)
    if centres:
        x1, x0 = (x - x.mean(-1, keepdim=True) for x in (x1, x0))
    secant = mean_square_secant(x1, x0, 1e-5, centres=centres)
    y1, y0 = (x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() for x in (x1, x0))
    torch.testing.assert_close(secant.push(x1 - x0), y1 - y0, rtol=1e-9, atol=1e-13)
    v, w = two(4, 9, seed=seed + 1)
    torch.testing.assert_close((secant.push(v) * w).sum(-1), (v * secant.pull(w)).sum(-1))


@given(steps, st.booleans(), st.integers(0, 1000))
def test_softmax(step, sinks, seed):
    z1, z0 = two(3, 6, 6, seed=seed, step=step)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    sink = torch.randn(3, 1).double().expand(3, 6) if sinks else None
    patterns, means, total = softmax_secant(z1, z0, seen, sink)
    full = [z.masked_fill(~seen, -torch.inf) for z in (z1, z0)]
    if sink is not None:
        full = [torch.cat([z, sink[..., None]], -1) for z in full]
    expected = [z.softmax(-1)[..., :6] for z in full]
    torch.testing.assert_close(patterns, expected)
    change, z = expected[0] - expected[1], z1 - z0
    moved = means * (z - (means * z).sum(-1, keepdim=True) / total[..., None])
    torch.testing.assert_close(moved, change, rtol=1e-7, atol=1e-13)


def test_logarithmic_means_lie_between():
    a, b = torch.tensor([1.0, 1e-30, 0.5, 0.3]).log(), torch.tensor([1.0, 1.0, 0.2, 0.3]).log()
    means = logarithmic_mean(a, b)
    assert ((means >= torch.minimum(a, b).exp()) & (means <= torch.maximum(a, b).exp())).all()
    assert float(means[2]) == pytest.approx(0.3 / (a[2] - b[2]))


@given(st.integers(0, 10**6), st.integers(2, 7), st.integers(1, 2), st.integers(0, 7))
def test_ritz_vectors_hold_the_starts_and_their_images(seed, m, starts, rank):
    """A form of low rank may have fewer dimensions than requested."""
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(5, rank, 8, generator=generator).double()
    forms = factor.mT @ (torch.randn(5, rank, 1, generator=generator).double() * factor)
    x = torch.randn(5, starts, 8, generator=generator).double()
    values, vectors, images = ritz_pairs(lambda v: v @ forms, x, m)
    torch.testing.assert_close(images, vectors @ forms, rtol=1e-9, atol=1e-9)
    inside = (x @ vectors.mT) @ vectors
    torch.testing.assert_close(inside, x, rtol=1e-9, atol=1e-9)
    gram = vectors @ vectors.mT
    absent = (vectors == 0).all(-1)
    torch.testing.assert_close(gram, torch.diag_embed((~absent).double()), rtol=0, atol=1e-9)
    if m > starts:
        image = (x[:, :1] @ forms @ vectors.mT) @ vectors
        torch.testing.assert_close(image, x[:, :1] @ forms, rtol=1e-7, atol=1e-7)
    rayleigh = ((vectors @ forms) * vectors).sum(-1)
    torch.testing.assert_close(rayleigh[~absent], values[~absent], rtol=1e-7, atol=1e-7)


@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 2))
def test_ritz_vectors_of_a_product_are_those_of_its_form(seed, m, starts):
    """With J' and J in its place the vectors of JJ' are the same, and J' of them is returned."""
    generator = torch.Generator().manual_seed(seed)
    j = torch.randn(5, 8, 6, generator=generator).double()
    x = torch.randn(5, starts, 8, generator=generator).double()
    expected, vectors, _ = ritz_pairs(lambda v: v @ (j @ j.mT), x, m)
    values, others, pulled = ritz_pairs(lambda v: v @ j, x, m, lambda n: n @ j.mT)
    torch.testing.assert_close(values, expected, rtol=1e-8, atol=1e-8)
    same = (vectors * others).sum(-1).abs()
    torch.testing.assert_close(same, torch.ones_like(same), rtol=0, atol=1e-5)
    torch.testing.assert_close(pulled, others @ j, rtol=1e-9, atol=1e-9)
    across = pulled @ pulled.mT
    torch.testing.assert_close(across, torch.diag_embed(values), rtol=0, atol=1e-7)


def test_positions_that_add_a_coordinate_are_refused():
    with pytest.raises(BilensError, match="turn the 4 numbers of a head into 5; expected as"):
        Rotation.shown_by(lambda rows: [rows[..., [0, 0, 1, 2, 3]]] * 2, torch.ones(3, 4))

"""No eigenvector carries more than the bound says, and the bound is of use."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.read.flow.screen import largest_flow
from bilens.tensor import QuadraticForm


def flows(left, right, weights, z):
    spectrum = QuadraticForm(left, right, weights, constant=False).eigh()
    overlap = torch.einsum("fkn,fn->fk", spectrum.vectors, z)
    return (spectrum.values * overlap.square()).abs().amax(-1)


@given(
    st.integers(0, 10**6),
    st.sampled_from([3, 8, 40]),
    st.sampled_from([1, 5, 60]),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.sampled_from(["random", "eigenvector", "nearly"]),
)
def test_no_eigenvector_carries_more(seed, n, rank, decay, start):
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(2, rank, n, generator=generator).double()
    weights = torch.randn(4, rank, generator=generator).double()
    weights = weights * torch.arange(1, rank + 1) ** -decay
    z = torch.randn(4, n, generator=generator).double()
    if start != "random":
        vectors = QuadraticForm(left, right, weights, constant=False).eigh().vectors[:, 0]
        z = vectors + (0.01 * z if start == "nearly" else 0)
    found, bound = flows(left, right, weights, z), largest_flow(left, right, weights, z)
    assert (found <= bound * (1 + 1e-9) + 1e-12).all()


def test_it_says_more_than_lengths_do():
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 300, 200, generator=generator).double()
    weights = torch.randn(5, 300, generator=generator).double()
    z = torch.randn(5, 200, generator=generator).double()
    forms = QuadraticForm(left, right, weights, constant=False)
    lengths = z.norm(dim=-1) * (forms.dense() @ z[..., None])[..., 0].norm(dim=-1) / 2
    assert (largest_flow(left, right, weights, z) < 0.8 * lengths).all()

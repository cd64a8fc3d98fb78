"""Norms are recognised by their outputs, to rounding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bilens.errors import BilensError
from bilens.residual.families import known_norm


class MadeNorm(nn.Module):
    """A norm of any of the four formulas, times a factor, with the eps that it says or another."""

    def __init__(self, weight, centres, offset, factor=1.0, eps=1e-6, message=1e-6):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.centres, self.offset, self.factor = centres, offset, factor
        self.eps, self.true_eps = message, eps

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True) if self.centres else x
        n = x * (x.square().mean(-1, keepdim=True) + self.true_eps).rsqrt()
        return self.factor * n * (self.offset + self.weight)


@given(
    largest=st.sampled_from([0.1, 1.0, 40.0, 1649.0]),
    centres=st.booleans(),
    offset=st.sampled_from([0.0, 1.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
)
def test_the_closest_of_the_four_formulas_is_taken(largest, centres, offset, dtype):
    weight = largest * torch.rand(64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    norm = known_norm("norm", MadeNorm(weight.to(dtype), centres, offset))
    assert (norm.centres, norm.offset) == (centres, offset)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "changes", [{"factor": 1.005}, {"factor": 1.0001}, {"offset": 0.9}, {"eps": 1e-5}]
)
def test_a_norm_that_is_a_little_different_is_refused(changes, dtype):
    weight = torch.rand(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    options = {"centres": False, "offset": 1.0, **changes}
    with pytest.raises(BilensError, match=r"norm is a MadeNorm and computes something else"):
        known_norm("norm", MadeNorm(weight, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_torch_itself_chooses_the_same_eps(dtype):
    norm = known_norm("norm", nn.RMSNorm(8, dtype=dtype))
    assert (norm.centres, norm.offset) == (False, 0.0)

from typing import get_args

import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.nn import Bilinear, GatedLayer
from bilens.nn.settings import GateName

layers = st.builds(
    dict,
    d_in=st.integers(1, 7),
    d_out=st.integers(1, 6),
    d_hidden=st.one_of(st.none(), st.integers(1, 8)),
    bias=st.booleans(),
    residual=st.booleans(),
)


def build(d_in, d_out, d_hidden, bias, residual, **gate) -> GatedLayer:
    torch.manual_seed(d_in + 10 * d_out)
    sizes = d_in, d_in if residual else d_out, d_hidden
    return GatedLayer(*sizes, bias=bias, residual=residual, **gate).double()


@given(layers, st.sampled_from([{}, {"gate": "swish", "beta": 0.0}]))
def test_the_tensor_is_the_layer(shape, gate):
    layer = build(**shape, **gate)
    x = torch.randn(5, shape["d_in"], dtype=torch.float64)
    assert torch.allclose(layer.tensor()(x), layer(x), rtol=1e-10, atol=1e-12)


@given(layers, st.sampled_from(get_args(GateName)))
def test_forward_is_the_equation(shape, gate):
    layer = build(**shape, gate=gate, beta=1.3)
    x = torch.randn(4, shape["d_in"], dtype=torch.float64)
    functions = {
        "identity": lambda z: z,
        "sigmoid": lambda z: 1 / (1 + torch.exp(-z)),
        "relu": lambda z: z.clamp_min(0),
        "gelu": lambda z: z * (1 + torch.erf(z / 2**0.5)) / 2,
        "silu": lambda z: z / (1 + torch.exp(-z)),
        "swish": lambda z: z / (1 + torch.exp(-1.3 * z)),
    }

    def affine(part, z):
        return z @ part.weight.T + (0 if part.bias is None else part.bias)

    y = affine(layer.left, x) * functions[gate](affine(layer.right, x))
    y = y if layer.out is None else affine(layer.out, y)
    assert torch.allclose(layer(x), x + y if shape["residual"] else y, rtol=1e-10, atol=1e-12)


def test_bilinear_is_the_gated_layer_without_a_gate():
    layer, x = Bilinear(4, 3, 5, bias=True), torch.randn(2, 4)
    assert torch.equal(layer(x), layer.out(layer.left(x) * layer.right(x)))


def test_gradients_reach_the_weights_through_the_tensor():
    layer, x = build(3, 2, 4, bias=True, residual=False), torch.randn(2, 3).double()
    sums, weights = [layer.tensor()(x).sum(), layer(x).sum()], [*layer.parameters()]
    gradients = [torch.autograd.grad(total, weights) for total in sums]
    torch.testing.assert_close(*gradients)

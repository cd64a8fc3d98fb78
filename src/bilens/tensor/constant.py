"""The constant coordinate: biases become weights once the input is [x, 1]."""

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.errors import BilensError
from bilens.tensor.exact import exact

__all__ = ["affine", "fit_input", "with_constant"]


@exact
def with_constant(x: Float[Tensor, "*batch n_in"]) -> Float[Tensor, "*batch n_in_and_1"]:
    """Append the constant 1 to each input: x' = [x, 1].

    Source: Pearce et al. 2024, section 3.4.
    """
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1)


@exact
def affine(
    weight: Float[Tensor, "n_out n_in"], bias: Float[Tensor, " n_out"] | None
) -> Float[Tensor, "n_out_and_1 n_in_and_1"]:
    """The map x -> W x + b as one matrix from [x, 1] to [W x + b, 1]: [[W, b], [0, 1]].

    `bias=None` means a bias of zero.
    """
    n_out, n_in = weight.shape
    matrix = weight.new_zeros(n_out + 1, n_in + 1)
    matrix[:n_out, :n_in] = weight
    if bias is not None:
        matrix[:n_out, n_in] = bias
    matrix[n_out, n_in] = 1
    return matrix


@exact
def fit_input(
    x: Float[Tensor, "*batch n"],
    rows: Float[Tensor, "*more n_in"],
    constant: bool,
    argument: str = "x",
) -> Float[Tensor, "*batch n_in"]:
    """Make `x` fit `rows` that read it: their number of inputs, their dtype and device.

    Where the last input is the constant 1 it is appended if it is missing.

    Raises:
        BilensError: the last axis of `x` has a length that the rows cannot read.
    """
    n_in = rows.shape[-1]
    if x.ndim and x.shape[-1] == n_in:
        return x.to(rows)
    if constant and x.ndim and x.shape[-1] == n_in - 1:
        return with_constant(x.to(rows))
    expected = f"{n_in - 1} (or {n_in}, with the constant 1 appended)" if constant else f"{n_in}"
    raise BilensError(
        f"{argument} has shape {tuple(x.shape)}; its last axis should have length {expected}, "
        "one number for each input of the tensor. Flatten images, one row each."
    )

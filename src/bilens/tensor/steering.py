"""The effect of a steering vector on a bilinear layer, in terms that add up exactly."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from bilens.checks import full_precision
from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor


@dataclass(frozen=True, eq=False)
class Steering:
    """The terms of B(x + s), for samples x and steering vectors s.

        B([x + s, 1]) = before + cross + constant + square

    `square` and `constant` need no input: they come from the weights. Axes of the samples are
    first, then those of the vectors.

    Attributes:
        square: s with itself, B(s, s).
        constant: s with the constant 1, 2 B(s, 1): through biases and a folded residual. Zero for a
            tensor without the constant coordinate.
        cross: s with the input, 2 B(s, x), linear in both.
        before: the layer without steering, B([x, 1]).
    """

    square: Float[Tensor, "*vectors n_out"]
    constant: Float[Tensor, "*vectors n_out"]
    cross: Float[Tensor, "..."]
    before: Float[Tensor, "*samples n_out"]

    def change(self) -> Float[Tensor, "..."]:
        """Return the change of the output, B(x + s) - B(x)."""
        return self.cross + self.constant + self.square

    def total(self) -> Float[Tensor, "..."]:
        """Return the output for the steered input, B(x + s)."""
        return _with_axes(self.before, self.square.ndim - 1) + self.change()

    def scaled(self, strength: float) -> "Steering":
        """Return the terms for strength * s: `square` grows with strength^2, others linearly."""
        return replace(
            self,
            square=strength**2 * self.square,
            constant=strength * self.constant,
            cross=strength * self.cross,
        )


@full_precision
def steer(
    tensor: BilinearTensor, s: Float[Tensor, "*vectors n"], x: Float[Tensor, "*samples n_in"]
) -> Steering:
    """Split the effect of steering vectors on a layer; exact, differentiable and batched.

    For other outputs, such as logits, change the tensor first: `tensor.change_basis(outputs=U)`.
    With `tensor.with_residual()` the vector also passes beside the layer. From the weights,
    `tensor.contract` returns the matrix of x -> B(s, x).

    Args:
        tensor: the layer.
        s: vectors to add to the input, without the constant coordinate, which never changes.
        x: inputs.

    Raises:
        BilensError: s or x does not fit the tensor.

    Source: The discussion of the post on tensor-transformer variants.
    """
    n, constant = tensor.n_in - tensor.constant, int(tensor.constant)
    if s.ndim == 0 or s.shape[-1] != n:
        beside = ", without the constant 1" if constant else ""
        raise BilensError(
            f"s has shape {tuple(s.shape)}; its last axis should have length {n}, one number for "
            f"each input of the tensor{beside}"
        )
    before = tensor(x)
    # Without the constant: the product of s with it is a term of its own.
    free_s, free_x = (functional.pad(vectors[..., :n], (0, constant)) for vectors in (s, x))
    square = tensor(free_s)
    unit = functional.pad(torch.zeros_like(s[..., :n]), (0, constant), value=1.0)
    return Steering(
        square=square,
        constant=2 * tensor(free_s, unit) if constant else torch.zeros_like(square),
        cross=2 * tensor(_with_axes(free_x, s.ndim - 1), free_s),
        before=before,
    )


def _with_axes(x: Tensor, n: int) -> Tensor:
    """Return x with n axes of length 1 inserted before the last."""
    return x.reshape(*x.shape[:-1], *[1] * n, x.shape[-1])

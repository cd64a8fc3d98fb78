"""What a steering vector does to a bilinear layer, in terms that add up exactly."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.constant import fit_input
from bilens.tensor.factored import FactoredMatrix

__all__ = ["Steering", "steer", "steering_map"]


@dataclass(frozen=True, eq=False)
class Steering:
    """The terms of B(x + s), for samples x and steering vectors s.

        B([x + s, 1]) = before + cross + constant + alone

    `alone` and `constant` need no input: they are what the weights say of s. Axes of the samples
    come first, then those of the vectors.

    Attributes:
        alone: s with itself, B(s, s).
        constant: s with the constant 1, 2 B(s, 1): through biases, and s itself through a residual
            that is folded in; zero for a tensor without the constant coordinate.
        cross: s with the input, 2 B(s, x), linear in both.
        before: the layer without steering, B([x, 1]).
    """

    alone: Float[Tensor, "*vectors n_out"]
    constant: Float[Tensor, "*vectors n_out"]
    cross: Float[Tensor, "..."]
    before: Float[Tensor, "*samples n_out"]

    def change(self) -> Float[Tensor, "..."]:
        """What steering changes, B(x + s) - B(x)."""
        return self.cross + self.constant + self.alone

    def total(self) -> Float[Tensor, "..."]:
        """What the layer gives for the steered input."""
        return _apart(self.before, self.alone.ndim - 1) + self.change()

    def scaled(self, strength: float) -> "Steering":
        """The same for strength * s: what is linear in s grows with it, `alone` with its square."""
        return replace(
            self,
            alone=strength**2 * self.alone,
            constant=strength * self.constant,
            cross=strength * self.cross,
        )


def steer(
    tensor: BilinearTensor, s: Float[Tensor, "*vectors n"], x: Float[Tensor, "*samples n_in"]
) -> Steering:
    """Split what steering vectors do to a layer; exact, differentiable and batched.

    For some outputs, such as logits, change the tensor's outputs first: `tensor.change_basis(
    outputs=U)`. With `tensor.with_residual()` the vector also passes beside the layer.

    Args:
        tensor: the layer.
        s: what is added to the input; without the constant coordinate, which steering leaves alone.
        x: inputs.

    Raises:
        BilensError: s or x does not fit the tensor.

    Source:
        The discussion of the post on tensor-transformer variants: the vector's interaction with
        itself follows from the weights, that with the input does not.
    """
    n = tensor.n_in - tensor.constant
    left_s, right_s = _hidden(tensor, s)
    x = fit_input(x, tensor.n_in, tensor.constant)
    L, R = tensor.left[:, :n], tensor.right[:, :n]
    left_x, right_x = (_apart(x[..., :n] @ F.T, s.ndim - 1) for F in (L, R))
    constant = torch.zeros_like(left_s)
    if tensor.constant:
        constant = tensor.left[:, -1] * right_s + tensor.right[:, -1] * left_s
    return Steering(
        alone=(left_s * right_s) @ tensor.out.T,
        constant=constant @ tensor.out.T,
        cross=(left_x * right_s + right_x * left_s) @ tensor.out.T,
        before=tensor(x),
    )


def steering_map(tensor: BilinearTensor, s: Float[Tensor, "*vectors n"]) -> FactoredMatrix:
    """The matrix of x -> 2 B(s, x), from the weights alone: what steering makes the layer do.

    Its singular vectors are the directions of the input that the steering vector works on, and of
    the output that it moves by them. Where the tensor has the constant coordinate, so has the
    matrix, in its last column.

    Args:
        tensor: the layer.
        s: one steering vector, or a batch for a batch of matrices; without the constant coordinate.

    Raises:
        BilensError: s does not fit the tensor.
    """
    left_s, right_s = _hidden(tensor, s)
    out = torch.cat([tensor.out * right_s[..., None, :], tensor.out * left_s[..., None, :]], -1)
    reading = torch.cat([tensor.left.T, tensor.right.T], -1)
    return FactoredMatrix(out, reading.expand(*s.shape[:-1], -1, -1))


def _hidden(tensor: BilinearTensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """L s and R s."""
    n = tensor.n_in - tensor.constant
    if s.ndim == 0 or s.shape[-1] != n:
        beside = ", the constant 1 not among them" if tensor.constant else ""
        raise BilensError(
            f"s has shape {tuple(s.shape)}; its last axis should have length {n}, one number for "
            f"each input of the tensor{beside}"
        )
    return s @ tensor.left[:, :n].T, s @ tensor.right[:, :n].T


def _apart(x: Tensor, axes: int) -> Tensor:
    """With so many axes of length 1 before the last."""
    return x.reshape(*x.shape[:-1], *[1] * axes, x.shape[-1])

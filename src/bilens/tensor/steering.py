"""What a steering vector does to a bilinear layer, in terms that add up exactly."""

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


@full_precision
def steer(
    tensor: BilinearTensor, s: Float[Tensor, "*vectors n"], x: Float[Tensor, "*samples n_in"]
) -> Steering:
    """Split what steering vectors do to a layer; exact, differentiable and batched.

    For some outputs, such as logits, change the tensor's first: `tensor.change_basis(outputs=U)`.
    With `tensor.with_residual()` the vector also passes beside the layer. From the weights alone,
    `tensor.contract` gives the matrix of x -> B(s, x).

    Args:
        tensor: the layer.
        s: what is added to the input, without the constant coordinate, which steering leaves alone.
        x: inputs.

    Raises:
        BilensError: s or x does not fit the tensor.

    Source: The discussion of the post on tensor-transformer variants.
    """
    n, constant = tensor.n_in - tensor.constant, int(tensor.constant)
    if s.ndim == 0 or s.shape[-1] != n:
        beside = ", the constant 1 not among them" if constant else ""
        raise BilensError(
            f"s has shape {tuple(s.shape)}; its last axis should have length {n}, one number for "
            f"each input of the tensor{beside}"
        )
    before = tensor(x)
    # Without the constant, which is a third thing that s works together with.
    free_s, free_x = (functional.pad(vectors[..., :n], (0, constant)) for vectors in (s, x))
    alone = tensor(free_s)
    one = functional.pad(torch.zeros_like(s[..., :n]), (0, constant), value=1.0)
    return Steering(
        alone=alone,
        constant=2 * tensor(free_s, one) if constant else torch.zeros_like(alone),
        cross=2 * tensor(_apart(free_x, s.ndim - 1), free_s),
        before=before,
    )


def _apart(x: Tensor, axes: int) -> Tensor:
    """With so many axes of length 1 before the last."""
    return x.reshape(*x.shape[:-1], *[1] * axes, x.shape[-1])

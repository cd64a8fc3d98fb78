"""How large an effective eigenvalue below a node of the eigenvector tree can be, from above.

Let lambda_i, w_i be the eigenpairs of Q = Q_l(v), and let no path that goes on from a unit vector w
into layer l-1 exceed s (w'Ww)^p, where p = (1/2)^(l-1). Coming from v it gains |lambda_i|^p, and as
Q w_i = lambda_i w_i

    |lambda_i| w_i'W w_i = |w_i'Z w_i| <= |Z|   with  Z = (W Q + Q W) / 2,

so no path below v exceeds s |Z|^p for the spectral norm |Z|. Z is linear in v, and is what Q is for
the tensor of factors [L W; L], [R; R W], [D, D] / 2. Hence |Z|_F^2 = v'Gv for the Gram matrix G of
that tensor's outputs, and s (v'Gv)^(p/2) bounds what is below v in the same form, one layer up. The
recursion starts below the first layer with W = 1, s = 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.tensor.bilinear import BilinearTensor

__all__ = ["LayerBound", "layer_bounds", "spectral_norm_bound"]

SQUARINGS = 3
"""Squarings behind a tight bound, each a matrix product. On trained digit models a fourth saved at
most one decomposition in two hundred."""


@dataclass(frozen=True, eq=False)
class LayerBound:
    """Bounds on |effective eigenvalue| / prod |known eigenvalue|^(its power) below directions v.

    Attributes:
        below: s of the layer below.
        power: p = (1/2)^(l-1).
        norm: Frobenius norm of the weighted tensor, the one whose interaction matrices are Z.
        gram: G / norm^2, of trace 1.
        weighted: that tensor, divided by norm.
    """

    below: float
    power: float
    norm: float
    gram: Float64[Tensor, "n_out n_out"]
    weighted: BilinearTensor

    def quick(self, directions: Float[Tensor, "k n_out"]) -> Float64[Tensor, " k"]:
        """From Frobenius norms, for many directions at once: O(n_out^2) each."""
        v = directions.double()
        squares = einsum(v @ self.gram, v, "k o, k o -> k").clamp_min(0)
        # A Gram matrix in float64 knows squares to its rounding only; they must not come out short.
        squares = squares + _rounding(self.gram) * (v**2).sum(-1)
        return self._scaled(squares.sqrt(), v)

    def tight(self, direction: Float[Tensor, " n_out"]) -> float:
        """From the matrix itself, at a fraction of what its eigenvectors cost."""
        norm = spectral_norm_bound(self.weighted.interaction(direction).dense())
        return float(self._scaled(norm.double(), direction.double()))

    def _scaled(
        self, norms: Float64[Tensor, "*batch"], v: Float64[Tensor, "*batch n_out"]
    ) -> Float64[Tensor, "*batch"]:
        """The bound s (norm |Z|)^p; the eigenvalues' own rounding must not rise above it."""
        room = _rounding(self.weighted.out) * torch.linalg.vector_norm(v, dim=-1)
        return self.below * (self.norm * (norms + room)) ** self.power


def layer_bounds(tensors: Sequence[BilinearTensor]) -> list[LayerBound]:
    """The bounds for each layer of a chain, the first layer first."""
    bounds: list[LayerBound] = []
    weighted, below, power = tensors[0].to(torch.float64), 1.0, 1.0
    for i, tensor in enumerate(tensors):
        if i > 0:
            weighted = _weighted(tensor.to(torch.float64), bounds[-1].gram)
        gram = weighted.output_gram()
        square = float(gram.trace())
        norm = square**0.5
        if norm > 0:
            gram = gram / square
            weighted = BilinearTensor(weighted.left, weighted.right, weighted.out / norm)
        bounds.append(LayerBound(below, power, norm, gram, weighted.to(tensor.out.dtype)))
        below, power = below * norm**power, power / 2
    return bounds


def spectral_norm_bound(
    matrix: Float[Tensor, "n n"], squarings: int = SQUARINGS
) -> Float[Tensor, ""]:
    """An upper bound on the largest |eigenvalue| of a symmetric matrix, from its powers.

    |A|_2 <= |A^p|_F^(1/p) <= m^(1/2p) |A|_2 for p = 2^squarings, if A is of rank m: the Schatten
    norm of order 2p.
    """
    bound = matrix.abs().max()
    if bound == 0:
        return bound
    matrix, power = matrix / bound, 1.0
    norm: Tensor = torch.linalg.matrix_norm(matrix)
    for _ in range(squarings):
        matrix, bound = matrix / norm, bound * norm**power
        matrix, power = matrix @ matrix, power / 2
        norm = torch.linalg.matrix_norm(matrix)
    return bound * norm**power


def _weighted(tensor: BilinearTensor, W: Float64[Tensor, "n_in n_in"]) -> BilinearTensor:
    """The tensor whose interaction matrices are (W Q + Q W) / 2."""
    return BilinearTensor(
        torch.cat([tensor.left @ W, tensor.left]),
        torch.cat([tensor.right, tensor.right @ W]),
        torch.cat([tensor.out, tensor.out], 1) / 2,
    )


def _rounding(matrix: Tensor) -> float:
    """Relative error that sums over this matrix may carry."""
    return max(matrix.shape) * torch.finfo(matrix.dtype).eps

"""Interaction matrices as quadratic forms, one or a batch of them, still factored."""

from dataclasses import dataclass, replace

import torch
from einops import einsum
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.errors import BilensError
from bilens.tensor.constant import fit_input
from bilens.tensor.eigen import apply_factored, dense_eigenpairs, top_eigenpairs
from bilens.tensor.gram import hidden_gram
from bilens.tensor.memory import DENSE_LIMIT, check_dense_size
from bilens.tensor.spectrum import Spectrum

__all__ = ["QuadraticForm"]


@dataclass(frozen=True, eq=False)
class QuadraticForm:
    """Symmetric matrices Q = 1/2 (L' diag(w) R + R' diag(w) L), one for each row w of weights.

    Get one from `BilinearTensor.interaction`. Batch axes come first everywhere; all forms of a
    batch share L and R, which is what makes batches cheap.

    Attributes:
        left: L; one row for each hidden unit.
        right: R; one row for each hidden unit.
        weights: w = D'u, one number for each hidden unit, for each form.
        constant: the last input coordinate is the constant 1.

    Source:
        Pearce et al. 2024, section 3.2.
    """

    left: Float[Tensor, "rank n_in"]
    right: Float[Tensor, "rank n_in"]
    weights: Float[Tensor, "*batch rank"]
    constant: bool = False

    @property
    def n_in(self) -> int:
        """Number of inputs, the constant among them."""
        return self.left.shape[1]

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of forms; empty for a single one."""
        return self.weights.shape[:-1]

    def __getitem__(self, index: int | slice) -> "QuadraticForm":
        """One form, or some of them, along the first batch axis."""
        if not self.batch_shape:
            raise BilensError("This quadratic form is a single one; there is no batch to index")
        return replace(self, weights=self.weights[index])

    def __call__(self, x: Float[Tensor, "*samples n_in"]) -> Float[Tensor, "..."]:
        """Evaluate x'Qx: shape `samples` followed by the batch axes."""
        x = fit_input(x, self.n_in, self.constant)
        hidden = (x @ self.left.T) * (x @ self.right.T)
        values = hidden @ self.weights.reshape(-1, self.weights.shape[-1]).T
        return values.reshape([*x.shape[:-1], *self.batch_shape])

    def apply(self, vectors: Float[Tensor, "*batch k n_in"]) -> Float[Tensor, "*batch k n_in"]:
        """Q v for k vectors of each form, from the factors: O(k rank n_in) each."""
        return apply_factored(self.left, self.right, self.weights, vectors)

    def norm(self) -> Float64[Tensor, "*batch"]:
        """Frobenius norm of each Q, in float64, from the factors: sqrt(w' K w)."""
        w = self.weights.double()
        K = hidden_gram(self.left.double(), self.right.double())
        return einsum(w @ K, w, "... h, ... h -> ...").clamp_min(0).sqrt()

    def dense(self, max_bytes: int = DENSE_LIMIT) -> Float[Tensor, "*batch n_in n_in"]:
        """The matrices themselves.

        Raises:
            BilensError: they would need more than `max_bytes`.
        """
        check_dense_size((*self.batch_shape, self.n_in, self.n_in), self.left, max_bytes)
        half = (self.left * self.weights[..., None]).mT @ self.right
        return (half + half.mT) / 2

    def eigh(self, k: int | None = None, *, tolerance: float = 1e-4, seed: int = 0) -> Spectrum:
        """Eigenvalues and eigenvectors of each form, the largest magnitude first.

        Q = sum_i lambda_i v_i v_i',  so  x'Qx = sum_i lambda_i (v_i . x)^2

        `k=None` decomposes each matrix whole and is exact and differentiable. A small k on a large
        form runs Lanczos on all forms of the batch at once, not differentiable. What it returns is
        certified: each pair has a residual |Qv - lambda v| / |lambda_1| of at most `tolerance`, as
        measured, and the k pairs are the top k: an eigenvalue that exceeds |lambda_k| by more than
        `tolerance` |lambda_1| is missing with a chance of at most `miss_chance`, 1 in 10,000.
        Where this cannot be had the form is decomposed whole, and its `miss_chance` is 0.

        Args:
            k: how many eigenpairs of each form.
            tolerance: largest residual of an iterated pair.
            seed: of the random vectors of the iteration.

        Raises:
            BilensError: k is not between 1 and n_in, or a factor is not finite.

        Source:
            Pearce et al. 2024, equations 2 and 3; for the certificate see `bilens.tensor.lanczos`.
        """
        if k is not None and not 1 <= k <= self.n_in:
            raise BilensError(f"k={k}, expected 1 to {self.n_in}, the number of inputs")
        for name in ("left", "right", "weights"):
            if not torch.isfinite(getattr(self, name)).all():
                raise BilensError(
                    f"{name} holds NaN or infinite values; the model's training may have diverged"
                )
        weights = self.weights.reshape(-1, self.weights.shape[-1])
        if k is None:
            pairs = dense_eigenpairs(self.left, self.right, weights, self.n_in)
        else:
            pairs = top_eigenpairs(self.left, self.right, weights, k, tolerance, seed)
        values, vectors, residuals, miss_chance = (
            part.reshape([*self.batch_shape, *part.shape[1:]]) for part in pairs
        )
        return Spectrum(values, vectors, residuals, self.constant, miss_chance)

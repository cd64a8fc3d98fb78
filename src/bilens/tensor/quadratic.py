"""Interaction matrices as factored quadratic forms, and their eigenpairs."""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from einops import einsum
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.checks import check_count, check_finite, full_precision
from bilens.errors import BilensError
from bilens.lazy_imports import pd
from bilens.memory import check_memory
from bilens.reading import Fact, Reading
from bilens.settings import Seed, Tolerance
from bilens.tensor import factors
from bilens.tensor.lanczos import MISS, Search, basis_size
from bilens.tensor.spectrum import Spectrum

WORKING_BYTES = 512 * 1024**2
"""Bytes of working memory of a batch; more forms are processed in turns."""

SMALL = 128
"""Forms of at most this many inputs are decomposed in full: iteration would save nothing."""

SHOWN = 2**10
"""Largest number of inputs of a form that is decomposed for display."""


@full_precision
@dataclass(frozen=True, eq=False, repr=False)
class QuadraticForm(Reading):
    """Symmetric matrices Q = 1/2 (L' diag(w) R + R' diag(w) L), one for each row w of weights.

    Made by `BilinearTensor.interaction`. Batch axes come first everywhere. All forms of a batch
    share L and R, so that batches are cheap.

    Attributes:
        left: L; one row for each hidden unit.
        right: R; one row for each hidden unit.
        weights: w = D'u, one number for each hidden unit, for each form.
        constant: the last input coordinate is the constant 1.

    Source: Pearce et al. 2024, section 3.2.
    """

    left: Float[Tensor, "rank n_in"]
    right: Float[Tensor, "rank n_in"]
    weights: Float[Tensor, "*batch rank"]
    constant: bool = False

    axes: ClassVar[dict[str, str]] = Spectrum.axes

    def facts(self) -> list[Fact]:
        """Return sizes and dtype."""
        facts: list[Fact] = [
            ("inputs", self.n_in),
            ("hidden units", self.left.shape[0]),
            ("", str(self.left.dtype).removeprefix("torch.")),
        ]
        if self.batch_shape:
            facts.insert(0, ("forms", "x".join(map(str, self.batch_shape))))
        return facts

    def frame(self) -> "pd.DataFrame":
        """Return the eigenvalues, at the cost of `eigh`."""
        return self.eigh().frame()

    def _table_html(self) -> str:
        return "" if self.n_in > SHOWN else super()._table_html()

    def __post_init__(self) -> None:
        factors.check_factors(left=self.left, right=self.right, weights=self.weights)

    @property
    def n_in(self) -> int:
        """Number of inputs, the constant among them."""
        return self.left.shape[1]

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of forms; empty for a single one."""
        return self.weights.shape[:-1]

    def __getitem__(self, index: int | slice) -> "QuadraticForm":
        """Return one or several forms along the first batch axis."""
        if not self.batch_shape:
            raise BilensError("This quadratic form is a single one, without a batch to index")
        return replace(self, weights=self.weights[index])

    def __call__(self, x: Float[Tensor, "*samples n_in"]) -> Float[Tensor, "..."]:
        """Evaluate x'Qx: shape `samples` followed by the batch axes."""
        x = factors.fit_input(x, self.left, self.constant)
        hidden = (x @ self.left.T) * (x @ self.right.T)
        values = hidden @ self.weights.reshape(-1, self.weights.shape[-1]).T
        return values.reshape([*x.shape[:-1], *self.batch_shape])

    def apply(self, vectors: Float[Tensor, "*batch k n_in"]) -> Float[Tensor, "*batch k n_in"]:
        """Return Q v for k vectors of each form, from the factors: O(k rank n_in) each."""
        vectors = factors.fit_input(vectors, self.left, False, "vectors")
        return apply_factored(self.left, self.right, self.weights, vectors)

    def norm(self) -> Float64[Tensor, "*batch"]:
        """Return the Frobenius norm of each Q, in float64, from the factors: sqrt(w' K w)."""
        unit, scale = self.without_scale()
        L, R, w = unit.left.double(), unit.right.double(), unit.weights.double()
        K = factors.hidden_product(L, R, L, R)
        squares = einsum(w @ K, w, "... h, ... h -> ...")
        return scale * squares.clamp_min(0).sqrt()

    def without_scale(self) -> tuple["QuadraticForm", Float64[Tensor, "*batch"]]:
        """Divide the forms by powers of two so that nothing over- or underflows; return both.

        In the dtype of the factors, but at least in float32.
        """
        check_finite(left=self.left, right=self.right, weights=self.weights)
        left, right, weights, scale = factors.take_out_scale(
            *factors.readable(self.left, self.right, self.weights)
        )
        return QuadraticForm(left, right, weights, self.constant), scale[..., 0]

    def dense(self, max_bytes: int = factors.DENSE_LIMIT) -> Float[Tensor, "*batch n_in n_in"]:
        """Return the matrices themselves, (*batch, n_in, n_in)."""
        factors.check_dense_size((*self.batch_shape, self.n_in, self.n_in), self.left, max_bytes)
        half = (self.left * self.weights[..., None]).mT @ self.right
        return (half + half.mT) / 2

    def eigh(
        self, k: int | None = None, *, tolerance: Tolerance = 1e-4, seed: Seed = 0
    ) -> Spectrum:
        """Return the eigenvalues and eigenvectors of each form, the largest magnitude first.

        Q = sum_i lambda_i v_i v_i',  so  x'Qx = sum_i lambda_i (v_i . x)^2

        `k=None` decomposes each full matrix and is exact and differentiable. A small k on a large
        form runs Lanczos on all forms at once, not differentiable. The result is certified: each
        pair has a measured residual |Qv - lambda v| / |lambda_1| of at most `tolerance`. The chance
        that an eigenvalue above |lambda_k| + `tolerance` |lambda_1| is missing is at most
        `miss_chance`, 1 in 10,000. A form that misses the certificate is decomposed in full, with a
        `miss_chance` of 0. The scale of the weights plays no part, and half precision is read in
        float32.

        Args:
            k: number of eigenpairs of each form.
            tolerance: largest residual of an iterated pair, between 0 and 1.
            seed: seed of the random vectors of the iteration.

        Source: Pearce et al. 2024, equations 2 and 3. The certificate is derived in
            `bilens.tensor.lanczos`.
        """
        if k is not None:
            check_count("k", k, self.n_in, "the number of inputs")
        unit, scale = self.without_scale()
        weights = unit.weights.reshape(-1, unit.weights.shape[-1])
        if k is None:
            pairs = dense_eigenpairs(unit.left, unit.right, weights, self.n_in)
        else:
            pairs = top_eigenpairs(unit.left, unit.right, weights, k, tolerance, seed)
        values, vectors, residuals, miss_chance = (
            part.reshape([*self.batch_shape, *part.shape[1:]]) for part in pairs
        )
        values = (scale[..., None] * values).to(values.dtype)
        check_finite(eigenvalues=values)
        return Spectrum(values, vectors, residuals, self.constant, miss_chance)


class Eigenpairs(NamedTuple):
    """Fields of a `Spectrum`, eigenvectors as rows."""

    values: Float[Tensor, "batch k"]
    vectors: Float[Tensor, "batch k n_in"]
    residuals: Float[Tensor, "batch k"]
    miss_chance: Float64[Tensor, " batch"]


def apply_factored(
    left: Float[Tensor, "rank n_in"],
    right: Float[Tensor, "rank n_in"],
    weights: Float[Tensor, "*batch rank"],
    vectors: Float[Tensor, "*batch k n_in"],
) -> Float[Tensor, "*batch k n_in"]:
    """Return Q v = 1/2 [L'(w * R v) + R'(w * L v)], by four products with L and R for the batch."""
    w = weights[..., None, :]
    return ((w * (vectors @ right.T)) @ left + (w * (vectors @ left.T)) @ right) / 2


def dense_eigenpairs(
    left: Float[Tensor, "rank n_in"],
    right: Float[Tensor, "rank n_in"],
    weights: Float[Tensor, "batch rank"],
    k: int,
) -> Eigenpairs:
    """Return the k eigenpairs of largest magnitude of each form, from the full matrix."""
    n = left.shape[1]
    batch_size = max(1, WORKING_BYTES // (3 * n * n * left.element_size()))
    # Both halves, the eigenvectors, and as much again and more for LAPACK.
    n_bytes = 6 * min(batch_size, len(weights)) * n * n * left.element_size()
    check_memory(n_bytes, f"All eigenvectors of a form on {n:,} inputs", left.device)
    parts = []
    for block in torch.split(weights, batch_size):
        half = (left * block[..., None]).mT @ right
        Q = (half + half.mT) / 2
        values, columns = torch.linalg.eigh(Q)
        order = values.detach().abs().argsort(dim=-1, descending=True, stable=True)[:, :k]
        values = values.gather(-1, order)
        vectors = columns.mT.gather(-2, order[..., None].expand(*order.shape, n))
        with torch.no_grad():
            errors = (vectors @ Q - values[..., None] * vectors).norm(dim=-1)
            top = values.abs().amax(-1, keepdim=True)
            # A form that is zero has no errors to divide.
            residuals = torch.where(top > 0, errors / top, errors)
        parts.append((values, vectors, residuals))
    values, vectors, residuals = (torch.cat(part) for part in zip(*parts, strict=True))
    nothing = torch.zeros(len(weights), dtype=torch.float64, device=weights.device)
    return Eigenpairs(values, vectors, residuals, miss_chance=nothing)


@torch.no_grad()
def top_eigenpairs(
    left: Float[Tensor, "rank n_in"],
    right: Float[Tensor, "rank n_in"],
    weights: Float[Tensor, "batch rank"],
    k: int,
    tolerance: float,
    seed: int,
) -> Eigenpairs:
    """Return the k eigenpairs of largest magnitude of each form, iterated if that is cheaper.

    A form that does not reach `tolerance`, or does not pass the test of completeness, is decomposed
    in full.
    """
    n, size = left.shape[1], basis_size(k)
    # A basis of half of the inputs costs as much as the full decomposition.
    if n <= SMALL or 2 * size > n:
        return dense_eigenpairs(left, right, weights, k)
    # Each form has its basis and the images of it, n numbers each, and the projected form.
    slots = WORKING_BYTES // ((2 * n + size) * size * left.element_size())
    search = Search(
        left, right, weights, k, tolerance, seed, slots=min(max(1, slots), len(weights))
    )
    search.run()
    failed = ~search.passed
    pairs = Eigenpairs(
        search.values, search.vectors, search.residuals, search.passed.double() * MISS
    )
    if failed.any():
        exact = dense_eigenpairs(left, right, weights[failed], k)
        for iterated, part in zip(pairs, exact, strict=True):
            iterated[failed] = part
    return pairs

"""The top eigenpairs of many forms at once by Lanczos, and a test that none of them was missed.

A Lanczos run from one start vector meets only one direction of each eigenspace. Small residuals
show that its Ritz pairs are eigenpairs, and nothing about further copies of a repeated eigenvalue.
So every form is first searched and then tested, until it passes. Let k pairs have converged, with
further Ritz pairs of residuals r_i, and let A be the form outside of all of these. With

    t = |lambda_k| + tolerance |lambda_1|,    b = t - sum_i r_i^2 / (t - |theta_i|),

summed over the further pairs, no other eigenvalue exceeds t in magnitude if |A| <= b.
Let a run of A from a random unit vector y have the coefficients alpha_j and beta_j, and p_j be the
orthonormal polynomials that they make. An eigenvector z of A of an eigenvalue beyond b has

    (z . y)^2 <= 1 / sum_j p_j(b)^2,    for eigenvalues beyond -b: p_j(-b),

which shrinks with every step. As y is drawn after the search, z does not depend on it. So the
chance of (z . y)^2 <= c is at most sqrt(2 n c / pi). Below `MISS` the form has passed. A p_j that
is not positive at b means that the run has a Ritz value beyond b. Then an eigenvalue was missed,
and the search continues in the space of both.

Source:
    Golub & Meurant 2010, "Matrices, Moments and Quadrature", chapters 2 and 4, for the polynomials.
"""

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

MISS = 1e-4
"""Largest chance of missing an eigenvalue of the top k."""

ALLOWANCE = 0.01
"""Part of t by which the sum over further pairs may lower b; more pairs make a test shorter."""

MARGIN = 0.995
"""Part of b that Ritz values of A may reach when a test begins; nearer to b it takes long."""

COUNTERS = ("form", "taken", "used", "steps", "look")
SLOTTED = (*COUNTERS, "projected", "vector", "scale", "b", "beta", "before", "now", "mass")
"""Attributes of `Search` with a row for each slot, besides the basis and its images."""

ROUNDING = 1000
"""Treat eigenvalues below this many units of rounding as zero."""


class Search:
    """Forms in slots, each at its point of the search or test; the next waits for a free slot.

    All slots take a step together, so that a few large products with L and R serve every slot. The
    unfilled part of a slot's basis is zero.

    Attributes:
        values: eigenvalues of each form, the largest magnitude first.
        vectors: their eigenvectors.
        residuals: |Qv - lambda v| / |lambda_1|.
        passed: True for forms that passed their test; the others ran out of room or steps.
    """

    def __init__(
        self,
        left: Float[Tensor, "rank n_in"],
        right: Float[Tensor, "rank n_in"],
        weights: Float[Tensor, "forms rank"],
        k: int,
        tolerance: float,
        seed: int,
        slots: int,
    ) -> None:
        forms, n = len(weights), left.shape[1]
        self.k, self.tolerance, self.weights, self.next = k, tolerance, weights, 0
        self.room, self.most_steps = basis_size(k), n // 2
        # The sum of p_j(b)^2 at which the chance sqrt(2 n c / pi), c = 1 / sum, is MISS.
        self.enough = 2 * n / (math.pi * MISS**2)
        self.eps, self.tiny = torch.finfo(left.dtype).eps, torch.finfo(left.dtype).tiny
        self.generator = torch.Generator(left.device).manual_seed(seed)
        self.reading = torch.cat([left, right])
        self.writing = self.reading.T.contiguous()
        self.values, self.residuals = left.new_empty(forms, k), left.new_empty(forms, k)
        self.vectors = left.new_empty(forms, k, n)
        self.passed = torch.zeros(forms, dtype=torch.bool, device=left.device)
        self.form = torch.zeros(slots, dtype=torch.int64, device=left.device)
        self.taken = torch.zeros(slots, dtype=torch.bool, device=left.device)
        self.used, self.steps, self.look = (torch.zeros_like(self.form) for _ in range(3))
        self.basis, self.images = (left.new_zeros(slots, 4 * k + 32, n) for _ in range(2))
        self.projected = left.new_zeros(slots, self.room, self.room)
        self.vector, self.scale = left.new_zeros(slots, n), left.new_zeros(slots)
        exact = torch.zeros(slots, 2, dtype=torch.float64, device=left.device)
        self.b, self.beta = exact[:, 0].clone(), exact[:, 0].clone()
        self.before, self.now, self.mass = exact.clone(), exact.clone(), exact.clone()
        self._fill(torch.arange(slots, device=left.device))

    def run(self) -> None:
        """Search and test until every form has passed or failed."""
        while len(self.alive):
            self._step()
            passed = (self.mass >= self.enough).all(1) & self.taken
            self.passed[self.form[passed]] = True
            late = (self.used >= self.room) | (self.steps >= self.most_steps)
            ended = passed | (late & self.taken)
            if ended.any():
                self._fill(ended.nonzero()[:, 0])

    def _step(self) -> None:
        """Add a vector to each basis and make the next one; then test, or compute Ritz pairs."""
        width = int(self.used.max()) + 1
        if width > self.basis.shape[1]:
            self._resize(self.slots, width * 3 // 2)
        basis = self.basis[:, :width]
        image = torch.zeros_like(self.vector)
        # Empty slots are left out of the expensive product; elsewhere they take part as zeros.
        image[self.alive] = self._product(self.vector[self.alive])
        self.basis[self.slots, self.used], self.images[self.slots, self.used] = self.vector, image
        # Full orthogonalisation instead of the three-term recurrence: without it copies of pairs
        # that have converged would come back, and the test would take them for missed ones.
        shares = (image[:, None] @ basis.mT)[:, 0]
        self.projected[self.slots, self.used, : basis.shape[1]] = shares
        alpha = shares[self.slots, self.used].double()
        self.used += self.taken
        self.steps += 1
        vector = image - (shares[:, None] @ basis)[:, 0]
        self.scale = torch.maximum(self.scale, image.norm(dim=-1))
        length = vector.norm(dim=-1)
        # After a subtraction that cancels a digit the remainder is no longer orthogonal to working
        # precision; a second pass is enough (Kahan and Parlett).
        if (length < 0.1 * self.scale).any():
            vector = _reject(vector, basis)
            length = vector.norm(dim=-1)
        # A vector that vanishes has met an invariant subspace; a random one continues from there.
        floor = 100 * self.eps * self.scale
        lost = ((length <= floor) & self.taken).nonzero()[:, 0]
        self.vector = vector / length.clamp_min(self.tiny)[:, None]
        if len(lost):
            self.vector[lost] = self._random(basis[lost])
        # beta is floored as well: a beta of rounding size would let p_j overflow in one step.
        self._extend_polynomials(alpha, torch.maximum(length, floor).double())
        searching = self.b.isnan() & (self.used >= self.look) & self.taken
        if searching.any():
            self._compute_ritz_pairs(searching.nonzero()[:, 0])

    def _product(self, vector: Float[Tensor, "slots n_in"]) -> Float[Tensor, "slots n_in"]:
        """Return Q v = 1/2 [L'(w * R v) + R'(w * L v)]; on a CPU columns are faster than rows."""
        left, right = (self.reading @ vector.T.contiguous()).chunk(2)
        return (self.writing @ torch.cat([self.w * right, self.w * left])).T

    def _extend_polynomials(self, alpha: Tensor, beta: Tensor) -> None:
        """Advance p_j at b, and (-1)^j p_j at -b; NaN in slots that are not being tested."""
        # beta_(j+1) p_(j+1) = (b - alpha_j) p_j - beta_j p_(j-1). At -b the sign alternates, which
        # the factor (-1)^j absorbs: both ends then run the same recurrence, with alpha or -alpha.
        shifted = self.b[:, None] - alpha[:, None] * alpha.new_tensor([1, -1])
        after = (shifted * self.now - self.beta[:, None] * self.before) / beta[:, None]
        self.before, self.now, self.beta = self.now, after, beta
        # By Sturm, p_j(b) <= 0 exactly when a Ritz value lies beyond b: back to the search.
        beyond = (after <= 0).any(1)
        self.b[beyond] = torch.nan
        self.mass = torch.where(beyond[:, None], torch.nan, self.mass + after**2)
        self.look = torch.where(beyond, self.used, self.look)

    def _compute_ritz_pairs(self, slots: Int64[Tensor, " slots"]) -> None:
        """Compute the Ritz values, and the pairs of slots with small estimated residuals."""
        used, k = self.used[slots], self.k
        width = int(used.max())
        values, columns = torch.linalg.eigh(self.projected[slots, :width, :width])
        order = values.abs().argsort(dim=-1, descending=True)[:, : 2 * k + 16]
        values = values.gather(-1, order)
        mix = columns.mT.gather(-2, order[..., None].expand(*order.shape, width))
        # Residuals are beta times the last entry, by the three terms of Lanczos. With pairs of an
        # earlier run in the basis this is only an estimate, which `_settle` measures again.
        last = mix[:, :k].gather(-1, (used - 1)[:, None, None].expand(-1, k, 1))[..., 0]
        residual = (self.beta[slots, None] * last.abs()).amax(-1)
        over = residual / (self.tolerance * values[:, 0].abs()).clamp_min(self.tiny)
        # Residuals fall to a half or a quarter with each step. Each check costs an
        # eigendecomposition, so the next one comes late rather than early: log 2 is 0.69, not 0.4.
        wait = (over.clamp_min(1).log() / 0.4).clamp_min(3).minimum(used / 4)
        self.look[slots] = used + wait.ceil().long()
        close = over <= 1
        if close.any():
            self._settle(slots[close], values[close], mix[close])

    def _settle(
        self,
        slots: Int64[Tensor, " slots"],
        values: Float[Tensor, "slots pairs"],
        mix: Float[Tensor, "slots pairs width"],
    ) -> None:
        """Begin the test of slots whose top k have converged; drop forms of lower rank than k."""
        k, width = self.k, mix.shape[-1]
        vectors, images = (mix @ rows[slots, :width] for rows in (self.basis, self.images))
        errors = (images - values[..., None] * vectors).norm(dim=-1)
        sizes = values.abs().double()
        t = sizes[:, k - 1] + self.tolerance * sizes[:, 0]
        # Schur complement: pairs beside the top k lower b by r_i^2 / (t - |theta_i|). As many are
        # taken into the basis as `ALLOWANCE` permits, so that A and its test become smaller.
        lowered = (errors[:, k:].double() ** 2 / (t[:, None] - sizes[:, k:])).cumsum(-1)
        n_pairs = k + (lowered[:, :-1] <= ALLOWANCE * t[:, None]).sum(-1)
        lowered = torch.cat([torch.zeros_like(lowered[:, :k]), lowered], 1)
        b = t - lowered.gather(1, n_pairs[:, None] - 1)[:, 0]
        left_out = sizes.gather(1, n_pairs[:, None])[:, 0]
        residuals = errors[:, :k] / sizes[:, :1].to(errors)
        low_rank = sizes[:, k - 1] <= ROUNDING * self.eps * sizes[:, 0]
        # Eigenvalues of 0 have any vector as eigenvector: no test ends. `run` drops such a form.
        self.steps[slots[low_rank]] = self.most_steps
        ready = (residuals <= self.tolerance).all(-1) & (left_out <= MARGIN * b) & ~low_rank
        if not ready.any():
            return
        slots, form, most = slots[ready], self.form[slots[ready]], values.shape[1]
        self.values[form], self.residuals[form] = values[ready, :k], residuals[ready]
        self.vectors[form] = vectors[ready, :k]
        inside = torch.arange(most, device=n_pairs.device) < n_pairs[ready, None]
        self._clear(slots)
        self.basis[slots, :most] = vectors[ready] * inside[..., None]
        self.images[slots, :most] = images[ready] * inside[..., None]
        self.projected[slots, :most, :most] = torch.diag_embed(values[ready] * inside)
        self.used[slots], self.b[slots] = n_pairs[ready], b[ready]
        # A fresh random vector: the proof needs one that is independent of the pairs.
        self.vector[slots] = self._random(self.basis[slots, :most])

    def _fill(self, slots: Int64[Tensor, " slots"]) -> None:
        """Assign slots to the next forms; drop empty slots once they are the majority."""
        filled = slots[: len(self.weights) - self.next]
        self.taken[slots] = False
        self.taken[filled] = True
        self.form[filled] = self.next + torch.arange(len(filled), device=slots.device)
        self.next += len(filled)
        self._clear(slots)
        self.steps[slots], self.scale[slots] = 0, 0
        self.look[slots] = min(2 * self.k + 8, self.room)
        self.vector[slots] = self._random(self.basis[slots, :1])
        if self.taken.sum() <= len(self.taken) // 2:
            active = self.taken.nonzero()[:, 0]
            self._resize(active, self.basis.shape[1])
            for name in SLOTTED:
                setattr(self, name, getattr(self, name)[active])
        self.slots = torch.arange(len(self.taken), device=slots.device)
        self.alive = self.slots[self.taken]
        self.w = (self.weights[self.form[self.alive]] / 2).T.contiguous()

    def _resize(self, slots: Int64[Tensor, " slots"], columns: int) -> None:
        """Copy the bases of `slots` to new memory, for longer bases or for fewer slots."""
        width = int(self.used.max())
        for name in ("basis", "images"):
            before = getattr(self, name)
            after = before.new_zeros(len(slots), columns, before.shape[2])
            after[:, :width] = before[slots, :width]
            setattr(self, name, after)

    def _clear(self, slots: Int64[Tensor, " slots"]) -> None:
        width = int(self.used.max())
        for rows in (self.basis, self.images, self.projected):
            rows[slots, :width] = 0
        self.used[slots], self.b[slots], self.beta[slots] = 0, torch.nan, 0
        # p_(-1) = 0 and p_0 = 1, at both ends.
        self.before[slots], self.now[slots], self.mass[slots] = 0, 1, 1

    def _random(self, basis: Float[Tensor, "slots size n_in"]) -> Float[Tensor, "slots n_in"]:
        """Return random unit vectors orthogonal to each basis."""
        shape = (len(basis), basis.shape[-1])
        vector = torch.randn(
            shape, dtype=basis.dtype, device=basis.device, generator=self.generator
        )
        vector = _reject(_reject(vector, basis), basis)
        return vector / torch.linalg.vector_norm(vector, dim=-1, keepdim=True)


def basis_size(k: int) -> int:
    """Return the largest number of vectors in the basis of a form."""
    return 16 * k + 128


def _reject(
    vector: Float[Tensor, "slots n_in"], basis: Float[Tensor, "slots size n_in"]
) -> Float[Tensor, "slots n_in"]:
    """Project each vector on the orthogonal complement of its orthonormal basis."""
    shares = vector[:, None] @ basis.mT
    return vector - (shares @ basis)[:, 0]

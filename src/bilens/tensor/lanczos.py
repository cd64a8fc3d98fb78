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
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

MISS = 1e-4
"""Largest chance of missing an eigenvalue of the top k."""

MOST_STEPS = 16
"""Steps between two checks at most, and on a GPU always, which each check makes wait."""

LEAST_STEPS = 3
"""Steps between two checks on a CPU, where a check costs about as much as a step."""

MANY = 32
"""Forms from which a step of a single one costs much more than its share of a step of all."""


@dataclass
class Batch:
    """Forms that take every step together, so that a few large products serve all of them.

    Attributes:
        form: number of each form.
        weights: half of its weights.
        basis: orthonormal vectors. The first `width` have images, and the next one follows them.
        images: Q times each vector.
        projected: lower triangle of the form in the basis.
        beta: coupling of the next vector to the one before.
        scale: largest length of an image.
        lost: `scale` where the next vector is zero, as the basis spans an invariant subspace.
        width: number of vectors with images.
        steps: number of products of each form.
    """

    form: Int64[Tensor, " forms"]
    weights: Float[Tensor, "forms rank"]
    beta: Float[Tensor, " forms"]
    scale: Float[Tensor, " forms"]
    lost: Float[Tensor, " forms"]
    basis: Float[Tensor, "forms room n_in"]
    images: Float[Tensor, "forms room n_in"]
    projected: Float[Tensor, "forms room room"]
    width: int = 0
    steps: int = 0

    def select(self, rows: Tensor) -> "Batch":
        """Return the batch of some of the forms, in the memory of this one."""
        used = self.width + 1
        names = ("form", "weights", "beta", "scale", "lost")
        parts: dict[str, Any] = {name: getattr(self, name)[rows] for name in names}
        for name in ("basis", "images", "projected"):
            space = getattr(self, name)
            # In place: the room after the vectors in use is mostly never touched.
            space[: len(rows), :used] = space[:, :used].index_select(0, rows)
            parts[name] = space[: len(rows)]
        return replace(self, **parts)

    def begin(self, vector: Float[Tensor, "forms n_in"]) -> None:
        """Start a run from a unit vector that is orthogonal to the basis."""
        self.basis[:, self.width] = vector
        self.beta, self.lost = torch.zeros_like(self.beta), torch.zeros_like(self.lost)


class Search:
    """Searches and tests of all forms, a batch of them at a time.

    Between two checks nothing waits for the device. Forms that have finished leave at a check.

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
        on_cpu = left.device.type == "cpu"
        self.k, self.tolerance, self.weights = k, tolerance, weights
        # Pairs beyond the top k are followed too. With them in the basis the form that is tested is
        # smaller, and its test shorter.
        self.n_pairs, self.room = 2 * k + 16, basis_size(k)
        # Of many forms the last are slow ones, for which products with L and R are no longer large:
        # decomposing them is cheaper.
        self.most_steps = n // (4 if forms >= MANY else 2)
        # More forms at a time make products no faster, and their bases leave the cache.
        self.slots = min(slots, 256) if on_cpu else slots
        self.least_steps = LEAST_STEPS if on_cpu else MOST_STEPS
        # The sum of p_j(b)^2 at which the chance sqrt(2 n c / pi), c = 1 / sum, is MISS.
        self.enough = 2 * n / (math.pi * MISS**2)
        self.eps, self.tiny = torch.finfo(left.dtype).eps, torch.finfo(left.dtype).tiny
        self.generator = torch.Generator(left.device).manual_seed(seed)
        self.reading = torch.cat([left, right])
        self.writing = self.reading.T.contiguous()
        # oneDNN multiplies in float32 as exactly as MKL, on AMD's processors twice as fast.
        is_float32 = left.dtype == torch.float32
        self.by_onednn = on_cpu and is_float32 and torch.backends.mkldnn.is_available()
        if self.by_onednn:
            self.reading, self.writing = self.reading.to_mkldnn(), self.writing.to_mkldnn()
        # Continues a run whose Krylov space is exhausted, as for forms of low rank.
        self.spare = self._random(left.new_zeros(1, 1, n))
        self.values, self.residuals = left.new_empty(forms, k), left.new_empty(forms, k)
        self.vectors = left.new_empty(forms, k, n)
        self.passed = torch.zeros(forms, dtype=torch.bool, device=left.device)

    def run(self) -> None:
        """Search and test until every form has passed or failed."""
        for start in range(0, len(self.weights), self.slots):
            # Q is the mean of both orders of L and R, hence half of the weights.
            weights = self.weights[start : start + self.slots] / 2
            form = torch.arange(start, start + len(weights), device=weights.device)
            batch = self._empty(form, weights)
            batch.begin(self._random(weights.new_zeros(len(form), 1, self.vectors.shape[-1])))
            # A test that meets a missed eigenvalue continues as a search in the space of both.
            while len(batch.form):
                batch = self._test(*self._search(batch))

    def _empty(self, form: Tensor, weights: Tensor) -> Batch:
        """Return a batch of forms with an empty basis."""
        n, more = self.vectors.shape[-1], self.room + 1
        basis, images, projected = (
            weights.new_empty(len(form), more, width) for width in (n, n, more)
        )
        nothing = weights.new_zeros(len(form))
        return Batch(form, weights, nothing, nothing, nothing, basis, images, projected)

    def _advance(self, batch: Batch, steps: int) -> tuple[Tensor, Tensor]:
        """Take steps of Lanczos; return alpha and beta (steps, forms) in float64 on the CPU."""
        first, alphas, betas, lengths = batch.width, [], [], []
        batch.width, batch.steps = first + steps, batch.steps + steps
        for place in range(first, batch.width):
            basis = batch.basis[:, : place + 1]
            vector = basis[:, place]
            image = self._product(vector, batch.weights)
            batch.images[:, place] = image
            # The three terms go first. Then the pass over the whole basis cancels nothing, and one
            # is enough (Kahan and Parlett). Without it copies of pairs that have converged would
            # come back, and the test would take them for missed ones.
            alpha = (image * vector).sum(-1)
            remainder = torch.addcmul(image, alpha[:, None], vector, value=-1)
            if place:
                remainder.addcmul_(batch.beta[:, None], basis[:, place - 1], value=-1)
            # After an invariant subspace, of which a zero vector tells, a random one continues.
            remainder.addcmul_(batch.lost[:, None], self.spare)
            shares = (remainder[:, None] @ basis.mT)[:, 0]
            remainder = torch.baddbmm(remainder[:, None], shares[:, None], basis, alpha=-1)[:, 0]
            follows = batch.lost == 0
            # Shares of a spare vector are no entries of the form, as it is no image.
            batch.projected[:, place, : place + 1] = shares * follows[:, None]
            batch.scale = torch.maximum(batch.scale, image.norm(dim=-1))
            # A remainder of this size is rounding of the product: no direction is left in it.
            length, floor = remainder.norm(dim=-1), 100 * self.eps * batch.scale
            nonzero = length > floor
            batch.basis[:, place + 1] = remainder * (nonzero / length.clamp_min(self.tiny))[:, None]
            alphas.append(alpha)
            betas.append(batch.beta)
            # A beta of rounding size would let p_j overflow in one step.
            lengths.append(torch.maximum(length, floor))
            batch.beta, batch.lost = length * (nonzero & follows), batch.scale * ~nonzero
        square = batch.projected[:, first : batch.width, first : batch.width]
        diagonal = square.diagonal(0, 1, 2)
        # The terms that were subtracted before the pass over the basis belong to the form too.
        diagonal += torch.stack(alphas, 1)
        above = max(first, 1)
        below = batch.projected[:, above : batch.width, above - 1 : batch.width - 1]
        below.diagonal(0, 1, 2).add_(torch.stack(betas, 1)[:, above - first :])
        return diagonal.T.double().cpu(), torch.stack(lengths).double().cpu()

    def _product(
        self, vector: Float[Tensor, "forms n_in"], weights: Float[Tensor, "forms rank"]
    ) -> Float[Tensor, "forms n_in"]:
        """Return Q v = L'(w * R v) + R'(w * L v), with w half of the weights."""
        left, right = self._linear(vector, self.reading).chunk(2, -1)
        return self._linear(torch.cat([weights * right, weights * left], -1), self.writing)

    def _linear(self, rows: Tensor, matrix: Tensor) -> Tensor:
        if self.by_onednn:
            return functional.linear(rows.contiguous().to_mkldnn(), matrix).to_dense()
        return rows @ matrix.T

    def _search(self, batch: Batch) -> tuple[Batch, Tensor]:
        """Search until the top k of each form have converged; return forms to test, and their b."""
        tested, bounds = [], []
        steps = 0 if batch.width else self.n_pairs
        while len(batch.form):
            if steps:
                self._advance(batch, min(steps, self.room - batch.width))
            values, mix, over = self._ritz_pairs(batch)
            leaves = torch.zeros_like(over, dtype=torch.bool)
            close = (over <= 1).nonzero()[:, 0]
            if len(close):
                ready, b = self._settle(batch, close, values[close], mix[close], leaves)
                tested.append(ready)
                bounds.append(b)
            if batch.width >= self.room or batch.steps >= self.most_steps:
                leaves[:] = True
            stays = (~leaves).nonzero()[:, 0]
            if len(stays) < len(leaves):
                batch, over = batch.select(stays), over[stays]
            if len(over):
                # Residuals fall to a half or a quarter with each step.
                wait = float(over.clamp_min(1).log().median()) / 0.7
                steps = max(self.least_steps, min(MOST_STEPS, math.ceil(wait)))
        if not tested:
            return batch, batch.beta
        return self._deflated(tested, batch.steps), torch.cat(bounds)

    def _ritz_pairs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return Ritz values, their mixtures of the basis, and residuals over the tolerance."""
        # eigh reads the lower triangle only, the part that `_advance` fills.
        values, columns = torch.linalg.eigh(batch.projected[:, : batch.width, : batch.width])
        order = values.abs().argsort(dim=-1, descending=True)[:, : self.n_pairs]
        values = values.gather(-1, order)
        mix = columns.mT.gather(-2, order[..., None].expand(-1, -1, batch.width))
        # Residuals are beta times the last entry, by the three terms of Lanczos. With pairs of an
        # earlier run in the basis this is only an estimate, which `_settle` measures again.
        residual = (batch.beta[:, None] * mix[:, : self.k, -1].abs()).amax(-1)
        over = residual / (self.tolerance * values[:, 0].abs()).clamp_min(self.tiny)
        return values, mix, over

    def _settle(
        self,
        batch: Batch,
        rows: Int64[Tensor, " close"],
        values: Float[Tensor, "close pairs"],
        mix: Float[Tensor, "close pairs width"],
        leaves: Bool[Tensor, " forms"],
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the pairs of forms whose top k have converged, and b; mark those that leave."""
        k, width = self.k, batch.width
        # Residuals are measured on the vectors, by their images, and not estimated from beta.
        vectors, images = (mix @ part[rows, :width] for part in (batch.basis, batch.images))
        errors = (images - values[..., None] * vectors).norm(dim=-1)
        sizes = values.abs().double()
        t = sizes[:, k - 1] + self.tolerance * sizes[:, 0]
        # Schur complement: pairs beside the top k lower b by r_i^2 / (t - |theta_i|). As many are
        # taken into the basis as lower b by at most 0.01 t, so that A and its test become smaller.
        lowered = (errors[:, k:].double() ** 2 / (t[:, None] - sizes[:, k:])).cumsum(-1)
        # The sum over further pairs may lower b by 0.01 t; more pairs make a test shorter.
        n_pairs = k + (lowered[:, :-1] <= 0.01 * t[:, None]).sum(-1)
        lowered = torch.cat([torch.zeros_like(lowered[:, :k]), lowered], 1)
        b = t - lowered.gather(1, n_pairs[:, None] - 1)[:, 0]
        left_out = sizes.gather(1, n_pairs[:, None])[:, 0]
        residuals = errors[:, :k] / sizes[:, :1].to(errors)
        # A form of rank below k has its other eigenvalues at 0, with rounding as residual.
        # Eigenvalues below 1000 units of rounding count as zero.
        low_rank = sizes[:, k - 1] <= 1000 * self.eps * sizes[:, 0]
        # A test begins below 0.98 b; nearer to b it takes long.
        ready = (residuals <= self.tolerance).all(-1) & (left_out <= 0.98 * b) & ~low_rank
        # Eigenvalues of 0 have any vector as eigenvector: no test of them would end.
        leaves[rows] = ready | low_rank
        # By numbers: each use of a mask would wait for its count.
        ready = ready.nonzero()[:, 0]
        rows, values, vectors, images = rows[ready], values[ready], vectors[ready], images[ready]
        form = batch.form[rows]
        self.values[form], self.residuals[form] = values[:, :k], residuals[ready]
        self.vectors[form] = vectors[:, :k]
        inside = torch.arange(values.shape[1], device=rows.device) < n_pairs[ready, None]
        scaled = (part * inside[..., None] for part in (vectors, images))
        parts = form, batch.weights[rows], batch.scale[rows], values * inside, *scaled
        return parts, b[ready]

    def _deflated(self, tested: list[tuple[Tensor, ...]], steps: int) -> Batch:
        """Return a batch of forms whose bases are their pairs, zero where a form has fewer."""
        form, weights, scale, values, vectors, images = map(torch.cat, zip(*tested, strict=True))
        batch = self._empty(form, weights)
        # Vectors that are zero stay without effect: they have no share in anything.
        batch.basis[:, : self.n_pairs], batch.images[:, : self.n_pairs] = vectors, images
        batch.projected[:, : self.n_pairs, : self.n_pairs] = torch.diag_embed(values)
        batch.scale, batch.width, batch.steps = scale, self.n_pairs, steps
        return batch

    def _test(self, batch: Batch, b: Tensor) -> Batch:
        """Test forms from a random vector; return those in which an eigenvalue was missed."""
        if not len(batch.form):
            return batch
        # The proof needs a vector that is independent of the pairs.
        batch.begin(self._random(batch.basis[:, : batch.width]))
        # At -b the sign of p_j alternates, which the factor (-1)^j absorbs: both ends then run the
        # same recurrence, with alpha or -alpha. It is a chain of small steps, so the CPU has it.
        ends = b.double().cpu()[:, None]
        signs = ends.new_tensor([1.0, -1.0])
        # p_0 = 1, so that both sums begin at 1.
        before, now = ends.new_zeros(len(b), 2), ends.new_ones(len(b), 2)
        mass, beta = now.clone(), torch.zeros_like(ends)
        passed = missed = torch.zeros_like(ends[:, 0], dtype=torch.bool)
        steps = MOST_STEPS
        while True:
            grown = mass
            for alpha, length in zip(*self._advance(batch, steps), strict=True):
                after = ((ends - alpha[:, None] * signs) * now - beta * before) / length[:, None]
                before, now, beta = now, after, length[:, None]
                # By Sturm, p_j(b) <= 0 exactly when a Ritz value lies beyond b.
                missed = missed | ((after <= 0).any(1) & ~passed)
                mass = mass + after**2
                passed = passed | ((mass >= self.enough).all(1) & ~missed)
            self.passed[batch.form] |= passed.to(b.device)
            undecided, room = ~(passed | missed), self.room - batch.width
            if not undecided.any() or not room or batch.steps >= self.most_steps:
                return batch.select(missed.nonzero()[:, 0].to(b.device))
            # The sums grow by a constant factor a step once b is beyond the spectrum, so the steps
            # that are left can be estimated. A check that comes too early only costs itself.
            growth = (mass / grown).amin(1)[undecided].log().median() / steps
            lacking = (self.enough / mass).amax(1)[undecided].log().median()
            wait = math.ceil(lacking / growth.clamp_min(0.1))
            steps = min(max(self.least_steps, min(MOST_STEPS, wait)), room)
            if passed.any():
                stays = (~passed).nonzero()[:, 0]
                batch = batch.select(stays.to(b.device))
                ends, before, now, mass, beta = (x[stays] for x in (ends, before, now, mass, beta))
                passed, missed = passed[stays], missed[stays]

    def _random(self, basis: Float[Tensor, "forms size n_in"]) -> Float[Tensor, "forms n_in"]:
        """Return random unit vectors orthogonal to each basis."""
        vector = basis.new_empty(len(basis), basis.shape[-1]).normal_(generator=self.generator)
        # The second pass removes what rounding left of the basis in the first.
        for _ in range(2):
            shares = vector[:, None] @ basis.mT
            vector = vector - (shares @ basis)[:, 0]
        return vector / torch.linalg.vector_norm(vector, dim=-1, keepdim=True)


def basis_size(k: int) -> int:
    """Return the largest number of vectors in the basis of a form."""
    # Search and tests share this room; a form that fills it is decomposed in full.
    return 16 * k + 128

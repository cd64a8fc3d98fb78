"""The eigenvectors of an interaction matrix: what they are, and what they do to an input."""

from dataclasses import dataclass, replace

import torch
from einops import einsum
from jaxtyping import Float, Float64, Int
from torch import Tensor

from bilens.errors import BilensError
from bilens.tensor.constant import affine, fit_input

__all__ = ["Spectrum"]


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenpairs of one quadratic form or of a batch: x'Qx = sum_i lambda_i (v_i . x)^2.

    Eigenvectors are orthonormal rows, ordered by |lambda| unless a method says otherwise; their
    signs are arbitrary until `oriented` chooses them.

    Attributes:
        values: lambda_i.
        vectors: v_i, one row each.
        residuals: |Q v_i - lambda_i v_i| / |lambda_1|, measured on these vectors.
        constant: the last input coordinate is the constant 1.
        miss_chance: for each form, an upper bound of the chance that a larger eigenvalue is missing
            among those that `eigh` found; 0 where it decomposed the form whole, None if unknown.

    Source:
        Pearce et al. 2024, equations 2 and 3.
    """

    values: Float[Tensor, "*batch k"]
    vectors: Float[Tensor, "*batch k n_in"]
    residuals: Float[Tensor, "*batch k"]
    constant: bool = False
    miss_chance: Float64[Tensor, "*batch"] | None = None

    @property
    def n_in(self) -> int:
        """Number of inputs, the constant among them."""
        return self.vectors.shape[-1]

    @property
    def k(self) -> int:
        """Number of eigenpairs of each form."""
        return self.values.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of forms; empty for a single one."""
        return self.values.shape[:-1]

    def __getitem__(self, index: int | slice) -> "Spectrum":
        """The spectrum of one form, or of some, along the first batch axis."""
        if not self.batch_shape:
            raise BilensError("This spectrum is of a single form; there is no batch to index")
        return replace(
            self,
            values=self.values[index],
            vectors=self.vectors[index],
            residuals=self.residuals[index],
            miss_chance=None if self.miss_chance is None else self.miss_chance[index],
        )

    def overlaps(self, x: Float[Tensor, "*samples n_in"]) -> Float[Tensor, "..."]:
        """v_i . x, of shape `samples` followed by the axes of `values`."""
        x = fit_input(x, self.n_in, self.constant)
        flat = x @ self.vectors.reshape(-1, self.n_in).T
        return flat.reshape([*x.shape[:-1], *self.values.shape])

    def activations(self, x: Float[Tensor, "*samples n_in"]) -> Float[Tensor, "..."]:
        """lambda_i (v_i . x)^2, of shape `samples` followed by the axes of `values`.

        Their sum over i is x'Qx when all eigenpairs are kept.

        Source:
            Pearce et al. 2024, equation 3.
        """
        return self.values * self.overlaps(x) ** 2

    def __call__(self, x: Float[Tensor, "*samples n_in"]) -> Float[Tensor, "..."]:
        """X'Qx through the kept eigenpairs alone, of shape `samples` followed by the batch."""
        return self.activations(x).sum(-1)

    def dense(self) -> Float[Tensor, "*batch n_in n_in"]:
        """The matrices that the kept eigenpairs make: sum_i lambda_i v_i v_i'."""
        scaled = self.values[..., None] * self.vectors
        return einsum(scaled, self.vectors, "... k i, ... k j -> ... i j")

    def truncate(self, k: int) -> "Spectrum":
        """The first k eigenpairs in the present order.

        Raises:
            BilensError: k is not between 1 and the number kept.
        """
        if not 1 <= k <= self.k:
            raise BilensError(f"k={k}, expected 1 to {self.k}, the number of eigenpairs kept")
        return self._take(torch.arange(k, device=self.values.device).expand(*self.batch_shape, k))

    def ordered_by(self, scores: Float[Tensor, "*batch k"]) -> "Spectrum":
        """Reorder by descending `scores`, one for each eigenpair.

        By signed eigenvalue: `spectrum.ordered_by(spectrum.values)`; by mean activation over
        data: `spectrum.ordered_by(spectrum.activations(x).mean(0))`.

        Raises:
            BilensError: there is not one score for each eigenpair.
        """
        if scores.shape != self.values.shape:
            raise BilensError(
                f"scores has shape {tuple(scores.shape)}; expected {tuple(self.values.shape)}, "
                "one number for each eigenpair"
            )
        return self._take(scores.argsort(dim=-1, descending=True, stable=True))

    def outermost(self, k: int) -> "Spectrum":
        """The k largest eigenvalues from the top down, then the k lowest from the bottom up.

        Fewer of either where there are not 2k.

        Raises:
            BilensError: k is not positive.
        """
        if k < 1:
            raise BilensError(f"k={k}, expected at least 1")
        order = self.values.argsort(dim=-1, descending=True)
        lowest = min(k, self.k - min(k, self.k))
        top, bottom = order[..., :k], order.flip(-1)[..., :lowest]
        return self._take(torch.cat([top, bottom], -1))

    def oriented(self, x: Float[Tensor, "samples n_in"], top: int = 3) -> "Spectrum":
        """Choose each eigenvector's sign so that it resembles the inputs it reacts to most.

        The sign is that of the sum of v.x over the `top` inputs of largest |activation|.

        Raises:
            BilensError: `x` holds no input.

        Source:
            Pearce et al. 2024, figure 2B.
        """
        if x.ndim != 2 or x.shape[0] == 0:
            raise BilensError(
                f"x has shape {tuple(x.shape)}; expected (samples, n_in) with at least one sample"
            )
        overlaps = self.overlaps(x)
        best = overlaps.abs().topk(min(top, x.shape[0]), dim=0).indices
        sign = torch.where(overlaps.gather(0, best).sum(0) < 0, -1, 1).to(self.values)
        return replace(self, vectors=sign[..., None] * self.vectors)

    def pullback(
        self, weight: Float[Tensor, "n_in n_features"], bias: Float[Tensor, " n_in"] | None = None
    ) -> "Spectrum":
        """The same eigenvectors read in the features z that feed them: v.x = (W'v).z for x = W z.

        This is how eigenvectors found behind an embedding become pictures. The pulled back vectors
        give the same activations but are no longer orthonormal.

        Args:
            weight: W, the map from features to the inputs of this spectrum.
            bias: of that map; needs, and keeps, the constant coordinate.

        Raises:
            BilensError: W does not fit, or there is a bias and no constant coordinate.

        Source:
            Pearce et al. 2024, section 4.2.
        """
        if bias is not None and not self.constant:
            raise BilensError("bias was given, but this spectrum has no constant coordinate for it")
        matrix = affine(weight, bias) if self.constant else weight
        if matrix.shape[0] != self.n_in:
            wanted = self.n_in - self.constant
            raise BilensError(
                f"weight has shape {tuple(weight.shape)}; expected ({wanted}, n_features)"
            )
        return replace(self, vectors=self.vectors @ matrix.to(self.vectors))

    def effective_rank(self) -> Float[Tensor, "*batch"]:
        """(sum |lambda|)^2 / sum lambda^2: how many eigenvalues of equal size would weigh as much.

        A zero form has effective rank 0.
        """
        magnitudes = self.values.abs()
        squares = (magnitudes**2).sum(-1)
        share = magnitudes.sum(-1) ** 2 / squares
        return torch.where(squares > 0, share, torch.zeros_like(squares))

    def _take(self, order: Int[Tensor, "*batch k"]) -> "Spectrum":
        rows = order[..., None].expand(*order.shape, self.n_in)
        return replace(
            self,
            values=self.values.gather(-1, order),
            vectors=self.vectors.gather(-2, rows),
            residuals=self.residuals.gather(-1, order),
        )

"""Interaction matrices as factored quadratic forms, their eigenvectors and their activations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from einops import einsum
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import check_count, check_finite, checked
from bilens.errors import BilensError, CheckpointError
from bilens.lazy_imports import lazy_import, safetensors
from bilens.memory import check_memory
from bilens.sections import Columns, Fact, shape_fact
from bilens.settings import Count
from bilens.tensor import factors
from bilens.tensor.factors import affine, fit_input

if TYPE_CHECKING:
    from bilens import files
else:
    files = lazy_import("bilens.files")

SAVED = ("values", "vectors", "residuals")


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Spectrum(Reading):
    """Eigenpairs of one quadratic form or of a batch: x'Qx = sum_i lambda_i (v_i . x)^2.

    Eigenvectors are orthonormal rows, ordered by |lambda| unless a method says otherwise; their
    signs are arbitrary until `oriented` chooses them.

    Attributes:
        values: lambda_i.
        vectors: v_i, one row each.
        residuals: |Q v_i - lambda_i v_i| / |lambda_1|, measured on these vectors.
        constant: the last input coordinate is the constant 1.

    Source: Pearce et al. 2024, equations 2 and 3.
    """

    values: Float[Tensor, "*batch k"]
    vectors: Float[Tensor, "*batch k n_in"]
    residuals: Float[Tensor, "*batch k"]
    constant: bool = False

    axes: ClassVar[dict[str, str]] = {"x": "number", "y": "eigenvalue", "color": "form"}

    def facts(self) -> list[Fact]:
        facts: list[Fact] = [("eigenpairs", self.k), ("inputs", self.n_in)]
        if self.batch_shape:
            facts.insert(0, ("forms", shape_fact(self.batch_shape)))
        if not self.values.numel() or not self.values.isfinite().all():
            return facts
        largest = self.values.gather(-1, self.values.abs().argmax(-1, keepdim=True)).mean()
        mean = "mean " if self.batch_shape else ""
        facts.append((f"{mean}top eigenvalue", float(largest)))
        return [*facts, (f"{mean}effective rank", round(float(self.effective_rank().mean()), 1))]

    def columns(self) -> Columns:
        """Return a row for each eigenpair: form, number, eigenvalue, share of the sum, residual.

        Forms are counted through the batch.
        """
        # The sum of magnitudes may leave the range of a smaller dtype.
        values = self.values.detach().cpu().double().reshape(-1, self.k)
        total = values.abs().sum(-1, keepdim=True)
        shares = values.abs() / torch.where(total > 0, total, torch.ones_like(total))
        columns = {
            "form": torch.arange(len(values))[:, None].expand_as(values),
            "number": torch.arange(1, self.k + 1).expand_as(values),
            "eigenvalue": values,
            "share": shares,
            "residual": self.residuals.detach().cpu(),
        }
        return {name: column.flatten().tolist() for name, column in columns.items()}

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

    def to(self, target: torch.dtype | torch.device | str) -> "Spectrum":
        """Return the same spectrum in another dtype or on another device."""
        return replace(self, **{name: getattr(self, name).to(target) for name in SAVED})

    def __getitem__(self, index: int | slice) -> "Spectrum":
        """Return the spectrum of one or several forms along the first batch axis."""
        if not self.batch_shape:
            raise BilensError("This spectrum is of a single form, without a batch to index")
        return replace(self, **{name: getattr(self, name)[index] for name in SAVED})

    def overlaps(self, x: Float[Tensor, "*samples n_in"]) -> Float[Tensor, "..."]:
        """Return v_i . x, of shape `samples` followed by the axes of `values`."""
        x = fit_input(x, self.vectors, self.constant)
        flat = x @ self.vectors.reshape(-1, self.n_in).T
        return flat.reshape([*x.shape[:-1], *self.values.shape])

    def activations(self, x: Float[Tensor, "*samples n_in"]) -> Float[Tensor, "..."]:
        """Return lambda_i (v_i . x)^2, of shape `samples` followed by the axes of `values`.

        Their sum over all eigenpairs is x'Qx.

        Source: Pearce et al. 2024, equation 3.
        """
        check_finite(x=x)
        return self.values * self.overlaps(x) ** 2

    def __call__(self, x: Float[Tensor, "*samples n_in"]) -> Float[Tensor, "..."]:
        """Evaluate x'Qx through these eigenpairs only, of shape `samples` followed by the batch."""
        return self.activations(x).sum(-1)

    def dense(self) -> Float[Tensor, "*batch n_in n_in"]:
        """Return the matrices that these eigenpairs make, sum_i lambda_i v_i v_i'."""
        rows = self.values[..., None] * self.vectors
        return einsum(rows, self.vectors, "... k i, ... k j -> ... i j")

    def truncate(self, k: int) -> "Spectrum":
        """Return the first k eigenpairs in the present order."""
        check_count("k", k, self.k, "the number of eigenpairs")
        return self.select(range(k))

    def select(self, indices: Int[Tensor, "... m"] | Sequence[int]) -> "Spectrum":
        """Return eigenpairs by their numbers, the same for every form or one row for each form."""
        order = torch.as_tensor(indices, device=self.values.device)
        if order.ndim == 0 or order.shape[:-1] not in (torch.Size(), self.batch_shape):
            rows = f" or {(*self.batch_shape, 'm')}" if self.batch_shape else ""
            raise BilensError(f"indices has shape {tuple(order.shape)}, expected (m,){rows}")
        are_integers = order.numel() and not order.is_floating_point()
        if not are_integers or order.min() < 0 or order.max() >= self.k:
            raise BilensError(
                f"indices={order.tolist()}, expected numbers of eigenpairs, 0 to {self.k - 1}, at "
                "least one"
            )
        return self._take(order.long().expand(*self.batch_shape, order.shape[-1]))

    def positive(self) -> "Spectrum":
        """Return the eigenpairs that can only raise the value, in the present order: Q_+ of Q.

        If forms of a batch have different numbers of them, the shorter ones are filled up with
        eigenvectors whose eigenvalues are set to 0.
        """
        return self._of_sign(self.values > 0)

    def negative(self) -> "Spectrum":
        """Return the eigenpairs that can only lower the value; see `positive`."""
        return self._of_sign(self.values < 0)

    def ordered_by(self, scores: Float[Tensor, "*batch k"]) -> "Spectrum":
        """Reorder by descending `scores`, such as `spectrum.activations(x).mean(0)`."""
        if scores.shape != self.values.shape:
            expected = f"{tuple(self.values.shape)}, one number for each eigenpair"
            raise factors.wrong_shape("scores", scores, expected)
        return self._take(scores.argsort(dim=-1, descending=True, stable=True))

    def outermost(self, k: Count) -> "Spectrum":
        """Return the k largest eigenvalues from the top down, then the k lowest from the bottom up.

        A form of fewer than 2k eigenvalues has fewer of either.
        """
        order = self.values.argsort(dim=-1, descending=True)
        top, bottom = order[..., :k], order[..., k:].flip(-1)[..., :k]
        return self._take(torch.cat([top, bottom], -1))

    def oriented(self, x: Float[Tensor, "samples n_in"], k: Count = 3) -> "Spectrum":
        """Choose each eigenvector's sign so that it resembles the inputs it reacts to most.

        The sign is that of the sum of v.x over the k inputs of largest |activation|.

        Source: Pearce et al. 2024, figure 2B.
        """
        if len(x) == 0:
            raise BilensError(f"x has shape {tuple(x.shape)}, expected at least one sample")
        overlaps = self.overlaps(x)
        best = overlaps.abs().topk(min(k, len(x)), dim=0).indices
        sign = torch.where(overlaps.gather(0, best).sum(0) < 0, -1, 1).to(self.values)
        return replace(self, vectors=sign[..., None] * self.vectors)

    def pullback(
        self, weight: Float[Tensor, "n_in n_features"], bias: Float[Tensor, " n_in"] | None = None
    ) -> "Spectrum":
        """Return the same eigenvectors as directions of features z: v.x = (W'v).z for x = W z.

        This turns eigenvectors after an embedding into pictures. The pulled back vectors have the
        same activations but are no longer orthonormal.

        Args:
            weight: W, the map from features to the inputs of this spectrum.
            bias: bias of that map; requires the constant coordinate, which stays.

        Source: Pearce et al. 2024, section 4.2.
        """
        if bias is not None and not self.constant:
            raise BilensError("bias was given, but this spectrum has no constant coordinate for it")
        matrix = affine(weight, bias) if self.constant else weight
        if matrix.shape[0] != self.n_in:
            n = self.n_in - self.constant
            raise factors.wrong_shape("weight", weight, f"({n}, n_features)")
        return replace(self, vectors=self.vectors @ matrix.to(self.vectors))

    def effective_rank(self) -> Float[Tensor, "*batch"]:
        """Return (sum |lambda|)^2 / sum lambda^2, the equivalent number of equal eigenvalues.

        A zero form has effective rank 0.
        """
        check_finite(values=self.values)
        magnitudes = self.values.abs()
        # Squares of small eigenvalues would underflow.
        largest = magnitudes.amax(-1, keepdim=True)
        magnitudes = magnitudes / torch.where(largest > 0, largest, 1)
        return magnitudes.sum(-1) ** 2 / (magnitudes**2).sum(-1).clamp_min(1)

    def save(self, path: Path | str) -> None:
        """Write all attributes to a safetensors file, `constant` as metadata; `load` reads it.

        Raises:
            CheckpointError: the system refuses.
        """
        tensors = {name: getattr(self, name).cpu() for name in SAVED}
        files.write_safetensors(Path(path), tensors, {"constant": str(self.constant)})

    @classmethod
    def load(cls, path: Path | str) -> "Spectrum":
        """Read a file written by `save`.

        Raises:
            CheckpointError: the file does not exist or holds no spectrum.
        """
        with files.file_errors(path, "read"), safetensors.safe_open(path, "pt") as file:
            constant = (file.metadata() or {}).get("constant")
            names = set(SAVED).intersection(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
        if constant not in ("True", "False") or not {*SAVED} <= tensors.keys():
            raise CheckpointError(
                f"{path} does not hold a spectrum: expected {', '.join(SAVED)}, and in its "
                "metadata constant, as Spectrum.save writes them"
            )
        return cls(**tensors, constant=constant == "True")

    def _take(self, order: Int[Tensor, "*batch k"]) -> "Spectrum":
        rows = order[..., None].expand(*order.shape, self.n_in)
        return replace(
            self,
            values=self.values.gather(-1, order),
            vectors=self.vectors.gather(-2, rows),
            residuals=self.residuals.gather(-1, order),
        )

    def _of_sign(self, is_member: Bool[Tensor, "*batch k"]) -> "Spectrum":
        count = max(1, int(is_member.sum(-1).max()))
        order = (~is_member).to(torch.uint8).argsort(dim=-1, stable=True)[..., :count]
        pairs = self._take(order)
        # The shorter forms of a batch have eigenpairs of the other sign here: they become zero.
        return replace(pairs, values=pairs.values * is_member.gather(-1, order))


WORKING_BYTES = 512 * 1024**2
"""Bytes of working memory of a batch; more forms are processed in turns."""


@checked
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
        facts: list[Fact] = [
            ("inputs", self.n_in),
            ("hidden units", self.left.shape[0]),
            ("", str(self.left.dtype).removeprefix("torch.")),
        ]
        if self.batch_shape:
            facts.insert(0, ("forms", shape_fact(self.batch_shape)))
        return facts

    def columns(self) -> Columns:
        """Return the eigenvalues, at the cost of `eigh`."""
        return self.eigh().columns()

    @property
    def is_quick(self) -> bool:
        """Whether it is small enough to be decomposed when it is shown."""
        return self.n_in <= 1024

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
        return factors.in_range(norm=scale * squares.clamp_min(0).sqrt())

    def without_scale(self) -> tuple["QuadraticForm", Float64[Tensor, "*batch"]]:
        """Divide the forms by powers of two so that nothing over- or underflows; return both.

        In the dtype of the factors, but at least in float32.
        """
        check_finite(left=self.left, right=self.right, weights=self.weights)
        # No decomposition accepts half precision.
        dtype = torch.promote_types(self.left.dtype, torch.float32)
        parts = (part.to(dtype) for part in (self.left, self.right, self.weights))
        left, right, weights, scale = factors.take_out_scale(*parts)
        return QuadraticForm(left, right, weights, self.constant), scale[..., 0]

    def dense(self, max_bytes: int = factors.DENSE_LIMIT) -> Float[Tensor, "*batch n_in n_in"]:
        """Return the matrices themselves, (*batch, n_in, n_in)."""
        factors.check_dense_size((*self.batch_shape, self.n_in, self.n_in), self.left, max_bytes)
        half = (self.left * self.weights[..., None]).mT @ self.right
        return (half + half.mT) / 2

    def eigh(self, k: int | None = None) -> Spectrum:
        """Return the eigenvalues and eigenvectors of each form, the largest magnitude first.

        Q = sum_i lambda_i v_i v_i',  so  x'Qx = sum_i lambda_i (v_i . x)^2

        Each matrix is decomposed in full, exactly and differentiably, some of a batch at a time;
        the scale of the weights plays no part, and half precision is read in float32.

        Args:
            k: number of eigenpairs of each form to return; all by default.

        Source: Pearce et al. 2024, equations 2 and 3.
        """
        if k is not None:
            check_count("k", k, self.n_in, "the number of inputs")
        unit, scale = self.without_scale()
        forms = replace(unit, weights=unit.weights.reshape(-1, unit.weights.shape[-1]))
        spectrum = eigenpairs(forms, k or self.n_in)
        values, vectors, residuals = (
            getattr(spectrum, name).reshape([*self.batch_shape, *getattr(spectrum, name).shape[1:]])
            for name in SAVED
        )
        values = factors.in_range(eigenvalues=(scale[..., None] * values).to(values.dtype))
        return Spectrum(values, vectors, residuals, self.constant)


def apply_factored(
    left: Float[Tensor, "rank n_in"],
    right: Float[Tensor, "rank n_in"],
    weights: Float[Tensor, "*batch rank"],
    vectors: Float[Tensor, "*batch k n_in"],
) -> Float[Tensor, "*batch k n_in"]:
    """Return Q v = 1/2 [L'(w * R v) + R'(w * L v)], by four products with L and R for the batch."""
    w = weights[..., None, :]
    return ((w * (vectors @ right.T)) @ left + (w * (vectors @ left.T)) @ right) / 2


def eigenpairs(forms: QuadraticForm, k: int) -> Spectrum:
    """Return the k eigenpairs of largest magnitude of each form, from the full matrix."""
    left, right, weights, n = forms.left, forms.right, forms.weights, forms.n_in
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
    return Spectrum(values, vectors, residuals, forms.constant)

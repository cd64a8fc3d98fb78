"""A layer in terms of given vectors: features of its output, directions, steering vectors."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn import functional

from bilens.checks import check_finite, checked
from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.quadratic import Spectrum


@checked
@dataclass(frozen=True, eq=False)
class Dictionary:
    """Output features F as columns, read off by a = F^+ y and written back by y = F a.

    F^+ y are the activations of least squares, of least length if several fit equally well. If
    the features span all outputs (`complete`), F F^+ = 1; otherwise F F^+ y is the part of y that
    they span. A dead feature, a column of zeros, has activation 0. Made by `Dictionary.of` or, from
    a trained autoencoder of SAELens, by `Dictionary.from_saelens`.

    Attributes:
        features: F, one column for each feature.
        inverse: F^+, one row for each feature, of the dtype of F.
        singular_values: of F, the largest first, in float64.
        rank: how many of them count; the rest was taken for zero.

    Source: Pearce & Dooms 2024, "The pseudoinverse trick for feature dictionaries"; their D is F
    here.
        Pearce et al. 2024, appendix B.1.
    """

    features: Float[Tensor, "n_out m"]
    inverse: Float[Tensor, "m n_out"]
    singular_values: Float64[Tensor, " s"]
    rank: int

    @classmethod
    def of(
        cls, features: Float[Tensor, "n_out m"], *, require_complete: bool = False
    ) -> "Dictionary":
        """Return the dictionary of the columns of F, its pseudoinverse computed in float64.

        Singular values up to max(n_out, m) eps sigma_1 count as zero, with eps that of the dtype of
        F. Differentiable as long as the rank does not change.

        Args:
            features: F, one column for each feature, of any number and length.
            require_complete: refuse features that do not span all outputs.
        """
        inverse, singular_values, rank = _pseudoinverse(features, "features", "(n_out, m)")
        if require_complete:
            _check_complete("features", rank, features.shape[0])
        return cls(features, inverse, singular_values, rank)

    @classmethod
    def from_saelens(cls, sae: Any) -> "Dictionary":
        """Return the features of a sparse autoencoder of SAELens, the rows of its `W_dec`.

        Everything else of the autoencoder is ignored. The pseudoinverse replaces the encoder.
        Activations are those of y itself, not of y - b_dec. `cfg.normalize_activations` and
        `cfg.reshape_activations` are not undone. SAELens need not be installed.
        """
        decoder = getattr(sae, "W_dec", None)
        if not isinstance(decoder, Tensor) or decoder.ndim != 2:
            shape = f" of shape {tuple(decoder.shape)}" if isinstance(decoder, Tensor) else ""
            raise BilensError(
                f"sae is a {type(sae).__name__} with W_dec a {type(decoder).__name__}{shape}; "
                "expected a sparse autoencoder of SAELens, with a tensor W_dec of shape "
                "(d_sae, d_in). Any other matrix of features goes into Dictionary.of()."
            )
        return cls.of(decoder.detach().T)

    @property
    def n_out(self) -> int:
        """Number of outputs, the length of a feature."""
        return self.features.shape[0]

    @property
    def n_features(self) -> int:
        """Number of features, dead ones among them."""
        return self.features.shape[1]

    @property
    def complete(self) -> bool:
        """True if the features span all outputs, so that F F^+ = 1."""
        return self.rank == self.n_out

    def activations(self, y: Float[Tensor, "*batch n_out"]) -> Float[Tensor, "*batch m"]:
        """Return the activations a = F^+ y for each row of `y`, in the dtype of `y`."""
        _check_last_axis(y, "y", self.n_out, "output")
        return y @ self.inverse.T.to(y)

    def reconstruct(self, a: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch n_out"]:
        """Return the outputs y = F a for each row of `a`, in the dtype of `a`."""
        _check_last_axis(a, "a", self.n_features, "feature")
        return a @ self.features.T.to(a)

    def features_tensor(self, tensor: BilinearTensor) -> BilinearTensor:
        """Return the tensor of x -> F^+ B(x), with an output for each feature: D becomes F^+ D."""
        if tensor.n_out != self.n_out:
            raise BilensError(
                f"tensor has {tensor.n_out} outputs; the dictionary's features are vectors of "
                f"{self.n_out} numbers"
            )
        return tensor.change_basis(outputs=self.inverse)

    def projector(self) -> Float[Tensor, "n_out n_out"]:
        """Return F F^+, the orthogonal projector onto the span of the features."""
        return self.features @ self.inverse


@checked
@dataclass(frozen=True, eq=False)
class Reexpression:
    """A layer through eigenvectors: B = sum_k sum_i lambda_ki u+_k (x) v_ki (x) v_ki.

    Get one from `reexpress`.

    Attributes:
        spectra: (lambda_k, v_k), one spectrum for each direction u_k.
        outputs: u+_k, one row each: the output of a unit of activation along u_k.
        rank: of the directions.
        complete: True if the directions span all outputs. Otherwise the sum is the orthogonal
            projection of B onto their span.

    Source: Pearce et al. 2024, equations 5 and 6.
    """

    spectra: Spectrum
    outputs: Float[Tensor, "m n_out"]
    rank: int
    complete: bool

    def __call__(self, x: Float[Tensor, "*batch n_in"]) -> Float[Tensor, "*batch n_out"]:
        """Evaluate sum_k u+_k sum_i lambda_ki (v_ki . x)^2 over the kept eigenpairs."""
        return self.spectra(x) @ self.outputs

    def truncate(self, k: int) -> "Reexpression":
        """Keep the first k eigenpairs of each direction: the approximate layer."""
        return replace(self, spectra=self.spectra.truncate(k))

    def tensor(self) -> BilinearTensor:
        """Return the same sum as factors, with a hidden unit for each eigenpair: L = R = V."""
        V = self.spectra.vectors.reshape(-1, self.spectra.n_in)
        out = self.spectra.values[..., None] * self.outputs[:, None]
        D = out.reshape(-1, self.outputs.shape[-1]).T
        return BilinearTensor(V, V, D, self.spectra.constant)


@checked
def reexpress(
    tensor: BilinearTensor,
    directions: Float[Tensor, "m n_out"],
    k: int | None = None,
    *,
    require_complete: bool = False,
) -> Reexpression:
    """Write a layer as the eigenvectors of a complete or over-complete set of directions.

    B = sum_k u+_k (x) Q(u_k),  with U^+ = [u+_1 ... u+_m], so that similar directions share their
    common part instead of counting it twice.

    Args:
        tensor: the layer.
        directions: U, one direction u_k in each row.
        k: number of eigenpairs of each direction; all of them by default, which is exact.
        require_complete: refuse directions that do not span all outputs.

    Source: Pearce et al. 2024, appendix B.1. Its u_k are rows in one sentence and columns in
        another: here rows of U, and the u+_k are columns of U^+.
    """
    form = f"(m, {tensor.n_out})"
    inverse, _, rank = _pseudoinverse(directions, "directions", form)
    if directions.shape[1] != tensor.n_out:
        raise BilensError(
            f"directions has shape {tuple(directions.shape)}; expected {form}, one row for each "
            "direction in the outputs of the tensor"
        )
    complete = rank == tensor.n_out
    if require_complete:
        _check_complete("directions", rank, tensor.n_out)
    spectra = tensor.interaction(directions).eigh(k)
    return Reexpression(spectra, inverse.T.to(spectra.values), rank, complete)


def _pseudoinverse(matrix: Tensor, name: str, form: str) -> tuple[Tensor, Tensor, int]:
    """Return the pseudoinverse, the singular values and the rank, computed in float64."""
    if matrix.numel() == 0:
        raise BilensError(
            f"{name} has shape {tuple(matrix.shape)}; expected {form}, with at least one row and "
            "column"
        )
    check_finite(**{name: matrix})
    exact = matrix.double()
    # By the stored dtype: singular values below its rounding are noise, whatever they are
    # computed in.
    relative = max(matrix.shape) * torch.finfo(matrix.dtype).eps
    singular_values = torch.linalg.svdvals(exact.detach())
    rank = int((singular_values > relative * singular_values[0]).sum())
    return torch.linalg.pinv(exact, rtol=relative).to(matrix.dtype), singular_values, rank


def _check_complete(name: str, rank: int, n_out: int) -> None:
    if rank < n_out:
        raise BilensError(
            f"{name} has rank {rank} of {n_out}: some outputs are outside of its span and would "
            "be lost. Add vectors, or drop require_complete to work with its span."
        )


def _check_last_axis(x: Tensor, name: str, length: int, unit: str) -> None:
    if x.shape[-1] != length:
        raise BilensError(
            f"{name} has shape {tuple(x.shape)}; its last axis should have length {length}, one "
            f"number for each {unit}"
        )


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


@checked
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

"""A layer in terms of given vectors: dictionaries of features of its output."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.checks import check_finite, checked
from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor


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
    def of(cls, features: Float[Tensor, "n_out m"]) -> "Dictionary":
        """Return the dictionary of the columns of F, its pseudoinverse computed in float64.

        Singular values up to max(n_out, m) eps sigma_1 count as zero, with eps that of the dtype of
        F. Differentiable as long as the rank does not change.
        """
        if features.numel() == 0:
            raise BilensError(
                f"features has shape {tuple(features.shape)}; expected (n_out, m), with at least "
                "one row and column"
            )
        check_finite(features=features)
        exact = features.double()
        # By the stored dtype: singular values below its rounding are noise, whatever they are
        # computed in.
        relative = max(features.shape) * torch.finfo(features.dtype).eps
        singular_values = torch.linalg.svdvals(exact.detach())
        rank = int((singular_values > relative * singular_values[0]).sum())
        inverse = torch.linalg.pinv(exact, rtol=relative).to(features.dtype)
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


def _check_last_axis(x: Tensor, name: str, length: int, unit: str) -> None:
    if x.shape[-1] != length:
        raise BilensError(
            f"{name} has shape {tuple(x.shape)}; its last axis should have length {length}, one "
            f"number for each {unit}"
        )

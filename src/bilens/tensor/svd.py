"""The tensor's singular value decomposition, output side against pairs of inputs."""

from dataclasses import dataclass, replace
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from bilens.checks import check_count
from bilens.lazy_imports import pd
from bilens.notebook import Shown
from bilens.tensor.exact import exact
from bilens.tensor.quadratic import QuadraticForm

__all__ = ["TensorSVD"]


@exact
@dataclass(frozen=True, eq=False, repr=False)
class TensorSVD(Shown):
    """B = sum_s sigma_s r_s (x) Q_s, the largest singular values first.

    The r_s are orthonormal, and so are the Q_s in the Frobenius inner product. The sign of each
    pair (r_s, Q_s) is arbitrary.

    Attributes:
        values: sigma_s.
        outputs: r_s, one row each.
        components: the interaction matrices Q_s, a batch of quadratic forms.
        norm: Frobenius norm of the whole tensor; norm^2 - sum(values^2) is what was cut off.
    """

    values: Float[Tensor, " k"]
    outputs: Float[Tensor, "k n_out"]
    components: QuadraticForm
    norm: Float[Tensor, ""]

    axes: ClassVar[dict[str, str]] = {"x": "component", "y": "value"}

    def facts(self) -> str:
        """Shape, the largest singular value and the effective rank of the squares."""
        shares = self.values**2 / self.norm**2
        return (
            f"{len(self)} components of {self.outputs.shape[1]} outputs and {self.components.n_in} "
            f"inputs, top singular value {self.values[0]:.4g}, effective rank "
            f"{shares.sum() ** 2 / (shares**2).sum():.1f}"
        )

    def frame(self) -> "pd.DataFrame":
        """A row for each component: its singular value, and its share of the squared norm."""
        values = self.values.detach().cpu()
        shares = (values / self.norm.detach().cpu()) ** 2
        numbers = range(1, len(self) + 1)
        return pd.DataFrame({"component": numbers, "value": values, "share": shares})

    def __len__(self) -> int:
        """Number of components kept."""
        return self.values.shape[0]

    def truncate(self, k: int) -> "TensorSVD":
        """The k largest components."""
        check_count("k", k, len(self), "the number of components kept")
        return replace(
            self,
            values=self.values[:k],
            outputs=self.outputs[:k],
            components=self.components[:k],
        )

    def __call__(self, x: Float[Tensor, "*batch n_in"]) -> Float[Tensor, "*batch n_out"]:
        """Evaluate the tensor through the kept components alone, as a bottleneck."""
        return (self.components(x) * self.values) @ self.outputs

    def projector(self) -> Float[Tensor, "n_out n_out"]:
        """Sum of r_s r_s' over the kept components: what is left of an output.

        `tensor.change_basis(outputs=svd.truncate(k).projector())` is the nearest tensor of rank k.
        """
        return self.outputs.T @ self.outputs

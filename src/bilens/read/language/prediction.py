"""One next-token logit, split exactly: paths past the MLP, and the MLP's eigenvectors."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.errors import BilensError
from bilens.nn.language import LanguageModel
from bilens.read.language.directions import interaction, output_direction
from bilens.read.language.logits import LogitTerms
from bilens.read.language.stream import read_stream

__all__ = ["LogitParts", "split_by_eigenvectors"]


@dataclass(frozen=True, eq=False)
class LogitParts:
    """What adds up to the logit of one token.

        logit = sum_a u . p_a + sum_i lambda_i (v_i . y)^2

    Attributes:
        token: its number.
        sources: names of the p_a: the token itself, each head, biases.
        residual: u . p_a, what each says past the MLP.
        eigenvalues: lambda_i of the eigenvectors that move it most, by |activation|.
        activations: lambda_i (v_i . y)^2 of those.
        rest: what all other eigenvectors add.
    """

    token: int
    sources: tuple[str, ...]
    residual: Float[Tensor, " sources"]
    eigenvalues: Float[Tensor, " k"]
    activations: Float[Tensor, " k"]
    rest: float

    def total(self) -> float:
        """The model's logit."""
        return float(self.residual.sum() + self.activations.sum()) + self.rest


@torch.no_grad()
def split_by_eigenvectors(
    model: LanguageModel, ids: Int[Tensor, " time"], terms: LogitTerms, token: int, k: int = 8
) -> LogitParts:
    """Split the logit of one token after a text.

    Args:
        model: of one block without norms.
        ids: the text.
        terms: its logits by path, as `split_logits(model, ids)` gives them.
        token: whose logit.
        k: how many eigenvectors to name.

    Raises:
        NotBilinearError: the MLP is no tensor.
        BilensError: there is no such token, or k is not positive.

    Source:
        Pearce et al. 2024, sections 4.1 and 6.1.
    """
    if k < 1:
        raise BilensError(f"k={k}, expected at least 1")
    spectrum = interaction(model, output_direction(model, token)).eigh()
    active = spectrum.activations(read_stream(model, ids, len(ids) - 1).total())
    strongest = active.abs().topk(min(k, spectrum.k)).indices
    return LogitParts(
        token=token,
        sources=terms.sources,
        residual=terms.residual[:, token],
        eigenvalues=spectrum.values[strongest],
        activations=active[strongest],
        rest=float(active.sum() - active[strongest].sum()),
    )

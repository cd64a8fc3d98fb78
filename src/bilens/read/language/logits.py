"""One prediction, split exactly at the last layer: paths past its MLP, and what is in it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_sum, full_precision
from bilens.errors import BilensError
from bilens.read.language.stream import head_outputs_at
from bilens.residual import Moment, ResidualModel
from bilens.residual.sums import check_split
from bilens.settings import Count
from bilens.tensor.factors import with_constant

__all__ = ["LogitParts", "LogitTerms", "split_by_eigenvectors", "split_logits"]


@dataclass(frozen=True, eq=False)
class LogitTerms:
    """The logits of the next token as a sum over paths through the last layer.

    With sources p_a of the stream (what was there before the layer, each of its heads, biases), and
    with the scales M and N that the norms before its MLP and before the unembedding have there,

        logits = sum_a W_U N p_a + sum_ab W_U N B(M p_a, M p_b) + b_U

    Attributes:
        sources: names of the p_a.
        residual: what each source says past the MLP; that of biases has b_U.
        pairs: W_U N B(M p_a, M p_b), symmetric in a and b.
        inputs: M p_a, of which the MLP reads the sum.
        scale: N, times the scale of a norm behind the MLP where there is one.
    """

    sources: tuple[str, ...]
    residual: Float[Tensor, "sources vocab"]
    pairs: Float[Tensor, "sources sources vocab"]
    inputs: Float[Tensor, "sources n_in"]
    scale: float

    def total(self) -> Float[Tensor, " vocab"]:
        """The model's logits, before a soft-cap where it has one."""
        return self.residual.sum(0) + self.pairs.sum((0, 1))


@dataclass(frozen=True, eq=False)
class LogitParts:
    """What adds up to the logit of one token.

        logit = sum_a u . N p_a + sum_i N lambda_i (v_i . M y)^2

    Attributes:
        token: its number.
        sources: names of the p_a.
        residual: u . N p_a, what each says past the MLP.
        eigenvalues: lambda_i of the eigenvectors that move it most, by |activation|.
        activations: N lambda_i (v_i . M y)^2 of those.
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
@full_precision
def split_logits(model: ResidualModel, ids: Int[Tensor, " time"], position: int = -1) -> LogitTerms:
    """Split the logits at one position of a text by path through the last layer.

    In a model of one layer the first source is the token itself. At the first position all heads
    look at the one token there is, so that without norms the split needs no text.

    A negative position counts from the end.

    Raises:
        NotBilinearError: the MLP is not a tensor.
        BilensError: the text has no such position.

    Source:
        Pearce et al. 2024, section 6.1; Elhage et al. 2021 for the paths around the MLP.
    """
    if not -len(ids) <= position < len(ids):
        raise BilensError(f"position={position}, expected {-len(ids)} to {len(ids) - 1}")
    position %= len(ids)
    layer = model.n_layers - 1
    tensor, parts = model.mlp(layer), model.layer(layer).mlp
    trace = model.trace(ids[: position + 1])
    found = trace.layers[layer]
    heads, constant = head_outputs_at(model, trace, layer, position)
    sources = torch.cat([found.attn_input[position][None], heads.sum(1), constant[None]])
    read = sources.clone()
    if model.parts.mlp_moment(layer) < Moment.attention(layer):
        read[1:] = 0
    read = parts.centred(read) * found.mlp_scale[position]
    if tensor.constant:
        read = with_constant(read)
        read[:-1, -1] = 0
    last = float(trace.scale[position])
    W_U, b_U = model.unembed()
    scale = last * float(found.mlp_out_scale[position])
    left, right = read @ tensor.left.T, read @ tensor.right.T
    hidden = (left[:, None] * right[None] + left[None] * right[:, None]) / 2
    residual = last * sources @ W_U
    residual[-1] += b_U
    names = ("direct", *(f"head {h}" for h in range(model.n_heads)), "biases")
    pairs = scale * hidden @ tensor.out.T @ W_U
    terms = LogitTerms(names, residual, pairs, read, scale)
    size = float((residual.abs().sum(0) + pairs.abs().sum((0, 1))).max())
    check_split(model, terms.total(), trace.logits[-1], "The split logit", size=size)
    return terms


@torch.no_grad()
@full_precision
def split_by_eigenvectors(
    model: ResidualModel, terms: LogitTerms, token: int, *, k: Count = 8
) -> LogitParts:
    """Split the logit of one token, of what `split_logits` gave, by the eigenvectors of the MLP.

    The k eigenvectors of largest |activation| are named, and the rest added up.

    Raises:
        NotBilinearError: the MLP is not a tensor.
        BilensError: there is no such token, or k is not positive.

    Source:
        Pearce et al. 2024, sections 4.1 and 6.1.
    """
    spectrum = model.interaction(model.direction(token), model.n_layers - 1).eigh()
    active = terms.scale * spectrum.activations(terms.inputs.sum(0))
    strongest = active.abs().topk(min(k, spectrum.k)).indices
    parts = LogitParts(
        token=token,
        sources=terms.sources,
        residual=terms.residual[:, token],
        eigenvalues=spectrum.values[strongest],
        activations=active[strongest],
        rest=float(active.sum() - active[strongest].sum()),
    )
    check_sum(
        "The logit, split by eigenvectors,",
        parts.total(),
        terms.total()[token],
        size=float(active.abs().sum() + parts.residual.abs().sum()),
        dtype=model.parts.embed.module.weight.dtype,
    )
    return parts

"""The stream at one position of a text as a sum of parts, and the logits split by these parts."""

from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_index, check_sum, full_precision
from bilens.errors import BilensError
from bilens.read.language.names import token_names, token_number
from bilens.reading import Fact, Reading
from bilens.registry import reading
from bilens.residual import Moment, ResidualModel, Trace
from bilens.residual.sums import check_split
from bilens.settings import Count
from bilens.tensor.factors import with_constant

SHOWN = 10
"""Logits in the table of a split."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Normalised input of an MLP at one position of a text, as a sum of parts.

        M y_t = M (x_t + sum_h sum_s A^h_ts O_h V_h N_s x_s + biases)

    N and M are the norms before attention and before the MLP, with their scales on the text: a
    scale divides all parts alike. An MLP parallel to attention has only x_t as its input.

    Attributes:
        direct: stream before the layer, x_t.
        heads: output of each head from each earlier token.
        constant: biases of attention.
    """

    direct: Float[Tensor, " d_model"]
    heads: Float[Tensor, "heads time d_model"]
    constant: Float[Tensor, " d_model"]

    def total(self) -> Float[Tensor, " d_model"]:
        """Return the MLP's input, the sum of all parts."""
        return self.direct + self.heads.sum((0, 1)) + self.constant


@torch.no_grad()
@full_precision
def read_stream(
    model: ResidualModel, text: str | Int[Tensor, " time"], position: int, *, layer: int
) -> Stream:
    """Split the MLP input of a layer at one position.

    Source:
        Pearce et al. 2024, section 6.2; Elhage et al. 2021, "Path expansion trick".
    """
    ids = model.ids(text)
    check_index("position", position, len(ids), "a position in the text")
    mlp = model.layer(layer).mlp
    trace = model.trace(ids[: position + 1])
    layer_trace = trace.layers[layer]
    # Everything below is at this position only: the MLP reads no other.
    direct = layer_trace.attn_input[position]
    if model.parts.mlp_moment(layer) < Moment.attention(layer):
        heads, constant = direct.new_zeros(model.n_heads, position + 1, model.d_model), 0 * direct
    else:
        heads, constant = head_outputs_at(model, trace, layer, position)
    # The norm's scale on the text is held fixed, which makes the split linear.
    scale = layer_trace.mlp_scale[position]
    stream = Stream(*(mlp.centred(part) * scale for part in (direct, heads, constant)))
    check_sum(
        f"The input of {mlp.name}, split by source,",
        stream.total(),
        layer_trace.mlp_n[position],
        size=float(scale * (direct.abs() + heads.abs().sum((0, 1)) + constant.abs()).max()),
        dtype=model.parts.embed.module.weight.dtype,
    )
    return stream


def head_outputs_at(
    model: ResidualModel, trace: Trace, layer: int, position: int
) -> tuple[Float[Tensor, "heads time d_model"], Float[Tensor, " d_model"]]:
    """Return the output of each head at a position from each token, and attention's biases."""
    layer_trace, weights = trace.layers[layer], model.layer(layer).heads.weights()
    sources = model.parts.value_sources(layer)
    values = torch.stack([trace.layers[s.layer].attn_n @ s.value for s in sources]).sum(0)
    bias = torch.stack([source.bias for source in sources]).sum(0)
    pattern, scale = layer_trace.pattern[:, position], layer_trace.attn_out_scale[position]
    heads = torch.einsum("ht,hte,hed->htd", pattern, values, weights.out)
    # The values' bias is multiplied by the row sum of the pattern, which need not be 1.
    value_bias = torch.einsum("h,he,hed->d", pattern.sum(-1), bias, weights.out)
    return scale * heads, scale * (value_bias + weights.out_bias)


@dataclass(frozen=True, eq=False, repr=False)
class LogitTerms(Reading):
    """Logits of the next token as a sum over paths through the last layer.

    Let p_a be the parts of the stream: the stream before the layer, each head's output, and biases.
    M and N are the scales of the norms before the MLP and before the unembedding. Then

        logits = sum_a W_U N p_a + sum_ab W_U N B(M p_a, M p_b) + b_U

    Attributes:
        model: the model.
        position: the position in the text.
        sources: names of the p_a.
        residual: logits of each part past the MLP; b_U is added to those of the biases.
        pairs: W_U N B(M p_a, M p_b), symmetric in a and b.
        inputs: M p_a; their sum is the MLP's input.
        scale: N, times the scale of a norm after the MLP, if the model has one.
    """

    model: ResidualModel
    position: int
    sources: tuple[str, ...]
    residual: Float[Tensor, "sources vocab"]
    pairs: Float[Tensor, "sources sources vocab"]
    inputs: Float[Tensor, "sources n_in"]
    scale: float

    axes: ClassVar[dict[str, str]] = {"x": "token", "y": "logit"}
    explanation: ClassVar[str] = (
        "Each logit is exactly the sum of its row: one term for each part of the stream that "
        "passes the last MLP, and one for the MLP."
    )

    def total(self) -> Float[Tensor, " vocab"]:
        """Return the model's logits, before a soft-cap if it has one."""
        return self.residual.sum(0) + self.pairs.sum((0, 1))

    @property
    def title(self) -> str:
        """Heading on a page."""
        return "Logits by path through the last layer"

    def facts(self) -> list[Fact]:
        """Return the position and the most likely token."""
        best = self.total().argmax()[None]
        return [("position", self.position), ("most likely", token_names(self.model, best)[0])]

    def frame(self) -> pd.DataFrame:
        """Return the ten largest logits: their token, value and terms."""
        # Largest logits first: the others are improbable.
        best = self.total().topk(min(SHOWN, self.residual.shape[1]))
        frame = pd.DataFrame(
            {"token": token_names(self.model, best.indices), "logit": best.values.tolist()}
        )
        for name, row in zip(self.sources, self.residual, strict=True):
            frame[name] = row[best.indices].tolist()
        return frame.assign(mlp=self.pairs.sum((0, 1))[best.indices].tolist())


@dataclass(frozen=True, eq=False, repr=False)
class LogitParts(Reading):
    """Logit of one token as a sum over parts of the stream and eigenvectors of the last MLP.

        logit = sum_a u . N p_a + sum_i N lambda_i (v_i . M y)^2

    Attributes:
        token: name of the token.
        sources: names of the p_a.
        residual: u . N p_a, the contribution of each part past the MLP.
        eigenvalues: lambda_i of the eigenvectors of largest |activation|.
        activations: N lambda_i (v_i . M y)^2 of these eigenvectors.
        remainder: sum of the activations of all other eigenvectors.
    """

    token: str
    sources: tuple[str, ...]
    residual: Float[Tensor, " sources"]
    eigenvalues: Float[Tensor, " k"]
    activations: Float[Tensor, " k"]
    remainder: float

    axes: ClassVar[dict[str, str]] = {"x": "term", "y": "logit"}

    def total(self) -> float:
        """Return the model's logit."""
        return float(self.residual.sum() + self.activations.sum()) + self.remainder

    @property
    def title(self) -> str:
        """Heading on a page."""
        return "A logit by eigenvectors of the last MLP"

    def facts(self) -> list[Fact]:
        """Return the token and its logit."""
        return [("token", self.token), ("logit", self.total())]

    def frame(self) -> pd.DataFrame:
        """Return a row for each term; eigenvectors are named by their eigenvalue."""
        eigenvectors = [f"eigenvector {value:.3g}" for value in self.eigenvalues.tolist()]
        return pd.DataFrame(
            {
                "term": [*self.sources, *eigenvectors, "other eigenvectors"],
                "logit": [*self.residual.tolist(), *self.activations.tolist(), self.remainder],
            }
        )


@reading("logits")
@torch.no_grad()
@full_precision
def split_logits(
    model: ResidualModel, text: str | Int[Tensor, " time"], position: int = -1
) -> LogitTerms:
    """Split the logits at one position of a text by path through the last layer.

    In a model of one layer the first source is the token itself. At the first position all heads
    attend to the only token, so without norms the split is the same for every text.

    Args:
        model: the model; its last MLP has to be a tensor.
        text: a string or token ids.
        position: position whose next token is predicted; a negative one counts from the end.

    Raises:
        NotBilinearError: the MLP is not a tensor.

    Source:
        Pearce et al. 2024, section 6.1; Elhage et al. 2021 for the paths around the MLP.
    """
    ids = model.ids(text)
    if not -len(ids) <= position < len(ids):
        raise BilensError(f"position={position}, expected {-len(ids)} to {len(ids) - 1}")
    # Everything after the position is cut off, as the model is causal.
    position %= len(ids)
    layer = model.n_layers - 1
    tensor, parts = model.mlp(layer), model.layer(layer).mlp
    trace = model.trace(ids[: position + 1])
    layer_trace = trace.layers[layer]
    heads, constant = head_outputs_at(model, trace, layer, position)
    sources = torch.cat([layer_trace.attn_input[position][None], heads.sum(1), constant[None]])
    inputs = sources.clone()
    if model.parts.mlp_moment(layer) < Moment.attention(layer):
        # An MLP parallel to attention does not see the heads.
        inputs[1:] = 0
    inputs = parts.centred(inputs) * layer_trace.mlp_scale[position]
    if tensor.constant:
        # The constant coordinate belongs to the biases only, the last source.
        inputs = with_constant(inputs)
        inputs[:-1, -1] = 0
    # Norms divide by the stream of this text, which freezes their scales.
    final_scale = float(trace.scale[position])
    scale = final_scale * float(layer_trace.mlp_out_scale[position])
    left, right = inputs @ tensor.left.T, inputs @ tensor.right.T
    # Symmetric in a and b, since the order of two sources has no meaning.
    hidden = (left[:, None] * right[None] + left[None] * right[:, None]) / 2
    W_U, b_U = model.W_U, model.b_U
    residual = final_scale * sources @ W_U
    # The unembedding's bias belongs to no part of the stream.
    residual[-1] += b_U
    names = ("direct", *(f"head {h}" for h in range(model.n_heads)), "biases")
    pairs = scale * hidden @ tensor.out.T @ W_U
    terms = LogitTerms(model, position, names, residual, pairs, inputs, scale)
    size = float((residual.abs().sum(0) + pairs.abs().sum((0, 1))).max())
    check_split(model, terms.total(), trace.logits[-1], "The split logit", size=size)
    return terms


@torch.no_grad()
@full_precision
def split_by_eigenvectors(terms: LogitTerms, token: str | int, *, k: Count = 8) -> LogitParts:
    """Split the logit of one token, from `split_logits`, by the eigenvectors of the last MLP.

    The k eigenvectors of largest |activation| are named, and all others are summed.

    Raises:
        NotBilinearError: the MLP is not a tensor.

    Source:
        Pearce et al. 2024, sections 4.1 and 6.1.
    """
    model, number = terms.model, token_number(terms.model, token)
    spectrum = model.mlp(model.n_layers - 1).interaction(model.direction(number)).eigh()
    # The eigenvectors are of the whole MLP, so they see the sum of the sources.
    activations = terms.scale * spectrum.activations(terms.inputs.sum(0))
    strongest = activations.abs().topk(min(k, spectrum.k)).indices
    parts = LogitParts(
        token=token_names(model, [number])[0],
        sources=terms.sources,
        residual=terms.residual[:, number],
        eigenvalues=spectrum.values[strongest],
        activations=activations[strongest],
        remainder=float(activations.sum() - activations[strongest].sum()),
    )
    check_sum(
        "The logit, split by eigenvectors,",
        parts.total(),
        terms.total()[number],
        size=float(activations.abs().sum() + parts.residual.abs().sum()),
        dtype=model.parts.embed.module.weight.dtype,
    )
    return parts

"""The stream at one position of a text as a sum of parts, and the logits split by these parts."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from bilens.analysis import Reading
from bilens.checks import check_index, check_sum, detached
from bilens.language.names import in_words, token_names
from bilens.language.sums import check_split
from bilens.sections import Columns, Fact
from bilens.tensor import FactoredMatrix
from bilens.transformer import Moment, Pass, ResidualModel
from bilens.transformer.layers import MLP, folded_output
from bilens.transformer.on_text import LayerOnText


@dataclass(frozen=True, eq=False)
class Sources:
    """A vector or a number at one position of a text, as a sum over the sources of the stream.

    Attributes:
        direct: of the stream before the layer.
        heads: of each token up to the position, through each head.
        constant: of biases.
    """

    direct: Float[Tensor, "*n"]
    heads: Float[Tensor, "heads time *n"]
    constant: Float[Tensor, "*n"]

    def tokens(self) -> Float[Tensor, "time *n"]:
        """Return the part of each token, over all paths."""
        parts = self.heads.sum(0)
        parts[-1] += self.direct
        return parts

    def total(self) -> Float[Tensor, "*n"]:
        """Return the sum of all parts."""
        return self.tokens().sum(0) + self.constant


@detached
def read_stream(
    model: ResidualModel, text: str | Int[Tensor, " time"], position: int, *, layer: int
) -> Sources:
    """Split the normalised MLP input of a layer at one position over the tokens before it.

        M y_t = M (x_t + sum_h sum_s A^h_ts O_h V_h N_s x_s + biases)

    N and M are the norms before attention and before the MLP, with their scales on the text: a
    scale divides all parts alike. An MLP parallel to attention has only x_t as its input.

    Source: Pearce et al. 2024, section 6.2; Elhage et al. 2021, "Path expansion trick".
    """
    ids = model.ids(text)
    check_index("position", position, len(ids), "a position in the text")
    of_text = Pass.of(model, ids[: position + 1], patterns=True)
    on_text = of_text.layer(layer)
    parts = _parts(of_text, layer, on_text)
    if model.modules.mlp_moment(layer) < Moment.attention(layer):
        parts[1:] = 0
    mlp = model.layer(layer).mlp
    # The norm's scale on the text is held fixed, which makes the split linear.
    parts = mlp.scale(on_text.mlp_input[0, -1]) * mlp.centred(parts)
    heads = parts[1:-1].unflatten(0, (model.n_heads, -1))
    stream = Sources(parts[0], heads, parts[-1])
    check_sum(
        f"The input of {mlp.name}, split by source,",
        stream.total(),
        on_text.mlp_n[0, -1],
        size=float(parts.abs().sum(0).max()),
        dtype=model.modules.embed.module.weight.dtype,
    )
    return stream


def _parts(of_text: Pass, layer: int, on_text: LayerOnText) -> Float[Tensor, "parts d_model"]:
    """Return the stream after a layer's heads at the last position, as a sum of parts.

    These are the stream before the layer, each head from each token, and attention's biases.
    """
    parts = of_text.model.modules
    heads, sources, values = parts.layers[layer].heads, parts.value_sources(layer), []
    for source in sources:
        of_source = on_text if source.layer == layer else of_text.layer(source.layer)
        values.append(of_source.attn_n[0] @ source.value)
    bias = torch.stack([source.bias for source in sources]).sum(0)
    weight, out_bias = folded_output(heads.out, heads.out_norm, heads.residual_scale)
    weight = on_text.attn_out_scale[0, -1] * weight.unflatten(1, (heads.n_heads, -1))
    pattern = of_text.pattern(layer)[0, :, -1]
    moved = torch.einsum("ht,hte,dhe->htd", pattern, torch.stack(values).sum(0), weight)
    # The values' bias is multiplied by the row sum of the pattern, which need not be 1.
    constant = torch.einsum("h,he,dhe->d", pattern.sum(-1), bias, weight)
    if out_bias is not None:
        constant = constant + on_text.attn_out_scale[0, -1] * out_bias
    return torch.cat([on_text.attn_input[0, -1:], moved.flatten(0, 1), constant[None]])


def _pairs_through_mlp(
    mlp: MLP, on_text: LayerOnText, parts: Float[Tensor, "parts d_model"]
) -> Float[Tensor, "parts parts d_model"]:
    """Return the output of an MLP at the last position for each pair of parts of its input.

    Parts are normalised, and gate ratios are held fixed. Biases belong to the last part.
    """
    tensor, ratio = mlp.factors(), on_text.gate_ratio[0, -1]
    # A bias after the MLP is one hidden unit more in the tensor; it is no product of inputs.
    first, second = tensor.left[: len(ratio)], tensor.right[: len(ratio)]
    if first.shape[1] > parts.shape[1]:
        parts = functional.pad(parts, (0, 1))
        parts[-1, -1] = 1
    left, right = parts @ first.T, parts @ second.T
    if mlp.gate is None:
        # The second factor is the constant 1.
        right = torch.zeros_like(left)
        right[-1] = 1
    weight, bias = folded_output(mlp.down, mlp.out_norm, mlp.residual_scale)
    # Where act(0) is not 0, a second set of units holds it, with the same output weights.
    weight = weight.repeat(1, len(ratio) // weight.shape[1])
    # Symmetric in both parts, since their order has no meaning.
    hidden = (left[:, None] * right + right[:, None] * left) / 2 * ratio
    rows = hidden @ weight.T
    if bias is not None:
        rows[-1, -1] += bias
    return on_text.mlp_out_scale[0, -1] * rows


@dataclass(frozen=True, eq=False, repr=False)
class LogitTerms(Reading):
    """Logits of the next token as a sum over paths through the last layer.

    Let p_a be the parts of the stream: the stream before the layer, each head's output, and biases.
    M and N are the scales of the norms before the MLP and before the unembedding. B is the MLP with
    its gate ratios. All are held fixed at their values on this text. Then

        logits = sum_a W_U N p_a + sum_ab W_U N B(M p_a, M p_b) + b_U

    A term is a vector of the stream times a column of W_U, so that all terms are one matrix. A
    column of it is the flow into that logit from the last layer. `matrix.top_entries(k)` finds the
    largest terms of all tokens.

    Attributes:
        model: the model.
        position: the position in the text.
        sources: names of the p_a.
        matrix: the terms, rows by part and columns by token: N p_a, then N B(M p_a, M p_b). The
            last column of its left factor is 1 for biases, whose term has b_U.
    """

    model: ResidualModel
    position: int
    sources: tuple[str, ...]
    matrix: FactoredMatrix

    title: ClassVar[str] = "Logits by path through the last layer"
    axes: ClassVar[dict[str, str]] = {"x": "token", "y": "logit"}
    explanation: ClassVar[str] = (
        "Each logit is exactly the sum of its row: one term for each part of the stream that "
        "passes the last MLP, and one for the MLP."
    )

    @property
    def residual(self) -> Float[Tensor, "sources vocab"]:
        """Logits of each part past the MLP; b_U is added to those of the biases."""
        return self.matrix.left[: len(self.sources)] @ self.matrix.right

    @property
    def pairs(self) -> Float[Tensor, "sources sources vocab"]:
        """Terms W_U N B(M p_a, M p_b), symmetric in a and b."""
        n = len(self.sources)
        return self.matrix.left[n:].unflatten(0, (n, n)) @ self.matrix.right

    def through_mlp(self) -> Float[Tensor, " vocab"]:
        """Return the logits through the MLP, the sum of all pairs."""
        return self.matrix.left[len(self.sources) :].sum(0) @ self.matrix.right

    def total(self) -> Float[Tensor, " vocab"]:
        """Return the model's logits, before a soft-cap if it has one."""
        return self.matrix.left.sum(0) @ self.matrix.right

    def facts(self) -> list[Fact]:
        """Return the position and the most likely token."""
        best = self.total().argmax()[None]
        return [
            ("position", self.position),
            ("most likely", in_words(token_names(self.model, best)[0])),
        ]

    def columns(self) -> Columns:
        """Return the ten largest logits: their token, value and terms."""
        # Largest logits first: the others are improbable.
        best = self.total().topk(min(10, self.residual.shape[1]))
        names = [in_words(name) for name in token_names(self.model, best.indices)]
        terms = self.residual[:, best.indices].tolist()
        columns = {"token": names, "logit": best.values.tolist()}
        columns |= dict(zip(self.sources, terms, strict=True))
        return columns | {"mlp": self.through_mlp()[best.indices].tolist()}


@detached
def split_logits(
    model: ResidualModel, prompt: str | Int[Tensor, " time"], position: int = -1
) -> LogitTerms:
    """Split the logits at one position of a text by path through the last layer.

    In a model of one layer the first source is the token itself. At the first position all heads
    attend to the only token, so without norms the split is the same for every text.

    Args:
        model: the model.
        prompt: A text, or token ids.
        position: position whose next token is predicted; a negative one counts from the end.

    Source: Pearce et al. 2024, section 6.1; Elhage et al. 2021 for the paths around the MLP.
    """
    # Everything after the position is cut off, as the model is causal.
    layer, of_text = model.n_layers - 1, Pass.of(model, model.ids(prompt, position), patterns=True)
    position, on_text = of_text.ids.shape[1] - 1, of_text.layer(layer)
    direct, *heads, constant = _parts(of_text, layer, on_text).split(
        [1, *[position + 1] * model.n_heads, 1]
    )
    sources = torch.cat([direct, *(part.sum(0, keepdim=True) for part in heads), constant])
    inputs = sources.clone()
    if model.modules.mlp_moment(layer) < Moment.attention(layer):
        # An MLP parallel to attention does not see the heads.
        inputs[1:] = 0
    # With norms and gate ratios at their values on the text, the last layer is a quadratic map.
    mlp = model.modules.layers[layer].mlp
    inputs = mlp.scale(on_text.mlp_input[0, -1]) * mlp.centred(inputs)
    pairs = _pairs_through_mlp(mlp, on_text, inputs).flatten(0, 1)
    scale = model.modules.scale(of_text.stream[0, -1])
    rows = scale * model.modules.centred(torch.cat([sources, pairs]))
    # The unembedding's bias belongs to no part of the stream: it is one more coordinate.
    rows = functional.pad(rows, (0, 1))
    rows[len(sources) - 1, -1] = 1
    W_U, b_U = model.modules.logit_weights()
    matrix = FactoredMatrix(rows, torch.cat([W_U, b_U[None]]))
    names = ("direct", *(f"head {h}" for h in range(model.n_heads)), "biases")
    terms = LogitTerms(model, position, names, matrix)
    sizes = [(part @ matrix.right).abs().sum(0) for part in rows.split(len(sources))]
    size = float(torch.stack(sizes).sum(0).max())
    check_split(model, terms.total(), of_text.next_logits[0], "The split logit", size=size)
    return terms

"""What a model makes of pairs of tokens, from its weights: matrices of tokens against tokens.

A token alone in the stream is its embedding e, with the vector of its position where positions are
learned. What a norm makes of a stream x is n(x) = x / |x| sqrt(d), and s(x) = sqrt(d) / |x| is its
scale. Let W_U be the unembedding, m_l the MLP of layer l, e' = e + m_l(e) the token with what this
MLP makes of it, O_h V_h the way of values through a head and Q(u) the interaction matrix of an
output u. Then

    bigrams        value(A, C) = s(e_A') W_U_C . (e_A + m_l(e_A))
    attention      score(A, B) = q(n(e_A)) . k(n(e_B)), positions and biases in q and k
    outputs        value(A, C) = W_U_C . O_h V_h n(e_A)
    skip-trigrams  value(A, B) = s(e_B') [u . w + 2 s(e_B) n(e_B)' Q(u) w],  w = O_h V_h n(e_A)

For one layer without norms these are exact parts of the logits. In any other model they leave out
what other layers make of a token, and norms divide by the size of the token and its MLP alone.

`layer` is the number of the layer whose heads and MLP count, `position` the place where the tokens
stand, which learned positions ask for, and `among` the tokens that rows and columns are chosen
from, all by default. What a model lacks of these raises BilensError.

Source: Pearce et al. 2024, section 6.1; Elhage et al. 2021 for heads.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import check_finite, check_index, checked, full_precision
from bilens.errors import BilensError
from bilens.read.language.names import chosen_tokens
from bilens.residual import Moment, ResidualModel
from bilens.residual.sums import check_alone, check_heads, check_mlp
from bilens.settings import Place
from bilens.tensor import FactoredMatrix
from bilens.tensor.factors import fit_input, with_constant

__all__ = [
    "BigramPart",
    "TrigramPart",
    "alone",
    "attention_scores",
    "bigram_matrix",
    "head_outputs",
    "head_writes",
    "skip_trigram_matrix",
]

CHECKED_TOKENS = 32
"""Logits of the model itself that a row of a matrix is checked against."""
BigramPart = Literal["direct", "mlp", "both"]
"""Through the residual stream, through the MLP of a layer, or their sum."""
TrigramPart = Literal["ov", "mlp", "both"]
"""Past the MLP, the same for every B but for scales; in the MLP together with B; or both."""


@torch.no_grad()
@full_precision
def bigram_matrix(
    model: ResidualModel,
    part: BigramPart = "both",
    layer: int = 0,
    *,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> FactoredMatrix:
    """How much each token (rows) raises the logit of each as its successor (columns).

    Raises:
        BilensError: see the module; or an unknown part.
    """
    tokens = chosen_tokens(model, among)
    e = model.embedded(tokens, position)
    x, added, scale = _alone_with_mlp(model, e, layer)
    token, few = int(tokens[0]), tokens[:CHECKED_TOKENS].tolist()
    W_U, b_U = model.unembed(few)
    check_alone(model, layer, token, position, few, scale[0] * (x + added)[0] @ W_U + b_U)
    read = {"direct": x, "mlp": added, "both": x + added}[part]
    return FactoredMatrix(scale * read, model.unembed(tokens.tolist())[0])


@torch.no_grad()
@checked
def attention_scores(
    model: ResidualModel,
    layer: int = 0,
    *,
    distance: Place = 1,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> tuple[FactoredMatrix, ...]:
    """The scores that every token as a query has for every token as a key.

    Rows are the tokens that look, at `position`, columns those that are looked at, `distance`
    places earlier; the batch axis is the heads. Biases, norms of queries and keys and positions
    (where they are vectors `position` has to be given) are all in it. The pattern is

        first * second       bilinear attention, entry by entry
        score * score        squared attention
        softmax of score     over the keys that there are
        softmax of first - lambda softmax of second      differential attention

    before what `attention_norm` divides it by, which depends on the text. In the first layer the
    scores are the model's own; in later ones the part that the tokens' own embeddings make.

    Returns:
        Two batches of matrices for bilinear and differential attention, or else one.

    Raises:
        BilensError: see the module; or the distance is negative.
    """
    position = _query_position(model, distance, position)
    tokens = chosen_tokens(model, among)

    def found(at: int) -> list[tuple[Tensor, Tensor]]:
        n = _attn_input(model, layer, model.embedded(tokens, at))
        return model.queries_keys(layer, n, at)

    return tuple(
        FactoredMatrix(q.transpose(0, 1), k.permute(1, 2, 0))
        for (q, _), (_, k) in zip(found(position), found(position - distance), strict=True)
    )


@torch.no_grad()
@full_precision
def head_outputs(
    model: ResidualModel,
    layer: int = 0,
    *,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> FactoredMatrix:
    """The logits that every token sends past the MLPs where a head looks at it with weight 1.

    Rows are tokens that are looked at, columns outputs; the batch axis is the heads. The scale of
    the last norm, which is that of the token that looks, is left out.

    Raises:
        BilensError: see the module.
    """
    tokens = chosen_tokens(model, among)
    e = model.embedded(tokens, position)
    check_heads(model, layer, alone(model, e[0], layer))
    values = _values(model, layer, e)
    return FactoredMatrix(values, model.heads(layer).out @ model.unembed(tokens.tolist())[0])


@torch.no_grad()
@full_precision
def skip_trigram_matrix(
    model: ResidualModel,
    direction: Float[Tensor, " d_model"],
    head: int,
    part: TrigramPart = "mlp",
    layer: int = 0,
    *,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> FactoredMatrix:
    """How much A ... B raises u through one head that looks at A (rows) from B (columns).

    Raises:
        NotBilinearError: the MLP is not a tensor, and part is not "ov".
        BilensError: see the module; or there is no such head, or an unknown part.
    """
    e = model.embedded(chosen_tokens(model, among), position)
    written = head_writes(model, layer, head, e)
    direction = fit_input(direction, written, constant=False, argument="direction")
    check_finite(direction=direction)
    last = _alone_with_mlp(model, e, layer)[2]
    ov = FactoredMatrix((written @ direction)[:, None], last.T)
    if part == "ov":
        return ov
    form, reader = model.interaction(direction, layer), model.layer(layer).mlp
    x = alone(model, e, layer)
    check_heads(model, layer, x[0])
    check_mlp(model, layer, x[0])
    n = reader.normalised(x)
    # What the head brings has nothing in the constant coordinate: only B brings the biases in.
    now = (with_constant(n) if form.constant else n) * last * reader.scale(x)[:, None]
    mlp = FactoredMatrix(2 * written @ form.dense()[: model.d_model], now.T)
    if part == "mlp":
        return mlp
    return FactoredMatrix(torch.cat([mlp.left, ov.left], 1), torch.cat([mlp.right, ov.right]))


def head_writes(
    model: ResidualModel, layer: int, head: int, e: Float[Tensor, "n d_model"]
) -> Float[Tensor, "n d_model"]:
    """What a head adds where it looks at a token alone, whose embedding is e, with weight 1."""
    check_index("head", head, model.n_heads)
    return _values(model, layer, e)[head] @ model.heads(layer).out[head]


def _values(model: ResidualModel, layer: int, e: Tensor) -> Float[Tensor, "heads n d_head"]:
    """The values of tokens alone, those of the first layer mixed in where the model mixes them."""
    sources = model.value_sources(layer)
    return torch.stack([s.values(_attn_input(model, s.layer, e)) for s in sources]).sum(0)


def alone(model: ResidualModel, e: Float[Tensor, "n d_model"], layer: int) -> Tensor:
    """The stream that a layer reads of tokens alone, or what is left behind the last layer.

    It is the embedding, but where layers read a x + b x_0.
    """
    moment = Moment.mlp(layer - 1) if layer == model.n_layers else Moment.input(layer)
    return model.parts.embedding_share(moment) * e


def _attn_input(model: ResidualModel, layer: int, e: Tensor) -> Float[Tensor, "n d_model"]:
    """What attention reads of tokens alone in the stream, normalised."""
    return model.layer(layer).heads.normalised(alone(model, e, layer))


def _alone_with_mlp(
    model: ResidualModel, e: Tensor, layer: int
) -> tuple[Float[Tensor, "n d_model"], Float[Tensor, "n d_model"], Float[Tensor, "n 1"]]:
    """A token alone behind the last layer, what an MLP adds to it, and the last norm's scale."""
    parts, x = model.parts, alone(model, e, model.n_layers)
    added = model.mlp_output(layer, alone(model, e, layer))
    return parts.centred(x), parts.centred(added), parts.scale(x + added)[:, None]


def _query_position(model: ResidualModel, distance: int, position: int | None) -> int:
    n_positions = model.parts.n_positions
    if position is None:
        if n_positions is not None:
            raise BilensError(
                "position=None, and the model has positions that are vectors, where more counts "
                "than the distance of two tokens; give a place in the text"
            )
        return distance
    if position < distance or (n_positions is not None and position >= n_positions):
        end = " or more" if n_positions is None else f" to {n_positions - 1}"
        raise BilensError(f"position={position}, expected {distance}{end}")
    return position

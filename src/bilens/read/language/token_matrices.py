"""Matrices of tokens against tokens, from the weights: bigrams, attention, skip-trigrams.

Let e be the embedding of a token, with the vector of its position if positions are learned, in a
stream that holds nothing else. A norm maps a stream x to n(x) = s(x) x with the scale
s(x) = sqrt(d) / |x|. W_U is the unembedding, and m_l is the MLP of layer l, so e' = e + m_l(e) is
the token with the MLP's output. V_h O_h are the value and output weights of a head, and Q(u) is the
interaction matrix of an output direction u. Then

    bigrams        value(A, C) = s(e_A') W_U_C . (e_A + m_l(e_A))
    attention      score(A, B) = q(n(e_A)) . k(n(e_B)), including positions and biases
    outputs        value(A, C) = W_U_C . O_h V_h n(e_A)
    skip-trigrams  value(A, B) = s(e_B') [u . w + 2 s(e_B) n(e_B)' Q(u) w],  w = O_h V_h n(e_A)

For one layer without norms these are exact parts of the logits. In other models the effect of other
layers on a token is left out. Each norm divides by the size of the token and its MLP only.

Arguments: `layer` is the number of the layer whose heads and MLP count. `position` is the position
of the tokens, required by models with learned positions. `among` are the tokens of rows and
columns, all by default. Values outside the model raise BilensError.

Source: Pearce et al. 2024, section 6.1; Elhage et al. 2021 for heads.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import check_index, checked, detached
from bilens.errors import BilensError
from bilens.read.language.names import direction_vector, token_range
from bilens.residual import Moment, ResidualModel, queries_keys
from bilens.residual.sums import check_alone, check_heads, check_mlp
from bilens.settings import Place
from bilens.tensor import FactoredMatrix
from bilens.tensor.factors import with_constant

CHECKED_TOKENS = 32
"""Number of the model's own logits that a row of a matrix is checked against."""
BigramPart = Literal["direct", "mlp", "both"]
"""Path through the residual stream, through the MLP of a layer, or the sum of both."""
TrigramPart = Literal["ov", "mlp", "both"]
"""Path past the MLP (the same for every B up to scales), through the MLP with B, or both."""


@detached
def bigram_matrix(
    model: ResidualModel,
    *,
    layer: int,
    part: BigramPart = "both",
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> FactoredMatrix:
    """Return the logit of each token (columns) as the successor of each token (rows)."""
    return bigram_parts(model, layer, position, among)[part]


def bigram_parts(
    model: ResidualModel, layer: int, position: int | None, among: Sequence[int] | None
) -> dict[BigramPart, FactoredMatrix]:
    """Return `bigram_matrix` of every part."""
    tokens = token_range(model, among)
    e = model.parts.embedded(tokens, position)
    x, mlp, scale = _final_stream(model, e, layer)
    # One row is compared with a run in which everything else is silent.
    token, checked_tokens = int(tokens[0]), tokens[:CHECKED_TOKENS].tolist()
    W_U, b_U = model.parts.logit_weights(checked_tokens)
    row = scale[0] * (x + mlp)[0] @ W_U + b_U
    check_alone(model, layer, token, position, checked_tokens, row)
    W_U, _ = model.parts.logit_weights(tokens.tolist())
    written: dict[BigramPart, Tensor] = {"direct": x, "mlp": mlp, "both": x + mlp}
    return {part: FactoredMatrix(scale * rows, W_U) for part, rows in written.items()}


@torch.no_grad()
@checked
def attention_scores(
    model: ResidualModel,
    *,
    layer: int,
    distance: Place = 1,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> tuple[FactoredMatrix, ...]:
    """Return the scores of every token as a query (rows) for every token as a key (columns).

    Queries are at `position`, keys `distance` positions earlier; the batch axis is the heads. The
    scores include biases, norms of queries and keys, and positions; learned positions require
    `position`. The attention pattern is

        first * second       bilinear attention, entry by entry
        score * score        squared attention
        softmax of score     over all earlier keys
        softmax of first - lambda softmax of second      differential attention

    before the division of `attention_norm`, which depends on the text. In the first layer the
    scores are the model's own; in later layers they are the part due to the tokens' embeddings.

    Returns:
        Two batches of matrices for bilinear and differential attention, or else one.
    """
    position = _query_position(model, distance, position)
    tokens = token_range(model, among)

    def rows_at(at: int) -> list[tuple[Tensor, Tensor]]:
        n = _attention_input(model, layer, model.parts.embedded(tokens, at))
        return queries_keys(model, layer, n, at)

    # Each side at its own position, since rotary positions turn them apart.
    pairs = zip(rows_at(position), rows_at(position - distance), strict=True)
    # Rows of (tokens, heads, d_head) become a batch of heads.
    return tuple(FactoredMatrix(q.transpose(0, 1), k.permute(1, 2, 0)) for (q, _), (_, k) in pairs)


@detached
def head_outputs(
    model: ResidualModel,
    *,
    layer: int,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> FactoredMatrix:
    """Return the logits (columns) that a head writes when it attends to a token (rows) only.

    The batch axis is the heads. MLPs after the head are left out, as is the scale of the final
    norm, which depends on the token that attends.
    """
    tokens = token_range(model, among)
    e = model.parts.embedded(tokens, position)
    check_heads(model, layer, _token_stream(model, e[0], layer))
    # Layers that mix the embedding in multiply all earlier writes on the way to the logits.
    out = model.parts.carried(Moment.attention(layer), model.layer(layer).heads.weights().out)
    W_U = model.parts.logit_weights(tokens.tolist())[0]
    return FactoredMatrix(_values(model, layer, e), out @ W_U)


@detached
def skip_trigram_matrix(
    model: ResidualModel,
    token: str | int | Float[Tensor, " d_model"],
    head: int,
    *,
    layer: int,
    minus: str | int | Sequence[str | int] = (),
    part: TrigramPart = "mlp",
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> FactoredMatrix:
    """Return the effect of A (rows) ... B (columns) on an output, through one head.

    The head is at B and attends to A only. The output is a token minus others, or a direction.

    Raises:
        NotBilinearError: the MLP is not a tensor, and part is not "ov".
    """
    u = direction_vector(model, token, minus)
    e = model.parts.embedded(token_range(model, among), position)
    written = _head_output(model, layer, head, e)
    last = _final_stream(model, e, layer)[2]
    by_head, by_mlp = (
        model.parts.carried(moment(layer), u) for moment in (Moment.attention, Moment.mlp)
    )
    # Past the MLP the effect of A is one number, which B only scales by the final norm.
    ov = FactoredMatrix((written @ by_head)[:, None], last.T)
    if part == "ov":
        return ov
    form, mlp_input = model.mlp(layer).interaction(by_mlp), model.layer(layer).mlp
    x = _token_stream(model, e, layer)
    check_heads(model, layer, x[0])
    check_mlp(model, layer, x[0])
    n = mlp_input.normalised(x)
    # The head's output is zero in the constant coordinate: only B brings the biases in.
    right = (with_constant(n) if form.constant else n) * last * mlp_input.scale(x)[:, None]
    # The cross term of (w + n)'Q(w + n) occurs twice.
    mlp = FactoredMatrix(2 * written @ form.dense()[: model.d_model], right.T)
    if part == "mlp":
        return mlp
    # Factors side by side are the factors of the sum.
    return FactoredMatrix(torch.cat((mlp.left, ov.left), 1), torch.cat((mlp.right, ov.right), 0))


def _head_output(
    model: ResidualModel, layer: int, head: int, e: Float[Tensor, "n d_model"]
) -> Float[Tensor, "n d_model"]:
    """Return the output of a head that attends only to a token with embedding e."""
    check_index("head", head, model.n_heads)
    return _values(model, layer, e)[head] @ model.layer(layer).heads.weights().out[head]


def _values(
    model: ResidualModel, layer: int, e: Float[Tensor, "n d_model"]
) -> Float[Tensor, "heads n d_head"]:
    """Return the values of tokens, including those of the first layer if the model mixes them."""
    sources = model.parts.value_sources(layer)
    return torch.stack([s.values(_attention_input(model, s.layer, e)) for s in sources]).sum(0)


def _token_stream(
    model: ResidualModel, e: Float[Tensor, "n d_model"], layer: int
) -> Float[Tensor, "n d_model"]:
    """Return the stream of tokens without context at a layer's input, or after the last layer.

    It is the embedding, unless layers mix the embedding in again as a x + b x_0.
    """
    # Layers that mix the embedding in again change its share on the way.
    moment = Moment.mlp(layer - 1) if layer == model.n_layers else Moment.input(layer)
    return model.parts.embedding_share(moment) * e


def _attention_input(
    model: ResidualModel, layer: int, e: Float[Tensor, "n d_model"]
) -> Float[Tensor, "n d_model"]:
    """Return attention's normalised input for tokens without context."""
    return model.layer(layer).heads.normalised(_token_stream(model, e, layer))


def _final_stream(
    model: ResidualModel, e: Float[Tensor, "n d_model"], layer: int
) -> tuple[Float[Tensor, "n d_model"], Float[Tensor, "n d_model"], Float[Tensor, "n 1"]]:
    """Return a token's stream after the last layer, an MLP's output, and the final norm's scale."""
    parts, x = model.parts, _token_stream(model, e, model.n_layers)
    mlp = model.layer(layer).mlp.stream_output(_token_stream(model, e, layer))
    mlp = parts.carried(Moment.mlp(layer), mlp)
    return parts.centred(x), parts.centred(mlp), parts.scale(x + mlp)[:, None]


def _query_position(model: ResidualModel, distance: int, position: int | None) -> int:
    # Rotary positions depend on the distance only, learned ones on the place.
    n_positions = model.parts.n_positions
    if position is None:
        if n_positions is not None:
            raise BilensError(
                "position=None, but the model has learned positions, so scores depend on more than "
                "the distance of two tokens; name the position of the query"
            )
        return distance
    if position < distance or (n_positions is not None and position >= n_positions):
        end = " or more" if n_positions is None else f" to {n_positions - 1}"
        raise BilensError(f"position={position}, expected {distance}{end}")
    return position

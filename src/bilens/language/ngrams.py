"""N-grams from the weights: bigrams, skip-trigrams of each head, and their matrices.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import check_index, checked, detached
from bilens.errors import BilensError, NotBilinearError
from bilens.language.names import (
    TokenDirection,
    direction_vector,
    in_words,
    token_names,
    token_number,
    token_range,
    top_pairs,
)
from bilens.language.sums import check_alone, check_heads, check_mlp
from bilens.progress import progress_bar
from bilens.sections import Columns, Fact, by_column
from bilens.settings import Count, Index
from bilens.tensor import FactoredMatrix
from bilens.tensor.factored import top_entries
from bilens.tensor.factors import with_constant
from bilens.transformer import ResidualModel
from bilens.transformer.layers import Modules, Moment

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
    e = model.modules.embedded(tokens, position)
    x, mlp, scale = _final_stream(model, e, layer)
    # 32 logits of one row are compared with a run in which everything else is silent.
    token, checked_tokens = int(tokens[0]), tokens[:32].tolist()
    W_U, b_U = model.modules.logit_weights(checked_tokens)
    row = scale[0] * (x + mlp)[0] @ W_U + b_U
    check_alone(model, layer, token, position, checked_tokens, row)
    W_U, _ = model.modules.logit_weights(tokens.tolist())
    rows_of: dict[BigramPart, Tensor] = {"direct": x, "mlp": mlp, "both": x + mlp}
    return {part: FactoredMatrix(scale * rows, W_U) for part, rows in rows_of.items()}


@detached
def attention_scores(
    model: ResidualModel,
    *,
    layer: int,
    distance: Index = 1,
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
        n = _attention_input(model, layer, model.modules.embedded(tokens, at))
        return model.queries_keys(layer, n, at, position + 1)

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
    heads, tokens = model.layer(layer).heads, token_range(model, among)
    e = model.modules.embedded(tokens, position)
    check_heads(model, layer, _token_stream(model, e[0], layer))
    # Layers that mix the embedding in multiply all earlier writes on the way to the logits.
    out = _carried(model.modules, Moment.attention(layer), heads.weights().out)
    W_U = model.modules.logit_weights(tokens.tolist())[0]
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
    e = model.modules.embedded(token_range(model, among), position)
    check_index("head", head, model.n_heads)
    # The head attends only to the token with embedding e.
    rows = _values(model, layer, e)[head] @ model.layer(layer).heads.weights().out[head]
    last = _final_stream(model, e, layer)[2]
    moments = (Moment.attention(layer), Moment.mlp(layer))
    by_head, by_mlp = (_carried(model.modules, moment, u) for moment in moments)
    # Past the MLP the effect of A is one number, which B only scales by the final norm.
    ov = FactoredMatrix((rows @ by_head)[:, None], last.T)
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
    mlp = FactoredMatrix(2 * rows @ form.dense()[: model.d_model], right.T)
    if part == "mlp":
        return mlp
    # Factors side by side are the factors of the sum.
    return FactoredMatrix(torch.cat((mlp.left, ov.left), 1), torch.cat((mlp.right, ov.right), 0))


def _values(model: ResidualModel, layer: int, e: Tensor) -> Tensor:
    """Return the values of tokens, including those of the first layer if the model mixes them."""
    sources = model.modules.value_sources(layer)
    return torch.stack([s.values(_attention_input(model, s.layer, e)) for s in sources]).sum(0)


def _token_stream(model: ResidualModel, e: Tensor, layer: int) -> Tensor:
    """Return the stream of tokens without context at a layer's input, or after the last layer.

    It is the embedding, unless layers mix the embedding in again as a x + b x_0.
    """
    # Layers that mix the embedding in again change its share on the way.
    moment = Moment.mlp(layer - 1) if layer == model.n_layers else Moment.input(layer)
    row = model.modules.mixing()[moment].tolist()
    factors = model.modules.embedding_factors().items()
    return sum(row[row_name] * factor for row_name, factor in factors) * e


def _attention_input(model: ResidualModel, layer: int, e: Tensor) -> Tensor:
    """Return attention's normalised input for tokens without context."""
    return model.layer(layer).heads.normalised(_token_stream(model, e, layer))


def _final_stream(model: ResidualModel, e: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a token's stream after the last layer, an MLP's output, and the final norm's scale."""
    parts, x = model.modules, _token_stream(model, e, model.n_layers)
    mlp = model.layer(layer).mlp.stream_output(_token_stream(model, e, layer))
    mlp = _carried(parts, Moment.mlp(layer), mlp)
    return parts.centred(x), parts.centred(mlp), parts.scale(x + mlp)[:, None]


def check_position(model: ResidualModel, position: int | None) -> None:
    """Raise if a position is named that changes nothing."""
    if position is not None and model.modules.n_positions is None:
        raise BilensError(
            f"position={position} has no effect on a model without learned positions; leave it out"
        )


def _query_position(model: ResidualModel, distance: int, position: int | None) -> int:
    # Rotary positions depend on the distance only, learned ones on the place.
    n_positions = model.modules.n_positions
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


@dataclass(frozen=True, eq=False, repr=False)
class NGramReading(Reading):
    """N-grams of a token, from the weights.

    Attributes:
        direction: the token, and those that are subtracted.
        layer: number of the layer whose heads and MLP count.
        preceding: tokens that make it likely.
        following: tokens that it makes likely.
        heads: skip-trigrams of each head that end in it; empty if the MLP is not a tensor.
        left_out: reason why skip-trigrams are missing, if they are.
    """

    direction: TokenDirection
    layer: int
    preceding: Columns
    following: Columns
    heads: list[Columns]
    left_out: str = ""

    axes: ClassVar[dict[str, str]] = {"x": "tokens", "y": "value", "color": "table"}

    def facts(self) -> list[Fact]:
        return [
            ("token", str(self.direction)),
            ("layer", self.layer),
            ("heads with skip-trigrams", len(self.heads)),
        ]

    def columns(self) -> Columns:
        """Return all tables as one: the table, its tokens, and their value."""
        token, rows = in_words(self.direction.token), []
        tables = {f"before {token}": self.preceding, f"after {token}": self.following}
        tables |= {f"head {i}": pairs for i, pairs in enumerate(self.heads)}
        for name, table in tables.items():
            for *tokens, value in zip(*words_of(table).values(), table["value"], strict=True):
                rows.append((name, " ".join(tokens), value))
        return by_column(["table", "tokens", "value"], rows)


@checked
def read_ngrams(
    model: ResidualModel,
    token: str | int,
    *,
    layer: int,
    minus: str | int | Sequence[str | int] = (),
    k: Count = 20,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> NGramReading:
    """Find k tokens that precede a token, k that follow it, and k skip-trigrams of each head.

    Tokens to subtract count in skip-trigrams only, which need a bilinear MLP.

    Args:
        model: the model.
        token: the token, by name or number.
        layer: number of the layer whose heads and MLP count.
        minus: tokens whose mean is subtracted from the output.
        k: number of rows of each table.
        position: position of the tokens, required by models with learned positions.
        among: tokens that skip-trigrams consist of; all by default.

    Raises:
        BilensError: a token is unknown, or an option has no effect on this model.
    """
    check_position(model, position)
    token_id = token_number(model, token)
    options: dict[str, Any] = {"layer": layer, "k": k, "position": position}
    heads: list[Columns] = []
    # Bigrams need no tensor, and are read even where skip-trigrams cannot be.
    left_out = ""
    try:
        for head in range(model.n_heads):
            pairs = skip_trigrams(model, token, head, minus=minus, among=among, **options)
            heads.append(pairs.to_dict("list"))
    except NotBilinearError as error:
        left_out = str(error)
        for name, value in (("minus", minus), ("among", among)):
            if value is not None and value != ():
                raise NotBilinearError(
                    f"{name} counts in skip-trigrams only, which this layer has none of: {error}"
                ) from error
    direction = TokenDirection.of(model, token, minus)
    before, after = (
        find(model, token_id, **options).to_dict("list") for find in (preceding, following)
    )
    return NGramReading(direction, layer, before, after, heads, left_out)


@checked
def following(
    model: ResidualModel,
    token: str | int,
    *,
    layer: int,
    part: BigramPart = "both",
    k: Count = 10,
    position: int | None = None,
) -> pd.DataFrame:
    """Return the k most likely successors of a token; see `bigram_matrix`.

    Returns:
        Columns token, direct, mlp and value, the largest value first; in logits.

    Source: Pearce et al. 2024, section 6.1 and Table 1.
    """
    return _neighbours(model, bigram_parts(model, layer, position, None), token, part, k)


@checked
def preceding(
    model: ResidualModel,
    token: str | int,
    *,
    layer: int,
    part: BigramPart = "both",
    k: Count = 10,
    position: int | None = None,
) -> pd.DataFrame:
    """Return the k tokens that make a token most likely to follow; columns as in `following`."""
    matrices = bigram_parts(model, layer, position, None)
    return _neighbours(model, {name: M.T for name, M in matrices.items()}, token, part, k)


@checked
def bigrams(
    model: ResidualModel,
    *,
    layer: int,
    part: BigramPart = "both",
    k: Count = 20,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> pd.DataFrame:
    """Return the k most salient bigrams of the vocabulary; see `bigram_matrix`.

    Returns:
        Columns input, output, direct, mlp and value, the largest value first; in logits.

    Source: Pearce et al. 2024, Table 6.
    """
    # The ranking is by one part, and the table shows both.
    matrices = bigram_parts(model, layer, position, among)
    parts: dict[str, FactoredMatrix] = {name: matrices[name] for name in ("direct", "mlp")}
    return pd.DataFrame(top_pairs(model, ("input", "output"), [matrices[part]], parts, k, among))


@checked
def skip_trigrams(  # noqa: PLR0913
    model: ResidualModel,
    token: str | int | Float[Tensor, " d_model"],
    head: int,
    *,
    layer: int,
    minus: str | int | Sequence[str | int] = (),
    part: TrigramPart = "mlp",
    k: Count = 20,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> pd.DataFrame:
    """Return the k pairs A ... B that raise an output most through one head.

    The output is a token minus others, or a direction; see `skip_trigram_matrix`.

    Returns:
        Columns virtual (A), direct (B), ov, mlp and value, the largest value first; in logits for
        a head that attends to A only.

    Raises:
        NotBilinearError: the MLP is not a tensor.

    Source: Pearce et al. 2024, section 6.1 and Table 7.
    """
    options: dict[str, Any] = {"layer": layer, "position": position, "among": among}
    matrix = partial(skip_trigram_matrix, model, token, head, minus=minus, **options)
    parts = {"ov": matrix(part="ov"), "mlp": matrix(part="mlp")}
    sides = ("virtual", "direct")
    return pd.DataFrame(top_pairs(model, sides, [matrix(part=part)], parts, k, among))


@detached
def pair_trigrams(
    model: ResidualModel, *, k: Count = 20, among: Sequence[int] | None = None
) -> pd.DataFrame:
    """Return the k triples A, B -> C in which A raises the probability of C after B the most.

        value(A, B, C) = p(C | A B) - mean over A' of p(C | A' B)

    Every text of two tokens is tried, after the token that texts begin with if the model has one.
    So all heads and layers count, with their actual patterns and norms. `skip_trigrams` describes
    single heads in logits, where tokens that never occur can have the largest numbers. Here only
    probabilities count. Time grows with the square of the number of tokens; a vocabulary of
    thousands takes a GPU.

    Returns:
        Columns virtual (A), direct (B), output (C) and value, the largest value first.
    """
    tokens = token_range(model, among)
    with progress_bar("texts of two tokens", total=len(tokens)) as bar:

        def gains() -> Iterator[Tensor]:
            # One B at a time, so that the probabilities after all its texts fit in memory.
            for second in tokens:
                # Texts of two tokens that run at once; each has the probability of every token.
                parts = [_next_token(model, firsts, second) for firsts in tokens.split(1024)]
                probabilities = torch.cat(parts)
                bar.update()
                # Minus the mean over A, which is the part that B explains by itself.
                yield probabilities - probabilities.mean(0)

        top = top_entries(gains(), k)
    # The blocks are stacked: all rows of the first B, then all rows of the second B, ...
    second, first = top.rows // len(tokens), top.rows % len(tokens)
    columns = {"virtual": tokens[first], "direct": tokens[second], "output": top.columns}
    frame = pd.DataFrame({name: token_names(model, ids) for name, ids in columns.items()})
    return frame.assign(value=top.values.tolist())


def _next_token(model: ResidualModel, firsts: Tensor, second: Tensor) -> Tensor:
    """Return the probabilities of the token after each text of two tokens."""
    texts = torch.stack([firsts, second.expand_as(firsts)], 1)
    begin = getattr(model.model.config, "bos_token_id", None)
    # Models that were trained with a first token know no texts without it.
    if begin is not None:
        texts = torch.cat([torch.full_like(texts[:, :1], begin), texts], 1)
    return model.logits(texts)[:, -1].softmax(-1)


def _neighbours(
    model: ResidualModel,
    matrices: dict[BigramPart, FactoredMatrix],
    token: str | int,
    part: BigramPart,
    k: int,
) -> pd.DataFrame:
    """Return the largest values in a token's row of the matrices."""
    index = torch.tensor([token_number(model, token)])
    # A row of each factored matrix; the whole matrix has vocab^2 entries.
    rows = {name: M.rows(index)[0] for name, M in matrices.items()}
    best = rows[part].topk(min(k, len(rows[part]))).indices
    columns = {"direct": rows["direct"], "mlp": rows["mlp"], "value": rows[part]}
    values = {name: row[best].tolist() for name, row in columns.items()}
    return pd.DataFrame({"token": token_names(model, best), **values})


def words_of(table: Columns) -> dict[str, list[str]]:
    """Return the columns of tokens, in words."""
    tokens = {name: cells for name, cells in table.items() if isinstance(cells[0], str)}
    return {name: [in_words(token) for token in cells] for name, cells in tokens.items()}


def _carried(modules: Modules, moment: Moment, rows: Tensor) -> Tensor:
    """Return rows that are written at a moment as the stream after the last layer has them."""
    # Layers that mix the embedding in multiply the stream by a number. The same number turns a
    # direction of the last stream into the one that it reads of those rows.
    return float(modules.mixing()[-1, moment]) * rows

"""Heads from the weights: tokens that they attend to, outputs that they raise, and composition."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import check_count, check_index, checked, detached
from bilens.errors import BilensError
from bilens.language.names import token_names, token_range, top_pairs
from bilens.language.ngrams import attention_scores, check_position, head_outputs
from bilens.nn import ATTENTIONS
from bilens.sections import Columns, Fact, stacked
from bilens.settings import Count
from bilens.tensor import FactoredMatrix
from bilens.transformer import ResidualModel
from bilens.transformer.layers import Moment


class Group(NamedTuple):
    """Heads of a layer, or its MLP, as writers or readers of the stream at a moment.

    The cores are matrices with the Frobenius norms of their maps.
    """

    moment: Moment
    names: list[str]
    cores: Float[Tensor, "names r n"]


@dataclass(frozen=True, eq=False, repr=False)
class CompositionScores(Reading):
    """Scores of every writer to the residual stream with every later reader.

    Attributes:
        writers: names such as `head 0.2`, layer and head, or `mlp 0`; the last MLP has no readers.
        readers: names such as `head 1.2 Q`, `K` or `V`, and `mlp 1 L` or `R`, the sides of a gated
            MLP, or `in`. Two pairs of queries and keys have numbers, such as Q2. Heads of the
            first layer, which see only the embedding, are not among them.
        scores: 0 to 1; NaN if the reader is not after the writer.
        baseline: root mean square of the score over all rotations of one against the other.
    """

    writers: tuple[str, ...]
    readers: tuple[str, ...]
    scores: Float64[Tensor, "writers readers"]
    baseline: float

    title: ClassVar[str] = "Composition of heads and MLPs"
    axes: ClassVar[dict[str, str]] = {"x": "reader", "y": "score", "color": "writer"}
    explanation: ClassVar[str] = (
        "The score is the share of a writer's output that is in a reader's input space. Random "
        "maps have the baseline as their root mean square."
    )

    def facts(self) -> list[Fact]:
        return [
            ("writers", len(self.writers)),
            ("readers", len(self.readers)),
            ("baseline", self.baseline),
        ]

    def columns(self) -> Columns:
        """Return the 20 pairs of highest score; see `pairs`."""
        return self.pairs(20)

    def pairs(self, k: Count) -> Columns:
        """Return the k pairs of highest score, and the excess of each over the baseline."""
        scores = self.scores.nan_to_num(-1).flatten()
        order = scores.argsort(descending=True, stable=True)[: min(k, int((scores >= 0).sum()))]
        rows, columns = order // len(self.readers), order % len(self.readers)
        return {
            "writer": [self.writers[i] for i in rows.tolist()],
            "reader": [self.readers[i] for i in columns.tolist()],
            "score": scores[order].tolist(),
            "excess": (scores[order] - self.baseline).tolist(),
        }


@detached
def composition_scores(model: ResidualModel) -> CompositionScores:
    """Compute |W R|_F / (|W|_F |R|_F) for every writer W and every later reader R.

    Writers are W_V W_O of a head and D of an MLP. Readers of a head are W_Q W_K' and its transpose
    (Q- and K-composition) and W_V W_O (V-composition). Readers of an MLP are its L and R, or its
    inner map if it has no gate. If either is rotated at random against the other, the score's mean
    square is exactly 1 / d_model, which is the baseline.

    Gains and centring of norms are included. Their scale cancels in the ratio, as do the shares of
    `value_mix` and `embed_mix`. Rotary positions are those of a token that attends to itself.

    Source: Elhage et al. 2021, "Two-layer attention-only transformers" and its footnote on
        composition scores of random matrices.
    """
    # The last MLP has no readers, and heads of the first layer have no writers.
    writers = list(_writers(model))[:-1]
    names: list[str] = []
    columns = []
    # Only writers are held: there are fewer of them, and each reader meets all before it.
    for reader in _readers(model):
        if reader.moment > Moment.input(0):
            names += reader.names
            columns.append(torch.cat([_scores(writer, reader) for writer in writers]))
    return CompositionScores(
        writers=tuple(name for group in writers for name in group.names),
        readers=tuple(names),
        scores=torch.cat(columns, 1).cpu() if columns else torch.zeros(0, 0, dtype=torch.float64),
        baseline=model.d_model**-0.5,
    )


def _writers(model: ResidualModel) -> Iterator[Group]:
    for layer in range(model.n_layers):
        OV, D = model.ov(layer), model.layer(layer).mlp.output_weights()
        # Norms are those of small cores, so no (d_model, d_model) map is formed.
        W = _core(OV.left) @ OV.right
        yield Group(Moment.attention(layer), _head_names(model, layer), W)
        yield Group(Moment.mlp(layer), [f"mlp {layer}"], _core(D.T)[None])


def _readers(model: ResidualModel) -> Iterator[Group]:
    for layer in range(model.n_layers):
        QK = model.qk(layer)
        sides: dict[str, FactoredMatrix] = {}
        for i, matrices in enumerate(QK, start=1):
            suffix = i if len(QK) > 1 else ""
            # A query and a key read the same form from its two sides.
            sides |= {f"Q{suffix}": matrices, f"K{suffix}": matrices.T}
        for side, matrices in (sides | {"V": model.ov(layer)}).items():
            # |W L Q| = |W L| for orthonormal rows Q, so the right factor shrinks to its core.
            R = matrices.left @ _core(matrices.right.mT).mT
            names = [f"{head} {side}" for head in _head_names(model, layer)]
            yield Group(Moment.input(layer), names, R)
        for side, weight in model.layer(layer).mlp.input_weights().items():
            moment, names = model.modules.mlp_moment(layer), [f"mlp {layer} {side}"]
            yield Group(moment, names, _core(weight).T[None])


def _head_names(model: ResidualModel, layer: int) -> list[str]:
    return [f"head {layer}.{head}" for head in range(model.n_heads)]


def _core(A: Float[Tensor, "*batch n_out n"]) -> Float[Tensor, "*batch small n"]:
    """Return the R factor of the QR decomposition: |R W| = |A W| for every W."""
    return torch.linalg.qr(A.double(), mode="r").R.to(A.dtype)


def _scores(writer: Group, reader: Group) -> Float64[Tensor, "writers readers"]:
    W, R = writer.cores, reader.cores
    shape = len(W), len(R)
    if writer.moment > reader.moment:
        return torch.full(shape, torch.nan, dtype=torch.float64, device=W.device)
    # One product of all with all: a batch of products would copy each core for each partner.
    flat = W.flatten(0, 1) @ R.transpose(0, 1).flatten(1)
    squares = flat.square_().view(shape[0], -1, shape[1], R.shape[2])
    norms = squares.sum((1, 3), dtype=torch.float64).sqrt()
    sizes = [torch.linalg.matrix_norm(x, dtype=torch.float64) for x in (W, R)]
    size = sizes[0][:, None] * sizes[1]
    # A map of zeros reads nothing.
    return torch.where(size > 0, norms / size, 0.0)


@dataclass(frozen=True, eq=False, repr=False)
class HeadPairs(Reading):
    """Pairs of tokens with the largest and with the smallest values, the extremes first."""

    highest: Columns
    lowest: Columns

    title: ClassVar[str] = "Pairs of tokens"

    def facts(self) -> list[Fact]:
        """Return the number of pairs."""
        return [("pairs", len(self.highest["value"]))]

    def columns(self) -> Columns:
        """Return the pairs with the largest values."""
        return self.highest


@dataclass(frozen=True, eq=False, repr=False)
class AttentionReading(Reading):
    """Heads of a layer, and the composition of all heads and MLPs of the model.

    Attributes:
        heads: by the number of each head, its pairs of query and key, `attends most` and `attends
            least`; pairs of a key and the output that it `raises` or `lowers`; and the strongest
            `components` of these outputs. Where the pattern is not ordered by one number for two
            tokens, as in differential attention, the first two are missing.
        layer: its number.
        distance: distance from a query back to its keys, in tokens.
        composition: composition scores of the model.
    """

    heads: dict[int, dict[str, Columns]]
    layer: int
    distance: int
    composition: CompositionScores

    axes: ClassVar[dict[str, str]] = {"x": "key", "y": "value", "color": "head"}

    def facts(self) -> list[Fact]:
        return [("layer", self.layer), ("heads", len(self.heads))]

    def columns(self) -> Columns:
        """Return the outputs that each head raises most: key, output, and value."""
        raises = {head: tables["raises"] for head, tables in self.heads.items()}
        return stacked({**x, "head": [head] * len(x["key"])} for head, x in raises.items())


@checked
def read_attention(
    model: ResidualModel,
    *,
    layer: int,
    heads: Sequence[int] | None = None,
    k: Count = 10,
    components: int = 2,
    distance: int = 1,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> AttentionReading:
    """Find the tokens that heads of a layer attend to and the outputs that they raise.

    Args:
        model: the model.
        layer: number of the layer.
        heads: numbers of the heads; all by default.
        k: number of pairs of each kind.
        components: number of singular components.
        distance: distance from the query back to the key, in tokens.
        position: position of the query, required by models with learned positions.
        among: tokens of the pairs, such as the most frequent ones; all by default.

    Raises:
        BilensError: a head or a position does not exist, or the position has no effect.
    """
    check_position(model, position)
    numbers = range(model.n_heads) if heads is None else heads
    # A head writes at the query what it reads at the key, `distance` before it.
    key_position = None if position is None else position - distance
    tables: dict[int, dict[str, Columns]] = {head: {} for head in numbers}
    # A difference of two softmaxes does not order pairs by one number.
    if ATTENTIONS[model.modules.attention].product:
        attends = attention_pairs(
            model, numbers, layer=layer, k=k, distance=distance, position=position, among=among
        )
        for head, pairs in zip(numbers, attends, strict=True):
            tables[head] = {"attends most": pairs.highest, "attends least": pairs.lowest}
    matrices = head_outputs(model, layer=layer, position=key_position, among=among)
    outputs = output_pairs(model, numbers, layer=layer, k=k, position=key_position, among=among)
    sides = ("key", "output")
    for head, pairs in zip(numbers, outputs, strict=True):
        svd = token_components(
            model, matrices[head], sides=sides, components=components, k=k, among=among
        ).to_dict("list")
        tables[head] |= {"raises": pairs.highest, "lowers": pairs.lowest, "components": svd}
    return AttentionReading(tables, layer, distance, composition_scores(model))


@checked
def attention_pairs(
    model: ResidualModel,
    heads: Sequence[int],
    *,
    layer: int,
    k: Count = 20,
    distance: int = 1,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> list[HeadPairs]:
    """Find the pairs of query and key with the largest and smallest scores of each head.

    The value is the pattern before any normalisation. In bilinear attention it is the product of
    both scores, which has a sign. In squared attention it is the square of the score, and under a
    softmax the score itself, an exponent. See `attention_scores`.

    Returns:
        For each head frames with columns query, key, the scores if they are multiplied, and value.

    Raises:
        BilensError: differential attention, whose pattern is not ordered by one number a pair.
    """
    product = ATTENTIONS[model.modules.attention].product
    if not product:
        raise BilensError(
            f"attention={model.modules.attention!r} has a pattern that is not ordered by one "
            "number for two tokens; read each of its attention_scores"
        )
    scores = attention_scores(model, layer=layer, distance=distance, position=position, among=among)
    # Bilinear attention multiplies two scores, whose signs are worth showing.
    names = ["first", "second"] if len(scores) == 2 else ["score"]

    pairs = []
    for head in heads:
        index = check_index("head", head, model.n_heads)
        # The pattern as a product of scores: [0, 1] in bilinear, [0, 0] in squared attention.
        factors = [scores[pair][index] for pair in product]
        parts = dict(zip(names, factors, strict=False)) if len(product) > 1 else {}
        pairs.append(_pairs(model, ("query", "key"), factors, parts, k, among))
    return pairs


@checked
def output_pairs(
    model: ResidualModel,
    heads: Sequence[int],
    *,
    layer: int,
    k: Count = 20,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> list[HeadPairs]:
    """Find the outputs that each head raises and lowers most, and the token it attends to.

    See `head_outputs`.

    Returns:
        For each head frames with columns key, output and value, in logits.
    """
    outputs = head_outputs(model, layer=layer, position=position, among=among)
    numbers = [check_index("head", head, model.n_heads) for head in heads]
    return [_pairs(model, ("key", "output"), [outputs[n]], {}, k, among) for n in numbers]


@detached
def token_components(
    model: ResidualModel,
    matrix: FactoredMatrix,
    *,
    sides: tuple[str, str],
    components: int = 4,
    k: Count = 10,
    among: Sequence[int] | None = None,
) -> pd.DataFrame:
    """Return the strongest singular components of a matrix of tokens, with their tokens.

    M[A, B] = sum_s sigma_s l_s[A] r_s[B]. Two tokens of equal sign raise the entry, and two of
    opposite sign lower it. Signs are chosen so that the first token on the left is positive.

    Args:
        model: model whose tokenizer names the tokens.
        matrix: scores or outputs of one head by tokens, or a product of such.
        sides: names of rows and columns, such as query and key, or key and output.
        components: number of components.
        k: number of tokens on either side of each, those of largest |weight|.
        among: tokens of rows and columns; all by default.

    Returns:
        Columns component, sigma, and for either side its token and weight.
    """
    tokens = token_range(model, among)
    if matrix.batch_shape or (matrix.n_rows, matrix.n_columns) != (len(tokens), len(tokens)):
        raise BilensError(
            f"matrix is of shape {(*matrix.batch_shape, matrix.n_rows, matrix.n_columns)}, "
            f"expected one table of {len(tokens)} tokens against {len(tokens)}; choose a head of "
            "it, as in matrix[0], and the tokens that it was made with"
        )
    check_count("k", k, len(tokens), "the number of tokens")
    # No matrix has more components than its rank.
    most = min(matrix.rank, len(tokens))
    check_count("components", components, most, "all components")
    svd, names, tables = matrix.svd(components), token_names(model, tokens), []
    for index, sigma in enumerate(svd.values.tolist()):
        left, right = svd.left[index], svd.right[index]
        # A component has no sign of its own.
        sign = torch.where(left[left.abs().argmax()] < 0, -1, 1).to(left)
        columns = {"component": [index] * k, "sigma": [sigma] * k}
        # Both sides are turned, so that their product stays.
        for side, vector in zip(sides, (sign * left, sign * right), strict=True):
            best = vector.abs().topk(k).indices
            columns[side] = [names[i] for i in best.tolist()]
            columns[f"{side} weight"] = vector[best].tolist()
        tables.append(columns)
    return pd.DataFrame(stacked(tables))


def _pairs(
    model: ResidualModel,
    sides: tuple[str, str],
    factors: list[FactoredMatrix],
    parts: dict[str, FactoredMatrix],
    k: int,
    among: Sequence[int] | None,
) -> HeadPairs:
    pairs = partial(top_pairs, model, sides, factors, parts, k, among)
    return HeadPairs(pairs(), pairs(largest=False))

"""Heads from the weights: the tokens that they attend to, and the outputs that they raise."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pandas as pd
import torch

from bilens.checks import check_count, check_index, detached, full_precision
from bilens.errors import BilensError
from bilens.lazy_imports import go
from bilens.nn import ATTENTIONS
from bilens.read.language.composition import Composition, composition_figure, composition_scores
from bilens.read.language.names import token_names, token_range, top_pairs
from bilens.read.language.ngrams import ngram_table
from bilens.read.language.token_matrices import attention_scores, head_outputs
from bilens.reading import Fact, Picture, Reading, Section
from bilens.registry import reading
from bilens.residual import ResidualModel
from bilens.settings import Count
from bilens.tensor import FactoredMatrix

OPEN = 4
"""Heads of a layer whose section is open at first."""


@dataclass(frozen=True, eq=False)
class HeadPairs:
    """Pairs of tokens with the largest and with the smallest values, the extremes first.

    Attributes:
        highest: largest values.
        lowest: smallest values.
    """

    highest: pd.DataFrame
    lowest: pd.DataFrame


@dataclass(frozen=True, eq=False)
class HeadReading:
    """One head in pairs of tokens.

    Attributes:
        head: its number.
        attends: pairs of query and key by score; None if the pattern is not ordered by one number
            for two tokens, as in differential attention.
        outputs: pairs of a key and the output that it raises or lowers.
        components: strongest singular components of these outputs.
    """

    head: int
    attends: HeadPairs | None
    outputs: HeadPairs
    components: pd.DataFrame

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the pairs that it attends to, and those that it raises and lowers."""
        tables = {}
        if self.attends is not None:
            tables = {"attends most": self.attends.highest, "attends least": self.attends.lowest}
        tables |= {"raises": self.outputs.highest, "lowers": self.outputs.lowest}
        return {**tables, "components": self.components}


@dataclass(frozen=True, eq=False, repr=False)
class AttentionReading(Reading):
    """Heads of a layer, and the composition of all heads and MLPs of the model.

    Attributes:
        heads: reading of each head.
        layer: number of the layer.
        distance: distance from a query back to its keys, in tokens.
        composition: composition scores of the model.
    """

    heads: list[HeadReading]
    layer: int
    distance: int
    composition: Composition

    axes: ClassVar[dict[str, str]] = {"x": "key", "y": "value", "color": "head"}

    def facts(self) -> list[Fact]:
        """Return the layer and the number of heads."""
        return [("layer", self.layer), ("heads", len(self.heads))]

    def frame(self) -> pd.DataFrame:
        """Return the outputs that each head raises most: key, output, and value."""
        frames = [reading.outputs.highest.assign(head=reading.head) for reading in self.heads]
        return pd.concat(frames, ignore_index=True)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the tables of each head, and the strongest composition."""
        tables = {
            f"head {self.layer}.{reading.head} {caption}": frame
            for reading in self.heads
            for caption, frame in reading.tables().items()
        }
        return {**tables, "composition": self.composition.frame()}

    def figures(self) -> "dict[str, go.Figure]":
        """Draw the composition of all heads and MLPs."""
        return {"composition": composition_figure(self.composition)}

    def sections(self) -> list[Section]:
        """Return the sections on the heads of a layer, and on their composition."""
        text = (
            "Most and least: pairs of a token (query) and one that it attends to (key), "
            f"{self.distance} earlier, by the head's pattern before any normalisation; under a "
            "softmax by its exponent. Raises and lowers: the head's contribution to an output, "
            "past the MLP, when it attends to a single token, in logits."
        )
        rows = [
            [
                ngram_table(frame, f"head {self.layer}.{head.head}: {caption}")
                for caption, frame in head.tables().items()
                if caption != "components"
            ]
            for head in self.heads
        ]
        heads = Section(f"Heads of layer {self.layer}", text, rows, folded=len(rows) > OPEN)
        composition = Section(
            "Which components read the output of heads",
            "The norm of the product of a writer's and a reader's matrix, over the product of "
            "their norms, less the norm for two random ones. Q, K and V are a head's queries, "
            "keys and values; L and R are the two sides of a bilinear layer.",
            [[Picture(name, figure) for name, figure in self.figures().items()]],
            folded=len(rows) > OPEN,
        )
        return [heads, composition]


@reading("heads")
@full_precision
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
    """
    numbers = range(model.n_heads) if heads is None else heads
    # A head writes at the query what it reads at the key, `distance` before it.
    key_position = None if position is None else position - distance
    attends: list[HeadPairs] | list[None] = [None] * len(numbers)
    # A difference of two softmaxes does not order pairs by one number.
    if ATTENTIONS[model.parts.attention].product:
        attends = attention_pairs(
            model, numbers, layer=layer, k=k, distance=distance, position=position, among=among
        )
    matrices = head_outputs(model, layer=layer, position=key_position, among=among)
    outputs = output_pairs(model, numbers, layer=layer, k=k, position=key_position, among=among)
    singular = [
        token_components(
            model, matrices[head], sides=("key", "output"), components=components, k=k, among=among
        )
        for head in numbers
    ]
    parts = zip(numbers, attends, outputs, singular, strict=True)
    readings = [HeadReading(*part) for part in parts]
    return AttentionReading(readings, layer, distance, composition_scores(model))


@full_precision
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
    product = ATTENTIONS[model.parts.attention].product
    if not product:
        raise BilensError(
            f"attention={model.parts.attention!r} has a pattern that is not ordered by one number "
            "for two tokens; read each of its attention_scores"
        )
    scores = attention_scores(model, layer=layer, distance=distance, position=position, among=among)
    # Bilinear attention multiplies two scores, whose signs are worth showing.
    names = ["first", "second"] if len(scores) == 2 else ["score"]

    def pairs(head: int) -> HeadPairs:
        number = check_index("head", head, model.n_heads)
        # The pattern as a product of scores: [0, 1] in bilinear, [0, 0] in squared attention.
        factors = [scores[pair][number] for pair in product]
        parts = dict(zip(names, factors, strict=False)) if len(product) > 1 else {}
        return _pairs(model, ("query", "key"), factors, parts, k, among)

    return [pairs(head) for head in heads]


@full_precision
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
        matrix: one head of a matrix of `token_matrices`, or a product of such.
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
    svd, names, frames = matrix.svd(components), token_names(model, tokens), []
    for number, (sigma, left, right) in enumerate(
        zip(svd.values, svd.left, svd.right, strict=True)
    ):
        # A component has no sign of its own.
        sign = torch.where(left[left.abs().argmax()] < 0, -1, 1).to(left)
        columns = {"component": [number] * k, "sigma": [float(sigma)] * k}
        # Both sides are turned, so that their product stays.
        for side, vector in zip(sides, (sign * left, sign * right), strict=True):
            best = vector.abs().topk(k).indices
            columns[side] = [names[i] for i in best.tolist()]
            columns[f"{side} weight"] = vector[best].tolist()
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


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

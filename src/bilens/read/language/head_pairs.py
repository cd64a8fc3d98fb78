"""The pairs of tokens that a head cares about most, in the whole square of the vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bilens.errors import BilensError
from bilens.nn.language import LanguageModel
from bilens.read.language.bigrams import ROWS
from bilens.read.language.names import chosen_tokens, token_names
from bilens.read.language.running import RunningTop
from bilens.read.language.scores import token_outputs, token_scores
from bilens.tensor import FactoredMatrix

__all__ = ["HeadPairs", "look_pairs", "looks_of_heads", "output_pairs", "outputs_of_heads"]


@dataclass(frozen=True, eq=False)
class HeadPairs:
    """The pairs of tokens with the largest values, and those with the smallest.

    Attributes:
        highest: the largest value first.
        lowest: the smallest value first, the most negative one where there is any.
    """

    highest: pd.DataFrame
    lowest: pd.DataFrame


def look_pairs(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    head: int,
    *,
    k: int = 20,
    layer: int = 0,
    distance: int = 1,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> HeadPairs:
    """Which token a head looks at from which, most and least, at a distance.

    The value is the pattern before any normalisation: the product of both scores in bilinear
    attention, which has a sign, the square of the score in squared attention; under a softmax it
    is the score, an exponent. The square of the vocabulary passes in blocks and is never held.

    Args:
        model: any for block 0; without norms for later ones. See `token_scores`.
        tokenizer: for the names of the tokens.
        head: number of the head.
        k: how many pairs of either kind.
        layer: the block.
        distance: how far back the token stands that is looked at.
        position: of the token that looks, for learned and shortformer positions.
        among: tokens to choose from, such as the most frequent ones; all by default.

    Returns:
        Frames with columns query, key, first and second or score, and value.

    Raises:
        NotBilinearError: the scores of a later block depend on the text through a norm.
        BilensError: there is no such head, block, position or token, k is not positive, or the
            attention is differential.
    """
    return looks_of_heads(
        model,
        tokenizer,
        [head],
        k=k,
        layer=layer,
        distance=distance,
        position=position,
        among=among,
    )[0]


def output_pairs(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    head: int,
    *,
    k: int = 20,
    layer: int = 0,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> HeadPairs:
    """Which output a head raises and lowers most past the MLP when it looks at a token.

    The square of the vocabulary passes in blocks and is never held.

    Args:
        model: without norms. See `token_outputs`.
        tokenizer: for the names of the tokens.
        head: number of the head.
        k: how many pairs of either kind.
        layer: the block.
        position: of the token that is looked at, for learned positions.
        among: tokens to choose from, such as the most frequent ones; all by default.

    Returns:
        Frames with columns key, output and value, in logits for a head that looks at the key alone.

    Raises:
        NotBilinearError: the model has a norm.
        BilensError: there is no such head, block, position or token, or k is not positive.
    """
    return outputs_of_heads(
        model, tokenizer, [head], k=k, layer=layer, position=position, among=among
    )[0]


@torch.no_grad()
def looks_of_heads(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    heads: Sequence[int],
    *,
    k: int,
    layer: int,
    distance: int,
    position: int | None,
    among: Sequence[int] | None = None,
) -> list[HeadPairs]:
    """`look_pairs` of several heads, whose queries and keys are worked out together."""
    if model.config.attention == "differential":
        raise BilensError(
            "attention='differential' subtracts one softmax from another, so no number of two "
            "tokens alone orders its pattern; read each of its token_scores"
        )
    scores = token_scores(model, layer, distance=distance, position=position, among=among)
    parts = {"softmax": (), "squared": ("score",), "bilinear": ("first", "second")}
    names = token_names(tokenizer, chosen_tokens(model, among))
    return [
        _pairs(
            [_of_head(matrices, head) for matrices in scores],
            k,
            names,
            ("query", "key"),
            parts[model.config.attention],
        )
        for head in heads
    ]


@torch.no_grad()
def outputs_of_heads(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    heads: Sequence[int],
    *,
    k: int,
    layer: int,
    position: int | None,
    among: Sequence[int] | None = None,
) -> list[HeadPairs]:
    """`output_pairs` of several heads, whose values are worked out together."""
    outputs = token_outputs(model, layer, position=position, among=among)
    names = token_names(tokenizer, chosen_tokens(model, among))
    return [_pairs([_of_head(outputs, head)], k, names, ("key", "output"), ()) for head in heads]


def _of_head(matrices: FactoredMatrix, head: int) -> FactoredMatrix:
    if not 0 <= head < matrices.batch_shape[0]:
        raise BilensError(f"head={head}, expected 0 to {matrices.batch_shape[0] - 1}")
    return matrices[head]


def _pairs(
    matrices: list[FactoredMatrix],
    k: int,
    names: list[str],
    sides: tuple[str, str],
    parts: tuple[str, ...],
) -> HeadPairs:
    """The ends of a matrix, or of a product entry by entry whose parts have these names."""
    if k < 1:
        raise BilensError(f"k={k}, expected at least 1")

    def value(entries: list[Tensor]) -> Tensor:
        # Squared attention has one score, which is multiplied with itself.
        return entries[0] * entries[-1] if parts else entries[0]

    def frame(top: RunningTop) -> pd.DataFrame:
        assert top.labels is not None
        rows, columns = top.labels[0].T
        entries = [matrix.entries(rows, columns) for matrix in matrices]
        named = {
            side: [names[i] for i in places.tolist()]
            for side, places in zip(sides, (rows, columns), strict=True)
        }
        known = dict(zip((*parts, "value"), (*entries[: len(parts)], value(entries)), strict=True))
        return pd.DataFrame(named | {name: part.tolist() for name, part in known.items()})

    highest, lowest = RunningTop(k), RunningTop(k)
    for start in range(0, matrices[0].n_rows, ROWS):
        block = value([matrix.rows(slice(start, start + ROWS)) for matrix in matrices])
        highest.update_pairs(block, start)
        lowest.update_pairs(-block, start)
    return HeadPairs(frame(highest), frame(lowest))

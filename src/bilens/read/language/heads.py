"""What the heads of a block do, from the weights: where they look, and what they say of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from bilens.nn.language import LanguageModel
from bilens.read.language.composition import Composition, composition_scores
from bilens.read.language.head_pairs import HeadPairs, looks_of_heads, outputs_of_heads

__all__ = ["AttentionReading", "HeadReading", "read_attention"]


@dataclass(frozen=True, eq=False)
class HeadReading:
    """One head in pairs of tokens.

    Attributes:
        head: its number.
        looks: from which token it looks at which.
        outputs: which output it raises and lowers for the token that it looks at; None for a model
            with norms, whose logits do not follow from the weights alone.
    """

    head: int
    looks: HeadPairs
    outputs: HeadPairs | None


@dataclass(frozen=True, eq=False)
class AttentionReading:
    """Heads of a block, and how those of the whole model work together.

    Attributes:
        heads: of the block.
        layer: which block.
        distance: how far back the tokens stand that are looked at.
        composition: of all heads and MLPs of the model.
    """

    heads: list[HeadReading]
    layer: int
    distance: int
    composition: Composition


def read_attention(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    layer: int = 0,
    *,
    heads: Sequence[int] | None = None,
    k: int = 10,
    distance: int = 1,
    position: int | None = None,
) -> AttentionReading:
    """Read the heads of a block from its weights.

    Args:
        model: with any attention but differential; without norms for blocks after the first.
        tokenizer: for the names of the tokens.
        layer: the block.
        heads: their numbers; all by default.
        k: how many pairs of each kind.
        distance: how far back the token stands that is looked at.
        position: of the token that looks, for learned and shortformer positions.

    Raises:
        NotBilinearError: scores of a later block depend on the text through a norm.
        BilensError: there is no such block, head or position, k is not positive, or the attention
            is differential.
    """
    chosen = range(model.config.n_heads) if heads is None else heads
    looks = looks_of_heads(
        model, tokenizer, chosen, k=k, layer=layer, distance=distance, position=position
    )
    outputs: list[HeadPairs] | list[None] = [None] * len(chosen)
    if model.config.norm == "none":
        seen = None if position is None else position - distance
        outputs = outputs_of_heads(model, tokenizer, chosen, k=k, layer=layer, position=seen)
    found = [HeadReading(*parts) for parts in zip(chosen, looks, outputs, strict=True)]
    return AttentionReading(found, layer, distance, composition_scores(model))

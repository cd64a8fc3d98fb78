"""The kinds of attention and their properties."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bilens.lazy_imports import lazy_import
from bilens.nn.norm import AttentionNorm

if TYPE_CHECKING:
    from bilens.nn.language import product, softmax
    from bilens.nn.language.attention import Attention
else:  # transformers takes seconds to import, and classifiers do not need it.
    product = lazy_import("bilens.nn.language.product")
    softmax = lazy_import("bilens.nn.language.softmax")


@dataclass(frozen=True)
class AttentionKind:
    """A kind of attention.

    Attributes:
        find: function that returns its class.
        pairs: number of pairs of queries and keys, one or two.
        product: numbers of the pairs whose scores are multiplied to the pattern, before any
            normalisation. For softmax it is the score in the exponent. It is empty if no number of
            two tokens orders the pattern.
        sums_to_one: True if each row of the pattern sums to 1, so that biases of values pass
            unchanged.
        keeps_state: True if it decodes with a state of constant size instead of all keys. Its mask
            can then exclude tokens, but no pairs of tokens.
        norms: its possible norms.
        numbers: attributes that are parameters, apart from its maps.
    """

    find: Callable[[], "type[Attention]"]
    pairs: int = 1
    product: tuple[int, ...] = ()
    sums_to_one: bool = False
    keeps_state: bool = False
    norms: tuple[AttentionNorm, ...] = ("none",)
    numbers: tuple[str, ...] = ()


ATTENTIONS: dict[str, AttentionKind] = {
    "softmax": AttentionKind(lambda: softmax.SoftmaxAttention, product=(0,), sums_to_one=True),
    "squared": AttentionKind(
        lambda: product.ProductAttention,
        product=(0, 0),
        keeps_state=True,
        norms=("none", "sum", "rms"),
    ),
    "bilinear": AttentionKind(
        lambda: product.ProductAttention,
        pairs=2,
        product=(0, 1),
        keeps_state=True,
        norms=("none", "rms"),
    ),
    "differential": AttentionKind(
        lambda: softmax.DifferentialAttention, pairs=2, numbers=("diff_lambda",)
    ),
}
"""Kinds by name. squared multiplies a score with itself, bilinear two scores, and differential is
the difference of two softmaxes."""

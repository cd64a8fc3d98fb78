"""The kinds of attention, and what the rest of bilens has to know of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bilens.lazy_imports import lazy_import

if TYPE_CHECKING:
    from bilens.nn.language import product, softmax
    from bilens.nn.language.attention import Attention
else:  # transformers takes seconds to import, and classifiers do without it.
    product = lazy_import("bilens.nn.language.product")
    softmax = lazy_import("bilens.nn.language.softmax")

__all__ = ["ATTENTIONS", "AttentionKind", "AttentionNorm"]

AttentionNorm = Literal["none", "sum", "rms"]
"""Of attention without softmax: none; the pattern's rows by their sum; the output by its size."""


@dataclass(frozen=True)
class AttentionKind:
    """A kind of attention.

    Attributes:
        find: gives its class.
        pairs: of queries and keys, one or two.
        product: which scores are multiplied to the pattern before any normalisation, by the numbers
            of their pairs; the one in the exponent under a softmax; none where no number of two
            tokens alone orders the pattern.
        sums_to_one: whether each row of the pattern does, so that biases of values arrive whole.
        keeps_state: whether it decodes by a state of constant size instead of all keys, and so
            leaves out tokens but no pairs of them.
        norms: which of `AttentionNorm` it may have.
        numbers: attributes that are parameters besides its maps.
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
"""softmax; squared, a score times itself; bilinear, the product of two scores; differential, the
difference of two softmaxes."""

"""Settings of models, and their kinds of layers by name; nothing here imports torch."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from bilens.errors import BilensError
from bilens.lazy_imports import lazy_import
from bilens.settings import Between, CheckedSettings, NotNegative, Positive, Size, check_settings

if TYPE_CHECKING:
    from bilens.nn.language import attention
else:  # transformers takes seconds to import, and classifiers do not need it.
    attention = lazy_import("bilens.nn.language.attention")


Depth = Annotated[int, Between(1, 1024)]
"""A number of layers, each a module."""
GateName = Literal["identity", "sigmoid", "relu", "gelu", "silu", "swish"]
"""Gates by their names; see `Gate`."""
MlpName = Literal["bilinear", "glu", "swiglu", "geglu", "reglu", "relu", "relu2", "gelu"]
"""MLPs of a transformer by their names; only bilinear is a tensor."""
MlpBias = Literal["none", "out", "all"]
"""Maps of an MLP that have biases: none, only the last (out), or all."""
NormName = Literal["none", "scalar", "rms", "layer"]
"""Norms by name; a model is a polynomial of its input only with none or scalar."""
AttentionNorm = Literal["none", "sum", "rms"]
"""Norms of attention without softmax: none, sum (rows of the pattern over their sum), or rms (the
output over its root mean square)."""
PositionName = Literal["rotary", "learned", "shortformer", "none"]
"""Kinds of positions by name.

- rotary turns queries and keys.
- learned adds a vector to the embedding.
- shortformer adds a vector only to the inputs of queries and keys, so that values and MLPs do not
  depend on positions (Press et al. 2021)."""


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

    find: Callable[[], "type[attention.Attention]"]
    pairs: int = 1
    product: tuple[int, ...] = ()
    sums_to_one: bool = False
    keeps_state: bool = False
    norms: tuple[AttentionNorm, ...] = ("none",)
    numbers: tuple[str, ...] = ()


ATTENTIONS: dict[str, AttentionKind] = {
    "softmax": AttentionKind(lambda: attention.SoftmaxAttention, product=(0,), sums_to_one=True),
    "squared": AttentionKind(
        lambda: attention.ProductAttention,
        product=(0, 0),
        keeps_state=True,
        norms=("none", "sum", "rms"),
    ),
    "bilinear": AttentionKind(
        lambda: attention.ProductAttention,
        pairs=2,
        product=(0, 1),
        keeps_state=True,
        norms=("none", "rms"),
    ),
    "differential": AttentionKind(
        lambda: attention.DifferentialAttention, pairs=2, numbers=("diff_lambda",)
    ),
}
"""Kinds by name. squared multiplies a score with itself, bilinear two scores, and differential is
the difference of two softmaxes."""


@dataclass(frozen=True)
class ClassifierConfig(CheckedSettings):
    """Architecture and sizes of an image classifier.

    The defaults are Table 2 of Pearce et al. 2024.

    Attributes:
        n_inputs: pixels of an image, height times width.
        n_classes: number of classes.
        d_model: width of the embedding and of every layer.
        n_layers: number of layers.
        d_hidden: hidden units of each layer, projected back to d_model; None for d_model of them
            and no projection, as in the paper.
        gate: gate of each layer; only identity, or swish at beta = 0, makes a tensor.
        beta: beta of the swish gate.
        bias: add biases to all maps.
        residual: each layer adds to its input instead of replacing it.
        norm: norm before each layer and before the unembedding. With none, or with scalar, which
            divides by a running mean, the model is a tensor. With rms or layer it is not.
        image_shape: height and width, for pictures; None if the inputs are not images.
        class_names: names of the classes; their numbers by default.
    """

    n_inputs: Size
    n_classes: Size
    d_model: Size = 300
    n_layers: Depth = 1
    d_hidden: Size | None = None
    gate: GateName = "identity"
    beta: float = 1.0
    bias: bool = False
    residual: bool = False
    norm: NormName = "none"
    image_shape: tuple[Size, Size] | None = None
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = self.image_shape
        if shape is not None and self.n_inputs != shape[0] * shape[1]:
            raise BilensError(
                f"image_shape={shape} has {shape[0] * shape[1]} pixels, but the model reads "
                f"n_inputs={self.n_inputs}"
            )
        names = tuple(self.class_names) or tuple(str(i) for i in range(self.n_classes))
        object.__setattr__(self, "class_names", names)
        if len(names) != self.n_classes:
            raise BilensError(
                f"class_names has {len(names)} names, expected n_classes={self.n_classes}"
            )


@dataclass
class LanguageSettings:
    """Architecture and sizes of a language model. The defaults are Table 3 of Pearce et al. 2024.

    Attributes:
        vocab_size: number of tokens; a tokenizer of at most this size is trained.
        d_model: width of the residual stream.
        n_layers: number of blocks, each attention and then an MLP.
        n_heads: attention heads of a block; d_model is a multiple of it.
        n_kv_heads: heads of keys and values; as many as heads by default.
        d_hidden: hidden units of each MLP.
        n_ctx: tokens of a text in training; learned and shortformer positions end there.
        mlp: bilinear, glu, swiglu, geglu, reglu, relu, relu2 or gelu; only bilinear is a tensor.
        norm: none, scalar, rms or layer, before attention, MLP and unembedding. scalar divides by a
            running mean, which readings fold into the weights.
        positions: rotary, learned, shortformer or none.
        attention: softmax, squared, bilinear or differential; squared and bilinear are tensors.
        attention_scale: factor of each score. By default it is 1 / d_head if scores are multiplied,
            and 1 / sqrt(d_head) in a softmax.
        attention_norm: none, sum or rms. With sum, rows of a squared pattern are divided by their
            sum. With rms, outputs of heads of squared or bilinear attention are divided by their
            size.
        attention_constant: squared and bilinear attention add a learned constant of each head to
            its scores. Rotary positions leave it unchanged.
        qk_norm: queries and keys divided by their root mean square, before rotary positions.
            Products of two scores begin near zero without it.
        bias: biases in attention and MLP.
        mlp_bias: none, out (only the last map) or all; by default all if bias is set.
        norm_eps: number that norms add to the mean square; torch's by default.
        value_mix: every block mixes the first block's values into its own, v + share (v_1 - v),
            with a learned share.
        embed_mix: every block reads a x + b x_0, with x_0 the input of the first block, and learned
            a and b.
        logit_cap: logits are cap tanh(z / cap), or z by default.
        rope_base: base of rotary positions.
        rope_bfloat16: cosines and sines of rotary positions are rounded to bfloat16.
        initializer_range: standard deviation of the initial weights, as in GPT-2; divided by
            sqrt(2 n_layers) for maps to the residual stream.
        tie_word_embeddings: embedding and unembedding are one matrix.

    Source: Pearce et al. 2024, appendix C, Table 3.
    """

    vocab_size: Size = 4096
    d_model: Size = 1024
    n_layers: Depth = 1
    n_heads: Size = 8
    n_kv_heads: Size | None = None
    d_hidden: Size = 3072
    n_ctx: Size = 256
    mlp: MlpName = "bilinear"
    norm: NormName = "none"
    positions: PositionName = "rotary"
    attention: str = "softmax"
    attention_scale: float | None = None
    attention_norm: AttentionNorm = "none"
    attention_constant: bool = False
    qk_norm: bool = False
    bias: bool = False
    mlp_bias: MlpBias | None = None
    norm_eps: Positive | None = None
    value_mix: bool = False
    embed_mix: bool = False
    logit_cap: Positive | None = None
    rope_base: Positive = 10_000.0
    rope_bfloat16: bool = False
    initializer_range: NotNegative = 0.02
    tie_word_embeddings: bool = False

    def settings(self) -> dict[str, Any]:
        """Return all settings by name, as JSON values."""
        return {field.name: getattr(self, field.name) for field in fields(LanguageSettings)}

    def check(self) -> None:
        """Raise BilensError unless the settings are in range and fit together."""
        check_settings(self, LanguageSettings)
        for name, divisor in (("d_model", "n_heads"), ("n_heads", "n_kv_heads")):
            size, part = getattr(self, name), getattr(self, divisor) or 1
            if size % part:
                raise BilensError(f"{name}={size} is not a multiple of {divisor}={part}")
        if self.attention not in ATTENTIONS:
            raise BilensError(
                f"attention={self.attention!r}, expected one of {', '.join(ATTENTIONS)}"
            )
        kinds = [name for name, kind in ATTENTIONS.items() if self.attention_norm in kind.norms]
        if self.attention not in kinds:
            raise BilensError(
                f"attention_norm={self.attention_norm!r} is for attention={' or '.join(kinds)}, "
                f"not {self.attention!r}"
            )
        if self.attention_constant and not ATTENTIONS[self.attention].keeps_state:
            raise BilensError(
                f"attention_constant=True is for attention without softmax, squared or bilinear, "
                f"not {self.attention!r}"
            )

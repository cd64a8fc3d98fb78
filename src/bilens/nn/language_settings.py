"""The sizes and parts of a language model; quick to import, as transformers is not."""

from dataclasses import dataclass, fields
from typing import Any

from bilens.errors import BilensError
from bilens.nn.attention import ATTENTIONS, AttentionNorm
from bilens.nn.mlp import MlpBias, MlpName
from bilens.nn.norm import NormName
from bilens.nn.position import PositionName
from bilens.settings import Depth, NotNegative, Positive, Size, check_settings

__all__ = ["LanguageSettings"]


@dataclass
class LanguageSettings:
    """What a language model is made of. The defaults are Table 3 of Pearce et al. 2024.

    Attributes:
        vocab_size: number of tokens; a tokenizer of at most this size is trained.
        d_model: width of the residual stream.
        n_layers: number of blocks, each attention and then an MLP.
        n_heads: attention heads of a block; d_model is a multiple of it.
        n_kv_heads: heads of keys and values; none: as many as heads.
        d_hidden: hidden units of each MLP.
        n_ctx: tokens of a text in training; learned and shortformer positions end there.
        mlp: bilinear, swiglu, geglu, reglu, relu, relu2 or gelu; only bilinear is a tensor.
        norm: none, scalar, rms or layer: before attention, before the MLP and before the
            unembedding; scalar divides by a running mean, which weights take in when it is read.
        positions: rotary, learned, shortformer or none.
        attention: softmax, squared, bilinear or differential; squared and bilinear are tensors.
        attention_scale: of each score; none: 1 / d_head where scores are multiplied, and
            1 / sqrt(d_head) under a softmax.
        attention_norm: none; of squared attention sum, rows of the pattern divided by their sum;
            of squared and bilinear attention rms, the output of each head divided by its size.
        attention_constant: squared and bilinear attention add a learned constant of each head to
            its scores. Rotary positions leave it unchanged.
        qk_norm: queries and keys divided by their root mean square, before rotary positions.
        bias: biases in attention and MLP.
        mlp_bias: none, out (behind the last map alone) or all; by default all where bias is set.
        norm_eps: what norms add to the mean square; none: what torch adds.
        value_mix: every block mixes the first one's values into its own, v + share (v_1 - v), with
            a share that is learned.
        embed_mix: every block reads a x + b x_0, with x_0 what the first block reads, and a and b
            learned.
        logit_cap: logits are cap tanh(z / cap); none: z.
        rope_base: of rotary positions.
        rope_bfloat16: cosines and sines of rotary positions are rounded to bfloat16.
        initializer_range: standard deviation of the initial weights, as in GPT-2; what writes to
            the residual stream has it divided by sqrt(2 n_layers).
        tie_word_embeddings: embedding and unembedding are one matrix.

    Raises:
        BilensError: a setting is out of range, d_model is not a multiple of n_heads, or n_heads of
            n_kv_heads, or attention_norm does not fit attention.

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
        """All of them by name, as JSON may hold them."""
        return {field.name: getattr(self, field.name) for field in fields(LanguageSettings)}

    def check(self) -> None:
        """See that the settings are in range and fit together."""
        check_settings(self, LanguageSettings)
        for name, divisor in (("d_model", "n_heads"), ("n_heads", "n_kv_heads")):
            size, part = getattr(self, name), getattr(self, divisor) or 1
            if size % part:
                raise BilensError(f"{name}={size} is not a multiple of {divisor}={part}")
        if self.attention not in ATTENTIONS:
            raise BilensError(
                f"attention={self.attention!r}, expected one of {', '.join(ATTENTIONS)}"
            )
        normed = [name for name, kind in ATTENTIONS.items() if self.attention_norm in kind.norms]
        if self.attention not in normed:
            raise BilensError(
                f"attention_norm={self.attention_norm!r} is for attention={' or '.join(normed)}, "
                f"not {self.attention!r}"
            )
        if self.attention_constant and not ATTENTIONS[self.attention].keeps_state:
            raise BilensError(
                f"attention_constant=True is for attention without softmax, squared or bilinear, "
                f"not {self.attention!r}"
            )

"""What a language model is made of, as a Hugging Face configuration."""

from typing import Any, no_type_check

from transformers import PreTrainedConfig

from bilens.errors import BilensError
from bilens.nn.attention import ATTENTION_NORMS, ATTENTIONS, AttentionNorm
from bilens.nn.mlp import MLP_BIASES, MLPS, MlpBias, MlpName
from bilens.nn.norm import NORMS, NormName
from bilens.nn.position import POSITIONS, PositionName

__all__ = ["LanguageConfig"]


# transformers makes the constructor, which takes more settings than its signature says.
@no_type_check
class LanguageConfig(PreTrainedConfig):
    """Sizes and parts of a `LanguageModel`. The defaults are Table 3 of Pearce et al. 2024.

    Attributes:
        vocab_size: number of tokens.
        d_model: width of the residual stream.
        n_layers: number of blocks, each attention and then an MLP.
        n_heads: attention heads of a block; d_model is a multiple of it.
        n_kv_heads: heads of keys and values; None for as many as heads.
        d_hidden: hidden units of each MLP.
        n_ctx: longest text in training; learned and shortformer positions end there.
        mlp: bilinear, swiglu, geglu, reglu, relu, relu2 or gelu; only bilinear is a tensor.
        norm: none, rms or layer: before attention, before the MLP and before the unembedding.
        positions: rotary, learned, shortformer or none.
        attention: softmax, squared, bilinear or differential; squared and bilinear are tensors.
        attention_scale: of each score; None for 1 / d_head where scores are multiplied, and
            1 / sqrt(d_head) under a softmax.
        attention_norm: none; of squared attention sum, rows of the pattern divided by their sum;
            of squared and bilinear attention rms, the output of each head divided by its size.
        qk_norm: queries and keys divided by their root mean square, before rotary positions.
        bias: biases in attention and MLP.
        mlp_bias: none, out (behind the last map alone) or all; None for all where bias is set.
        norm_eps: what norms add to the mean square; None for what torch adds.
        value_mix: every block mixes the first one's values into its own, v + share (v_1 - v), with
            a share that is learned.
        embed_mix: every block reads a x + b x_0, with x_0 what the first block reads, and a and b
            learned.
        logit_cap: logits are cap tanh(z / cap); None for z.
        rope_base: of rotary positions.
        rope_bfloat16: cosines and sines of rotary positions are rounded to bfloat16.
        initializer_range: standard deviation of the initial weights, as in GPT-2; what writes to
            the residual stream has it divided by sqrt(2 n_layers).
        tie_word_embeddings: embedding and unembedding are one matrix.

    Raises:
        BilensError: a size, norm_eps or logit_cap is not positive, d_model no multiple of n_heads,
            n_heads none of n_kv_heads, a name unknown, or attention_norm does not fit attention.

    Source:
        Pearce et al. 2024, appendix C, Table 3.
    """

    model_type = "bilens-language"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "d_hidden",
        "max_position_embeddings": "n_ctx",
    }

    vocab_size: int = 4096
    d_model: int = 1024
    n_layers: int = 1
    n_heads: int = 8
    n_kv_heads: int | None = None
    d_hidden: int = 3072
    n_ctx: int = 256
    mlp: MlpName = "bilinear"
    norm: NormName = "none"
    positions: PositionName = "rotary"
    attention: str = "softmax"
    attention_scale: float | None = None
    attention_norm: AttentionNorm = "none"
    qk_norm: bool = False
    bias: bool = False
    mlp_bias: MlpBias | None = None
    norm_eps: float | None = None
    value_mix: bool = False
    embed_mix: bool = False
    logit_cap: float | None = None
    rope_base: float = 10_000.0
    rope_bfloat16: bool = False
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **rest: Any) -> None:
        if self.n_kv_heads is None:
            self.n_kv_heads = self.n_heads
        if self.mlp_bias is None:
            self.mlp_bias = "all" if self.bias else "none"
        for name in (
            "vocab_size",
            "d_model",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "d_hidden",
            "n_ctx",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise BilensError(f"{name}={value!r}, expected a whole number of at least 1")
        for name, known in (
            ("mlp", MLPS),
            ("mlp_bias", MLP_BIASES),
            ("norm", NORMS),
            ("positions", POSITIONS),
            ("attention", ATTENTIONS),
            ("attention_norm", ATTENTION_NORMS),
        ):
            if getattr(self, name) not in known:
                raise BilensError(
                    f"{name}={getattr(self, name)!r}, expected one of {', '.join(known)}"
                )
        for name in ("norm_eps", "logit_cap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BilensError(f"{name}={value!r}, expected a number above 0, or None")
        for name, divisor in (("d_model", "n_heads"), ("n_heads", "n_kv_heads")):
            if getattr(self, name) % getattr(self, divisor):
                raise BilensError(
                    f"{name}={getattr(self, name)} is no multiple of "
                    f"{divisor}={getattr(self, divisor)}"
                )
        normed = [name for name, kind in ATTENTIONS.items() if self.attention_norm in kind.norms]
        if self.attention not in normed:
            raise BilensError(
                f"attention_norm={self.attention_norm!r} is for attention={' or '.join(normed)}, "
                f"not {self.attention!r}"
            )
        super().__post_init__(**rest)  # type: ignore[no-untyped-call]

    @property
    def obstacles(self) -> list[str]:
        """What keeps logits from being the sum of all that is written to the stream, read once.

        Settings as name=value; empty for a model whose weights alone say what each part adds.
        """
        plain = {"norm": "none", "value_mix": False, "embed_mix": False, "logit_cap": None}
        return [
            f"{name}={found!r}"
            for name, value in plain.items()
            if (found := getattr(self, name)) != value
        ]

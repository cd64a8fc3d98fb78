"""The causal transformer of the papers, as a Hugging Face model, and its configuration."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, no_type_check

import torch
import transformers
from huggingface_hub import file_exists
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, initialization
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from bilens.checks import check_index
from bilens.errors import BilensError
from bilens.nn.card import CARD_NAME, model_card, write_card
from bilens.nn.language.attention import Attention, Rope, StateLayer, rotation
from bilens.nn.layers import GatedLayer, PlainMLP, make_mlp, make_norm
from bilens.nn.settings import ATTENTIONS, LanguageSettings

CACHE = [*inspect.signature(create_causal_mask).parameters][3]
"""Name of the keys and values of earlier tokens in the installed transformers."""


# transformers makes the constructor, which takes more settings than its signature says.
@no_type_check
class LanguageConfig(LanguageSettings, transformers.PreTrainedConfig):
    """The `LanguageSettings` of a `LanguageModel`, with the settings of transformers."""

    model_type = "bilens-language"
    keys_to_ignore_at_inference = [CACHE]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "d_hidden",
        "max_position_embeddings": "n_ctx",
    }

    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **settings: Any) -> None:
        for name in settings.keys() & self.attribute_map.keys():
            setattr(self, name, settings.pop(name))
        self.check()
        if self.n_kv_heads is None:
            self.n_kv_heads = self.n_heads
        if self.mlp_bias is None:
            self.mlp_bias = "all" if self.bias else "none"
        super().__post_init__(**settings)  # type: ignore[no-untyped-call]


class Block(GradientCheckpointingLayer):
    """x + attention(norm(x)), and then y + mlp(norm(y)).

    With `embed_mix` the x of both is a x + b x_0, with x_0 the input of the first block.
    """

    def __init__(self, config: LanguageConfig, layer: int) -> None:
        super().__init__()
        self.residual_mix = nn.Parameter(torch.tensor([1.0, 0.0])) if config.embed_mix else None
        self.attn_norm = make_norm(config.norm, config.d_model, config.norm_eps)
        self.attn = _make_attention(config, layer)
        self.mlp_norm = make_norm(config.norm, config.d_model, config.norm_eps)
        self.mlp = make_mlp(
            config.mlp,
            config.d_model,
            config.d_hidden,
            bias=config.mlp_bias == "all",
            out_bias=config.mlp_bias != "none",
        )

    def forward(
        self,
        x: Float[Tensor, "batch time d_model"],
        pos_embed: Float[Tensor, "batch time d_model"] | None = None,
        rope: Rope | None = None,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        v_first: Tensor | None = None,
        x0: Float[Tensor, "batch time d_model"] | None = None,
    ) -> Float[Tensor, "batch time d_model"]:
        """Return the stream after the block; arguments as for `Attention`, and `x0` to mix in."""
        x = self.mixed(x, x0)
        x = x + self.attn(self.attn_norm(x), pos_embed, rope, mask, cache, v_first)
        return x + self.mlp(self.mlp_norm(x))

    def mixed(
        self, x: Float[Tensor, "batch time d_model"], x0: Float[Tensor, "batch time d_model"] | None
    ) -> Float[Tensor, "batch time d_model"]:
        """Return the input stream of the block: a x + b x_0, or x without `embed_mix`."""
        if self.residual_mix is None:
            return x
        if x0 is None:
            raise BilensError(
                "x0=None, but with embed_mix a block reads a x + b x_0; pass the input of the "
                "first block, as returned by model.embed_text()"
            )
        return self.residual_mix[0] * x + self.residual_mix[1] * x0


def _make_attention(config: LanguageConfig, layer: int) -> Attention:
    kind = ATTENTIONS[config.attention]
    make: Callable[..., Attention] = kind.find()
    options: dict[str, Any] = {}
    if kind.keeps_state:
        options = {"norm": config.attention_norm, "constant": config.attention_constant}
    return make(
        d_model=config.d_model,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        bias=config.bias,
        layer=layer,
        qk_norm=config.qk_norm,
        value_mix=config.value_mix,
        pairs=kind.pairs,
        scale=config.attention_scale,
        **options,
    )


class LanguageModel(transformers.PreTrainedModel, transformers.GenerationMixin):
    """logits = W_U norm(blocks(W_E tokens)): a causal transformer with MLPs that are tensors.

    Trains with `transformers.Trainer` and writes with `generate`. `save_pretrained` saves it, and
    `AutoModelForCausalLM.from_pretrained` loads it once `bilens.nn.language` is imported. Weights
    have the field's names: `W_E`, `W_U`, `blocks[i].attn.W_Q` and so on,
    `blocks[i].mlp.W_L`, `W_R`, `W_D`.

    Args:
        config: architecture and sizes of the model.

    Source: Pearce et al. 2024, section 6 and appendix C.
    """

    config: LanguageConfig
    config_class = LanguageConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _input_embed_layer = "embed"
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _tied_weights_keys = {"unembed.weight": "embed.weight"}  # noqa: RUF012

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        if config.positions in ("learned", "shortformer"):
            self.pos_embed = nn.Embedding(config.n_ctx, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = make_norm(config.norm, config.d_model, config.norm_eps)
        self.unembed = nn.Linear(config.d_model, config.vocab_size, bias=False)
        # transformers finds its loss by this name.
        self.loss_type = "ForCausalLM"
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        writing = {part.out for block in self.blocks for part in (block.attn, block.mlp)}  # type: ignore[union-attr]
        if isinstance(module, nn.Linear) and module in writing:
            # 2 n_layers maps add to the stream, whose variance then does not grow with the depth.
            std = self.config.initializer_range / (2 * self.config.n_layers) ** 0.5
            initialization.normal_(module.weight, mean=0.0, std=std)

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """Save the model as transformers does, with a model card."""
        super().save_pretrained(save_directory, *args, **options)
        write_card(Path(save_directory), self.config.to_diff_dict(), self.name_or_path)

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:  # type: ignore[override]
        """Upload the model as transformers does, with a model card if the hub has none."""
        token = options.get("token")
        has_card = file_exists(repo_id, CARD_NAME, token=token)
        result = super().push_to_hub(repo_id, **options)  # type: ignore[arg-type]
        if not has_card:
            card = model_card(self.config.to_diff_dict(), self.name_or_path, repo_id)
            card.push_to_hub(repo_id, token=token)
        return result

    def get_output_embeddings(self) -> nn.Module:
        """Return the unembedding, which `tie_word_embeddings` may share."""
        return self.unembed

    def forward(
        self,
        input_ids: Int[Tensor, "batch time"],
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "_ time"] | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        labels: Int[Tensor, "batch time"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **loss: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits of the next token at every position.

        Args:
            input_ids: tokens.
            attention_mask: 0 for padding, also for tokens in the cache. Attention without softmax
                can mask tokens, not pairs of them.
            position_ids: positions, counted from the end of the cache by default.
            past_key_values: keys and values of earlier tokens.
            cache: the same, as transformers calls it from 5.24 on.
            labels: tokens again, or -100 to omit one from the loss; each position is compared with
                the label of the next.
            use_cache: keep keys and values for the next call.
            logits_to_keep: number of last positions to return; 0 for all.
            loss: options of the loss, such as `num_items_in_batch`.
        """
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            states = Cache(layers=[StateLayer() for _ in self.blocks])
            cache = states if self._keeps_state() else DynamicCache(config=self.config)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            times = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)
            position_ids = times[None]
        x, pos_embed, rope = self.embed_text(input_ids, position_ids)
        mask = self._mask(x, attention_mask, cache, position_ids)
        x0, v_first = x, self.first_block_values(x)
        for block in self.blocks:
            x = block(x, pos_embed, rope, mask, cache, v_first, x0)
        # -0 is 0, so that 0 keeps all positions.
        logits = self.unembed(self.norm(x[:, -logits_to_keep:]))
        if self.config.logit_cap is not None:
            logits = self.config.logit_cap * torch.tanh(logits / self.config.logit_cap)
        mean_loss = None
        if labels is not None:
            mean_loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **loss
            )
        # By their order, since transformers has renamed the cache.
        return CausalLMOutputWithPast(mean_loss, logits, cache)

    def _supports_default_dynamic_cache(self) -> bool:  # type: ignore[override]
        # `generate` calls this before it makes a cache of keys; otherwise `forward` makes its own.
        return not self._keeps_state()

    def _keeps_state(self) -> bool:
        return ATTENTIONS[self.config.attention].keeps_state

    def _mask(
        self, x: Tensor, attention_mask: Tensor | None, cache: Cache | None, position_ids: Tensor
    ) -> Tensor | None:
        """Return the mask of visible pairs of tokens; without softmax, of visible tokens."""
        if self._keeps_state():
            if attention_mask is None:
                return None
            if attention_mask.ndim != 2:
                raise BilensError(
                    f"attention_mask has shape {tuple(attention_mask.shape)}, expected (batch, "
                    f"time): {self.config.attention} attention can mask tokens, not pairs"
                )
            # Padding in the cache needs no mask: its keys were zero when they entered the state.
            return attention_mask[:, None, None, -x.shape[1] :].bool()
        # By their order, since transformers has renamed the cache.
        return create_causal_mask(  # type: ignore[return-value]
            self.config, x, attention_mask, cache, position_ids
        )

    def embed_text(
        self, input_ids: Int[Tensor, "batch time"], position_ids: Int[Tensor, "_ time"]
    ) -> tuple[Float[Tensor, "batch time d_model"], Tensor | None, Rope | None]:
        """Return the input of the first block, and the positions for all blocks.

        Returns:
            The embedded tokens, the shortformer positions of queries and keys, and the cosines and
            sines of rotary positions; None for positions of another kind.
        """
        x, config = self.embed(input_ids), self.config
        if config.positions == "rotary":
            width = config.d_model // config.n_heads
            # Models that were trained with rounded angles need the same rounding.
            like = x.new_empty(0, dtype=torch.bfloat16) if config.rope_bfloat16 else x
            cos, sin = rotation(position_ids, width, config.rope_base, like)
            return x, None, (cos.to(x.dtype), sin.to(x.dtype))
        if config.positions == "none":
            return x, None, None
        if int(position_ids.max()) >= config.n_ctx:
            raise BilensError(
                f"input_ids reaches position {int(position_ids.max())}; {config.positions} "
                f"positions end at n_ctx={config.n_ctx}"
            )
        pos_embed = self.pos_embed(position_ids)
        if config.positions == "learned":
            return x + pos_embed, None, None
        return x, pos_embed.expand_as(x), None

    def first_block_values(
        self, x0: Float[Tensor, "batch time d_model"]
    ) -> Float[Tensor, "batch kv_heads time d_head"] | None:
        """Return the values of the first block at its input x0; None without `value_mix`."""
        if not self.config.value_mix:
            return None
        block: Block = self.blocks[0]  # type: ignore[assignment]
        return block.attn.own_values(block.attn_norm(block.mixed(x0, x0)))

    @property
    def W_E(self) -> Float[Tensor, "vocab d_model"]:
        """Embedding of each token."""
        return self.embed.weight

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]:
        """Unembedding of each token, one column each."""
        return self.unembed.weight.T

    def mlp(self, layer: int) -> GatedLayer | PlainMLP:
        """Return the MLP of a block."""
        return self.blocks[check_index("layer", layer, len(self.blocks))].mlp  # type: ignore[return-value]


# Auto classes open saved models once this module is imported.
transformers.AutoConfig.register(LanguageConfig.model_type, LanguageConfig)
transformers.AutoModelForCausalLM.register(LanguageConfig, LanguageModel)

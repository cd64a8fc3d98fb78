"""A language model in TransformerLens 3.9 and 4, with its names of hooks."""

from typing import Any

from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge import generalized_components as parts
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import PreTrainedTokenizerBase

from bilens.nn import GatedLayer
from bilens.nn.language import Attention, LanguageModel


def to_transformer_lens(
    model: LanguageModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> TransformerBridge:
    """Return a model in TransformerLens's bridge: `run_with_cache`, `run_with_hooks`, `W_Q`, ...

    The logits stay the same. `attn.q`, `k`, `v` and `o` have hooks, and with two patterns `q2` and
    `k2`. So have both factors of a gated layer, `mlp.in` (left) and `mlp.gate` (right).
    `hook_pattern` never fires, since the kernels do not compute the pattern;
    `Attention.attention_pattern` does.
    TransformerLens adds its hooks in place, so load another model for other uses. It opens models
    of transformers itself. The tokenizer is for prompts as text.
    """
    architecture = "BilensLanguageModel"
    ArchitectureAdapterFactory.register_adapter(architecture, _Adapter)
    config = model.config
    settings = TransformerBridgeConfig(
        d_model=config.d_model,
        d_head=config.d_model // config.n_heads,
        n_heads=config.n_heads,
        n_key_value_heads=config.n_kv_heads,
        n_layers=config.n_layers,
        n_ctx=config.n_ctx,
        d_vocab=config.vocab_size,
        d_mlp=config.d_hidden,
        act_fn=config.mlp,
        normalization_type={"none": None, "rms": "RMS", "layer": "LN"}[config.norm],
        uses_rms_norm=config.norm == "rms",
        gated_mlp=isinstance(model.mlp(0), GatedLayer),
        use_qk_norm=config.qk_norm,
    )
    # The adapter sees only these settings.
    attn: Attention = model.blocks[0].attn  # type: ignore[assignment]
    settings.n_pairs = attn.pairs
    settings.has_pos_embed = hasattr(model, "pos_embed")
    return build_bridge_from_module(
        model, architecture, tl_config=settings, tokenizer=tokenizer, model_name="bilens"
    )


class _Adapter(ArchitectureAdapter):
    """Names of the model's parts for TransformerLens."""

    def __init__(self, cfg: TransformerBridgeConfig) -> None:
        super().__init__(cfg)
        self.weight_processing_conversions = self._qkvo_weight_conversions()
        self.component_mapping = {
            "embed": parts.EmbeddingBridge(name="embed"),
            "blocks": parts.BlockBridge(name="blocks", submodules=self._block()),
            "ln_final": self._norm("norm"),
            "unembed": parts.UnembeddingBridge(name="unembed", config=self.cfg),
        }
        if cfg.has_pos_embed:
            self.component_mapping["pos_embed"] = parts.PosEmbedBridge(name="pos_embed")

    def _block(self) -> dict[str, Any]:
        reading = {"q": "query", "k": "key", "v": "value", "o": "out"}
        if self.cfg.n_pairs == 2:
            reading |= {"q2": "query2", "k2": "key2"}
        layer = {"in": "left", "gate": "right"} if self.cfg.gated_mlp else {"in": "inner"}
        return {
            "ln1": self._norm("attn_norm"),
            "ln2": self._norm("mlp_norm"),
            "attn": parts.AttentionBridge("attn", self.cfg, _maps(reading)),
            "mlp": parts.MLPBridge("mlp", self.cfg, _maps({**layer, "out": "out"})),
        }

    def _norm(self, name: str) -> Any:
        kinds = {"RMS": parts.RMSNormalizationBridge, "LN": parts.NormalizationBridge}
        return kinds.get(self.cfg.normalization_type, GeneralizedComponent)(name, self.cfg)


def _maps(names: dict[str, str]) -> dict[str, Any]:
    return {there: parts.LinearBridge(name=here) for there, here in names.items()}

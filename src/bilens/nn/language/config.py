"""The settings of a language model as a Hugging Face configuration."""

from typing import Any, no_type_check

from transformers import PreTrainedConfig

from bilens.nn.language_settings import LanguageSettings


# transformers makes the constructor, which takes more settings than its signature says.
@no_type_check
class LanguageConfig(LanguageSettings, PreTrainedConfig):
    """The `LanguageSettings` of a `LanguageModel`, with the settings of transformers."""

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

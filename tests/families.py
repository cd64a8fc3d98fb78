"""Tiny models of every family with random weights, norms and biases among them."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from bilens.transformer import ResidualModel
from tests.models import TOKENS, random_model
from tests.nightly import nightly

VOCAB, WIDTH, HIDDEN, LAYERS, HEADS, TIME = 30, 16, 20, 2, 4, 12

ENDS = {"bos_token_id": 1, "eos_token_id": 2}
LIKE_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": TIME,
    **ENDS,
    "pad_token_id": 0,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": TIME,
    **ENDS,
}
NEOX = {k: v for k, v in LIKE_LLAMA.items() if k != "num_key_value_heads"}
FACTORS = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.7,
    "attention_multiplier": 0.4,
}
KINDS_OF_LAYERS = ["sliding_attention", "full_attention"]
GEMMA = {**LIKE_LLAMA, "head_dim": 4, "query_pre_attn_scalar": 4}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied": ("GPT2", {**GPT2, "tie_word_embeddings": False}),
    "neox": ("GPTNeoX", NEOX),
    "neox-sequential": ("GPTNeoX", {**NEOX, "use_parallel_residual": False}),
    "neox-no-bias": ("GPTNeoX", {**NEOX, "attention_bias": False}),
    "llama": ("Llama", {**LIKE_LLAMA, "tie_word_embeddings": False}),
    "llama-biases": ("Llama", {**LIKE_LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {**LIKE_LLAMA, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**LIKE_LLAMA, "head_dim": 6}),
    "qwen2": ("Qwen2", LIKE_LLAMA),
    "phi3": ("Phi3", LIKE_LLAMA),
    "qwen3": ("Qwen3", {**LIKE_LLAMA, "head_dim": 6}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": ("Gemma3", GEMMA),
    "gemma2-uncapped": ("Gemma2", {**GEMMA, "final_logit_softcapping": None}),
    "gemma": ("Gemma", {**LIKE_LLAMA, "head_dim": 4}),
    "granite": ("Granite", {**LIKE_LLAMA, **FACTORS}),
    "olmo2": ("Olmo2", LIKE_LLAMA),
    "helium": ("Helium", {**LIKE_LLAMA, "head_dim": 4}),
    "glm": ("Glm", {**LIKE_LLAMA, "head_dim": 8, "attention_bias": True}),
    "cohere2": ("Cohere2", {**LIKE_LLAMA, "sliding_window": 6, "layer_types": KINDS_OF_LAYERS}),
}
EXPERTS = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    # Products of groups, the default, need weights of 32 bits or fewer.
    "num_experts_per_tok": 2,
    "eos_token_id": 1,
    "experts_implementation": "eager",
}
QWEN3_MOE = {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 12}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 4}),
    "olmoe": ("Olmoe", {**EXPERTS, "num_experts": 4}),
    "olmoe-normed": ("Olmoe", {**EXPERTS, "num_experts": 4, "norm_topk_prob": True}),
    "qwen3-experts": ("Qwen3Moe", {**QWEN3_MOE, "head_dim": 6}),
    "qwen3-dense": ("Qwen3Moe", {**QWEN3_MOE, "mlp_only_layers": [0, 2]}),
}
PLAIN = ["gpt2", "gpt2-untied", "neox", "neox-sequential", "neox-no-bias"]
GATED = [name for name in FAMILIES if name not in PLAIN]
OWN = {
    "own-layer": {"norm": "layer", "positions": "learned"},
    "own-layer-bias": {"norm": "layer", "bias": True, "n_kv_heads": 2},
    "own-rms": {"norm": "rms", "bias": True, "mlp": "gelu"},
    "own-none": {"norm": "none", "positions": "shortformer", "tie_word_embeddings": True},
    "own-mixed": {"norm": "rms", "attention": "bilinear", "value_mix": True, "embed_mix": True},
    "own-constant": {"norm": "rms", "attention": "squared", "attention_constant": True},
}
ALL = [*FAMILIES, *OWN]
DAILY = ["gpt2", "neox", "llama-biases", "gemma2", "gemma3", "phi3", "granite", "cohere2"]
DAILY += ["own-layer-bias", "own-mixed", "own-constant"]
"""Structures that differ: merged weights, parallel blocks, norms after parts, caps, factors."""
EACH = nightly(ALL, DAILY)  # all families as cases, the others than `DAILY` at night
EACH_READ = nightly(ALL, ("gpt2", "gemma2", "cohere2", "own-mixed", "own-constant"))
"""The same for readings, whose parts come from `bilens.transformer`, tested on all of `DAILY`."""
EACH_GATED = nightly(GATED, ("llama-biases", "gemma3", "phi3"))
"""Families with gates: an MLP with biases, another activation, gates merged with other weights."""


def tiny(name: str, seed: int = 0, dtype: Any = torch.float64, settings: Any = None) -> Any:
    """Return a model whose weights, gains and biases are all of order one.

    `settings` are others than those of the family.
    """
    if name in OWN:
        return random_model(seed, n_layers=LAYERS, **OWN[name]).to(dtype)
    family, usual = {**FAMILIES, **MIXTURES}[name]
    config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_name)(**(settings or usual))
    suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    return of_order_one(getattr(transformers, family + suffix)(config), seed).to(dtype)


def of_order_one(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Return the model in float64, with random weights, gains and biases of order one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator).double()
        parameter.data = values / (parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 2)
    return model.eval().requires_grad_(False)


def altered(model: PreTrainedModel, name: str, value: Any) -> PreTrainedModel:
    """Return a model that has another part or attribute, by its dotted name."""
    path, _, last = name.rpartition(".")
    setattr(attrgetter(path)(model) if path else model, last, value)
    return model


def family_view(name: str, **how: Any) -> ResidualModel:
    return ResidualModel(tiny(name, **how), TOKENS)


@contextmanager
def exact_norms() -> Iterator[None]:
    """Norms of transformers round to float32 inside; in here they keep the dtype of the model."""

    def forward(offset: float, centres: bool) -> Any:
        def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
            eps = getattr(self, "variance_epsilon", getattr(self, "eps", 0.0))
            x = x - x.mean(-1, keepdim=True) if centres else x
            return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (offset + self.weight)

        return norm

    with pytest.MonkeyPatch.context() as patch:
        for family in {family.lower() for family, _ in FAMILIES.values()} - {"gpt2", "gptneox"}:
            module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            for name, kind in vars(module).items():
                if name.endswith(("RMSNorm", "Cohere2LayerNorm")):
                    offset = 1.0 if name.startswith("Gemma") else 0.0
                    patch.setattr(kind, "forward", forward(offset, name.endswith("LayerNorm")))
        yield


def some_text(texts: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (texts, TIME), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def log_probabilities(model: PreTrainedModel) -> torch.Tensor:
    return model(some_text(), use_cache=False).logits.log_softmax(-1)

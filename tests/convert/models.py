"""Tiny models of every family with random weights, norms and biases among them."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.language import random_model

VOCAB, WIDTH, HIDDEN, LAYERS, HEADS, TIME = 30, 16, 20, 2, 4, 12

LIKE_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": TIME,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": TIME,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEOX = {k: v for k, v in LIKE_LLAMA.items() if k != "num_key_value_heads"}
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
    "qwen3": ("Qwen3", {**LIKE_LLAMA, "head_dim": 6}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma2-uncapped": ("Gemma2", {**GEMMA, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", GEMMA),
    "phi3": ("Phi3", LIKE_LLAMA),
}
GATED = ["llama", "llama-biases", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"]
OWN = {
    "own-layer": {"norm": "layer", "positions": "learned"},
    "own-layer-bias": {"norm": "layer", "bias": True, "n_kv_heads": 2},
    "own-rms": {"norm": "rms", "bias": True, "mlp": "gelu"},
    "own-none": {"norm": "none", "positions": "shortformer", "tie_word_embeddings": True},
}
ALL = [*FAMILIES, *OWN]


def tiny(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model whose weights, gains and biases are all of order one."""
    if name in OWN:
        return random_model(seed, n_layers=LAYERS, **OWN[name]).to(dtype)
    family, settings = FAMILIES[name]
    config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_name)(**settings)
    suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, family + suffix)(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator).double()
        parameter.data = values / (parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 2)
    return model.to(dtype).eval().requires_grad_(False)


def some_text(texts: int = 3, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (texts, TIME), generator=generator)


@torch.no_grad()
def log_probabilities(model: PreTrainedModel) -> torch.Tensor:
    return model(some_text(), use_cache=False).logits.log_softmax(-1)

"""Causal models of transformers that a flow reads, each made small, with random weights.

No figure of the papers. Every type of causal model that transformers knows is made small, in
float64. Measured are, for each,

- the relative error of a flow's sum between two texts, with eager attention and with torch's
  fused one, or why it is refused;
- that of the sum over the weights between it and a copy, all of whose weights are changed, on one
  text and with a second text for the base;
- seconds.

A sum is exact if the error is below 1e-4: norms and patterns of most models compute in float32.
Small and paper are the same: 12 minutes on one core.
"""

import multiprocessing
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from textwrap import shorten
from typing import Any

import pandas as pd
import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bilens.analysis import Table
from bilens.data import DeepGrammar
from bilens.flows import diff, flow
from bilens.transformer import ResidualModel
from experiments.context import Outcome, RecipeContext
from experiments.results import Row

EXACT, FLOAT64 = 1e-4, 1e-9
"""Relative errors of an exact sum are smaller, and where all of a type's code is in float64."""
SECONDS, BYTES = 90, 9 * 2**30
"""Each type has no more."""
VOCAB, TIME = 97, 9

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "is_decoder": True,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 12,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "d_model": 48,
    "n_layers": 3,
    "n_heads": 4,
    "num_layers": 3,
    "num_heads": 4,
    "ffn_dim": 64,
    "word_embed_proj_dim": 48,
    "rotary_dim": 8,
    "max_seq_len": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_layer_start_index": 1,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_dense_layers": 1,
    "state_size": 4,
    "mamba_d_state": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_n_groups": 1,
    "time_step_rank": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "lru_width": 48,
    "attention_window_size": 32,
    "sliding_window": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "attention_heads": 4,
    "dff": 64,
    "context_length": 64,
    "attention_hidden_size": 48,
    "intermediate_size_mlp": 64,
    "global_head_dim": 12,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "num_kv_shared_layers": 0,
    "altup_num_inputs": 2,
    "laurel_rank": 4,
    "num_attention_groups": 2,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "embedding_size": 48,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 64,
    "multi_query": False,
    "num_kv_heads": 4,
    "new_decoder_architecture": False,
    "kv_channels": 12,
    "mamba_expand": 2,
    "mamba_d_ssm": 96,
    "mamba_num_heads": 12,
    "mamba_head_dim": 8,
    "n_groups": 1,
    "ssm_state_size": 4,
    "num_memory_blocks": 1,
    "max_target_positions": 64,
    "max_source_positions": 64,
    "head_dim_qk": 12,
}
"""Settings of all types that have them."""
LATENT = {"num_key_value_heads": 4, "head_dim": 8}
SHARED_KEYS = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "global_head_dim": 12,
}
OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),
            *("minicpm3", "youtu", "dots3_note", "dots3_note_text"),
        ),
        LATENT,
    ),
    "cohere_compass_text": {
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 1e4}
            for name in ("sliding_attention", "full_attention")
        },
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "hidden_size": 48,
            "ffn_hidden_size": 64,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    **dict.fromkeys(("gemma4", "gemma4_text"), SHARED_KEYS),
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {**LATENT, "num_layers": 3, "num_hidden_layers": None},
    "mamba2": {"num_heads": 12, "head_dim": 8, "expand": 2},
    "prophetnet": {"num_hidden_layers": None, "num_decoder_layers": 3, "num_encoder_layers": 2},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "local", "local"],
        "num_hidden_layers": None,
        "axial_pos_embds": False,
        "attention_head_size": 12,
        "feed_forward_size": 64,
        "local_attn_chunk_length": 16,
    },
    "stablelm": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    },
    "xlnet": {"max_position_embeddings": None, "n_layer": 3, "d_inner": 64},
    "xlstm": {"v_head_dim": None, "qk_head_dim": None, "head_dim": None},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "attention_head_dim": 24,
        "mamba_dt_rank": 4,
        "attention_hidden_size": None,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "attention_hidden_size": None,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Further settings of single types; None leaves a setting out."""
VISION = {
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
}
TOWERS: dict[str, dict[str, Any]] = {
    "fuyu": {},
    "gemma3": VISION,
    "gemma4": {},
    "gemma4_unified": {},
    "got_ocr2": VISION,
}
"""Types that read images too, and the settings of what reads them, which no text meets."""
NEEDS = {
    "gemma3n": "a vision tower of timm",
    "moss_transcribe_diarize": "an audio tower",
    "musicgen": "tokens of four codebooks",
    "musicgen_melody": "tokens of four codebooks",
    "gemma4_assistant": "streams of another model",
    "gemma4_unified_assistant": "streams of another model",
    "blt": "more memory, and bytes",
}
"""Types that are not made, and what they need."""
SINGLE = ("xglm", "inkling2_text")
"""Types whose code computes in float32 only."""
DROPPED = (
    (),
    ("head_dim",),
    ("num_key_value_heads",),
    ("head_dim", "num_key_value_heads"),
    ("layer_types",),
)
"""Settings that are left out one after the other, until a type can be made."""


def run(context: RecipeContext) -> Outcome:
    """Make each type of model small and measure the sums of its flows."""
    rows = measure_all(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    table = Table(pd.DataFrame(rows), "Types of causal models")
    of_types = counts(rows)
    numbers = {"types": rows, "counts": of_types}
    return Outcome(numbers, parts=[table], rows=stated(of_types), details=numbers)


def stated(of_types: dict[str, int]) -> list[Row]:
    """Return the rows of the file of results."""
    return [
        Row(
            f"{name}: types whose sum is exact",
            of_types[f"{name}: exact"],
            n=of_types["made"],
            baselines={
                kind: of_types[f"{name}: {kind}"] for kind in ("all in float64", "refused", "off")
            },
        )
        for name in SUMS
    ]


def counts(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return how many types are made, exact, refused and off."""
    made = [row for row in rows if not row["not made"]]
    result = {"types": len(rows), "made": len(made)}
    for name in SUMS:
        errors = [row[name] for row in made if not row[f"{name}: refused by"]]
        result[f"{name}: exact"] = sum(is_exact(error) for error in errors)
        result[f"{name}: all in float64"] = sum(is_exact(error, FLOAT64) for error in errors)
        result[f"{name}: off"] = len(errors) - result[f"{name}: exact"]
        result[f"{name}: refused"] = len(made) - len(errors)
    return result


def is_exact(error: float | None, most: float = EXACT) -> bool:
    """Return True for the error of an exact sum; NaN is none."""
    return error is not None and error < most


def measure_all(kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return the row of each type, each measured in a process of its own."""
    fork = multiprocessing.get_context("fork")
    with fork.Pool(1, maxtasksperchild=1) as pool:
        return list(pool.imap(_measured, kinds, chunksize=1))


def _measured(kind: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    return measure(kind)


def measure(kind: str) -> dict[str, Any]:
    """Return what a flow reads of one type of model."""
    start = time.process_time()
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    row: dict[str, Any] = {"type": kind, "class": name, "not made": ""}
    for column in SUMS:
        row[column], row[f"{column}: refused by"] = None, ""
    row["seconds"] = 0.0
    if kind in NEEDS:
        row["not made"] = f"needs {NEEDS[kind]}"
        return row
    for column, (attention, error_of) in SUMS.items():
        try:
            with _limited():
                model = make(kind, attention)
        except Exception as error:
            row["not made"] = _short(error)
            break
        try:
            with _limited():
                row[column] = float(f"{error_of(model):.1e}")
        except Exception as error:
            row[f"{column}: refused by"] = _short(error)
    row["seconds"] = round(time.process_time() - start, 1)
    return row


def _short(error: Exception) -> str:
    """Return the operation that has no rule, or a short error."""
    if type(error).__name__ == "UnknownOperationError":
        message = re.split(r":| has no rule|, a | takes | at ", str(error))[0]
    else:
        message = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return shorten(message, 80, placeholder=" …")


@contextmanager
def _limited() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def make(kind: str, attention: str = "eager") -> Any:
    """Return a small model of a type, in float64, with random norms and biases.

    A type without the attention of this name has its eager one.
    """
    torch.manual_seed(0)
    model = _made(kind, attention)
    torch.manual_seed(1)
    for weight in model.parameters():
        if weight.dim() < 2:
            weight.data += 0.2 * torch.randn_like(weight)
        else:
            weight.data *= 2
    return model


def _made(kind: str, attention: str) -> Any:
    config_class: Any = CONFIG_MAPPING[kind]
    others = OTHERS.get(kind, {})
    probe = config_class()
    text = probe.get_text_config(decoder=True)
    known = {
        name: value
        for name, value in SMALL.items()
        if hasattr(type(text), name) or name in vars(text)
    }
    failures: list[Exception] = []
    for dropped in DROPPED:
        left_out = {*dropped, *(name for name, value in others.items() if value is None)}
        settings = {**known, **others}
        try:
            settings = {k: v for k, v in settings.items() if k not in left_out}
            config = type(text)(**settings)
            if kind in TOWERS:
                config = config_class(text_config=config.to_dict(), **TOWERS[kind])
            kind_of_model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
            is_there = attention != "sdpa" or kind_of_model._supports_sdpa
            config._attn_implementation = attention if is_there else "eager"
            config._experts_implementation = "eager"
            model = kind_of_model(config).eval()
            model.to(torch.float32 if kind in SINGLE else torch.float64)
            _logits(model, torch.randint(3, VOCAB, (5,)))
            return model
        except Exception as error:
            failures.append(error)
    raise failures[0]


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    """Return the logits after a text."""
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0, -1]
    return logits


def texts() -> Tensor:
    """Return two texts that differ in two tokens."""
    generator = torch.Generator().manual_seed(2)
    first = torch.randint(3, VOCAB, (TIME,), generator=generator)
    second = first.clone()
    second[2], second[5] = 7, 11
    return torch.stack([first, second])


def error_of_flow(model: Any) -> float:
    """Return the relative error of the sum of a flow between two texts."""
    text, against = texts()
    view = ResidualModel(model, DeepGrammar().tokenizer())
    token, minus, change = largest(view, _logits(model, text), _logits(model, against))
    through = flow(view, text, token, minus=minus, against=against, labels=0)
    total = float(through.embeddings.sum() + through.choices.sum())
    return abs(total - change) / abs(change)


def error_of_diff(model: Any, *, two_texts: bool = False) -> float:
    """Return the relative error of the sum over all weights between a model and a changed copy."""
    tuned = deepcopy(model)
    torch.manual_seed(3)
    for weight in tuned.parameters():
        weight.data *= 1 + 0.1 * torch.randn_like(weight)
    text, other = texts()
    view, after = (ResidualModel(x, DeepGrammar().tokenizer()) for x in (model, tuned))
    first, second = _logits(tuned, text), _logits(model, other if two_texts else text)
    token, minus, change = largest(view, first, second)
    against = other if two_texts else None
    found = diff(view, after, text, token, minus, against=against)
    total = float(found.flows.sum() + found.rest.sum())
    return abs(total - change) / abs(change)


def largest(view: ResidualModel, first: Tensor, second: Tensor) -> tuple[str, str, float]:
    """Return the tokens whose logits rise and fall most from a run to another, and by how much.

    A small change would be told from the rounding of logits less well.
    """
    tokenizer: Any = view.tokenizer
    changes = (first - second)[: len(tokenizer)]
    numbers = int(changes.argmax()), int(changes.argmin())
    token, minus = tokenizer.convert_ids_to_tokens([*numbers])
    return token, minus, float(changes[numbers[0]] - changes[numbers[1]])


SUMS: dict[str, tuple[str, Callable[[Any], float]]] = {
    "eager attention": ("eager", error_of_flow),
    "sdpa attention": ("sdpa", error_of_flow),
    "two models": ("eager", error_of_diff),
    "two models and two texts": ("eager", partial(error_of_diff, two_texts=True)),
}
"""Attention by products and a softmax, or torch's fused one, and what is added up."""

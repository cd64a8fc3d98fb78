"""The families of transformers whose structure is known, each as an `Anatomy`."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from bilens.convert.anatomy import Anatomy, Map, Norm, Reading, Table, Values
from bilens.errors import BilensError

__all__ = ["FAMILIES", "anatomy"]


class _Parts:
    """Names for the modules of a model, and a check that each is of a kind that is understood."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: name for name, module in model.named_modules()}

    def maps(self, *modules: nn.Module) -> list[Map]:
        for module in modules:
            if type(module) not in (nn.Linear, Conv1D):
                raise self._unknown(module, "a plain linear map; merge adapters and dequantize")
        return [Map(self.names[module], module) for module in modules]

    def table(self, module: nn.Module) -> Table:
        if not isinstance(module, nn.Embedding):
            raise self._unknown(module, "an embedding")
        return Table(self.names[module], module)

    def norm(self, module: nn.Module) -> Norm | None:
        if isinstance(module, nn.Identity):
            return None
        found = type(module).__name__
        if found not in NORMS:
            raise self._unknown(module, f"one of {', '.join(NORMS)}")
        centres, offset = NORMS[found]
        return Norm(self.names[module], module, centres, offset)

    def _unknown(self, module: nn.Module, expected: str) -> BilensError:
        return BilensError(
            f"{self.names[module]} is a {type(module).__name__}, expected {expected} first"
        )


NORMS = {
    "LayerNorm": (True, 0.0),
    "RMSNorm": (False, 0.0),
    "LlamaRMSNorm": (False, 0.0),
    "MistralRMSNorm": (False, 0.0),
    "Qwen2RMSNorm": (False, 0.0),
    "Qwen3RMSNorm": (False, 0.0),
    "Phi3RMSNorm": (False, 0.0),
    "Gemma2RMSNorm": (False, 1.0),
    "Gemma3RMSNorm": (False, 1.0),
}
"""Whether a norm takes the mean away, and what it adds to its weight to have its gain."""


def _gpt2(model: Any) -> Anatomy:
    parts, core, d_model = _Parts(model), model.transformer, model.config.hidden_size
    readings, writes, values = [], [], []
    for block in core.h:
        qkv, out, up, down = parts.maps(
            block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj
        )
        readings += [
            Reading(parts.norm(block.ln_1), [qkv]),
            Reading(parts.norm(block.ln_2), [up]),
        ]
        writes += [out, down]
        rows = torch.arange(2 * d_model, 3 * d_model)
        values.append(Values(qkv, rows, out, block.attn.head_dim))
    [unembed] = parts.maps(model.lm_head)
    readings.append(Reading(parts.norm(core.ln_f), [unembed]))
    tables = [parts.table(core.wte), parts.table(core.wpe)]
    return Anatomy(readings, writes, tables, unembed, values)


def _neox(model: Any) -> Anatomy:
    parts, core = _Parts(model), model.gpt_neox
    readings, writes, values = [], [], []
    for block in core.layers:
        qkv, out, up, down = parts.maps(
            block.attention.query_key_value,
            block.attention.dense,
            block.mlp.dense_h_to_4h,
            block.mlp.dense_4h_to_h,
        )
        readings += [
            Reading(parts.norm(block.input_layernorm), [qkv]),
            Reading(parts.norm(block.post_attention_layernorm), [up]),
        ]
        writes += [out, down]
        width = block.attention.head_size
        # Each head has its query, key and value in a row.
        rows = torch.arange(qkv.n_out).reshape(-1, 3, width)[:, 2].flatten()
        values.append(Values(qkv, rows, out, width))
    [unembed] = parts.maps(model.lm_head)
    readings.append(Reading(parts.norm(core.final_layer_norm), [unembed]))
    return Anatomy(readings, writes, [parts.table(core.embed_in)], unembed, values)


def _llama(model: Any) -> Anatomy:
    """Llama and what is built like it: Mistral, Qwen 2 and 3, Gemma 2 and 3, Phi-3."""
    parts, core = _Parts(model), model.model
    readings, writes, values, inner = [], [], [], []
    for block in core.layers:
        attn, mlp = block.self_attn, block.mlp
        out, down = parts.maps(attn.o_proj, mlp.down_proj)
        attention, gated = parts.maps(*_projections(attn)), parts.maps(*_gates(mlp))
        # Where a norm stands before the MLP by this name, the one after attention is no reading
        # norm: its output is added to the stream, and its gain stays.
        before = getattr(block, "pre_feedforward_layernorm", None)
        readings += [
            Reading(parts.norm(block.input_layernorm), attention),
            Reading(parts.norm(before or block.post_attention_layernorm), gated),
        ]
        writes += [out, down]
        inner += [*_inner(attn)]
        if before is not None:
            inner += [block.post_attention_layernorm, block.post_feedforward_layernorm]
        reads = attention[-1]
        n_out = reads.n_out
        heads = model.config.num_attention_heads // attn.num_key_value_groups
        rows = torch.arange(n_out - heads * attn.head_dim, n_out)
        values.append(Values(reads, rows, out, attn.head_dim, attn.num_key_value_groups))
    [unembed] = parts.maps(model.lm_head)
    readings.append(Reading(parts.norm(core.norm), [unembed]))
    softcap = getattr(model.config, "final_logit_softcapping", None) is not None
    tables = [parts.table(core.embed_tokens)]
    return Anatomy(readings, writes, tables, unembed, values, inner, softcap)


def _projections(attn: Any) -> list[nn.Module]:
    fused = getattr(attn, "qkv_proj", None)
    return [fused] if fused is not None else [attn.q_proj, attn.k_proj, attn.v_proj]


def _gates(mlp: Any) -> list[nn.Module]:
    fused = getattr(mlp, "gate_up_proj", None)
    return [fused] if fused is not None else [mlp.gate_proj, mlp.up_proj]


def _inner(attn: Any) -> Iterator[nn.Module]:
    """Norms of queries and keys stand behind the maps that a norm before attention folds into."""
    for name in ("q_norm", "k_norm"):
        if hasattr(attn, name):
            yield getattr(attn, name)


def _own(model: Any) -> Anatomy:
    config = model.config
    parts, shortformer = _Parts(model), config.positions == "shortformer"
    apart = "shortformer positions are added behind the norm" if shortformer else None
    readings, writes, values, inner = [], [], [], []
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        value, out, down = parts.maps(attn.value, attn.out, mlp.out)
        pairs = parts.maps(attn.query, attn.key)
        if attn.pairs == 2:
            pairs += parts.maps(attn.query2, attn.key2)
        gates = [mlp.left, mlp.right] if hasattr(mlp, "left") else [mlp.inner]
        readings += [
            Reading(parts.norm(block.attn_norm), [*pairs, value], apart),
            Reading(parts.norm(block.mlp_norm), parts.maps(*gates)),
        ]
        writes += [out, down]
        rows = torch.arange(value.n_out)
        values.append(Values(value, rows, out, attn.d_head, attn.n_heads // attn.n_kv_heads))
        # The numbers by which they mix stand in them, apart from any map.
        inner += [block, attn]
    [unembed] = parts.maps(model.unembed)
    readings.append(Reading(parts.norm(model.norm), [unembed]))
    places = [model.pos_embed] if config.positions == "learned" else []
    tables = [parts.table(module) for module in (model.embed, *places)]
    inner += [model.pos_embed] if shortformer else []
    softcap = config.logit_cap is not None
    return Anatomy(readings, writes, tables, unembed, values, inner, softcap, _partly(config))


def _partly(config: Any) -> str | None:
    if config.attention != "softmax":
        return f"rows of a pattern do not sum to 1 with attention={config.attention!r}"
    if config.value_mix:
        return "the first block's values are mixed into all, and so are their biases"
    return None


FAMILIES: dict[str, Callable[[Any], Anatomy]] = {
    "GPT2LMHeadModel": _gpt2,
    "GPTNeoXForCausalLM": _neox,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _llama,
    "Qwen2ForCausalLM": _llama,
    "Qwen3ForCausalLM": _llama,
    "Gemma2ForCausalLM": _llama,
    "Gemma3ForCausalLM": _llama,
    "Phi3ForCausalLM": _llama,
    "LanguageModel": _own,
}


def anatomy(model: nn.Module) -> Anatomy:
    """What reads and writes the residual stream of a model of a known family.

    Raises:
        BilensError: the family is unknown, or the model has parts that its family has not.
    """
    kind = type(model).__name__
    if kind not in FAMILIES:
        raise BilensError(
            f"model is a {kind}, whose structure is not known; expected {', '.join(FAMILIES)}"
        )
    found = FAMILIES[kind](model)
    known = {id(part) for module in found.modules() for part in module.parameters(recurse=False)}
    strange = [name for name, part in model.named_parameters() if id(part) not in known]
    if strange:
        raise BilensError(
            f"This {kind} has weights that its family has not, so what they do is not known: "
            f"{', '.join(strange[:5])}"
        )
    return found

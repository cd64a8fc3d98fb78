"""Pretrained transformers as models of bilens, whose attention may lose its softmax."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN, LinearActivation

from bilens.errors import BilensError
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.transformer.families import find_modules
from bilens.transformer.layers import Modules, Moment
from bilens.transformer.maps import Norm
from bilens.transformer.sums import check_unchanged, log_probabilities


def as_language_model(model: Any) -> LanguageModel:
    """Return a Llama-like transformer as a `LanguageModel` with the same logits.

    Weights that need no change are shared with the original.

    Its norms are RMSNorms before attention, MLP and unembedding, its positions are rotary, and its
    MLPs are gated. The logits of both models are compared on random tokens.

    Raises:
        BilensError: the model has another part, or its logits differ.
    """
    if isinstance(model, LanguageModel):
        settings = model.config
        missing = {
            "attention other than softmax": settings.attention != "softmax",
            "shortformer positions": settings.positions == "shortformer",
            "mixed values or embeddings": settings.value_mix or settings.embed_mix,
        }
        _check_none("LanguageConfig", missing)
        return model.eval()  # type: ignore[no-untyped-call]
    modules = find_modules(model)
    config = _config(model.config, modules)
    dtype = modules.embed.module.weight.dtype
    with torch.device("meta"):
        copy: Any = LanguageModel(config)
    copy = _filled(copy, {name: weight.to(dtype) for name, weight in _weights(copy, modules)})
    action = f"Copying this {type(model).__name__}"
    check_unchanged(copy, log_probabilities(model), action, "no model of bilens is its copy")
    return copy


def without_softmax(model: LanguageModel) -> LanguageModel:
    """Return a model with squared attention whose rows are divided by their sum.

    A score s = q.k / sqrt(d) enters as (s / 2 + 1)^2, close to exp(s) for small s. Queries keep
    their weights. The constant of each head is a parameter. All other weights are shared.
    """
    settings = model.config.settings() | {
        "attention": "squared",
        "attention_norm": "sum",
        "attention_constant": True,
        "attention_scale": 0.5 / (model.config.d_model // model.config.n_heads) ** 0.5,
    }
    extra = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id")}
    with torch.device("meta"):
        copy: Any = LanguageModel(LanguageConfig(**settings, **extra))
    weights = model.state_dict()
    for name, constant in copy.named_parameters():
        if name.endswith("score_constant"):
            weights[name] = torch.ones_like(constant, device="cpu").to(model.embed.weight)
    return _filled(copy, weights)


def _filled(model: Any, weights: dict[str, Tensor]) -> LanguageModel:
    """Return a model without memory of its own, with these weights."""
    is_tied = model.config.tie_word_embeddings
    model.load_state_dict(weights, strict=not is_tied, assign=True)
    if is_tied:
        model.unembed.weight = model.embed.weight
    return model.eval()


def _config(config: Any, modules: Modules) -> LanguageConfig:
    """Return the settings of the copy; raise if the model has a part that it lacks."""
    first = modules.layers[0]
    heads, mlp = first.heads, first.mlp
    width = modules.embed.module.embedding_dim
    rope = getattr(config, "rope_parameters", None) or {}
    missing = {
        "attention other than softmax": modules.attention != "softmax",
        "parallel attention and MLP": modules.mlp_moment(0) == Moment.input(0),
        "learned positions": modules.positions is not None or modules.hidden_positions is not None,
        "norms after attention or MLP": heads.out_norm is not None or mlp.out_norm is not None,
        "norms of queries and keys": bool(heads.inner),
        "heads whose widths do not add up to the stream's": heads.d_head * heads.n_heads != width,
        "MLPs without gates": mlp.gate is None,
        "experts": any(layer.mlp.router is not None for layer in modules.layers),
        "scaled embeddings or logits": modules.embed.scale != 1 or modules.logit_scale != 1,
        "scaled outputs of layers": mlp.residual_scale != 1,
        "scaled rotary positions": rope.get("rope_type", "default") != "default",
        "LayerNorms": any(norm is None or norm.centres for norm in (heads.norm, mlp.norm)),
        "sliding windows": "sliding_attention" in (getattr(config, "layer_types", None) or ())
        or getattr(config, "sliding_window", None) is not None,
    }
    _check_none(type(config).__name__, missing)
    activation = mlp.activation_function()
    gates: dict[type[nn.Module], Any] = {
        LinearActivation: "bilinear",
        nn.SiLU: "swiglu",
        type(ACT2FN["silu"]): "swiglu",
    }
    gate = gates.get(type(activation))
    if gate is None:
        raise BilensError(
            f"{mlp.name} has the activation {activation}, expected SiLU or a linear one; "
            "`bilens linearise` makes any gate linear"
        )
    has_bias = any(part.bias() is not None for part in (*heads.reads, heads.out))
    mlp_has_bias = any(part.bias() is not None for part in (*mlp.reads, mlp.down))
    assert isinstance(heads.norm, Norm)
    return LanguageConfig(
        vocab_size=modules.embed.module.num_embeddings,
        d_model=width,
        n_layers=len(modules.layers),
        n_heads=heads.n_heads,
        n_kv_heads=heads.n_kv_heads,
        d_hidden=mlp.down.n_in,
        n_ctx=config.max_position_embeddings,
        mlp=gate,
        norm="rms",
        norm_eps=heads.norm.eps,
        bias=has_bias,
        mlp_bias="all" if mlp_has_bias else "none",
        rope_base=rope.get("rope_theta", 10_000.0),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )


def _check_none(name: str, missing: dict[str, bool]) -> None:
    if present := [part for part, is_so in missing.items() if is_so]:
        raise BilensError(
            f"{name} has {', '.join(present)}; expected a Llama-like model, with RMSNorms, rotary "
            "positions and gated MLPs"
        )


def _weights(copy: LanguageModel, modules: Modules) -> Any:
    """Yield the weights of the copy by their names."""
    maps: dict[str, Any] = {}
    norms: dict[str, Any] = {"norm": modules.norm}
    for i, layer in enumerate(modules.layers):
        name, heads, mlp = f"blocks.{i}", layer.heads, layer.mlp
        norms |= {f"{name}.attn_norm": heads.norm, f"{name}.mlp_norm": mlp.norm}
        [(query, key)] = heads.pairs
        maps |= {f"{name}.attn.{n}": m for n, m in (("query", query), ("key", key))}
        maps |= {f"{name}.attn.value": heads.value, f"{name}.attn.out": heads.out}
        maps |= {f"{name}.mlp.left": mlp.up, f"{name}.mlp.right": mlp.gate}
        maps[f"{name}.mlp.out"] = mlp.down
    yield "embed.weight", modules.embed.weight()
    if not copy.config.tie_word_embeddings:
        yield "unembed.weight", modules.unembed.weight()
    for name, norm in norms.items():
        yield f"{name}.weight", norm.gain()
    for name, part in maps.items():
        yield f"{name}.weight", part.weight()
        module: Any = copy.get_submodule(name)
        if module.bias is not None:
            # One setting gives all maps of a layer biases, so those without one get zeros.
            bias = part.bias()
            yield f"{name}.bias", part.weight().new_zeros(part.n_out) if bias is None else bias

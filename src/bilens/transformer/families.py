"""Architectures, each a table of the names of its parts; users add theirs in one call."""

import math
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.hooks import evaluating
from bilens.nn import ATTENTIONS
from bilens.nn.layers import GATES, ScalarNorm
from bilens.transformer.layers import MLP, Heads, Layer, Modules, known_parameters
from bilens.transformer.maps import (
    ConstantNorm,
    Embedding,
    ExpertMap,
    InputNorm,
    LinearMap,
    ModuleMap,
    Norm,
    working_dtype,
)

ConfigNumber = Callable[[Any], float | None]
"""A number by a model's configuration."""


@dataclass(frozen=True)
class Family:
    """Names of the parts of an architecture; the defaults are Llama's.

    Names from `layers` to `hidden_positions` are those of modules of the model, names from `attn`
    to `numbers` those of modules of a layer. None is for parts that the architecture does not have.
    Maps that are fused into one module all have its name. Other attributes are functions of the
    model's configuration.

    Attributes:
        layers: the list of layers.
        embed: the embedding of tokens.
        norm: the norm before the unembedding.
        unembed: the map to the logits.
        positions: embedding of positions that is added to that of tokens.
        hidden_positions: embedding of positions that only queries and keys read.
        attn: the attention.
        query: the map of queries.
        key: the map of keys.
        value: the map of values.
        pair: the maps of a second pair of queries and keys.
        fused: order of a map of queries, keys and values: all queries, then all keys, then all
            values; or the three of each head.
        out: the map of the heads' values to the stream.
        attn_norm: the norm before the heads.
        attn_out_norm: the norm between the heads' output and the stream.
        head_norms: norms of queries and keys, if the model has them.
        mlp: the MLP.
        gate: the map under the activation; None for an MLP without a gate.
        up: the other factor.
        down: the map back to the stream.
        activation: the attribute of the MLP that is its activation.
        experts: the experts of a mixture, with the parameters gate_up_proj and down_proj, in layers
            that have them.
        router: the map whose scores select experts.
        mlp_norm: the norm before the MLP.
        mlp_out_norm: the norm between the MLP's output and the stream.
        residual_mix: factors of the stream and of the embedding that a layer adds to it.
        v_first_share: share of the first layer's values in those of each layer.
        numbers: other numbers of a layer that are known.
        parallel: True if attention and MLP of a layer read the same stream.
        embed_scale: factor of token embeddings; modules that multiply their rows themselves by
            their own `embed_scale` need none.
        residual_scale: factor of the outputs of attention and MLPs.
        logit_scale: factor of logits.
        softcap: c if logits are c tanh(z / c), or None.
        partial_values: the reason why attention changes the biases of values, or None.
        fixed_heads: the reason why attention needs the coordinates of queries, keys and values as
            they are, besides rotary positions and norms; or None.
        attention: one of `bilens.nn.ATTENTIONS`.
        queries_keys: function of an attention module, its inputs (n, d_model) and a position. It
            returns scaled queries and keys, pairs of (n, heads, d_head). Only attention that is not
            built on transformers' interface needs it.
    """

    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    unembed: str = "lm_head"
    positions: str | None = None
    hidden_positions: str | None = None
    attn: str = "self_attn"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    pair: tuple[str, str] | None = None
    fused: Literal["in order", "by head"] = "in order"
    out: str = "self_attn.o_proj"
    attn_norm: str | None = "input_layernorm"
    attn_out_norm: str | None = None
    head_norms: tuple[str, ...] = ("self_attn.q_norm", "self_attn.k_norm")
    mlp: str = "mlp"
    gate: str | None = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    activation: str = "act_fn"
    experts: str | None = None
    router: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    residual_mix: str | None = None
    v_first_share: str | None = None
    numbers: tuple[str, ...] = ()
    parallel: Callable[[Any], bool] = lambda _: False
    embed_scale: ConfigNumber = lambda _: 1.0
    residual_scale: ConfigNumber = lambda _: 1.0
    logit_scale: ConfigNumber = lambda _: 1.0
    softcap: ConfigNumber = lambda config: getattr(config, "final_logit_softcapping", None)
    partial_values: Callable[[Any], str | None] = lambda _: None
    fixed_heads: Callable[[Any], str | None] = lambda _: None
    attention: Callable[[Any], str] = lambda _: "softmax"
    queries_keys: Callable[[Any, Tensor, int], list[tuple[Tensor, Tensor]]] | None = None


LLAMA = Family()
FUSED_MLP = replace(
    LLAMA, gate="mlp.gate_up_proj", up="mlp.gate_up_proj", activation="activation_fn"
)
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "HeliumForCausalLM": LLAMA,
    **dict.fromkeys(
        ("MixtralForCausalLM", "OlmoeForCausalLM", "Qwen3MoeForCausalLM"),
        replace(LLAMA, experts="mlp.experts", router="mlp.gate"),
    ),
    "GlmForCausalLM": FUSED_MLP,
    "Phi3ForCausalLM": replace(
        FUSED_MLP, query="self_attn.qkv_proj", key="self_attn.qkv_proj", value="self_attn.qkv_proj"
    ),
    "GraniteForCausalLM": replace(
        LLAMA,
        embed_scale=lambda config: config.embedding_multiplier,
        residual_scale=lambda config: config.residual_multiplier,
        logit_scale=lambda config: 1 / config.logits_scaling,
    ),
    "Cohere2ForCausalLM": replace(
        LLAMA,
        mlp_norm="input_layernorm",
        parallel=lambda _: True,
        logit_scale=lambda config: config.logit_scale,
    ),
    "Olmo2ForCausalLM": replace(
        LLAMA,
        attn_norm=None,
        attn_out_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_out_norm="post_feedforward_layernorm",
    ),
    "GemmaForCausalLM": LLAMA,
    **dict.fromkeys(
        ("Gemma2ForCausalLM", "Gemma3ForCausalLM"),
        replace(
            LLAMA,
            attn_out_norm="post_attention_layernorm",
            mlp_norm="pre_feedforward_layernorm",
            mlp_out_norm="post_feedforward_layernorm",
        ),
    ),
    "GPT2LMHeadModel": Family(
        layers="transformer.h",
        embed="transformer.wte",
        positions="transformer.wpe",
        norm="transformer.ln_f",
        attn="attn",
        query="attn.c_attn",
        key="attn.c_attn",
        value="attn.c_attn",
        out="attn.c_proj",
        attn_norm="ln_1",
        gate=None,
        up="mlp.c_fc",
        down="mlp.c_proj",
        activation="act",
        mlp_norm="ln_2",
    ),
    "GPTNeoXForCausalLM": Family(
        layers="gpt_neox.layers",
        embed="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        attn="attention",
        query="attention.query_key_value",
        key="attention.query_key_value",
        value="attention.query_key_value",
        fused="by head",
        out="attention.dense",
        gate=None,
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        activation="act",
        parallel=lambda config: config.use_parallel_residual,
    ),
}


def own_family(config: Any) -> Family:
    """Return the family of bilens's own `LanguageModel`, by its configuration."""
    has_gate = config.mlp in GATES
    kind = ATTENTIONS[config.attention]
    numbers = (*kind.numbers, *(["score_constant"] if config.attention_constant else []))
    return Family(
        layers="blocks",
        embed="embed",
        norm="norm",
        unembed="unembed",
        positions="pos_embed" if config.positions == "learned" else None,
        hidden_positions="pos_embed" if config.positions == "shortformer" else None,
        attn="attn",
        query="attn.query",
        key="attn.key",
        value="attn.value",
        pair=("attn.query2", "attn.key2") if kind.pairs == 2 else None,
        out="attn.out",
        attn_norm="attn_norm",
        gate="mlp.right" if has_gate else None,
        up="mlp.left" if has_gate else "mlp.inner",
        down="mlp.out",
        activation="gate" if has_gate else "activate",
        mlp_norm="mlp_norm",
        residual_mix="residual_mix" if config.embed_mix else None,
        v_first_share="attn.value_mix_share" if config.value_mix else None,
        numbers=tuple(f"attn.{name}" for name in numbers),
        softcap=lambda config: config.logit_cap,
        attention=lambda config: config.attention,
        partial_values=_own_partial_values,
        fixed_heads=_own_fixed_heads,
    )


def _own_partial_values(config: Any) -> str | None:
    if not ATTENTIONS[config.attention].sums_to_one:
        return f"rows of a pattern do not sum to 1 with attention={config.attention!r}"
    if config.value_mix:
        return "the first block's values are mixed into all, and so are their biases"
    return None


def _own_fixed_heads(config: Any) -> str | None:
    if config.qk_norm:
        return "queries and keys are divided by their root mean square"
    if config.attention_norm == "rms":
        return "outputs of heads are divided by their root mean square"
    return "the first block's values are mixed into all" if config.value_mix else None


@checked
def register_family(architecture: str, family: Family) -> None:
    """Let bilens read and process models of an architecture, the name of their class.

    The family is checked against the first model that is read.

    Raises:
        BilensError: the architecture is known already.
    """
    if architecture in known_families():
        raise BilensError(f"architecture={architecture!r} is known already; expected a new name")
    FAMILIES[architecture] = family


def known_families() -> list[str]:
    """Return the names of the architectures that are known."""
    return [*FAMILIES, "LanguageModel"]


def _family_of(model: Any) -> Family:
    kind = type(model).__name__
    return own_family(model.config) if kind == "LanguageModel" else FAMILIES[kind]


def config_numbers(model: Any) -> dict[str, Any]:
    """Return the numbers that a model's configuration gives its forward pass, by their name."""
    family, config = _family_of(model), model.config
    # Its modules were made by these settings.
    made_by = (
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("clip_qkv", "use_bidirectional_attention"),
    )
    numbers: dict[str, Any] = {name: getattr(config, name, None) for name in made_by}
    for name in ("embed_scale", "residual_scale", "logit_scale"):
        try:
            factor = getattr(family, name)(config)
        except ZeroDivisionError:
            factor = math.inf
        numbers[name] = 1.0 if factor is None else float(factor)
        if not math.isfinite(numbers[name]):
            raise BilensError(
                f"{name} of this {type(model).__name__} is {numbers[name]} by its configuration, "
                "expected a finite factor"
            )
    return {
        **numbers,
        "parallel": bool(family.parallel(config)),
        "softcap": family.softcap(config),
        "attention": family.attention(config),
    }


def find_modules(model: nn.Module) -> Modules:
    """Return the parts of a model of a known family; raise unless the model has just these."""
    check_merged(model)
    kind = type(model).__name__
    if kind not in known_families():
        raise BilensError(
            f"model is a {kind}, whose structure is not known, as readings of weights need. Flows, "
            "patches, circuits and task directions read every causal model of transformers; "
            "bilens.register_family() adds an architecture to the known ones, "
            f"{', '.join(known_families())}"
        )
    family = _family_of(model)
    with evaluating(model):
        modules = _Finder(model, family).modules()
        # Names may fit by chance. On random numbers a different formula shows.
        for layer in modules.layers:
            layer.mlp.check()
    _check_unshared(modules)
    _check_one_type(modules)
    ids = {id(parameter) for parameter in known_parameters(modules)}
    # A weight without a role could add to the stream unseen, so the view would not be exact.
    strange = [name for name, part in model.named_parameters() if id(part) not in ids]
    if strange:
        raise BilensError(
            f"This {kind} has weights that its family does not have, so what they do is not known: "
            f"{', '.join(strange[:5])}"
        )
    return modules


def check_merged(model: nn.Module) -> None:
    """Raise BilensError if a model has adapters of PEFT around it."""
    if hasattr(model, "merge_and_unload"):
        raise BilensError(
            f"model is a {type(model).__name__}, whose adapters stand beside its weights; merge "
            "them: model = model.merge_and_unload()"
        )


class _Finder:
    """Lookup of the parts that a family names, each of a kind that is understood."""

    def __init__(self, model: nn.Module, family: Family) -> None:
        self.model, self.family = model, family
        self.config: Any = model.config
        n_layers = len(self._module(family.layers))  # type: ignore[arg-type]
        self.layers = [f"{family.layers}.{i}" for i in range(n_layers)]
        self._require_all()
        self._check_sizes()
        self.numbers = config_numbers(model)

    def modules(self) -> Modules:
        family, config = self.family, self.config
        return Modules(
            layers=[self._layer(name) for name in self.layers],
            embed=self._embedding(family.embed, self.numbers["embed_scale"]),
            positions=self._positions(family.positions),
            hidden_positions=self._positions(family.hidden_positions),
            norm=self._norm(family.norm),
            unembed=self._map(family.unembed),
            parallel=self.numbers["parallel"],
            logit_scale=self.numbers["logit_scale"],
            softcap=self.numbers["softcap"],
            partial_values=family.partial_values(config),
            fixed_heads=family.fixed_heads(config),
            attention=self.numbers["attention"],
            queries_keys=family.queries_keys,
        )

    def _require_all(self) -> None:
        """Raise BilensError with all names of the family that the model does not have."""
        family = self.family
        outer = [family.embed, family.norm, family.unembed]
        outer += [name for name in (family.positions, family.hidden_positions) if name]
        inner = [family.attn, family.query, family.key, family.value, family.out, family.mlp]
        inner += list(family.pair or ())
        if not self._has_experts(f"{self.layers[0]}." if self.layers else ""):
            inner += [family.up, family.down, f"{family.mlp}.{family.activation}"]
            inner += [family.gate] if family.gate else []
        optional = [family.attn_norm, family.attn_out_norm, family.mlp_norm]
        optional += [family.mlp_out_norm, family.residual_mix, family.v_first_share]
        inner += [name for name in optional if name]
        names = outer + [f"{self.layers[0]}.{name}" for name in inner if self.layers]
        # All at once: a user who writes a Family would otherwise correct one name at a time.
        missing = [name for name in names if self._get(name) is None]
        if not hasattr(self.config, "num_attention_heads"):
            missing.append("config.num_attention_heads")
        if missing:
            raise BilensError(
                f"{type(self.model).__name__} has no {', '.join(missing)}; set their names in its "
                "Family, or None for parts that the architecture does not have"
            )

    def _check_sizes(self) -> None:
        """Raise BilensError unless the modules are those that the configuration describes."""
        kind, config = type(self.model).__name__, self.config
        n_layers = getattr(config, "num_hidden_layers", len(self.layers))
        if not self.layers or len(self.layers) != n_layers:
            raise BilensError(
                f"{kind} has {len(self.layers)} layers and num_hidden_layers={n_layers} in its "
                "configuration, expected the same number, 1 or more"
            )
        # OLMo may cut queries, keys and values off.
        if getattr(config, "clip_qkv", None) is not None:
            raise BilensError(
                f"{kind} has clip_qkv={config.clip_qkv}, so that queries, keys and values are not "
                "linear maps; expected None"
            )
        for layer in self.layers:
            attention = self._module(f"{layer}.{self.family.attn}")
            bidirectional = getattr(config, "use_bidirectional_attention", False)
            if bidirectional or getattr(attention, "is_causal", True) is False:
                raise BilensError(
                    f"{layer}.{self.family.attn} is not causal: its tokens attend to later ones, "
                    "expected a causal language model"
                )

    def _layer(self, name: str) -> Layer:
        return Layer(
            name=name,
            module=self._module(name),
            heads=self._heads(f"{name}."),
            mlp=self._mlp(f"{name}."),
            residual_mix=self._parameter(f"{name}.", self.family.residual_mix),
            numbers=tuple(self._get(f"{name}.{i}") for i in self.family.numbers),
        )

    def _heads(self, layer: str) -> Heads:
        family, config = self.family, self.config
        n_heads = config.num_attention_heads
        # Configurations without the setting have as many heads of keys as of queries.
        n_kv_heads = getattr(config, "num_key_value_heads", None) or n_heads
        names = (family.query, family.key, family.value)
        if len(set(names)) == 1:
            query, key, value = self._fused(layer + family.query, n_heads, n_kv_heads)
        else:
            query, key, value = (self._map(layer + name) for name in names)
        second = [self._map(layer + name) for name in family.pair or ()]
        out = self._map(layer + family.out)
        d_head, remainder = divmod(value.n_out, n_kv_heads)
        width = getattr(self._module(layer + family.attn), "head_dim", d_head)
        if remainder or not query.n_out == out.n_in == n_heads * d_head == n_heads * width:
            raise BilensError(
                f"{layer}{family.attn} has maps of {query.n_out} queries and {value.n_out} values, "
                f"which do not fit {n_heads} heads that share {n_kv_heads} heads of keys, those of "
                "the model's configuration; was it changed?"
            )
        return Heads(
            module=self._module(layer + family.attn),
            norm=self._norm(family.attn_norm, layer),
            pairs=((query, key), (second[0], second[1])) if second else ((query, key),),
            value=value,
            out=out,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            out_norm=self._norm(family.attn_out_norm, layer),
            inner=tuple(
                known_norm(layer + name, module)
                for name in family.head_norms
                if (module := self._get(layer + name)) is not None
            ),
            v_first_share=self._parameter(layer, family.v_first_share),
            residual_scale=self.numbers["residual_scale"],
        )

    def _fused(self, name: str, n_heads: int, n_kv_heads: int) -> list[LinearMap]:
        # One module holds all three maps; each becomes a map with some of its rows.
        projection = self._map(name)
        rows = torch.arange(projection.n_out)
        if self.family.fused == "by head":
            # GPT-NeoX: the rows of a head's query, key and value follow each other.
            parts = [part.flatten() for part in rows.reshape(n_heads, 3, -1).unbind(1)]
        else:
            d_head = projection.n_out // (n_heads + 2 * n_kv_heads)
            sizes = [n * d_head for n in (n_heads, n_kv_heads, n_kv_heads)]
            parts = list(rows.split(sizes))
        return [replace(projection, rows=part) for part in parts]

    def _has_experts(self, layer: str) -> bool:
        family = self.family
        return family.experts is not None and self._get(layer + family.experts) is not None

    def _mlp(self, layer: str) -> MLP:
        family = self.family
        mlp = partial(
            MLP,
            name=layer + family.mlp,
            module=self._module(layer + family.mlp),
            norm=self._norm(family.mlp_norm, layer),
            out_norm=self._norm(family.mlp_out_norm, layer),
            residual_scale=self.numbers["residual_scale"],
        )
        if self._has_experts(layer):
            return self._mixture(layer, mlp)
        up, down = self._map(layer + family.up), self._map(layer + family.down)
        gate = self._map(layer + family.gate) if family.gate else None
        if gate is not None and gate.module is up.module:
            # Phi-3 and GLM: the first half of the rows is the gate.
            gate, up = (replace(up, rows=half) for half in torch.arange(up.n_out).chunk(2))
        return mlp(up=up, gate=gate, down=down, activation=family.activation)

    def _mixture(self, layer: str, mlp: Callable[..., MLP]) -> MLP:
        """Return an MLP of experts: all their hidden units, one expert after the other."""
        family = self.family
        assert family.experts is not None
        assert family.router is not None
        name = layer + family.experts
        module = self._module(name)
        for parameter in ("gate_up_proj", "down_proj"):
            if not isinstance(getattr(module, parameter, None), nn.Parameter):
                raise self._unknown(name, f"experts with the parameter {parameter}")
        pair = ExpertMap(f"{name}.gate_up_proj", module, parameter="gate_up_proj")
        n_experts, n_out, _ = pair.stored.shape
        # Each expert has the rows of its gate first, then those of its other factor.
        rows = torch.arange(n_experts * n_out).unflatten(0, (n_experts, 2, n_out // 2))
        return mlp(
            up=replace(pair, rows=rows[:, 1].flatten()),
            gate=replace(pair, rows=rows[:, 0].flatten()),
            down=ExpertMap(f"{name}.down_proj", module, parameter="down_proj", joins=True),
            activation=f"{family.experts.removeprefix(family.mlp + '.')}.{family.activation}",
            router=ModuleMap(layer + family.router, self._module(layer + family.router)),
        )

    def _map(self, name: str) -> LinearMap:
        module = self._module(name)
        if type(module) not in (nn.Linear, Conv1D):
            raise self._unknown(name, "a plain linear map; merge adapters and dequantize")
        return ModuleMap(name, module)

    def _embedding(self, name: str, factor: float = 1.0) -> Embedding:
        module = self._module(name)
        if not isinstance(module, nn.Embedding):
            raise self._unknown(name, "an embedding")
        return Embedding(name, module, factor)

    def _positions(self, name: str | None) -> Embedding | None:
        return self._embedding(name) if name else None

    def _parameter(self, layer: str, name: str | None) -> nn.Parameter | None:
        return self._get(layer + name) if name else None

    def _norm(self, name: str | None, layer: str = "") -> Norm | None:
        if name is None:
            return None
        name = layer + name
        module = self._module(name)
        if isinstance(module, nn.Identity):
            return None
        if isinstance(module, ScalarNorm):
            return ConstantNorm(name, module, centres=False, offset=0.0, eps=0.0)
        # Norms without a gain would pass for any other module.
        if not isinstance(getattr(module, "weight", None), nn.Parameter):
            raise self._unknown(name, "a norm with a gain, or nn.Identity for none")
        return known_norm(name, module)

    def _module(self, name: str) -> nn.Module:
        module = self._get(name)
        if not isinstance(module, nn.Module):
            raise BilensError(f"{type(self.model).__name__} has no module {name}")
        return module

    def _get(self, name: str) -> Any:
        part_of_model: Any = self.model
        for part in name.split("."):
            part_of_model = getattr(part_of_model, part, None)
        return part_of_model

    def _unknown(self, name: str, expected: str) -> BilensError:
        kind = type(self._get(name)).__name__
        return BilensError(f"{name} is a {kind}, expected {expected} first")


def _check_one_type(modules: Modules) -> None:
    """Check that all maps that the stream passes are stored in one type: others do not run."""
    embed = modules.embed.module.weight
    maps = [part for layer in modules.layers for part in (*layer.heads.reads, *layer.mlp.reads)]
    for part in (*maps, *modules.writes, modules.unembed):
        if part.stored.dtype != embed.dtype:
            raise BilensError(
                f"{part.name} is stored in {part.stored.dtype} and {modules.embed.name} in "
                f"{embed.dtype}, and a model of both does not run; model.to({embed.dtype}) makes "
                "them one"
            )


def _check_unshared(modules: Modules) -> None:
    """Check that no module is used in two places of the model.

    A forward pass would run it twice, so that its trace is ambiguous. Folding a norm into it for
    one place would change the other.
    """
    groups = modules.fold_groups()
    places: list[tuple[str, nn.Module | nn.Parameter]] = []
    for group in groups:
        places += [(part.name, part.stored) for part in group.maps]
        if group.norm is not None:
            places.append((group.norm.name, group.norm.module))
    places += [(part.name, part.stored) for part in modules.writes]
    for layer in modules.layers:
        before, after = layer.heads.norm, layer.mlp.norm
        # Maps after one norm are grouped, which is right only if they read the same stream.
        if before and after and before.module is after.module and not modules.parallel:
            places.append((before.name, before.module))
    counts = Counter(id(module) for _, module in places)
    names = sorted({name for name, module in places if counts[id(module)] > 1})
    if names:
        raise BilensError(
            f"{', '.join(names[:5])}: one module stands in several places of the model, so that "
            "it can be neither read nor processed for one of them. Copy it for each place first."
        )


def known_norm(name: str, module: nn.Module) -> Norm:
    """Return a norm, recognised by its output: centred or not, gain `weight` or 1 + `weight`.

    The closest of the four formulas is taken. It must agree with the module at every coordinate
    within rounding of the gain. Tiny inputs are among those compared: they tell a wrong eps.
    """
    # Recognised by its outputs: classes of norms have no common interface, and the same name has
    # the gain w in one family and 1 + w in another.
    weight: Any = module.weight
    wide = working_dtype(weight.dtype)
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    eps = torch.finfo(wide).eps if eps is None else float(eps)
    generator = torch.Generator().manual_seed(0)
    # Tiny inputs, since eps has no effect on those of size 1.
    sizes = torch.tensor([1.0, 1.0, 1e-3, 1e-3])[:, None]
    x = (sizes * (torch.randn(4, len(weight), generator=generator) + 1)).to(weight.device, wide)
    with torch.no_grad():
        # A copy in float32 or float64: rounding of 16 bits would hide a gain that is 0.5 % off.
        expected = deepcopy(module).to(wide)(x)
        formulas = product((False, True), (0.0, 1.0))
        norms = [InputNorm(name, module, centres, offset, eps) for centres, offset in formulas]
        errors = []
        for norm in norms:
            bias, error = norm.bias(), (norm.applied(norm.normalised(x)) - expected).abs()
            size = norm.gain().abs() + (0 if bias is None else bias.abs())
            # Where gain and bias are 0 the output is 0, and any other number is wrong beyond
            # measure.
            relative = torch.where(error == 0, error, error / size).nan_to_num(torch.inf)
            errors.append(float(relative.max()))
    best = min(range(len(norms)), key=errors.__getitem__)
    # Norms of transformers compute in float32, also in a model of float64.
    if not errors[best] <= 1e-5:
        raise BilensError(
            f"{name} is a {type(module).__name__} and computes something else than gain * x / |x| "
            "+ bias, centred or not, so it cannot be folded. The closest formula is off by "
            f"{errors[best]:.2g} of the gain."
        )
    return norms[best]

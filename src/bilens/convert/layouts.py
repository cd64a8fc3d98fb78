"""Checkpoints in the layouts of others: recognised by config.json, renamed by a table of weights.

Three layouts are known. The repository of the paper saves language models with softmax attention
and rotary positions. Their attention output is divided by sqrt(2 n_layer), and their RMS norms have
no gain and epsilon 1e-8. Left and right factor are one matrix, with the gate on the left one. It
saves image classifiers too.

The code of the post on tensor-transformer variants has RMS norms without gain of the embedding, and
before attention, MLP and unembedding. Queries and keys are divided by their size and rotated in the
opposite sense, with cosines and sines in bfloat16. Values are mixed with those of the first block,
the input of each block with the embedding, and logits are capped.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig

from bilens.checks import check_weights
from bilens.convert.weights import read_weights
from bilens.errors import BilensError, CheckpointError
from bilens.nn import ATTENTIONS, ClassifierConfig, ImageClassifier
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.nn.settings import MlpName
from bilens.settings import check_names

REMEDY = "They do not fit config.json, or the model is of another kind."


@dataclass(frozen=True)
class Plan:
    """The model of a checkpoint, and the table of its weights.

    Attributes:
        model: class of the model.
        config: its configuration.
        n_layers: number of layers.
        names: names in bilens of the parts that are stacked in a weight, separated by spaces, by
            the name of the weight in the checkpoint. {} is the number of a layer.
        changes: functions of the parts of some weights, which keep their shape.
    """

    model: Callable[[Any], nn.Module]
    config: LanguageConfig | ClassifierConfig
    n_layers: int
    names: Mapping[str, str]
    changes: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[str, list[str], Callable[[Tensor], Tensor] | None]]:
        """Yield name, names of the parts, and their change, for the weights of each layer."""
        for theirs, ours in self.names.items():
            change = self.changes.get(theirs)
            for layer in range(self.n_layers if "{}" in theirs else 1):
                name = str(layer)
                yield theirs.replace("{}", name), ours.replace("{}", name).split(), change


@dataclass(frozen=True)
class Layout:
    """A layout of checkpoints.

    Attributes:
        name: name in error messages.
        marks: settings that no other layout has.
        settings: settings that a checkpoint must have; it may have `others` too.
        plan: function of settings and weights.
        tokenizers: repositories of tokenizers by their names in config.json; under None the one
            of configurations without a name.
    """

    name: str
    marks: frozenset[str]
    settings: frozenset[str]
    others: frozenset[str]
    plan: Callable[[Mapping[str, Any], dict[str, Tensor]], Plan]
    tokenizers: Mapping[str | None, str]

    def open(self, source: str | Path, settings: dict[str, Any], **place: Any) -> nn.Module:
        """Return the model with its weights, by its config.json, in evaluation mode.

        Raises:
            CheckpointError: a setting or a weight is missing, unknown or out of range, or a file
                missing or damaged.
        """
        # Settings that transformers adds to any configuration, and that no layout reads.
        general = frozenset(PreTrainedConfig().to_dict()) | {"torch_dtype", "auto_map"}
        what, others = f"settings for {self.name}", self.others | general
        check_names(source, what, settings.keys(), self.settings, REMEDY, others)
        weights = read_weights(source, **place)
        try:
            plan = self.plan(settings, weights)
            # Without memory: the weights of the checkpoint become those of the model.
            with torch.device("meta"):
                model = plan.model(plan.config)
        except (BilensError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(f"{source}: config.json cannot be used: {error}") from error
        _fill(model, plan, weights, source)
        return model.eval()


def find_layout(settings: Mapping[str, Any]) -> Layout | None:
    """Return the layout of a config.json; None for models of transformers and of bilens."""
    # transformers and bilens always write a type, these layouts never.
    if settings.get("model_type"):
        return None
    return next((layout for layout in LAYOUTS if layout.marks <= settings.keys()), None)


def _fill(model: nn.Module, plan: Plan, weights: dict[str, Tensor], source: str | Path) -> None:
    """Fill a model on the meta device with the weights of a checkpoint, all and only these.

    Weights that the layout lacks have no effect here: gains of norms are 1, biases 0. All are in
    the widest dtype among them.
    """
    rows = list(plan.rows())
    check_names(source, "weights", weights.keys(), {theirs for theirs, _, _ in rows}, REMEDY)
    dtype = reduce(torch.promote_types, (weight.dtype for weight in weights.values()))
    empty, state = model.state_dict(), dict[str, Tensor]()
    for theirs, ours, change in rows:
        weight = weights[theirs].to(dtype)
        # A single number is saved without an axis.
        matrix = weight[None] if weight.ndim == 0 else weight
        sizes = [len(empty[name]) for name in ours]
        shape = (sum(sizes), *empty[ours[0]].shape[1:])
        if matrix.shape != shape:
            raise CheckpointError(
                f"{source}: {theirs} has shape {tuple(weight.shape)}, expected {shape}"
            )
        for name, part in zip(ours, matrix.split(sizes), strict=True):
            # Parts of one matrix are copied, so that no two weights share their memory.
            own = part.clone() if len(ours) > 1 else part
            state[name] = own if change is None else change(own)
    for name in empty.keys() - state.keys():
        if name.endswith(("norm.weight", ".bias")):
            value = 0.0 if name.endswith("bias") else 1.0
            state[name] = torch.full(empty[name].shape, value, dtype=dtype)
    # Assigned: parameters on the meta device have no memory to copy to.
    model.load_state_dict(state, assign=True)
    check_weights(model)


def paper_model(settings: Mapping[str, Any], weights: dict[str, Tensor]) -> Plan:
    """Return the plan of a language model of the paper.

    The scale of attention's output goes into its weights. The size of the vocabulary is not among
    the settings, so it is that of the embedding.

    Raises:
        CheckpointError: bilens has no such MLP, or rotary positions have other frequencies.
    """
    # Kinds of MLPs by `bilinear` and `gate` of the paper's models.
    paper_mlps: dict[tuple[bool, str | None], MlpName] = {
        (True, None): "bilinear",
        (True, "relu"): "reglu",
        (True, "silu"): "swiglu",
        (True, "gelu"): "geglu",
        (False, "relu"): "relu",
        (False, "gelu"): "gelu",
    }
    mlp = paper_mlps.get((bool(settings["bilinear"]), settings["gate"]))
    if mlp is None:
        raise CheckpointError(
            f"bilinear={settings['bilinear']} with gate={settings['gate']!r} in config.json: "
            "bilens has no such MLP; expected bilinear with gate None, relu, silu or gelu, or not "
            "bilinear with gate relu or gelu"
        )
    # Its absence is reported with all other missing weights, so any size will do here.
    embed = weights.get("transformer.wte.weight")
    config = LanguageConfig(
        vocab_size=1 if embed is None else embed.shape[0],
        d_model=settings["d_model"],
        n_layers=settings["n_layer"],
        n_heads=settings["n_head"],
        d_hidden=settings["d_hidden"],
        n_ctx=settings.get("n_ctx", 256),
        mlp=mlp,
        mlp_bias="all" if settings.get("bias") else "none",
        norm="rms" if settings["normalization"] else "none",
        norm_eps=1e-8,
    )
    _remove_frequencies(weights, config)
    attn, mlps = "blocks.{}.attn.", "blocks.{}.mlp."
    names = {
        "transformer.wte.weight": "embed.weight",
        "lm_head.weight": "unembed.weight",
        "transformer.h.{}.attn.qkv.weight": " ".join(
            f"{attn}{name}.weight" for name in ("query", "key", "value")
        ),
        "transformer.h.{}.attn.o.weight": f"{attn}out.weight",
    }
    # Their gate is on the left factor, that of bilens on the right.
    factor_names = ("left", "right") if mlp == "bilinear" else ("right", "left")
    factors = ("inner",) if mlp in ("relu", "gelu") else factor_names
    for kind in ("weight", "bias") if config.mlp_bias == "all" else ("weight",):
        parts = [f"{mlps}{name}.{kind}" for name in factors]
        names[f"transformer.h.{{}}.mlp.w.{kind}"] = " ".join(parts)
        names[f"transformer.h.{{}}.mlp.p.{kind}"] = f"{mlps}out.{kind}"
    scale = (2 * config.n_layers) ** -0.5
    changes = {"transformer.h.{}.attn.o.weight": lambda weight: scale * weight}
    return Plan(LanguageModel, config, config.n_layers, names, changes)


def _remove_frequencies(weights: dict[str, Tensor], config: LanguageConfig) -> None:
    """Remove the frequencies of rotary positions, which bilens computes itself, from weights."""
    d_head = config.d_model // config.n_heads
    expected = config.rope_base ** -(torch.arange(0, d_head, 2) / d_head)
    for name in [name for name in weights if name.endswith(".attn.rotary.inv_freq")]:
        frequencies = weights.pop(name).float()
        same_shape = frequencies.shape == expected.shape
        if not same_shape or not torch.allclose(frequencies, expected, rtol=1e-2):
            raise CheckpointError(
                f"{name} holds other frequencies than those of rotary positions of base "
                f"{config.rope_base:,.0f} and heads of width {d_head}"
            )


def paper_classifier(settings: Mapping[str, Any], _: dict[str, Tensor]) -> Plan:
    """Return the plan of an image classifier of the paper.

    Images are square if the number of their pixels is a square.
    """
    pixels, side = settings["d_input"], isqrt(settings["d_input"])
    config = ClassifierConfig(
        n_inputs=pixels,
        n_classes=settings["d_output"],
        d_model=settings["d_hidden"],
        n_layers=settings["n_layer"],
        bias=settings["bias"],
        residual=settings["residual"],
        image_shape=(side, side) if side**2 == pixels else None,
    )
    names = {"embed.weight": "embed.weight", "head.weight": "unembed.weight"}
    for kind in ("weight", "bias") if config.bias else ("weight",):
        names[f"blocks.{{}}.{kind}"] = f"layers.{{}}.left.{kind} layers.{{}}.right.{kind}"
    return Plan(ImageClassifier, config, config.n_layers, names)


def tensor_transformer(settings: Mapping[str, Any], weights: dict[str, Tensor]) -> Plan:
    """Return the plan of a model of the post.

    The embedding is normalised in its table. Swapping the halves of each query and key reverses
    the sense of rotary positions, and an MLP that squares is bilinear with two equal factors. So
    neither needs a setting.
    """
    heads, width = settings["n_head"], settings["n_embd"]
    # Kinds of attention by `squared_attn` and `bilinear_attn` of the post's models.
    variant_attention = {
        (False, False): "softmax",
        (True, False): "squared",
        (True, True): "bilinear",
        (False, True): "differential",
    }
    attention = variant_attention[bool(settings["squared_attn"]), bool(settings["bilinear_attn"])]
    mlp: MlpName = "bilinear" if settings["bilinear"] or settings["squared_mlp"] else "relu2"
    if settings["bilinear"] and settings["gated"]:
        mlp = "swiglu"
    # The longest text is no setting; the largest of these models is reported to fail beyond 512.
    config = LanguageConfig(
        vocab_size=settings["vocab_size"],
        d_model=width,
        n_layers=settings["n_layer"],
        n_heads=heads,
        d_hidden=(settings["expansion_factor"] if settings["bilinear"] else 4) * width,
        n_ctx=512,
        mlp=mlp,
        mlp_bias="out",
        norm="rms",
        attention=attention,
        attention_scale=heads / width if attention == "differential" else None,
        qk_norm=True,
        rope_bfloat16=True,
        value_mix=True,
        embed_mix=True,
        logit_cap=30.0,
    )

    def halves_swapped(weight: Tensor) -> Tensor:
        halves = rearrange(weight, "(h two i) d -> h two i d", h=heads, two=2)
        return rearrange(halves.flip(1), "h two i d -> (h two i) d")

    def normalised(table: Tensor) -> Tensor:
        return functional.rms_norm(table, table.shape[-1:])

    block = {
        "lambdas": "residual_mix",
        "attn.lamb": "attn.value_mix_share",
        "attn.c_v.weight": "attn.value.weight",
        "attn.c_proj.weight": "attn.out.weight",
    }
    changes: dict[str, Callable[[Tensor], Tensor]] = {"transformer.wte.weight": normalised}
    for pair in ("", "2")[: ATTENTIONS[attention].pairs]:
        for theirs, ours in (("q", "query"), ("k", "key")):
            block[f"attn.c_{theirs}{pair}.weight"] = f"attn.{ours}{pair}.weight"
            changes[f"transformer.h.{{}}.attn.c_{theirs}{pair}.weight"] = halves_swapped
    if attention == "differential":
        block["attn.bilinear_lamb"] = "attn.diff_lambda"
    if settings["bilinear"]:
        # Their gate is on Left, that of bilens on the right; without one both are alike.
        block |= {
            "mlp.Left.weight": "mlp.right.weight",
            "mlp.Right.weight": "mlp.left.weight",
            "mlp.Down.weight": "mlp.out.weight",
            "mlp.Down_bias": "mlp.out.bias",
        }
    else:
        block |= {"mlp.c_proj.weight": "mlp.out.weight", "mlp.bias": "mlp.out.bias"}
        block["mlp.c_fc.weight"] = "mlp.inner.weight"
        if settings["squared_mlp"]:
            block["mlp.c_fc.weight"] = "mlp.left.weight mlp.right.weight"
            for name in [*weights]:
                if name.endswith(".mlp.c_fc.weight"):
                    weights[name] = torch.cat([weights[name]] * 2)
    names = {"transformer.wte.weight": "embed.weight", "lm_head.weight": "unembed.weight"}
    for theirs, ours in block.items():
        names[f"transformer.h.{{}}.{theirs}"] = "blocks.{}." + ours.replace(" ", " blocks.{}.")
    return Plan(LanguageModel, config, config.n_layers, names, changes)


LAYOUTS = (
    Layout(
        name="a model of the post on tensor-transformer variants",
        marks=frozenset({"n_embd", "squared_mlp"}),
        settings=frozenset(
            {"n_layer", "n_head", "n_embd", "vocab_size", "bilinear", "gated", "expansion_factor"}
            | {"squared_mlp", "squared_attn", "bilinear_attn"}
        ),
        others=frozenset({"step"}),
        plan=tensor_transformer,
        tokenizers={None: "openai-community/gpt2"},
    ),
    Layout(
        name="a language model of the paper's repository",
        marks=frozenset({"d_hidden", "normalization"}),
        settings=frozenset(
            {"n_layer", "n_head", "d_model", "d_hidden", "bilinear", "gate", "normalization"}
        ),
        others=frozenset({"n_ctx", "bias", "tokenizer", "repo"}),
        plan=paper_model,
        tokenizers={
            "ts-4096": "tdooms/ts-tokenizer-4096",
            "mistral": "mistral-community/Mixtral-8x22B-v0.1",
            "gpt2": "openai-community/gpt2",
        },
    ),
    Layout(
        name="an image classifier of the paper's repository",
        marks=frozenset({"d_input", "d_output"}),
        settings=frozenset({"n_layer", "d_input", "d_hidden", "d_output", "bias", "residual"}),
        others=frozenset({"lr", "wd", "epochs", "batch_size", "seed", "device"}),
        plan=paper_classifier,
        tokenizers={},
    ),
)
"""All layouts that are known."""

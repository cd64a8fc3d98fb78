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

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from math import isqrt, prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import safetensors
import torch
from einops import rearrange
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

from bilens.checks import check_weights
from bilens.convert.damage import is_out_of_memory
from bilens.errors import BilensError, CheckpointError
from bilens.nn import ATTENTIONS, ClassifierConfig, ImageClassifier, MlpName
from bilens.nn.language import LanguageConfig, LanguageModel

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files of weights, in the order of preference; an index names the files that share them."""
# torch.load and safetensors let any of these through for a damaged file.
DAMAGED = (SafetensorError, UnpicklingError, RuntimeError, EOFError, LookupError, TypeError)
DAMAGED += (ValueError, AttributeError)  # type: ignore[assignment]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GENERAL = frozenset(PreTrainedConfig().to_dict()) | {"torch_dtype", "auto_map"}
"""Settings that transformers adds to any configuration, and that no layout reads."""


@dataclass(frozen=True)
class Row:
    """A row of a table of weights.

    Attributes:
        theirs: name of a weight in the checkpoint.
        ours: names in bilens of the parts that are stacked in it, separated by spaces.
        change: function of each part, which keeps its shape.
    """

    theirs: str
    ours: str
    change: Callable[[Tensor], Tensor] = lambda weight: weight


Build = Callable[[Mapping[str, Any], dict[str, Tensor]], tuple[nn.Module, list[Row]]]
"""Function of settings and weights: an empty model and the table of its weights."""


@dataclass(frozen=True)
class Layout:
    """A layout of checkpoints.

    Attributes:
        name: name in error messages.
        marks: settings that no other layout has.
        settings: settings that a checkpoint must have; it may have `others` too.
        build: function that makes an empty model and its table.
        tokenizers: repositories of tokenizers by their names in config.json; under None the one
            of configurations without a name.
    """

    name: str
    marks: frozenset[str]
    settings: frozenset[str]
    others: frozenset[str]
    build: Build
    tokenizers: Mapping[str | None, str]

    def open(self, source: str | Path, settings: dict[str, Any], **place: Any) -> nn.Module:
        """Return the model with its weights, by its config.json, in evaluation mode.

        Raises:
            CheckpointError: a setting or a weight is missing, unknown or out of range, or a file
                missing or damaged.
        """
        for complaint, names in (
            ("missing", self.settings - settings.keys()),
            ("unknown", settings.keys() - self.settings - self.others - GENERAL),
        ):
            if names:
                raise CheckpointError(
                    f"{source}: {complaint} settings for {self.name}: {', '.join(sorted(names))}"
                )
        weights = read_weights(source, **place)
        try:
            model, rows = self.build(settings, weights)
        except (BilensError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(f"{source}: config.json cannot be used: {error}") from error
        fill(model, weights, rows, source)
        return model.eval()


def find_layout(settings: Mapping[str, Any]) -> Layout | None:
    """Return the layout of a config.json; None for models of transformers and of bilens."""
    # transformers and bilens always write a type, these layouts never.
    if settings.get("model_type"):
        return None
    return next((layout for layout in LAYOUTS if layout.marks <= settings.keys()), None)


# Tables of weights


def _table(top: Iterable[Row], block: Iterable[Row], n_layers: int) -> list[Row]:
    """Return the rows of a language model: `top`, then `block` for every layer."""
    table = list(top)
    for layer in range(n_layers):
        for row in block:
            ours = " ".join(f"blocks.{layer}.{name}" for name in row.ours.split())
            table.append(Row(f"transformer.h.{layer}.{row.theirs}", ours, row.change))
    return table


PAPER_MLPS: dict[tuple[bool, str | None], MlpName] = {
    (True, None): "bilinear",
    (True, "relu"): "reglu",
    (True, "silu"): "swiglu",
    (True, "gelu"): "geglu",
    (False, "relu"): "relu",
    (False, "gelu"): "gelu",
}
"""Kinds of MLPs by `bilinear` and `gate` of the paper's models."""
# Their gate is on the left factor, that of bilens on the right.
PAPER_FACTORS = {"bilinear": ("left", "right"), "relu": ("inner",), "gelu": ("inner",)}


def paper_model(
    settings: Mapping[str, Any], weights: dict[str, Tensor]
) -> tuple[LanguageModel, list[Row]]:
    """Return an empty language model of the paper, and the table of its weights.

    The scale of attention's output goes into its weights. The size of the vocabulary is not among
    the settings, so it is that of the embedding.

    Raises:
        CheckpointError: bilens has no such MLP, or rotary positions have other frequencies.
    """
    mlp = PAPER_MLPS.get((bool(settings["bilinear"]), settings["gate"]))
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
    # Without memory: the weights of the checkpoint become those of the model.
    with torch.device("meta"):
        model = LanguageModel(config)
    scale = (2 * config.n_layers) ** -0.5
    factors = PAPER_FACTORS.get(mlp, ("right", "left"))
    block = [
        Row("attn.qkv.weight", "attn.query.weight attn.key.weight attn.value.weight"),
        Row("attn.o.weight", "attn.out.weight", lambda weight: scale * weight),
    ]
    for kind in ("weight", "bias") if config.mlp_bias == "all" else ("weight",):
        block.append(Row(f"mlp.w.{kind}", " ".join(f"mlp.{name}.{kind}" for name in factors)))
        block.append(Row(f"mlp.p.{kind}", f"mlp.out.{kind}"))
    top = [Row("transformer.wte.weight", "embed.weight"), Row("lm_head.weight", "unembed.weight")]
    return model, _table(top, block, config.n_layers)


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


def paper_classifier(
    settings: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[ImageClassifier, list[Row]]:
    """Return an empty image classifier of the paper, and the table of its weights.

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
    with torch.device("meta"):
        model = ImageClassifier(config)
    rows = [Row("embed.weight", "embed.weight"), Row("head.weight", "unembed.weight")]
    for layer in range(config.n_layers):
        for kind in ("weight", "bias") if config.bias else ("weight",):
            both = f"layers.{layer}.left.{kind} layers.{layer}.right.{kind}"
            rows.append(Row(f"blocks.{layer}.{kind}", both))
    return model, rows


VARIANT_ATTENTION = {
    (False, False): "softmax",
    (True, False): "squared",
    (True, True): "bilinear",
    (False, True): "differential",
}
"""Kinds of attention by `squared_attn` and `bilinear_attn` of the post's models."""
VARIANT_LENGTH = 512
"""Longest text. It is not a setting; the largest of these models is reported to fail beyond."""


def tensor_transformer(
    settings: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[LanguageModel, list[Row]]:
    """Return an empty model of the post, and the table of its weights.

    The embedding is normalised in its table. Swapping the halves of each query and key reverses
    the sense of rotary positions, and an MLP that squares is bilinear with two equal factors. So
    neither needs a setting.
    """
    heads, width = settings["n_head"], settings["n_embd"]
    attention = VARIANT_ATTENTION[bool(settings["squared_attn"]), bool(settings["bilinear_attn"])]
    mlp: MlpName = "bilinear" if settings["bilinear"] or settings["squared_mlp"] else "relu2"
    if settings["bilinear"] and settings["gated"]:
        mlp = "swiglu"
    config = LanguageConfig(
        vocab_size=settings["vocab_size"],
        d_model=width,
        n_layers=settings["n_layer"],
        n_heads=heads,
        d_hidden=(settings["expansion_factor"] if settings["bilinear"] else 4) * width,
        n_ctx=VARIANT_LENGTH,
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
    with torch.device("meta"):
        model = LanguageModel(config)

    def halves_swapped(weight: Tensor) -> Tensor:
        halves = rearrange(weight, "(h two i) d -> h two i d", h=heads, two=2)
        return rearrange(halves.flip(1), "h two i d -> (h two i) d")

    block = [
        Row("lambdas", "residual_mix"),
        Row("attn.lamb", "attn.value_mix_share"),
        Row("attn.c_v.weight", "attn.value.weight"),
        Row("attn.c_proj.weight", "attn.out.weight"),
    ]
    for pair in ("", "2")[: ATTENTIONS[attention].pairs]:
        block.append(Row(f"attn.c_q{pair}.weight", f"attn.query{pair}.weight", halves_swapped))
        block.append(Row(f"attn.c_k{pair}.weight", f"attn.key{pair}.weight", halves_swapped))
    if attention == "differential":
        block.append(Row("attn.bilinear_lamb", "attn.diff_lambda"))
    if settings["bilinear"]:
        # Their gate is on Left, that of bilens on the right.
        left, right = ("right", "left") if settings["gated"] else ("left", "right")
        block += [
            Row("mlp.Left.weight", f"mlp.{left}.weight"),
            Row("mlp.Right.weight", f"mlp.{right}.weight"),
            Row("mlp.Down.weight", "mlp.out.weight"),
            Row("mlp.Down_bias", "mlp.out.bias"),
        ]
    else:
        factors = ("left", "right") if settings["squared_mlp"] else ("inner",)
        # Each factor is a matrix of its own, so that no two weights share their memory.
        block += [Row("mlp.c_fc.weight", f"mlp.{name}.weight", torch.clone) for name in factors]
        block += [Row("mlp.c_proj.weight", "mlp.out.weight"), Row("mlp.bias", "mlp.out.bias")]
    top = [
        Row(
            "transformer.wte.weight",
            "embed.weight",
            lambda table: functional.rms_norm(table, table.shape[-1:]),
        ),
        Row("lm_head.weight", "unembed.weight"),
    ]
    return model, _table(top, block, config.n_layers)


LAYOUTS = (
    Layout(
        name="a model of the post on tensor-transformer variants",
        marks=frozenset({"n_embd", "squared_mlp"}),
        settings=frozenset(
            {"n_layer", "n_head", "n_embd", "vocab_size", "bilinear", "gated", "expansion_factor"}
            | {"squared_mlp", "squared_attn", "bilinear_attn"}
        ),
        others=frozenset({"step"}),
        build=tensor_transformer,
        tokenizers={None: "openai-community/gpt2"},
    ),
    Layout(
        name="a language model of the paper's repository",
        marks=frozenset({"d_hidden", "normalization"}),
        settings=frozenset(
            {"n_layer", "n_head", "d_model", "d_hidden", "bilinear", "gate", "normalization"}
        ),
        others=frozenset({"n_ctx", "bias", "tokenizer", "repo"}),
        build=paper_model,
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
        build=paper_classifier,
        tokenizers={},
    ),
)
"""All layouts that are known."""


# Files of weights


def read_weights(source: str | Path, **place: Any) -> dict[str, Tensor]:
    """Return all weights of a checkpoint under the names in its files.

    Files that torch wrote are read with `weights_only=True`: tensors, and nothing that runs.

    Raises:
        CheckpointError: a file is missing or damaged, or holds something else.
    """
    path = _weights_file(source, **place)
    if path is None:
        expected = ", ".join(WEIGHT_FILES)
        raise CheckpointError(f"{source} holds no weights; expected one of {expected}")
    weights: dict[Any, Any] = {}
    try:
        for name in shard_names(path) if path.suffix == ".json" else [path.name]:
            content = _read(Path(str(cached_file(str(source), name, **place))))
            if not isinstance(content, dict):
                raise TypeError(f"a {type(content).__name__}, expected a dictionary of tensors")
            weights |= content
    except CheckpointError:
        raise
    except DAMAGED as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(f"{path}: the weights cannot be read: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{source}: weights are missing: {error}") from error
    for key, value in weights.items():
        if not isinstance(key, str) or not _is_dense(value):
            raise CheckpointError(
                f"{path} holds {key!r}, {_described(value)}, expected names and dense tensors of "
                "floating-point numbers only. Save the model's state_dict() and nothing more."
            )
    return weights


def _is_dense(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype in FLOATS
        and value.layout == torch.strided
        and not value.is_meta
    )


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    kind = str(value.layout).removeprefix("torch.").replace("strided", "dense")
    return f"a {'meta' if value.is_meta else kind} tensor of {value.dtype}"


def stored_numbers(source: str | Path, **place: Any) -> int | None:
    """Return how many numbers the safetensors files of a model hold, by their headers.

    None if the model has no such files; opening it then raises.
    """
    path = _weights_file(source, **place)
    if path is None or not path.name.startswith("model.safetensors"):
        return None
    total = 0
    for name in shard_names(path) if path.suffix == ".json" else [path.name]:
        with safetensors.safe_open(cached_file(str(source), name, **place), "pt") as file:
            total += sum(prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    return total


def shard_names(index: Path) -> list[str]:
    """Return the names of the files that an index lists, which are in its folder.

    Raises:
        CheckpointError: it names a file elsewhere, or is damaged.
    """
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        elsewhere = [name for name in names if Path(name).name != name or name in ("", "..")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is damaged and names no files: {error!r}") from error
    if elsewhere:
        raise CheckpointError(
            f"{index} names {elsewhere[0]!r}, expected files beside itself and none elsewhere"
        )
    return names


def _weights_file(source: str | Path, **place: Any) -> Path | None:
    for name in WEIGHT_FILES:
        try:
            path = cached_file(
                str(source), name, _raise_exceptions_for_missing_entries=False, **place
            )
        except OSError as error:
            raise CheckpointError(f"{source}: weights are missing: {error}") from error
        if path is not None:
            return Path(path)
    return None


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def fill(
    model: nn.Module, weights: Mapping[str, Tensor], rows: Iterable[Row], source: str | Path
) -> None:
    """Fill a model on the meta device with the weights of a checkpoint, all and only these.

    Weights that the layout lacks have no effect here: gains of norms are 1, biases 0. All are in
    the widest dtype among them.

    Raises:
        CheckpointError: a weight is missing, unknown, of another shape, NaN or infinite.
    """
    rows = list(rows)
    known = {row.theirs for row in rows}
    for complaint, names in (
        ("unknown", weights.keys() - known),
        ("missing", known - weights.keys()),
    ):
        if names:
            raise CheckpointError(
                f"{source}: {complaint} weights: {', '.join(sorted(names))}. They do not fit "
                "config.json, or the model is of another kind."
            )
    dtype = reduce(torch.promote_types, (weight.dtype for weight in weights.values()))
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    state = {
        name: part
        for row in rows
        for name, part in _parts(row, weights[row.theirs].to(dtype), shapes, source).items()
    }
    for name in shapes.keys() - state.keys():
        if name.endswith(("norm.weight", ".bias")):
            value = 0.0 if name.endswith("bias") else 1.0
            state[name] = torch.full(shapes[name], value, dtype=dtype)
    # Assigned: parameters on the meta device have no memory to copy to.
    model.load_state_dict(state, assign=True)
    check_weights(model)


def _parts(
    row: Row, weight: Tensor, shapes: Mapping[str, torch.Size], source: str | Path
) -> dict[str, Tensor]:
    # A single number is saved without an axis.
    stacked = weight[None] if weight.ndim == 0 else weight
    names = row.ours.split()
    first, sizes = shapes[names[0]], [shapes[name][0] for name in names]
    if stacked.shape != (sum(sizes), *first[1:]):
        raise CheckpointError(
            f"{source}: {row.theirs} has shape {tuple(weight.shape)}, expected "
            f"{(sum(sizes), *first[1:])}"
        )
    # Parts of one matrix are copied, so that no two weights share their memory.
    parts = [part.clone() for part in stacked.split(sizes)] if len(names) > 1 else [stacked]
    return {name: row.change(part) for name, part in zip(names, parts, strict=True)}

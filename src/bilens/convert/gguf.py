"""GGUF files as models in float32: every tensor and setting of a file must have its place.

transformers fills a tensor that is missing with random numbers, skips one that it does not know,
and ignores settings that the model computes with. Here the header is read first. A file is refused
unless each of its tensors and settings has a place in the model. Each weight of the model must be
in the file. Names of tensors and their layouts are those of transformers.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from bilens.convert.gguf_header import Header, read_header
from bilens.convert.weights import complaints, reading_files
from bilens.errors import CheckpointError
from bilens.files import UNFINISHED
from bilens.lazy_imports import lazy_import
from bilens.memory import check_memory
from bilens.settings import Between, Tolerance, checker, describe_type

gguf = lazy_import("gguf", install=".[gguf]")

SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
LLAMA = {
    **SIZES,
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
ROTARY, HEAD = {"rope.freq_base": "rope_theta"}, {"attention.key_length": "head_dim"}
WINDOW = {"attention.sliding_window": "sliding_window"}
CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}


@dataclass(frozen=True)
class _Architecture:
    """Settings of an architecture: their names in a file, and those in transformers.

    A file must hold all `settings`. It may hold the `optional` ones. Those that are `renamed` have
    another name in this architecture than in others.
    """

    model_type: str
    settings: dict[str, str]
    optional: dict[str, str]
    renamed: dict[str, str] = field(default_factory=dict)


ARCHITECTURES = {
    "llama": _Architecture("llama", LLAMA | ROTARY | {"rope.dimension_count": "head_dim"}, {}),
    "qwen2": _Architecture("qwen2", LLAMA | ROTARY, {}),
    "qwen3": _Architecture("qwen3", LLAMA | ROTARY | HEAD, {}),
    "phi3": _Architecture("phi3", LLAMA | ROTARY, WINDOW),
    # Files of Gemma 2 leave out the base of its rotary positions, 10,000.
    "gemma2": _Architecture("gemma2", LLAMA | HEAD | WINDOW, ROTARY | CAPS),
    "gemma3": _Architecture("gemma3_text", LLAMA | ROTARY | HEAD | WINDOW, CAPS),
    "gpt2": _Architecture(
        "gpt2",
        {**SIZES, "attention.layer_norm_epsilon": "layer_norm_epsilon"},
        {},
        {"max_position_embeddings": "n_positions", "intermediate_size": "n_inner"},
    ),
}
FREQUENCIES = "rope_freqs.weight"
"""Tensor with the factors of Llama 3's rotary positions, which transformers has as settings."""


def gguf_model(
    path: Path, dtype: torch.dtype | None = None, *, low_memory: bool = False
) -> nn.Module:
    """Open the model of a GGUF file in evaluation mode, its weights dequantised.

    With `low_memory` the weights are dequantised one by one into a file beside it, and stay there.

    Raises:
        CheckpointError: the file is missing, damaged or incomplete, or its architecture is not
            known. A tensor or setting without a place in the model is refused too.
        MemoryLimitError: the weights do not fit into memory.
    """
    header = read_header(path)
    config = _config(header)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # Without memory: only the names and shapes of its parameters are compared with the file.
    with torch.device("meta"):
        empty = kind(config)
    kind_of_layout: Any = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
    processor = kind_of_layout(config=config.to_dict())
    names: dict[str, str] = get_gguf_hf_weights_map(_Named(empty), processor)
    _check_tensors(header, names, empty)
    n_weights = sum(prod(tensor.shape) for tensor in header.tensors.values())
    if not low_memory:
        check_memory(4 * n_weights, f"{path}: its {n_weights:,} weights")
    dtype = dtype or torch.float32
    # Tensors that are stored as they are keep their memory; a model has each of them once.
    state: dict[str, Tensor] = _Spilled(path, dtype) if low_memory else {}
    for name, values in _dequantised(header):
        if name == FREQUENCIES:
            continue
        _check_values(path, name, values)
        # Files have other layouts for some families: rows of queries and keys are in the order of
        # neighbouring rotary pairs, and the norms of Gemma have the 1 of 1 + w added.
        result = processor.process(
            weights=values,
            name=name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": state},
        )
        if result.name is not None:  # otherwise the processor has put it into `state`
            state[names[result.name]] = torch.from_numpy(np.ascontiguousarray(result.weights))
    # By from_pretrained, which ties weights and reports those that are missing.
    with reading_files(path):
        model, report = kind.from_pretrained(
            None, config=config, state_dict=state, output_loading_info=True, dtype=dtype
        )
    if text := complaints(report):
        raise CheckpointError(f"{path}: its tensors do not fit its settings ({text})")
    _check_frequencies(header, model)
    # transformers writes None here, the folder that it was given.
    model.config.name_or_path = model.name_or_path = str(path)
    return cast(nn.Module, model.eval())


class _Spilled(dict[str, Tensor]):
    """Tensors by name, each moved to a file when it is put in, and read where it is used.

    The files are beside the model, as folders for temporary files are often in memory. They have
    no name once they are open, so that they go with the last tensor.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        super().__init__()
        self._folder, self._dtype = path.parent if os.access(path.parent, os.W_OK) else None, dtype

    def __setitem__(self, name: str, values: Tensor) -> None:
        with TemporaryDirectory(
            prefix=UNFINISHED, dir=self._folder, ignore_cleanup_errors=True
        ) as folder:
            file = str(Path(folder) / "weight")
            copy = torch.from_file(file, True, values.numel(), dtype=self._dtype)
            copy.copy_(values.flatten())
            # Private now: a change of the weight is one in memory.
            private = torch.from_file(file, False, values.numel(), dtype=self._dtype)
        super().__setitem__(name, private.view(values.shape))


class _Named:
    """A module as transformers' map of tensor names reads it, with at most one level below it."""

    def __init__(self, module: nn.Module, *, has_children: bool = True) -> None:
        # The map asks every module for its names, and each time makes a table of all names of
        # tensors anew, for seconds. The model and its stack of layers hold all names.
        self.config: Any = module.config
        self.state_dict = module.state_dict
        self.named_children = list if not has_children else lambda: self._children(module)

    def _children(self, module: nn.Module) -> Iterator[tuple[str, "_Named"]]:
        for name, child in module.named_children():
            if hasattr(child, "config"):
                yield name, _Named(child, has_children=False)


def _config(header: Header) -> Any:
    """Return the configuration of transformers, each setting of the file used or checked."""
    name, path = header.architecture, header.path
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{path} is of architecture {name!r}, expected one of {', '.join(ARCHITECTURES)}. Open "
            "the model's folder in the format of transformers instead."
        )
    architecture, prefix = ARCHITECTURES[name], f"{name}."
    own = [key for key in header.settings if key.startswith(prefix)]
    settings = {key.removeprefix(prefix): header.settings[key] for key in own}
    missing = sorted(architecture.settings.keys() - settings.keys())
    if missing:
        raise CheckpointError(
            f"{path} lacks the settings {', '.join(f'{name}.{key}' for key in missing)}: it is "
            "damaged, or from a program older than these settings. Convert the model again."
        )
    names = architecture.renamed
    values: dict[str, Any] = {}
    for key, setting in (architecture.settings | architecture.optional).items():
        if key in settings:
            _check_setting(path, f"{name}.{key}", setting, settings.pop(key))
            values[names.get(setting, setting)] = header.settings[f"{name}.{key}"]
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{path} has no tensor token_embd.weight, the embedding of tokens")
    values["vocab_size"] = embedding.shape[0]
    # The format has no setting for tied weights; a file that lacks the unembedding has them.
    values["tie_word_embeddings"] = "output.weight" not in header.tensors
    values |= _special_tokens(header, embedding.shape[0])
    layers: int = values["num_hidden_layers"]
    blocks = {tensor.split(".")[1] for tensor in header.tensors if tensor.startswith("blk.")}
    if blocks != set(map(str, range(layers))):
        raise CheckpointError(
            f"{path} has {name}.block_count={layers} and tensors of {len(blocks)} blocks; the two "
            "have to agree"
        )
    with reading_files(path):
        config = AutoConfig.for_model(architecture.model_type, **values)
    # Layers of the models with 27 billion weights, whose queries are scaled by d_model / n_heads.
    layers_of = {"gemma2": 46, "gemma3": 62}
    if name in layers_of:
        # The format has no setting for the scale of scores of Gemma. The largest size differs from
        # the others, and is recognised by its number of layers, as in llama.cpp.
        config.query_pre_attn_scalar = config.head_dim
        if layers == layers_of[name]:
            config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    _apply_scaling(header, config, settings)
    _check_rest(header, config, settings)
    return config


def _check_setting(path: Path, name: str, setting: str, value: Any) -> None:
    """Raise unless a setting is a number in its range."""
    kind: Any = Annotated[int, Between(1, 1024 if setting == "num_hidden_layers" else 2**24)]
    if setting.endswith(("eps", "epsilon")):
        kind = Tolerance
    elif setting in ("rope_theta", "factor"):
        kind = Annotated[float, Between(1)]
    elif setting in CAPS.values():
        kind = Annotated[float, Between(0, above=True)]
    if not checker(kind)(value):
        raise CheckpointError(f"{path} has {name}={value!r:.80}, expected {describe_type(kind)}")


def _special_tokens(header: Header, vocab_size: int) -> dict[str, int | None]:
    """Return the special tokens of the tokenizer, which has to fit the embedding."""
    path, settings = header.path, header.settings
    for key in ("tokens", "token_type", "scores"):
        entries = settings.get(f"tokenizer.ggml.{key}")
        if entries is not None and len(entries) != vocab_size:
            raise CheckpointError(
                f"{path} has {len(entries):,} entries in tokenizer.ggml.{key}, and its embedding "
                f"has {vocab_size:,} tokens"
            )
    # Families have defaults for these, which are tokens of another vocabulary.
    special: dict[str, int | None] = {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        special[f"{name}_token_id"] = None
        token = settings.get(f"tokenizer.ggml.{key}_token_id")
        if token is None:
            continue
        if type(token) is not int or not 0 <= token < vocab_size:
            raise CheckpointError(
                f"{path} has tokenizer.ggml.{key}_token_id={token!r:.80}, expected 0 to "
                f"{vocab_size - 1}"
            )
        special[f"{name}_token_id"] = token
    return special


def _apply_scaling(header: Header, config: Any, settings: dict[str, Any]) -> None:
    """Apply linear scaling of rotary positions, and that of Llama 3, to a configuration."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    if settings.get("rope.scaling.type") in ("linear", "none"):
        kind, factor = settings.pop("rope.scaling.type"), settings.pop("rope.scaling.factor", 1.0)
        settings.pop("rope.scaling.finetuned", None)
        _check_setting(header.path, "rope.scaling.factor", "factor", factor)
        # Every position is divided by the factor: known to transformers under the same name.
        if kind == "linear" and factor != 1:
            parameters |= {"rope_type": "linear", "factor": float(factor)}
    if FREQUENCIES in header.tensors:
        # Its largest factor is that of the configuration; `_check_frequencies` compares all.
        factors = next(values for name, values in _dequantised(header, [FREQUENCIES]))
        parameters |= {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            # The other numbers are the same in all sizes of Llama 3.1 and 3.2.
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }


def _check_rest(header: Header, config: Any, settings: Mapping[str, Any]) -> None:
    """Raise unless the settings that no configuration takes agree with the model or are unused."""
    # Unknown settings are errors: a model that ignores one would compute something else, silently.
    heads, n_kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    d_head = getattr(config, "head_dim", None) or config.hidden_size // heads
    if heads % (n_kv_heads or heads) or d_head % 2:
        raise CheckpointError(
            f"{header.path} has {heads} heads of width {d_head} that share {n_kv_heads} heads of "
            "keys, expected an even width and a number that the other divides"
        )
    rotary = getattr(config, "rope_parameters", None) or {}
    # Settings that follow from others: a file may state them, if it states the same.
    expected = {
        "attention.causal": True,
        "attention.key_length": d_head,
        "attention.value_length": d_head,
        "rope.dimension_count": int(d_head * rotary.get("partial_rotary_factor", 1.0)),
        "vocab_size": config.vocab_size,
    }
    for key, value in settings.items():
        name = f"{header.architecture}.{key}"
        if key in expected:
            if value != expected[key]:
                raise CheckpointError(
                    f"{header.path} has {name}={value!r:.80}, expected {expected[key]}, as the "
                    "architecture and its other settings say"
                )
        elif key != "tensor_data_layout" and value not in (0, "none"):
            raise CheckpointError(
                f"{header.path} has {name}={value!r:.80}, a setting that bilens does not know "
                "and the model may compute with. Open the model's folder in the format of "
                "transformers instead."
            )


def _check_tensors(header: Header, names: Mapping[str, str], empty: nn.Module) -> None:
    """Raise unless the tensors of a file are the weights of a model, by name and size."""
    parameters = {name: tuple(weight.shape) for name, weight in empty.named_parameters()}
    unknown = sorted(header.tensors.keys() - names.keys() - {FREQUENCIES})
    present = {names[name] for name in header.tensors if name in names}
    theirs = {names[name]: name for name in names}
    missing = sorted(theirs.get(name, name) for name in parameters.keys() - present)
    for complaint, tensors in (("unknown", unknown), ("missing", missing)):
        if tensors:
            raise CheckpointError(
                f"{header.path}: {complaint} tensors: {', '.join(tensors[:5])}"
                f"{f' and {len(tensors) - 5} more' * (len(tensors) > 5)}. It is no complete "
                f"{header.architecture} model by its settings; fetch it again."
            )
    for name, tensor in header.tensors.items():
        expected = parameters.get(names.get(name, ""))
        # Some families have their matrices transposed.
        if expected is not None and sorted(tensor.shape) != sorted(expected):
            raise CheckpointError(
                f"{header.path}: {name} has shape {tensor.shape}, expected {expected} by the "
                "file's settings"
            )


def _dequantised(
    header: Header, names: Collection[str] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a file, in float32."""
    # A plain array: each slice of a memmap would take a Python call of its own.
    content = np.memmap(header.path, dtype=np.uint8, mode="r").view(np.ndarray)
    for name in header.tensors if names is None else names:
        tensor = header.tensors[name]
        data = content[None, tensor.start : tensor.start + tensor.size]
        # 8192 blocks at a time: few calls, and arrays that stay in a cache.
        step = 8192 * gguf.GGML_QUANT_SIZES[tensor.kind][1]
        try:
            # As single rows: gguf takes 16 rows at a time, which are short in most models.
            parts = [
                gguf.dequantize(data[:, start : start + step], tensor.kind)[0]
                for start in range(0, tensor.size, step)
            ]
        except NotImplementedError as error:
            raise CheckpointError(
                f"{header.path} has {name} in {tensor.kind.name}, which cannot be dequantised; "
                "convert the model to another format"
            ) from error
        # Concatenated into new memory: a view of the file would change with it.
        yield name, np.concatenate(parts, dtype=np.float32).reshape(tensor.shape)


def _check_values(path: Path, name: str, values: np.ndarray) -> None:
    """Raise if a tensor holds no weights: NaN, or the zeros of a file that is still empty."""
    if not np.isfinite(values).all():
        raise CheckpointError(f"{path}: {name} holds NaN or infinite values; fetch it again")
    if name.endswith("weight") and not values.any():
        raise CheckpointError(
            f"{path}: {name} holds only zeros, as after a download that was not completed; fetch "
            "it again"
        )


def _check_frequencies(header: Header, model: Any) -> None:
    """Raise unless the rotary positions of a model turn by the frequencies of its file."""
    if FREQUENCIES not in header.tensors:
        return
    factors = next(values for _, values in _dequantised(header, [FREQUENCIES]))
    d_head = 2 * factors.size
    # base^(-2 i / d_head), each divided by its factor: compared with what the model turns by.
    exponents = -np.arange(0, d_head, 2) / d_head
    expected = model.config.rope_parameters["rope_theta"] ** exponents / factors.ravel()
    actual = model.model.rotary_emb.inv_freq.double().numpy()
    if actual.shape != expected.shape or not np.allclose(actual, expected, rtol=1e-3):
        raise CheckpointError(
            f"{header.path}: {FREQUENCIES} holds other frequencies than those of Llama 3, and "
            "transformers has no setting for them"
        )

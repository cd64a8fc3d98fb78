"""GGUF files of tiny models, written byte by byte so that each part of them can be wrong."""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

from bilens.convert.gguf import ARCHITECTURES

FORMATS = {"u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q")}


@dataclass
class GgufFile:
    """Contents of a GGUF file, and the layout of the bytes around them."""

    settings: list[tuple[str, str, Any]]
    tensors: dict[str, np.ndarray]
    magic: bytes = b"GGUF"
    version: int = 3
    more_tensors: int = 0
    more_settings: int = 0
    alignment: int = 32
    kinds: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    twice: str = ""

    def set(self, name: str, value: Any, kind: str = "") -> None:
        for place, (key, old, _) in enumerate(self.settings):
            if key == name:
                self.settings[place] = (key, kind or old, value)
                return
        self.settings.append((name, kind, value))

    def remove(self, name: str) -> None:
        self.settings = [entry for entry in self.settings if entry[0] != name]

    def content(self) -> bytes:
        table, data, tensors = b"", b"", [*self.tensors.items()]
        tensors += [(name, values) for name, values in tensors if name == self.twice]
        for name, values in tensors:
            shape = self.shapes.get(name, values.shape)
            table += _text(name) + struct.pack("<I", len(shape))
            table += struct.pack(f"<{len(shape)}Q", *reversed(shape))
            table += struct.pack("<IQ", self.kinds.get(name, 0), self.offsets.get(name, len(data)))
            data += values.astype("<f4").tobytes()
            data += bytes(-len(data) % self.alignment)
        counts = len(tensors) + self.more_tensors, len(self.settings) + self.more_settings
        head = self.magic + struct.pack("<IQQ", self.version, *counts)
        head += b"".join(_text(name) + _value(kind, value) for name, kind, value in self.settings)
        head += table
        return head + bytes(-len(head) % self.alignment) + data

    def write(self, folder: Path) -> Path:
        (folder / "tiny.gguf").write_bytes(self.content())
        return folder / "tiny.gguf"


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(kind: str, value: Any) -> bytes:
    if kind == "text":
        return struct.pack("<I", 8) + _text(value)
    if kind == "texts":
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    if kind == "i32s":
        return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    number, form = FORMATS[kind]
    return struct.pack(f"<I{form}", number, value)


def gguf_file(model: PreTrainedModel, architecture: str) -> GgufFile:
    """Return the file that llama.cpp's converter makes of a model, as far as bilens reads it."""
    known, config = ARCHITECTURES[architecture], model.config
    settings: list[tuple[str, str, Any]] = [("general.architecture", "text", architecture)]
    for key, setting in (known.settings | known.optional).items():
        name = ARCHITECTURES[architecture].renamed.get(setting, setting)
        value = getattr(config, name, None)
        if setting == "rope_theta":
            ropes = config.rope_parameters
            value = ropes.get("full_attention", ropes)["rope_theta"]
        if name == "n_inner":
            value = 4 * config.n_embd
        if value is not None:
            kind = "f32" if isinstance(value, float) else "u32"
            settings.append((f"{architecture}.{key}", kind, value))
    tokens = [*(f"t{number}" for number in range(config.vocab_size - 2)), "t", "0"]
    of_tokens = [("model", "text", "gpt2"), ("merges", "texts", ["t 0"])]
    of_tokens += [("tokens", "texts", tokens), ("token_type", "i32s", [1] * len(tokens))]
    of_tokens += [("bos_token_id", "u32", 1), ("eos_token_id", "u32", 2)]
    settings += [(f"tokenizer.ggml.{name}", kind, value) for name, kind, value in of_tokens]
    state = dict(model.named_parameters())  # of tied weights the first
    tensors = {}
    for theirs, ours in get_gguf_hf_weights_map(model, TensorProcessor()).items():
        if ours in state:
            values = _as_stored(architecture, theirs, state[ours].detach().float(), config)
            tensors[theirs] = np.ascontiguousarray(values.numpy())
    return GgufFile(settings, tensors)


def _as_stored(architecture: str, name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Return a weight as the converter writes it."""
    if architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
        # Rotary pairs are neighbours there.
        heads = weight.shape[0] // config.head_dim
        return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return weight + 1
    transposed = ("attn_qkv.weight", "ffn_down.weight", "ffn_up.weight", "attn_output.weight")
    return weight.T if architecture == "gpt2" and name.endswith(transposed) else weight

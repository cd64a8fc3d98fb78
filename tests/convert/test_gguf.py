"""GGUF files open as the models that were written, and no damaged file opens."""

import struct
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import bilens
from bilens.convert import gguf as convert_gguf
from bilens.convert import open_model, save_model
from bilens.errors import BilensError, CheckpointError
from tests.convert.gguf_files import GgufFile, gguf_file
from tests.families import some_text, tiny

gguf = pytest.importorskip("gguf", reason="pip install gguf")

FAMILIES = {
    "llama": "llama",
    "llama-tied": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "gpt2": "gpt2",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_opens_as_the_model_that_was_written(family, tmp_path):
    model, path = tiny(family, dtype=torch.float32), tmp_path / "tiny.gguf"
    path.write_bytes(gguf_file(model, FAMILIES[family]).content())
    # The bytes are those of a GGUF file to the library of the format, too.
    assert len(gguf.GGUFReader(path).tensors) == len(list(model.parameters()))
    opened = open_model(path)
    assert opened.dtype == torch.float32
    torch.testing.assert_close(opened(some_text()).logits, model(some_text()).logits)
    bilens.load(path)
    save_model(tmp_path / "saved", opened, None)
    again = open_model(tmp_path / "saved")
    torch.testing.assert_close(again(some_text()).logits, model(some_text()).logits)


def write_quantised(path, kind):
    """Write a tiny model's weights in a format of numbers; return the weights as it rounds them."""
    file = gguf_file(tiny("llama", dtype=torch.float32), "llama")
    kind = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    for name, form, value in file.settings[1:]:
        # The writer finds the type of a value by itself, and takes a whole number for 64 bits.
        add = {"u32": writer.add_uint32, "f32": writer.add_float32, "text": writer.add_string}
        add.get(form, writer.add_array)(name, value)
    expected = {}
    for name, values in file.tensors.items():
        rounds = values.ndim == 2 and values.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        stored = gguf.quantize(values, kind) if rounds else values
        writer.add_tensor(name, stored, raw_dtype=kind if rounds else None)
        expected[name] = gguf.dequantize(stored, kind) if rounds else values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_weights_are_dequantised(kind, tmp_path):
    path = tmp_path / "tiny.gguf"
    expected = write_quantised(path, kind)
    opened = gguf_file(open_model(path), "llama").tensors
    assert all(np.array_equal(opened[name], values) for name, values in expected.items())


def test_with_little_memory_one_weight_after_another_is_dequantised(tmp_path, monkeypatch):
    path, alive = tmp_path / "tiny.gguf", []
    write_quantised(path, "Q8_0")
    dequantised, weights = convert_gguf._dequantised, []

    def watched(*arguments):
        for name, values in dequantised(*arguments):
            weights.append(weakref.ref(values))
            alive.append(sum(weight() is not None for weight in weights))
            yield name, values

    monkeypatch.setattr(convert_gguf, "_dequantised", watched)
    model = bilens.load(path, low_memory=True)
    # This one, and the one before it, which the loop still holds.
    assert max(alive) <= 2 < len(alive)
    ids = torch.arange(7)[None]
    alive.clear(), weights.clear()
    in_memory = bilens.load(path)
    assert max(alive) > 2
    assert torch.equal(model.logits(ids), in_memory.logits(ids))


def test_rotary_positions_of_llama_3(tmp_path):
    """Their factors are a tensor in the file, and settings in transformers."""
    model = tiny("llama-tied", dtype=torch.float32)
    d_head, theta = 4, model.config.rope_parameters["rope_theta"]
    wavelength = 2 * np.pi * theta ** (np.arange(0, d_head, 2) / d_head)
    smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
    factors = 1 / ((1 - smooth) / 8 + smooth)
    file = gguf_file(model, "llama")
    file.tensors["rope_freqs.weight"] = factors.astype(np.float32)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(file.content())
    opened = open_model(path)
    if factors.max() > 1:
        assert opened.config.rope_parameters["rope_type"] == "llama3"
    torch.testing.assert_close(
        opened.model.rotary_emb.inv_freq.double(),
        torch.from_numpy(theta ** -(np.arange(0, d_head, 2) / d_head) / factors),
    )
    file.tensors["rope_freqs.weight"] = np.array([1.0, 5.0], dtype=np.float32)
    path.write_bytes(file.content())
    with pytest.raises(CheckpointError, match="holds other frequencies than those of Llama 3"):
        open_model(path)


def test_linear_scaling_of_positions_is_used(tmp_path):
    file = gguf_file(tiny("gemma3", dtype=torch.float32), "gemma3")
    file.set("gemma3.rope.scaling.type", "linear", "text")
    file.set("gemma3.rope.scaling.factor", 8.0, "f32")
    (tmp_path / "tiny.gguf").write_bytes(file.content())
    ropes = open_model(tmp_path / "tiny.gguf").config.rope_parameters
    assert ropes["full_attention"]["factor"] == 8
    assert ropes["sliding_attention"]["rope_type"] == "default"


Damage = Any
L = "llama."


def _setting(name: str, value: Any, kind: str = "") -> Damage:
    return lambda file: file.set(name, value, kind)


def _without(*names: str) -> Damage:
    def damage(file: GgufFile) -> None:
        for name in names:
            del file.tensors[name]

    return damage


def _tensor(name: str, change: Any) -> Damage:
    def damage(file: GgufFile) -> None:
        file.tensors[name] = change(file.tensors[name])

    return damage


def _field(name: str, value: Any) -> Damage:
    return lambda file: setattr(file, name, value)


def _first(values: np.ndarray, value: float) -> np.ndarray:
    changed = values.copy()
    changed.flat[0] = value
    return changed


DOWN, UP = "blk.1.ffn_down.weight", "blk.1.ffn_up.weight"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no tensors": (_field("tensors", {}), "no tensor token_embd.weight"),
    "ffn_down of a layer is missing": (_without(DOWN), "missing tensors: blk.1.ffn_down.weight"),
    "the embedding is missing": (_without("token_embd.weight"), "no tensor token_embd.weight"),
    "a tensor has another name": (
        lambda file: file.tensors.update({"blk.1.ffn_dawn.weight": file.tensors.pop(DOWN)}),
        "unknown tensors: blk.1.ffn_dawn.weight",
    ),
    "a tensor is there twice": (_field("twice", DOWN), "the tensor '.*' twice"),
    "block_count one too many": (_setting(L + "block_count", 3), "block_count=3 and tensors of 2"),
    "block_count 2^31 - 1": (_setting(L + "block_count", 2**31 - 1), "at least 1 and at most 1024"),
    "block_count is a text": (_setting(L + "block_count", "2", "text"), "='2', expected a whole"),
    "block_count is missing": (lambda f: f.remove(L + "block_count"), "lacks .* llama.block_count"),
    "a setting is there twice": (
        lambda file: file.settings.append(file.settings[1]),
        "has the setting 'llama.context_length' twice",
    ),
    "eps -1": (
        _setting(L + "attention.layer_norm_rms_epsilon", -1.0),
        "expected a finite number, above 0",
    ),
    "eps NaN": (_setting(L + "attention.layer_norm_rms_epsilon", np.nan), "=nan, expected a fin"),
    "rope base 0": (_setting(L + "rope.freq_base", 0.0), "expected a finite number, at least 1"),
    "rope dimension of another head": (_setting(L + "rope.dimension_count", 8), "expected .*16"),
    "twice the heads": (_setting(L + "attention.head_count", 8), "attn_.*has shape"),
    "three heads of keys": (_setting(L + "attention.head_count_kv", 3), "share 3 heads of keys"),
    "heads of keys as a list": (
        _setting(L + "attention.head_count_kv", [2, 2], "i32s"),
        r"=\[2, 2\], expected a whole number, at least 1",
    ),
    "embedding_length one more": (
        _setting(L + "embedding_length", 17),
        "multiple of the number of",
    ),
    "feed_forward_length one less": (_setting(L + "feed_forward_length", 19), "has shape"),
    "context length 0": (_setting(L + "context_length", 0), "expected a whole number"),
    "vocab_size of another model": (_setting(L + "vocab_size", 29, "u32"), "vocab_size=29, exp"),
    "a setting that nobody knows": (
        _setting(L + "rope.scaling.yarn_log_multiplier", 0.1, "f32"),
        "a setting that bilens does not know",
    ),
    "attention that is not causal": (
        _setting(L + "attention.causal", value=False, kind="bool"),
        "attention.causal=False, expected True",
    ),
    "linear scaling by 0": (
        lambda f: (
            f.set(L + "rope.scaling.type", "linear", "text"),
            f.set(L + "rope.scaling.factor", 0.0, "f32"),
        ),
        "rope.scaling.factor=0.0, expected a finite number, at least 1",
    ),
    "another architecture": (_setting("general.architecture", "qwen2"), "lacks the settings"),
    "an unknown architecture": (_setting("general.architecture", "lama"), "of architecture 'lama'"),
    "no architecture": (lambda f: f.remove("general.architecture"), "of architecture 'None'"),
    "a token less": (
        _setting("tokenizer.ggml.tokens", [f"t{i}" for i in range(29)]),
        "29 entries in tokenizer.ggml.tokens",
    ),
    "a token type more": (_setting("tokenizer.ggml.token_type", [1] * 31), "31 entries in"),
    "bos token 10^9": (_setting("tokenizer.ggml.bos_token_id", 10**9), "=1000000000, expected 0"),
    "one infinite weight": (_tensor(UP, lambda w: _first(w, np.inf)), f"{UP} holds NaN"),
    "a matrix of zeros": (_tensor(UP, lambda w: w * 0), f"{UP} holds only zeros"),
    "a matrix transposed": (_tensor(UP, lambda w: w.T), "mismatched|shape"),
    "a vector for a matrix": (_tensor(UP, np.ravel), "has shape"),
    "a shape of 2^40": (_field("shapes", {UP: (2**40, 16)}), "of shape"),
    "five axes": (_field("shapes", {UP: (1, 1, 1, 20, 16)}), "5 axes, expected 1 to 4"),
    "an unknown format of numbers": (_field("kinds", {UP: 99}), "format 99, which is not known"),
    "float16 said of float32": (_field("kinds", {UP: 1}), "at byte"),
    "an offset into another tensor": (_field("offsets", {UP: 0}), "at byte 0, expected"),
    "an offset beyond the end": (_field("offsets", {UP: 2**40}), "at byte 1,099,511,627,776"),
    "another magic": (_field("magic", b"GGML"), "does not begin with GGUF"),
    "version 1": (_field("version", 1), "of version 1, expected 2 or 3"),
    "version of big-endian files": (_field("version", 3 << 24), "little-endian"),
    "a tensor more announced": (_field("more_tensors", 1), "damaged or incomplete"),
    "2^60 tensors announced": (_field("more_tensors", 2**60), "damaged or incomplete"),
    "a setting more announced": (_field("more_settings", 1), "damaged or incomplete"),
    "an alignment of 3": (_setting("general.alignment", 3, "u32"), "expected a power of two"),
    "an alignment of 4096 over 32": (_setting("general.alignment", 4096, "u32"), "at byte"),
}


CUTS: dict[str, Any] = {
    "empty": lambda content: b"",
    "cut in the table": lambda content: content[: content.index(b"blk.1.")],
    "cut by a tensor": lambda content: content[:-1280],
    "a kilobyte too many": lambda content: content + bytes(1024),
    "a byte of the header is lost": lambda content: content[:300] + content[301:],
    "a list of 2^40 numbers": lambda content: content.replace(
        struct.pack("<IIQ", 9, 5, 30), struct.pack("<IIQ", 9, 5, 2**40)
    ),
    "a name of 2^63 bytes": lambda content: content[:24] + struct.pack("<Q", 2**63) + content[32:],
    "a web page": lambda content: b"<!DOCTYPE html>" + b" " * 5000,
}


@pytest.fixture(scope="module")
def model():
    return tiny("llama-tied", dtype=torch.float32)


@pytest.mark.parametrize("way", [*DAMAGES, *CUTS])
def test_a_damaged_file_is_refused(way, tmp_path, model):
    file, message = (
        gguf_file(model, "llama"),
        "damaged or incomplete|complete GGUF|only zeros|a web page",
    )
    if way in DAMAGES:
        damage, message = DAMAGES[way]
        damage(file)
    content = file.content()
    path = tmp_path / "tiny.gguf"
    path.write_bytes(CUTS[way](content) if way in CUTS else content)
    with pytest.raises(CheckpointError, match=message) as refused:
        bilens.load(path)
    assert str(path) in str(refused.value)


def test_weights_that_do_not_fit_into_memory(tmp_path, model, monkeypatch):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_file(model, "llama").content())
    monkeypatch.setattr("bilens.memory.available_memory", lambda device: 1000)
    with pytest.raises(BilensError, match=r"gguf: its 4,016 weights need 0.00 GB of memory on cpu"):
        open_model(path)

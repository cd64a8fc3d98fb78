"""GGUF files open as the models that were written, and no damaged file opens."""

import re
import struct
import weakref

import numpy as np
import pytest
import torch

import bilens
from bilens.convert import gguf as convert_gguf
from bilens.convert import open_model, save_model
from bilens.errors import CheckpointError
from tests.convert.gguf_files import gguf_file
from tests.families import some_text, tiny
from tests.refusals import refused

gguf = pytest.importorskip("gguf", reason="pip install gguf")

FAMILIES = ("llama", "llama-tied", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_opens_as_the_model_that_was_written(family, tmp_path):
    model = tiny(family, dtype=torch.float32)
    path = gguf_file(model, family.removesuffix("-tied")).write(tmp_path)
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
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match="damaged or incomplete|complete GGUF"):
        open_model(path)


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
    wavelength = model.config.rope_parameters["rope_theta"] ** (np.arange(0, 4, 2) / 4)
    smooth = np.clip((8192 / (2 * np.pi * wavelength) - 1) / 3, 0, 1)
    factors = 1 / ((1 - smooth) / 8 + smooth)
    file = gguf_file(model, "llama")
    file.tensors["rope_freqs.weight"] = factors.astype(np.float32)
    opened = open_model(file.write(tmp_path))
    if factors.max() > 1:
        assert opened.config.rope_parameters["rope_type"] == "llama3"
    expected = torch.from_numpy(1 / wavelength / factors)
    torch.testing.assert_close(opened.model.rotary_emb.inv_freq.double(), expected)
    file.tensors["rope_freqs.weight"] = np.array([1.0, 5.0], dtype=np.float32)
    with pytest.raises(CheckpointError, match="holds other frequencies than those of Llama 3"):
        open_model(file.write(tmp_path))


def scale_linearly(file, architecture, factor):
    file.set(f"{architecture}.rope.scaling.type", "linear", "text")
    file.set(f"{architecture}.rope.scaling.factor", factor, "f32")


def test_linear_scaling_of_positions_is_used(tmp_path):
    file = gguf_file(tiny("gemma3", dtype=torch.float32), "gemma3")
    scale_linearly(file, "gemma3", 8.0)
    ropes = open_model(file.write(tmp_path)).config.rope_parameters
    assert ropes["full_attention"]["factor"] == 8
    assert ropes["sliding_attention"]["rope_type"] == "default"


@pytest.fixture(scope="module")
def model():
    return tiny("llama-tied", dtype=torch.float32)


def damaged(change=lambda file: None, cut=lambda content: content):
    """Return the opening of a file after a change of its parts, or of its bytes."""

    def opened(tmp_path, model):
        file = gguf_file(model, "llama")
        change(file)
        path = file.write(tmp_path)
        path.write_bytes(cut(path.read_bytes()))
        with pytest.raises(CheckpointError, match=re.escape(str(path))) as refused:
            bilens.load(path)
        raise refused.value

    return opened


def setting(name, value, kind=""):
    return damaged(lambda file: file.set(name, value, kind))


def llama(name, value, kind=""):
    return setting(f"llama.{name}", value, kind)


def lacking(setting):
    return damaged(lambda file: file.remove(setting))


def without(tensor):
    return damaged(lambda file: file.tensors.pop(tensor))


def another_up(change):
    return damaged(lambda file: file.tensors.update({UP: change(file.tensors[UP])}))


def holding(part, value):
    return damaged(lambda file: setattr(file, part, value))


def renamed(old, new):
    return damaged(lambda file: file.tensors.update({new: file.tensors.pop(old)}))


DOWN, UP = "blk.1.ffn_down.weight", "blk.1.ffn_up.weight"
KEYS, EPS = "attention.head_count_kv", "attention.layer_norm_rms_epsilon"
NUMBERS = struct.pack("<IIQ", 9, 5, 30)
CUTS = (
    lambda content: b"",
    lambda content: content[: content.index(b"blk.1.")],
    lambda content: content[:-1280],  # a tensor less
    lambda content: content[:-1280] + bytes(1280),
    lambda content: content + bytes(1024),
    lambda content: content[:300] + content[301:],
    lambda content: content.replace(NUMBERS, struct.pack("<IIQ", 9, 5, 2**40)),
    lambda content: content[:24] + struct.pack("<Q", 2**63) + content[32:],  # bytes of a name
    lambda content: b"<!DOCTYPE html>" + b" " * 5000,
)
DAMAGES = {
    "no tensor token_embd.weight": [holding("tensors", {}), without("token_embd.weight")],
    "missing tensors: blk.1.ffn_down.weight": without(DOWN),
    "unknown tensors: blk.1.ffn_dawn.weight": renamed(DOWN, "blk.1.ffn_dawn.weight"),
    "unknown tensors: output_horn.weight": renamed("output_norm.weight", "output_horn.weight"),
    "block_count=2 and tensors of 3": renamed(DOWN, "blk.4.ffn_down.weight"),
    "block_count=1 and tensors of 2": llama("block_count", 1),
    "the tensor '.*' twice": holding("twice", DOWN),
    "block_count=3 and tensors of 2": llama("block_count", 3),
    "at least 1 and at most 1024": llama("block_count", 2**31 - 1),
    "='2', expected a whole": llama("block_count", "2", "text"),
    "lacks .* llama.block_count": lacking("llama.block_count"),
    "has the setting 'llama.context_length' twice": damaged(
        lambda file: file.settings.append(file.settings[1])
    ),
    "expected a finite number, above 0": llama(EPS, -1.0),
    "=nan, expected a fin": llama(EPS, np.nan),
    "expected a finite number, at least 1": llama("rope.freq_base", 0.0),
    "expected .*16": llama("rope.dimension_count", 8),
    "attn_.*has shape": llama("attention.head_count", 8),
    "share 3 heads of keys": llama(KEYS, 3),
    r"=\[2, 2\], expected a whole number, at least 1": llama(KEYS, [2, 2], "i32s"),
    "multiple of the number of": llama("embedding_length", 17),
    "has shape": [llama("feed_forward_length", 19), another_up(np.ravel)],
    "expected a whole number": llama("context_length", 0),
    "vocab_size=29, exp": llama("vocab_size", 29, "u32"),
    "a setting that bilens does not know": llama("rope.scaling.yarn_log_multiplier", 0.1, "f32"),
    "attention.causal=False, expected True": llama("attention.causal", False, "bool"),
    "rope.scaling.factor=0.0, expected a finite number, at least 1": damaged(
        lambda file: scale_linearly(file, "llama", 0.0)
    ),
    "lacks the settings": setting("general.architecture", "qwen2"),
    "of architecture 'lama'": setting("general.architecture", "lama"),
    "of architecture 'None'": lacking("general.architecture"),
    "29 entries in tokenizer.ggml.tokens": setting("tokenizer.ggml.tokens", [*map(str, range(29))]),
    "31 entries in": setting("tokenizer.ggml.token_type", [1] * 31),
    "=1000000000, expected 0": setting("tokenizer.ggml.bos_token_id", 10**9),
    f"{UP} holds NaN": another_up(lambda w: np.where(w == w.max(), np.inf, w)),
    f"{UP} holds only zeros": another_up(lambda w: w * 0),
    "mismatched|shape": another_up(np.transpose),
    "of shape": holding("shapes", {UP: (2**40, 16)}),
    "5 axes, expected 1 to 4": holding("shapes", {UP: (1, 1, 1, 20, 16)}),
    "format 99, which is not known": holding("kinds", {UP: 99}),
    "at byte": [holding("kinds", {UP: 1}), setting("general.alignment", 4096, "u32")],
    "at byte 0, expected": holding("offsets", {UP: 0}),
    "at byte 1,099,511,627,776": holding("offsets", {UP: 2**40}),
    "does not begin with GGUF": holding("magic", b"GGML"),
    "of version 1, expected 2 or 3": holding("version", 1),
    "little-endian": holding("version", 3 << 24),
    "damaged or incomplete": [
        *(holding("more_tensors", more) for more in (1, 2**60)),
        holding("more_settings", 1),
    ],
    "expected a power of two": setting("general.alignment", 3, "u32"),
    "damaged or incomplete|complete GGUF|only zeros|a web page": [damaged(cut=cut) for cut in CUTS],
}
test_a_damaged_file_is_refused = refused(DAMAGES, CheckpointError)


def open_in_little_memory(tmp_path, model, monkeypatch):
    monkeypatch.setattr("bilens.memory.available_memory", lambda device: 1000)
    open_model(gguf_file(model, "llama").write(tmp_path))


test_weights_that_do_not_fit_into_memory = refused(
    {"gguf: its 4,016 weights need 0.00 GB of memory on cpu": open_in_little_memory}
)

"""Faults of a model's files are named, and no file is half-written."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import bilens
from bilens.cli import main
from bilens.convert import loading, open_model, open_tokenizer, save_model
from bilens.convert.loading import find_tokenizer
from bilens.convert.weights import read_weights
from bilens.errors import BilensError, CheckpointError
from bilens.memory import MemoryLimitError
from bilens.nn import ClassifierConfig, ImageClassifier
from tests.convert.foreign import IMAGES, state_of, write
from tests.convert.gguf_files import gguf_file
from tests.families import tiny
from tests.models import check_same_model, toy_tokenizer


@pytest.fixture
def saved(tmp_path):
    save_model(tmp_path / "model", tiny("llama", dtype=torch.float32), toy_tokenizer())
    return tmp_path / "model"


def change_json(path, **settings):
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_stay_in_their_files_are_the_same(tmp_path, family, dtype):
    """The model computes the same, its memory is that of the file, and the file does not change."""
    tiny(family, dtype=dtype).save_pretrained(tmp_path, max_shard_size="40KB")
    files = {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    model, in_memory = (bilens.load(tmp_path, low_memory=low) for low in (True, False))
    ids = torch.arange(7)[None]
    assert torch.equal(model.logits(ids), in_memory.logits(ids))
    assert model.model.config.to_dict() == in_memory.model.config.to_dict()
    weights = dict(model.model.named_parameters())
    assert weights.keys() == dict(in_memory.model.named_parameters()).keys()
    assert {weight.dtype for weight in weights.values()} == {dtype}
    check_mapped(model, str(tmp_path))
    with torch.no_grad():
        for weight in weights.values():
            weight.zero_()
    assert all(path.read_bytes() == content for path, content in files.items())


OPTIONS: dict[str, Any] = {
    **{"low_memory": True, "input_shape": (5,), "dtype": torch.float64, "device_map": "auto"},
    **{"max_memory": {"cpu": "9GB"}, "offload_folder": "offload", "colour": "red"},
    **{"revision": "main", "cache_dir": "cache", "load_in_8bit": True},
}
PLACES = {"revision", "cache_dir"}
USED: dict[str, set[str]] = {
    "transformer": {"low_memory", "dtype", "device_map", *PLACES},
    "gguf": {"low_memory", "dtype"},
    "layout": {"dtype", *PLACES},
    "images": PLACES,
    "open transformer": set(),
    "open stack": {"input_shape"},
    "open classifier": set(),
}
"""Options of a loading by the kind of model that uses them."""


class Product(nn.Linear):
    def forward(self, x):
        return super().forward(x) * x


@pytest.fixture(scope="module")
def of_kinds(tmp_path_factory):
    """A folder, a file or a module of each kind, by its name."""
    folder = tmp_path_factory.mktemp("kinds")
    llama, classifier = (
        tiny("llama", dtype=torch.float32),
        ImageClassifier(ClassifierConfig(25, 4, 8)),
    )
    save_model(folder / "llama", llama, toy_tokenizer())
    classifier.save_pretrained(folder / "images")
    return {
        "transformer": folder / "llama",
        "gguf": gguf_file(llama, "llama").write(folder),
        "layout": write(folder / "layout", IMAGES, state_of(IMAGES, torch.float32)),
        "images": folder / "images",
        "open transformer": llama,
        "open stack": nn.Sequential(Product(5, 5), nn.Linear(5, 3)),
        "open classifier": classifier.eval(),
    }


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", USED)
def test_what_a_kind_of_model_does_not_use_is_refused_by_name(of_kinds, kind, option):
    refused = pytest.raises(BilensError, match=f"^{option}=.* is not used by a")
    with contextlib.nullcontext() if option in USED[kind] else refused:
        bilens.load(of_kinds[kind], **{option: OPTIONS[option]})


@pytest.mark.parametrize("kind", [kind for kind in USED if "dtype" in USED[kind]])
def test_a_type_of_numbers_may_be_named(of_kinds, kind):
    view = bilens.load(of_kinds[kind], dtype="float64")
    module = getattr(view, "model", view)
    assert next(module.parameters()).dtype == torch.float64
    for dtype in (torch.int8, "int8", "torch.int64", "float33", float, {"": "float32"}):
        with pytest.raises(BilensError, match="^dtype=.*, expected auto, torch.float16, torch.b"):
            bilens.load(of_kinds[kind], dtype=dtype)


def test_weights_in_fp8_are_dequantised_on_load(tmp_path):
    tiny("llama", dtype=torch.float32).save_pretrained(tmp_path)
    stored, expected = load_file(tmp_path / "model.safetensors"), dict[str, torch.Tensor]()
    for name, weight in [*stored.items()]:
        expected[name] = weight
        if name.endswith("proj.weight"):
            scale = weight.abs().max() / 448
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
            expected[name] = stored[name].float() * scale
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path.write_text(json.dumps(config), encoding="utf-8")
    opened = dict(bilens.load(tmp_path).model.named_parameters())
    assert all(torch.equal(weight, expected[name]) for name, weight in opened.items())
    assert expected.keys() == opened.keys()


def test_dequantised_weights_stay_in_a_file_without_a_name(tmp_path):
    pytest.importorskip("gguf")
    path = gguf_file(tiny("llama", dtype=torch.float32), "llama").write(tmp_path)
    model, in_memory = (bilens.load(path, low_memory=low) for low in (True, False))
    ids = torch.arange(7)[None]
    assert torch.equal(model.logits(ids), in_memory.logits(ids))
    assert list(tmp_path.iterdir()) == [path]
    check_mapped(model, f"{tmp_path}/.")


def check_mapped(view, folder: str) -> None:
    """See that all weights are where files of a folder are mapped."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not list its mappings")
    ends = [line.split()[0].split("-") for line in maps.read_text().splitlines() if folder in line]
    mapped = [range(int(start, 16), int(stop, 16)) for start, stop in ends]
    assert all(any(x.data_ptr() in part for part in mapped) for x in view.model.parameters())


def test_a_model_larger_than_memory_is_opened_only_on_request(saved, monkeypatch):
    monkeypatch.setattr("bilens.memory.available_memory", lambda device: 2000)
    for request in ({}, {"low_memory": True, "dtype": torch.float64}):
        with pytest.raises(MemoryLimitError):
            bilens.load(saved, **request)
    bilens.load(saved, low_memory=True)


@pytest.mark.parametrize("sizes", [("4GB", "9KB"), ("9KB", "4GB"), ("9KB", "5KB")])
def test_a_folder_holds_the_model_that_was_saved_last(tmp_path, monkeypatch, sizes):
    for seed, size in enumerate(sizes):
        monkeypatch.setattr(loading, "SHARD_SIZE", size)
        model = tiny("llama", seed, torch.float32)
        save_model(tmp_path, model, None)
    check_same_model(open_model(tmp_path), model)


def test_another_tokenizer_is_refused(saved):
    model = open_model(saved)
    model.config.vocab_size = 20
    with pytest.raises(CheckpointError, match="has 30 tokens, the model 20; they do not belong"):
        open_tokenizer(saved, model)
    (saved / "tokenizer.json").unlink()
    for read in (open_tokenizer, find_tokenizer):
        with pytest.raises(CheckpointError, match="holds no complete tokenizer"):
            read(saved, model)
    (saved / "tokenizer_config.json").unlink()
    assert find_tokenizer(saved, model) is None


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    model, full = tiny("llama"), Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(type(model), "save_pretrained", full)
    with pytest.raises(CheckpointError, match="could not be written: No space left"):
        save_model(tmp_path / "model", model, None)
    assert list((tmp_path / "model").iterdir()) == []


TRAP = "open({!r}, 'w').write('ran')\nraise SystemExit('ran')\n"
OF_MODEL = {"AutoConfig": "trap.Config", "AutoModelForCausalLM": "trap.Model"}


def lay_trap(folder, tmp_path):
    """Return the file that is written if code runs that the settings of a folder name."""
    sprung = tmp_path / "sprung"
    (folder / "trap.py").write_text(TRAP.format(str(sprung)))
    change_json(folder / "config.json", auto_map=OF_MODEL)
    tokenizer = {"AutoTokenizer": ["trap.Tokenizer", "trap.Tokenizer"]}
    change_json(folder / "tokenizer_config.json", auto_map=tokenizer)
    return sprung


@pytest.mark.parametrize("model_type", ["llama", "made-up"])
def test_code_of_a_models_folder_never_runs(saved, tmp_path, model_type, monkeypatch):
    """Not even where somebody says yes to everything."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    change_json(saved / "config.json", model_type=model_type)
    sprung = lay_trap(saved, tmp_path)
    options = dict.fromkeys(("process", "export", "spectra", "heads", "report"), ())
    options |= dict.fromkeys(("ngrams", "contexts"), ("--token", "t3"))
    options |= {"anneal": ("--data", "nothing.txt"), "generate": ("--prompt", "t3")}
    monkeypatch.chdir(tmp_path)
    for command, more in options.items():
        with contextlib.suppress(SystemExit):
            main([command, str(saved), *more])
        assert not sprung.exists(), command
    with contextlib.suppress(CheckpointError):
        bilens.load(saved)
    assert not sprung.exists()


ON_CPU = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 B")
ON_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


@pytest.mark.parametrize("error", [ON_CPU, ON_GPU], ids=["CPU", "GPU"])
def test_too_little_memory_is_not_a_missing_model(saved, monkeypatch, error):
    full = Mock(side_effect=error)
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", full)
    monkeypatch.setattr("bilens.convert.weights.load_file", full)
    for read in (open_model, read_weights):
        with pytest.raises(type(error), match="allocate"):
            read(saved)


def test_a_reference_that_leads_out_of_the_cache(tmp_path, monkeypatch, saved):
    """A cache holds the names of its folders in files."""
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("../../../../model")
    (repository / "snapshots").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="some/model is not a directory here, and config.jso"):
        bilens.load("some/model", cache_dir=tmp_path / "hub")


def test_a_damaged_tokenizer_is_named(tmp_path):
    """Also one of older files, which no tokenizer.json stands beside."""
    tiny("gpt2", dtype=torch.float32).save_pretrained(tmp_path)
    assert bilens.load(tmp_path).tokenizer is None
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "vocab.json").write_text('{"a": 0, "b"')
    with pytest.raises(CheckpointError, match=f"{tmp_path} holds no complete tokenizer"):
        bilens.load(tmp_path)


def test_a_tokenizer_of_another_run_is_refused(saved, tmp_path):
    toy = Tokenizer(models.WordLevel({f"u{i}": i for i in range(30)}, unk_token="u0"))
    other = PreTrainedTokenizerFast(tokenizer_object=toy, bos_token="u1")
    save_model(tmp_path / "other", tiny("llama", dtype=torch.float32), other)
    assert bilens.load(tmp_path / "other").token("u7") == 7
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "other" / name, saved)
    with pytest.raises(CheckpointError, match="is not the one that was saved with the model"):
        bilens.load(saved)


def test_a_bug_is_not_taken_for_a_damaged_file(saved, monkeypatch):
    bug = Mock(side_effect=KeyError("a name of bilens"))
    monkeypatch.setattr("bilens.convert.loading.find_spec", lambda _: True)
    of_loading = ("_check_shards", "_add_biases", "_check_special_tokens", "gates.find_swish")
    calls = [(f"loading.{name}", open_model, saved) for name in of_loading]
    calls += [("loading.gguf_model", open_model, Path("model.gguf"))]
    calls += [("weights._shards", read_weights, saved)]
    for name, read, source in calls:
        with monkeypatch.context() as patch, pytest.raises(KeyError, match="a name of bilens"):
            patch.setattr(f"bilens.convert.{name}", bug)
            read(source)


def test_an_added_bias_that_does_not_fit_is_named(saved):
    weights = load_file(saved / "model.safetensors")
    for name, bias in (("model.layers.0", 5), ("lm_head", 7)):
        change_json(saved / "config.json", bilens_processing={"steps": [], "added_biases": [name]})
        save_file({**weights, f"{name}.bias": torch.ones(bias)}, saved / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"{name}.bias has shape \({bias},\) and does"):
            open_model(saved)


def test_a_model_with_added_biases_is_of_the_class_of_transformers(saved, caplog, capfd):
    weights, bias = load_file(saved / "model.safetensors"), torch.arange(30.0)
    save_file({**weights, "lm_head.bias": bias}, saved / "model.safetensors", {"format": "pt"})
    change_json(saved / "config.json", bilens_processing={"steps": [], "added_biases": ["lm_head"]})
    model = open_model(saved)
    assert type(model) is LlamaForCausalLM
    assert torch.equal(model.lm_head.bias, bias)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")

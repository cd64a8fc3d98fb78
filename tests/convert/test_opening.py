"""What is wrong with a model's files is said, and nothing is half-written."""

import json

import pytest
import torch
from transformers import PreTrainedConfig

from bilens.convert import open_model, open_tokenizer, save_model
from bilens.errors import CheckpointError
from tests.families import tiny
from tests.language import toy_tokenizer


@pytest.fixture
def saved(tmp_path):
    save_model(tmp_path / "model", tiny("llama", dtype=torch.float32), toy_tokenizer())
    return tmp_path / "model"


def test_what_was_saved_is_opened(saved):
    model = open_model(saved)
    assert not model.training
    assert len(open_tokenizer(saved, model)) == 30


def test_the_configuration_is_fetched_from_the_same_place(monkeypatch):
    asked = []

    def offline(*args, **kwargs):
        asked.append((args, kwargs))
        raise OSError

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", offline)
    with pytest.raises(CheckpointError):
        open_model("you/model", revision="old", dtype=torch.float64)
    assert asked == [(("you/model",), {"revision": "old"})]


def test_no_model_and_no_hub(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", offline)
    with pytest.raises(CheckpointError, match="you/model holds no whole .* We couldn't connect"):
        open_model("you/model")


def test_a_missing_shard_is_named(tmp_path):
    model = tiny("llama", dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{tmp_path} holds no whole .*{shard.name}"):
        open_model(tmp_path)


def test_a_cut_file_is_damaged(saved):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=f"{saved} holds no whole language model"):
        open_model(saved)


def test_pickles_are_not_read(tmp_path):
    model = tiny("llama", dtype=torch.float32)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=f"{tmp_path} holds no whole language model"):
        open_model(tmp_path)


@pytest.mark.parametrize(("layers", "named"), [(3, "layers.2.mlp"), (1, "layers.1.mlp")])
def test_weights_that_do_not_fit_are_named(saved, layers, named):
    path = saved / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": layers}))
    with pytest.raises(CheckpointError, match=f"do not fit config.json .*{named}"):
        open_model(saved)


def test_another_tokenizer_is_refused(saved):
    model = open_model(saved)
    model.config.vocab_size = 20
    with pytest.raises(CheckpointError, match="has 30 tokens, the model 20; they do not belong"):
        open_tokenizer(saved, model)
    (saved / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="holds no whole tokenizer"):
        open_tokenizer(saved, model)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    model = tiny("llama")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(model), "save_pretrained", full)
    with pytest.raises(CheckpointError, match="could not be written to .* No space left"):
        save_model(tmp_path / "model", model, None)
    assert list((tmp_path / "model").iterdir()) == []

"""Layouts are recognised by their settings, and parts that do not fit are named."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

import bilens
from bilens.convert import open_model, open_tokenizer
from bilens.convert.layouts import LAYOUTS, find_layout
from bilens.errors import CheckpointError
from tests.convert.foreign import IMAGES, PAPER, RELEASED, state_of, write
from tests.families import tiny
from tests.models import random_model, toy_tokenizer

KNOWN = [RELEASED, PAPER, IMAGES]


def test_each_layout_is_told_by_its_settings():
    for settings, layout in zip(KNOWN, LAYOUTS, strict=True):
        assert find_layout(settings) is layout
    for model in (random_model(), tiny("gpt2"), tiny("llama")):
        assert find_layout(model.config.to_dict()) is None


@pytest.mark.parametrize("settings", KNOWN)
def test_missing_and_unknown_weights_are_named(tmp_path, settings):
    state = state_of(settings, torch.float32)
    *_, gone = state
    for changed, message in (
        ({gone: None}, f"missing weights: {gone}. They do not fit"),
        ({"extra.weight": torch.ones(3)}, "unknown weights: extra.weight. They do not fit"),
        ({gone: state[gone][:-1]}, f"{gone} has shape .*, expected"),
        ({gone: state[gone] * torch.nan}, "holds NaN or infinite values"),
    ):
        held = {name: x for name, x in (state | changed).items() if x is not None}
        with pytest.raises(CheckpointError, match=message):
            bilens.load(write(tmp_path, settings, held))


def test_weights_may_be_in_several_files(tmp_path):
    state = state_of(PAPER, torch.float32)
    names = {key: f"part-{number % 2}.safetensors" for number, key in enumerate(state)}
    write(tmp_path, PAPER, {}, "other.bin")
    for file in set(names.values()):
        save_file({k: v for k, v in state.items() if names[k] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert torch.equal(bilens.load(tmp_path).W_E, state["transformer.wte.weight"])
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"weights are missing: .*part-1.safetensors"):
        bilens.load(tmp_path)


def test_a_tokenizer_beside_the_model_comes_before_the_one_of_the_layout(tmp_path, monkeypatch):
    model = open_model(write(tmp_path, PAPER, state_of(PAPER, torch.float32)))
    asked = []

    def fetched(name, **options):
        asked.append(name)
        return toy_tokenizer()

    with monkeypatch.context() as patched:
        patched.setattr(AutoTokenizer, "from_pretrained", fetched)
        assert len(open_tokenizer(tmp_path, model)) == 30
        for settings in (PAPER | {"tokenizer": "gpt2"}, RELEASED):
            (tmp_path / "config.json").write_text(json.dumps(settings))
            open_tokenizer(tmp_path, model)
    assert asked == ["tdooms/ts-tokenizer-4096", *["openai-community/gpt2"] * 2]
    (tmp_path / "config.json").write_text(json.dumps(PAPER | {"tokenizer": None}))
    with pytest.raises(CheckpointError, match="holds no tokenizer, expected one of tokenizer.json"):
        open_tokenizer(tmp_path, model)
    toy_tokenizer().save_pretrained(tmp_path)
    assert len(open_tokenizer(tmp_path, model)) == 30

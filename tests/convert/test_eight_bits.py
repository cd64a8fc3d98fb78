"""Weights in eight bits are restored within half a step, and are never taken for something else."""

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import bilens
from bilens.checks import FLOATS
from bilens.convert import save_model
from bilens.convert.eight_bits import MARK, restore_rows, round_rows
from bilens.errors import CheckpointError
from tests.families import tiny
from tests.models import random_model, toy_tokenizer


@given(st.integers(0, 1000), st.floats(-20, 20), st.integers(1, 6), st.sampled_from(FLOATS))
def test_each_number_is_within_half_a_step_of_its_row(seed, size, n_rows, dtype):
    generator = torch.Generator().manual_seed(seed)
    power = size / 5 if dtype == torch.float16 else size
    weight = (torch.randn(n_rows, 5, generator=generator) * 10.0**power).to(dtype)
    weight[seed % n_rows, 2 * (seed % 2) :] = 0  # a part of a row, or all of it
    restored = restore_rows(round_rows({"map": weight, "bias": weight[0]}), "here")
    step = weight.double().abs().amax(dim=1, keepdim=True) / 127
    assert ((restored["map"] - weight.double()).abs() <= 0.501 * step).all()
    assert torch.equal(restored["bias"], weight[0])
    again = restore_rows(round_rows({"map": restored["map"]}), "here")["map"]
    torch.testing.assert_close(again, restored["map"])  # nothing more is lost


def saved(model, folder):
    save_model(folder, model, None, eight_bits=True)
    assert MARK not in vars(model.config)
    return folder


@pytest.mark.parametrize("family", ["bilens", "llama", "gpt2"])
def test_a_model_is_opened_in_float32_and_saved_again_as_an_ordinary_one(tmp_path, family):
    model = random_model(n_layers=2).float() if family == "bilens" else tiny(family).float()
    folder = saved(model, tmp_path / "small")
    size = sum(4 * weight.numel() for weight in model.parameters())
    assert (folder / "model.safetensors").stat().st_size < 0.6 * size
    opened, ids = bilens.load(folder), torch.arange(1, 7)[None]
    logits, expected = opened.logits(ids), model(input_ids=ids).logits
    assert 1e-6 < (logits - expected).norm() / expected.norm() < 0.05
    save_model(tmp_path / "whole", opened.model, toy_tokenizer())
    assert torch.equal(bilens.load(tmp_path / "whole").logits(ids), logits)


def test_a_model_in_a_folder_named_story_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "story").mkdir()
    assert bilens.load("story").vocab_size == 2048  # the folder holds no model
    saved(random_model().float(), tmp_path / "story")
    assert bilens.load("story").vocab_size == 30


def test_whole_numbers_without_their_scales_are_refused(tmp_path):
    folder = saved(random_model().float(), tmp_path / "small")
    weights = load_file(folder / "model.safetensors")
    del weights["embed.weight.scale"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"embed\.weight has no scale for each of its rows"):
        bilens.load(folder)


def test_transformers_does_not_take_whole_numbers_for_weights(tmp_path):
    folder = saved(tiny("llama").float(), tmp_path / "small")
    _, about = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert "model.embed_tokens.weight" in about["missing_keys"]

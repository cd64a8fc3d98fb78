"""A saved search is resumed for the same model only."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import bilens.read.deep
from bilens.read import load_paths, read_deep, save_paths
from bilens.tensor import top_paths
from tests.models import digit_model, digits


@pytest.fixture(scope="module")
def model():
    return digit_model(2)


@pytest.fixture
def saved(model, tmp_path):
    search = top_paths(model.tensors(), torch.eye(10), 40)
    save_paths(tmp_path / "paths.safetensors", search, model.tensors())
    return tmp_path / "paths.safetensors", search


@pytest.mark.parametrize("k", [1, 25, 40])
def test_what_is_loaded_is_what_was_found(model, saved, k):
    path, search = saved
    result, expected = load_paths(path, model.tensors(), k), search.paths.truncate(k)
    assert (result.expanded, result.total) == (search.expanded, search.total)
    assert result.paths.constant == expected.constant
    for name in ("directions", "roots", "indices", "eigenvalues", "vectors"):
        assert torch.equal(getattr(result.paths, name), getattr(expected, name))


def test_more_paths_another_model_or_a_bad_file_are_searched_anew(model, saved, tmp_path):
    path, _ = saved
    assert load_paths(path, model.tensors(), 41) is None
    assert load_paths(path, digit_model(2, bias=True).tensors(), 40) is None
    first, second = model.tensors()
    assert load_paths(path, [replace(first, left=1.001 * first.left), second], 40) is None
    assert load_paths(tmp_path / "nothing", model.tensors(), 40) is None
    path.write_bytes(path.read_bytes()[:-8])
    assert load_paths(path, model.tensors(), 40) is None
    save_file({"a": torch.zeros(1)}, path)
    assert load_paths(path, model.tensors(), 40) is None


def test_a_reading_takes_it_up(model, saved, monkeypatch):
    path, _ = saved
    expected = read_deep(model, digits(), 40)
    monkeypatch.setattr(bilens.read.deep, "top_paths", None)
    reading = read_deep(model, digits(), 40, saved=path)
    assert reading.record() == expected.record()


def test_the_file_says_how_strong_each_path_is(saved):
    path, search = saved
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor("effective"), search.paths.effective)
        assert torch.equal(file.get_tensor("roots"), search.paths.roots)

"""The recipe of directions of the stream, on a tiny random model."""

import json

import pytest
import torch
from experiments.context import RecipeContext
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bilens.residual import ResidualModel
from bilens.tensor.jacobian_bonds import principal_bonds
from experiments import stream_directions as recipe


@pytest.fixture(scope="module")
def model() -> ResidualModel:
    texts = [
        question
        for questions in (recipe.agreement, recipe.indirect_objects)
        for half in (0, 1)
        for question in questions(400, half)
    ]
    words = sorted(
        {word for item in texts for part in item for word in part.replace(",", "").split()}
    )
    vocabulary = {word: i for i, word in enumerate(["[UNK]", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    return ResidualModel(LlamaForCausalLM(config).requires_grad_(False), tokenizer)


def test_the_recipe_counts_directions(model, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "open_model", lambda _: model)
    outcome = recipe.run(RecipeContext("small", tmp_path))
    numbers = json.loads(json.dumps(outcome.numbers, allow_nan=False))
    for task in ("agreement", "IOI"):
        needed = numbers[task]["needed"]
        assert {"function", "PCA", "random"} < needed.keys()
        assert all(k is None or k in recipe.RANKS for row in needed.values() for k in row)
        for row in numbers[task]["error_and_accuracy"]["function"]:
            assert row[1] >= numbers[task]["accuracy"] - recipe.LOST
    # Measured numbers are read again.
    monkeypatch.setattr(recipe, "measure", None)
    again = recipe.run(RecipeContext("small", tmp_path))
    assert json.loads(json.dumps(again.numbers)) == numbers


def test_gradients_are_those_of_a_small_change_of_the_stream(model):
    texts = recipe.tokens(model, recipe.agreement(4, 0))
    (x,), (slope,) = recipe.gradients(model, [1], texts, of_loss=False)
    change = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    up, down = (recipe.differences(model, texts, 1, x + sign * change) for sign in (1, -1))
    expected = (slope * change).sum((1, 2))
    assert torch.allclose((up - down) / 2, expected, atol=2e-5)
    _, (by_loss,) = recipe.gradients(model, [1], texts, of_loss=True)
    assert not torch.allclose(by_loss, slope)


def test_all_directions_are_the_model_and_the_complement_is_at_its_mean(model):
    texts = recipe.tokens(model, recipe.agreement(40, 0))
    method = recipe.moments(model, [2], texts)["random"]
    (bond,), (mean,) = principal_bonds(method.moments), method.means
    x = recipe.stream_before(model, 2, texts.ids)
    assert torch.allclose(mean, x.mean(0))
    assert torch.allclose(recipe._projected(x, mean, bond, bond.k), x, atol=1e-4)
    few = recipe._projected(x, mean, bond, 3)
    assert torch.allclose(few.mean(0), mean, atol=1e-5)
    assert torch.linalg.matrix_rank((few - mean).flatten(0, 1).double(), rtol=1e-4) == 3
    full = recipe.differences(model, texts)
    assert torch.allclose(recipe.differences(model, texts, 2, x), full, atol=1e-5)


def test_the_fewest_that_suffice_are_found():
    full = torch.linspace(-1, 3, 50)

    def change(k):
        return full - (0.0 if k >= 12 else 10.0)

    assert recipe.fewest(change, recipe.RANKS, full, 0.74) == (12, [0.0, pytest.approx(0.74)])
    assert recipe.fewest(change, recipe.RANKS, full, 0.77)[0] is None


def test_halves_share_no_word():
    for questions in (recipe.agreement, recipe.indirect_objects):
        subjects = [{q.text.split()[1] for q in questions(200, half)} for half in (0, 1)]
        assert not subjects[0] & subjects[1]

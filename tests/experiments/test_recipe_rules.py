"""Rules in two blocks: circuits that were built are found, and the recipe runs on random models."""

import json
from dataclasses import dataclass

import pytest
import torch
from experiments.context import RecipeContext
from experiments.grammar import divergence
from experiments.rules import KINDS, Circuits, count, parts_of_rules
from experiments.running import run_recipe

from bilens.cli.running import recipes
from bilens.data import DeepGrammar
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.transformer import ResidualModel
from experiments import rules
from tests.experiments.tiny import check_rows

N = 46


@pytest.fixture
def built() -> LanguageModel:
    """Return a token in the first half of the stream, the one before it in the second, by head 0.0.

    Head 1.0 attends to its own token as the previous one, and writes its successor. Head 1.1
    attends from nouns to the successor of a free word, and writes the closing bracket.
    """
    sizes = {"vocab_size": N, "d_model": 2 * N, "n_layers": 2, "n_heads": 2, "d_hidden": 4}
    config = LanguageConfig(**sizes, n_ctx=32, positions="none")
    model = LanguageModel(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    token, before = torch.eye(2 * N)[:N], torch.eye(2 * N)[N:]
    vocabulary = DeepGrammar().vocabulary

    def rows(*words):
        return [vocabulary.index(word) for word in words]

    model.embed.weight.copy_(token.T if model.embed.weight.shape == (2 * N, N) else token)
    model.unembed.weight.copy_(token)
    first, second = (block.attn for block in model.blocks)
    first.value.weight[:N] = token
    first.out.weight[:, :N] = before.T
    second.query.weight[:N] = token
    second.key.weight[:N] = before
    second.value.weight[:N] = token
    second.out.weight[:, :N] = token.T
    free = rows("tale", *DeepGrammar.fillers, *DeepGrammar.verbs[0], *DeepGrammar.verbs[1])
    second.query.weight[N, rows(*DeepGrammar.nouns[0], *DeepGrammar.nouns[1])] = 1
    second.key.weight[N, [N + row for row in free]] = 1
    second.value.weight[N:] = token
    for opening, closing in DeepGrammar.brackets.items():
        (a,), (b,) = rows(opening), rows(closing)
        second.out.weight[b, N + a] = 1
    return model


def test_built_circuits_are_found(built):
    circuits = Circuits(ResidualModel(built), DeepGrammar())
    assert circuits.induction() == {(0, 0)}
    assert circuits.agreement() == {(0, 1)}
    assert circuits.brackets() == {1}
    assert circuits.repeated() == {"found": 1, "false": 0}


def test_nothing_is_found_where_nothing_is(built):
    for block in built.blocks:
        block.attn.out.weight.zero_()
    circuits = Circuits(ResidualModel(built), DeepGrammar())
    assert circuits.induction() == circuits.agreement() == circuits.brackets() == set()
    assert circuits.repeated()["found"] == 0


def test_a_silent_head_is_missed_where_it_is_needed(built):
    grammar = DeepGrammar()
    ids = grammar.sample(50, 12, seed=0)
    before = [weight.clone() for weight in built.parameters()]
    part = parts_of_rules(ResidualModel(built), grammar, ids)
    assert all(map(torch.equal, before, built.parameters()))
    full = divergence(ResidualModel(built), grammar, ids, KINDS)
    built.blocks[1].attn.out.weight[:, :N] = 0
    silent = divergence(ResidualModel(built), grammar, ids, KINDS)
    for kind in KINDS:
        assert (0 in part[kind]) == (silent[kind] - full[kind] >= 0.1)


def test_counting():
    assert count({0, 1}, {1, 2, 3}) == {"found": 1, "false": 1, "missed": 2}


@dataclass(frozen=True)
class RandomContext(RecipeContext):
    def choose(self, small, paper):
        return 1

    def language(self, name, training, model):
        torch.manual_seed(training.seed)
        config = LanguageConfig(**{**model.settings(), "d_model": 16, "d_hidden": 8, "n_heads": 2})
        return ResidualModel(LanguageModel(config).requires_grad_(False))


def test_the_recipe_writes_its_numbers_and_its_page(tmp_path, monkeypatch):
    assert "rules" in recipes()
    monkeypatch.setattr("bilens.data.corpus.GRAMMAR_SENTENCES", 400)
    record = run_recipe("rules", RandomContext("small", tmp_path), tmp_path)
    assert json.loads((tmp_path / "rules.json").read_text()) == record
    for attention in ("softmax", "bilinear"):
        assert record[attention]["kl"]["induction"]["mean"] > 0
        assert record[attention]["brackets"][0].keys() == {"found", "false", "missed"}
    check_rows(rules.run(RandomContext("small", tmp_path)))
    assert "Rules in the weights" in (tmp_path / "rules.html").read_text()

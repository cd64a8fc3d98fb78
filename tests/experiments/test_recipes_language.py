"""The recipes on language models, on small corpora with tiny models."""

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
import torch
from experiments.context import RecipeContext, validation_loss
from experiments.running import run_recipe
from experiments.stories import PROMPT, VERBS

from bilens.data import Corpus, Grammar, load_corpus
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.nn.settings import LanguageSettings
from bilens.train.settings import PRESETS
from bilens.transformer import ResidualModel
from experiments import grammar as recipe
from experiments import stories as stories_recipe
from experiments import story
from tests.experiments.tiny import check_rows, write_gzip
from tests.models import grammar_view, random_model

pytestmark = pytest.mark.long

STORY = f'{PROMPT} {{0}} . he likes to swim and {{1}} . the girl said , " i like it too ! "'
TEXTS = [STORY.format(a, b) for a in ("Dog", "cat", "fish", "bird") for b in VERBS]


@cache
def stories(folder: str, n_ctx: int) -> Corpus:
    file = Path(folder) / "stories.txt"
    file.write_text("\n<|endoftext|>\n".join(TEXTS), encoding="utf-8")
    how = {"vocab_size": 300, "validation_share": 0.2, "clean": "tinystories"}
    return load_corpus(file, n_ctx=n_ctx, **how)


@dataclass(frozen=True)
class TinyContext(RecipeContext):
    """Random models of no more than two initialisations, and a handful of stories."""

    def choose(self, small, paper):
        selected = super().choose(small, paper)
        return 2 if isinstance(selected, int) else selected

    def language(self, name, training, model):
        config = LanguageConfig(**{**model.settings(), "d_model": 16, "d_hidden": 20, "n_heads": 2})
        torch.manual_seed(training.seed)
        model = LanguageModel(config).requires_grad_(False)
        if name == "grammar":
            return ResidualModel(model, Grammar().tokenizer())
        return ResidualModel(model, self.corpus(name, config.n_ctx, 300).tokenizer)

    def corpus(self, name, n_ctx, vocab_size):
        return stories(str(self.models), n_ctx)


@pytest.mark.parametrize("name", ["grammar", "stories"])
def test_a_recipe_writes_its_numbers_and_its_page(name, tmp_path, monkeypatch):
    monkeypatch.setattr(
        stories_recipe, "SMALL", replace(PRESETS["tiny"], model=LanguageSettings(n_ctx=16))
    )
    record = run_recipe(name, TinyContext("small", tmp_path), tmp_path)
    assert json.loads((tmp_path / f"{name}.json").read_text()) == record
    page = (tmp_path / f"{name}.html").read_text()
    assert record["recipe"] == name
    check_rows(import_module(f"experiments.{name}").run(TinyContext("small", tmp_path)))
    if name == "stories":
        assert "Contexts" in page
        assert "head 1, to" in page


@pytest.fixture
def story_context(tmp_path, monkeypatch):
    """Return a context whose folder of data has the texts of its corpus, cut into two files."""
    for name, texts in (("train", TEXTS[3:]), ("valid", TEXTS[:3])):
        joined = "\n<|endoftext|>\n".join(texts)
        write_gzip(tmp_path / "tinystories" / f"{name}.txt.gz", joined)
    short = replace(PRESETS["story"], model=LanguageSettings(n_ctx=16))
    monkeypatch.setitem(PRESETS, "story", short)
    return TinyContext("small", tmp_path, data_dir=tmp_path)


def test_held_out_stories_are_not_those_of_training(story_context):
    held_out = list(story.held_out_stories(story_context))
    assert len(held_out) > 2
    assert set(held_out) < set(TEXTS)
    corpus = story_context.corpus("tinystories", 16, 300)
    rows = torch.cat([row["input_ids"] for row in corpus.train])
    trained = story.spelling(corpus.tokenizer.decode(rows))
    assert not [text for text in held_out if story.spelling(text) in trained]


def test_known_pairs_count_both_tokens():
    pairs = [("said", ","), ("##laimed", ":"), ("dog", ","), ("said", "."), ('"', "."), (".", '"')]
    frame = pd.DataFrame(pairs, columns=["virtual", "direct"])
    assert stories_recipe.talk_pairs(frame) == [True, True, False, False, False, False]
    assert stories_recipe.closing_pairs(frame) == [False, False, False, False, True, False]


def test_what_an_eigenvector_takes_away_is_a_slope(monkeypatch):
    """The heads add to one output; the MLP takes half of its square away, and the square is it."""
    view, number = model_of_rules(d_model=72, positions="none")
    output = number["ate"]
    # Heads attend to all tokens alike and copy "ben" to "ate", on which N1 is.
    attn, mlp = view.model.blocks[0].attn, view.model.blocks[0].mlp
    attn.value.weight[0, number["ben"]] = attn.out.weight[output, 0] = 1
    view.model.W_U[output, output] = 1
    mlp.left.weight[0, output] = mlp.right.weight[0, output] = 1
    mlp.out.weight[output, 0] = -1
    # Two texts: "ben" is among two tokens, or among three; the sums are its shares.
    texts = torch.tensor([[number["then"], number["ben"]], [number["then"], number["and"]]])
    away, against = stories_recipe.cancelling_rows(view, texts, [output])
    shares = torch.tensor([0, 1 / 2, 0, 0])
    logits, taken = shares * (1 - 1 / 72), shares**2 * (1 - 1 / 72)
    slope = torch.cov(torch.stack([logits, taken]), correction=0)
    assert away.value == pytest.approx(float(slope[0, 1] / slope[0, 0]), rel=1e-3)
    assert against.value == 1


def test_validation_loss_is_a_mean_over_all_texts(tmp_path):
    corpus = stories(str(tmp_path), 16)
    model = random_model(vocab_size=300, n_ctx=16)
    ids = corpus.validation[:]["input_ids"]
    expected = pytest.approx(float(model(ids, labels=ids).loss), rel=1e-5)
    assert validation_loss(model, corpus, batch_size=1) == expected


def model_of_rules(**parts):
    """Return a view without weights but its embedding, which is the identity, and its numbers."""
    view = grammar_view(n_heads=4, **parts)
    for parameter in view.model.parameters():
        parameter.zero_()
    view.model.W_E.copy_(torch.eye(*view.model.W_E.shape))
    return view, {word: i for i, word in enumerate(Grammar().vocabulary)}


class Oracle:
    """Its logits are those of the truth wherever asked."""

    def logits(self, ids):
        return Grammar().next_distribution(ids).clamp_min(1e-30).log()


def test_the_truth_has_no_divergence_from_itself():
    ids = Grammar().sample(20, 16, seed=1)
    assert max(abs(value) for value in recipe.divergence(Oracle(), Grammar(), ids).values()) < 1e-9
    assert min(recipe.divergence(grammar_view(), Grammar(), ids).values()) > 0.1


@torch.no_grad()
def test_a_model_that_is_all_bigrams_has_them_found():
    grammar = Grammar()
    view, number = model_of_rules(d_model=72)
    for first, second in grammar.bigrams[:7]:
        view.model.W_U[number[first], number[second]] = 1
    assert recipe.found_bigrams(view, grammar) >= 0.7
    assert recipe.found_trigrams(view, grammar) < 0.5


@torch.no_grad()
def test_verbs_that_look_at_names_are_found():
    grammar = Grammar()
    view, number = model_of_rules(d_model=72, positions="none")
    for head, verbs in ((1, ("sang", "ate", "lost")), (3, ("lost", "found"))):
        attn = view.model.blocks[0].attn
        unit = head * attn.d_head
        attn.query.weight[unit, [number[verb] for verb in verbs]] = 1
        attn.key.weight[unit, [number[name] for name, _, _ in grammar.skip_trigrams]] = 1
    result = recipe.found_pairs(view, grammar)
    assert result == {"pairs_found_by_one_head": 0.75, "pairs_found": 1.0}


@torch.no_grad()
def test_the_flow_of_a_rule_is_on_its_nodes():
    grammar = Grammar()
    view, number = model_of_rules(d_model=72, positions="none")
    model, attn = view.model, view.model.blocks[0].attn
    # One head moves the name to the verb, where it raises what it ate.
    attn.query.weight[0, number["ate"]] = 1
    for unit, name in enumerate(dict.fromkeys(name for name, _, _ in grammar.skip_trigrams)):
        attn.key.weight[0, number[name]] = 1
        attn.value.weight[unit, number[name]] = attn.out.weight[number[name], unit] = 1
    for name, verb, word in grammar.skip_trigrams:
        model.W_U[number[name], number[word]] = float(verb == "ate")
    result = recipe.rule_in_flows(view, grammar)
    # The second run is the neutral text, in which the head attends to all tokens a little.
    assert result == pytest.approx({"flow_of_rule": 1, "left_by_rule": 1}, abs=1e-2)

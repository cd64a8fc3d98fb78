"""The recipe of agreement, on a tiny random model and BLiMP of two pairs a paradigm."""

import json

import pytest
import torch
from experiments.blimp import Pair, Preferences, load_pairs
from experiments.context import RecipeContext
from experiments.contrasts import NOUNS, VERBS, contrasts

from bilens.errors import DataError
from experiments import agreement as recipe
from experiments import one_direction, pretrained
from tests.experiments.tiny import check_rows, save_llama, write_gzip

FEW = {tuple: (2, 2), int: 4}
PAIRS = {
    "regular": (recipe.TERM, "The cat is near", "The cat are near"),
    "others": ("binding", "The dog has the car", "The the has dog car"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(RecipeContext, "choose", lambda _, small, paper: FEW[type(small)])
    words = ["The", *(w for group in (*NOUNS, *VERBS) for w in group.split())]
    words += ["near", "the", "behind", "with", "of"]
    sizes = {"num_attention_heads": 2, "max_position_embeddings": 4096}
    save_llama(tmp_path / recipe.SMOLLM2, words, **sizes, initializer_range=0.3)
    for name, (term, good, bad) in PAIRS.items():
        row = {"linguistics_term": term, "sentence_good": good, "sentence_bad": bad}
        write_gzip(tmp_path / "blimp" / f"{name}.jsonl.gz", f"{json.dumps(row)}\n" * 2)
    return tmp_path


def test_the_recipe_finds_edits_and_measures(folder):
    outcome = check_rows(recipe.run(RecipeContext("small", folder / "models", folder)))
    numbers = json.loads(json.dumps(outcome.numbers, allow_nan=False))
    assert numbers["prefixes"] == 4
    assert numbers["pairs"] == {"agreement": 2, "others": 2}
    for name, edit in numbers["turned_along_number"]["edits"].items():
        assert name.endswith((": along number", ": whole"))
        changes = edit["others_paradigms"]
        assert changes.keys() == {"others"}
        assert edit["others_mean_absolute"] == abs(changes["others"])
        assert edit["others_mean_absolute"] <= edit["others_flips"] <= 100
    assert {"mlp", "head"} <= numbers["interventions"].keys()
    assert sum(fit["nodes"] for fit in numbers["interventions"].values()) > 4
    assert outcome.figures.keys() == {"interventions"}


def test_edits_of_one_direction_have_a_row_each(folder, monkeypatch):
    monkeypatch.setattr(pretrained, "model_paths", lambda _: {"tiny": folder / recipe.SMOLLM2})
    write_gzip(folder / "text" / "wikitext2_valid.txt.gz", "The dog is near the cat\n" * 400)
    outcome = check_rows(one_direction.run(RecipeContext("small", folder / "models", folder)))
    numbers = outcome.numbers["tiny"]
    assert len(outcome.rows) == len(numbers) - len(("heads", "before")) == 6
    for row in outcome.rows:
        edit = row.claim.removeprefix("tiny, ").partition(":")[0]
        assert row.value == -numbers[edit]["agreement_change"][0]


@pytest.fixture
def model(folder):
    return recipe.open_model(folder)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_sentence_is_scored_as_if_it_stood_alone(model, folder, layer):
    pairs = load_pairs(folder / "blimp", 1, 1)
    preferred = Preferences(model, pairs, layer)
    model = recipe._scaled(model, [(1, 0)], -1.0)
    for pair, first in zip(pairs, preferred(model), strict=True):
        losses = []
        for text in (pair.good, pair.bad):
            ids = model.tokenizer(text, return_tensors="pt")["input_ids"]
            logits = model.logits(ids)[0, :-1].log_softmax(-1)
            losses.append(float(logits.gather(-1, ids[0, 1:, None]).sum()))
        assert first == (losses[0] > losses[1])


def test_turned_heads_write_the_opposite_change_of_number(model):
    number = contrasts(model, 3)
    for layer, head in number.strongest("contrastive flow", 2):
        turned = number.turned(model, [(layer, head)])
        change = number.changes[layer, head]
        old, new = (change @ m.layer(layer).heads.weights().out[head] for m in (model, turned))
        assert torch.allclose(new, -old, atol=1e-5 * float(old.abs().max()))
    # The gradients' estimate is the change itself in the limit of a small one.
    assert number.scores["gradients"].shape == (model.n_layers, model.n_heads)


def test_changes_of_paradigms_do_not_cancel():
    pairs = [Pair(name, "binding", "good", "bad") for name in "aabb"]
    numbers = recipe.accuracy(pairs, [True, True, False, False], [True, False, True, False])
    assert numbers["others_change"][0] == 0
    assert numbers["others_paradigms"] == {"a": 50, "b": -50}
    assert (numbers["others_mean_absolute"], numbers["others_flips"]) == (50, 50)


def test_other_heads_are_as_many_of_the_same_layers(model):
    assert recipe._other_heads(model, [(1, 0), (0, 1)]) == [(0, 0), (1, 1)]


def test_prefixes_are_half_plural_and_name_the_right_form(model):
    plural = dict(word.split() for word in VERBS)
    for number, (ids, direction) in enumerate(recipe._prefixes(model, 8)):
        subject = model.tokenizer.decode(ids).split()[1]
        assert subject in {noun.split()[number % 2] for noun in NOUNS}
        right, [wrong] = direction.token.strip(), direction.minus
        assert plural[wrong.strip() if number % 2 else right] in (right, wrong.strip())


def test_missing_data_is_said(tmp_path):
    with pytest.raises(DataError, match="holds no files of BLiMP"):
        load_pairs(tmp_path, 1, 1)

"""The recipe of patching, on a tiny random model and on known numbers."""

import json

import numpy as np
import pytest
from experiments.context import RecipeContext

from bilens.circuits import patch
from bilens.errors import BilensError
from bilens.flows import flow
from bilens.models import load
from experiments import pairs, pretrained, tasks
from experiments import patching as recipe
from tests.experiments.tiny import save_llama

pytestmark = pytest.mark.long


class TinyContext(RecipeContext):
    def choose(self, small, paper):
        return {1: 1, 2: 2, 3: 2, 4: 1, 10: 1, 20: 2}[small] if isinstance(small, int) else small


def words():
    contrasts = [*pairs.templates().values(), *(make() for make in tasks.TEMPLATES.values())]
    every = [(pair.text, pair.against, pair.token, *pair.minus) for of in contrasts for pair in of]
    texts = [text for row in every for text in row]
    return sorted({word for text in texts for word in text.split()})


def lines(context, name):
    """Return the rows that a recipe saved in the folder of the commit."""
    (path,) = context.models.glob(f"*/{name}-tiny.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module", autouse=True)
def few_words():
    """Sequences of five of all words would be a quarter of a million texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "WORDS", pairs.WORDS[:8])
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    save_llama(path, words(), **heads, initializer_range=0.6, max_position_embeddings=64)
    return path


@pytest.fixture
def installed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "model_paths", lambda _: {"tiny": folder})
    three = ("agreement", "gender", "ioi")
    monkeypatch.setattr(tasks, "TEMPLATES", {task: tasks.TEMPLATES[task] for task in three})
    return TinyContext("small", tmp_path)


def test_patching_compares_attributions_with_effects(installed, folder, monkeypatch):
    monkeypatch.setattr(recipe, "pairs_of", lambda model, _, *of: pairs.pairs_of(model, 1, *of))
    numbers = recipe.run(installed).numbers["tiny"]
    assert json.loads(json.dumps(numbers)) == numbers
    assert numbers["tasks"].keys() == pairs.templates().keys()
    assert numbers["pairs"] == len(numbers["tasks"])
    rows = lines(installed, "patching")
    model = load(str(folder))
    for row in rows[:3]:
        question = {name: row[name] for name in ("text", "token", "minus", "against")}
        effects = patch(model, **question)
        assert row["heads"]["patching"] == pytest.approx(effects.heads.flatten().tolist(), abs=1e-5)
        mlps = [0.0] * model.n_layers
        for node in flow(model, **question).nodes:
            if node.kind == "mlp":
                mlps[node.layer] += node.flow
        assert row["mlps"]["contrastive flow"] == pytest.approx(mlps, abs=1e-3)
    for kind in ("heads", "mlps"):
        values = numbers[kind]["contrastive flow"]["pearson"]
        assert -1 <= values["low"] <= values["mean"] <= values["high"] <= 1
    # A run that goes on measures nothing twice, and fewer pairs are a part of what is there.
    recipe.run(installed)
    assert lines(installed, "patching") == rows


def test_metrics_are_those_of_numbers_that_are_known():
    heads = {"patching": [1.0, 2.0, 4.0], "half": [0.5, 1.0, 2.0], "same": [1.0, 2.0, 4.0]}
    row = {"task": "ioi", "text": "a", "seconds": {}, "heads": heads}
    other = row | {"task": "facts", "heads": row["heads"] | {"half": row["heads"]["patching"]}}
    rows = [of | {"mlps": of["heads"]} for of in (row, row, other)]
    kinds = recipe.unseen_kinds(rows).set_index(["parts", "attribution"])
    mean = (1 + recipe.scores(row, "heads")["half"]["r2"]) / 2
    assert kinds.loc[("mlps", "half"), "R2"] == pytest.approx(mean)
    ends = kinds.loc[("heads", "half")]
    assert (ends["worst"], ends["best"], ends["best R2"]) == ("ioi", "facts", 1)
    assert ends["worst R2"] == recipe.scores(row, "heads")["half"]["r2"]
    values = recipe.scores(row, "heads")
    assert values["same"] == pytest.approx({"pearson": 1, "spearman": 1, "r2": 1})
    left = (0.25 + 1 + 4) / np.var([1, 2, 4]) / 3
    assert values["half"] == pytest.approx({"pearson": 1, "spearman": 1, "r2": 1 - left})
    assert values["random"]["pearson"] < 1


def test_a_missing_model_is_said(installed, monkeypatch):
    monkeypatch.setattr(pretrained, "model_paths", lambda _: {})
    with pytest.raises(BilensError, match="No model is installed"):
        recipe.run(installed)


def test_there_are_templates_for_a_hundred_pairs_of_each_task():
    for task, contrasts in pairs.templates().items():
        texts = {(pair.text, pair.against) for _, pair in zip(range(200), contrasts, strict=False)}
        assert len(texts) > 150, task

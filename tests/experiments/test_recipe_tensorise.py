"""The recipe of transformers made tensors, on a tiny random model and stories of its letters."""

import json
from dataclasses import replace

import pytest
import torch
from experiments.context import RecipeContext
from sklearn.metrics import roc_auc_score

from bilens.circuits import edit
from bilens.transformer import ResidualModel
from experiments import tensor_readings as readings
from experiments import tensorise as recipe
from experiments import tensorise_own as heads64
from tests.experiments import test_llama2c as llama2c
from tests.experiments.tiny import check_rows
from tests.models import random_model

pytestmark = pytest.mark.long

SIZES = {"tokens": 2 * 2 * 8, "length": 8, "calibration_tokens": 64, "layer_steps": 1}
SIZES |= {"pattern_steps": 2, "batch_size": 2, "sample_batch": 8}
TINY = replace(recipe.SMALL, **SIZES)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder of stories and models for all tests, which share what they train."""
    folder = tmp_path_factory.mktemp("data")
    variants = {name: recipe.VARIANTS[name] for name in ("gates", "attention", "both", "control")}
    changed = ({"tokens": 32, "seed": 1}, {"learning_rate": 0.1})
    rows = [("stories260K", variant, {}) for variant in variants]
    rows += [("stories260K", "both", changes) for changes in changed]
    sizes = {"vocab_size": 64, "d_model": 16, "n_heads": 2, "d_hidden": 12, "n_ctx": 8}
    first = replace(recipe.OWN_FIRST, epochs=1, batch_size=4, precision="float32")
    own = {"OWN": replace(recipe.OWN, **sizes), "OWN_FIRST": first}
    own |= {"OWN_TENSOR": replace(TINY, data_share=0.75)}
    with pytest.MonkeyPatch.context() as patch:
        llama2c.write_stories(folder, patch)
        for name, value in {"SMALL": TINY, "VARIANTS": variants, "ROWS": rows, **own}.items():
            patch.setattr(recipe, name, value)
        patch.setattr(heads64, "ROWS", heads64.ROWS[2:3])
        read = tuple(("stories260K", variant, {}) for variant in ("both", "gates"))
        patch.setattr(readings, "READ", read)
        yield folder


def test_every_variant_is_compared_with_the_original(data):
    outcome = check_rows(recipe.run(RecipeContext("small", data / "models", data)))
    numbers = json.loads(json.dumps(outcome.numbers, allow_nan=False))
    fresh, faster = (numbers[f"stories260K, both{end}"] for end in ("", ", learning_rate=0.1"))
    assert len(numbers["stories260K, both, tokens=32, seed=1"]) == len(fresh) == 4
    assert fresh[3]["kl"] != faster[3]["kl"], "the last stage differs"
    assert fresh[2]["kl"] == faster[2]["kl"], "stages before the last are shared"
    rows = {name: numbers[f"stories260K, {name}"] for name in recipe.VARIANTS}
    for name, part in rows.items():
        between = {"control": [], "both": ["gates", "attention"]}.get(name, [name])
        assert [row["stage"] for row in part] == ["original", *between, "distilled"]
    assert rows["control"][1]["kl"] == pytest.approx(0, abs=1e-5)
    assert all(row["kl"] > 1e-6 for row in rows["both"][1:])


def test_readings_of_tensors_are_tables(data, monkeypatch):
    sizes = {"LEAST": 2, "LENGTHS": (16, 64, 128), "STEPS": 2, "SAMPLES": 50}
    for name, value in (sizes | {"ANSWERS": (("h", "t"), ("xyzzy", "t"))}).items():
        monkeypatch.setattr(readings, name, value)
    context, numbers = RecipeContext("small", data / "models", data), {}
    for outcome in (readings.run(context), heads64.run(context)):
        check_rows(outcome)
        numbers |= json.loads(json.dumps(outcome.numbers))
    assert len(numbers) == 2 * 4 + 3 + 1
    for name in ("stories260K, both", "two blocks, both"):
        answers = numbers[f"{name}: answers"]
        assert all(0 <= row["low"] <= row["AUC"] <= row["high"] <= 1 for row in answers[:6])
        state = [row["bytes kept"] for row in numbers[f"{name}: generation"]]
        assert state[1] > state[0], "keys of softmax grow"
        assert state[2] == state[3] == state[4], "the state of the tensor does not"


def test_auc_is_the_share_of_ordered_pairs():
    torch.manual_seed(0)
    score, label = torch.randn(60).mul(3).round(), torch.rand(60) < 0.4
    assert readings.auc(score, label) == pytest.approx(roc_auc_score(label, score))
    low, high = readings.bootstrap(score, label)
    assert low < readings.auc(score, label) < high


def test_edits_by_eigenvectors_change_what_weights_predict():
    model = ResidualModel(random_model(norm="rms", mlp="bilinear", n_layers=2, attention="squared"))
    x, u = model.mlp_inputs(1, torch.randint(3, 8, (30, 10))), model.direction(3, minus=4)
    form = model.mlp(1).interaction(u)
    vectors = readings._ends(form.eigh(), 2)
    change = edit(model, 1, vectors.vectors).mlp(1).interaction(u)(x) - form(x)
    torch.testing.assert_close(change, -vectors(x))

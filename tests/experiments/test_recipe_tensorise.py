"""The recipe of transformers made tensors, on a tiny random model and stories of its letters."""

import gzip
import json
from dataclasses import replace

import pytest
from experiments.context import RecipeContext

from bilens.errors import DataError
from experiments import tensorise as recipe
from tests.convert import test_llama2c as llama2c

TINY = replace(
    recipe.SMALL,
    tokens=2 * 2 * 8,
    length=8,
    calibration_tokens=64,
    layer_steps=1,
    pattern_steps=2,
    batch_size=2,
    sample_batch=8,
)


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(llama2c, "VOCAB", len(llama2c.ALL_PIECES))
    monkeypatch.setattr(recipe, "SMALL", TINY)
    sizes = {"vocab_size": 64, "d_model": 16, "n_heads": 2, "d_hidden": 12, "n_ctx": 8}
    monkeypatch.setattr(recipe, "OWN", replace(recipe.OWN, **sizes))
    first = replace(recipe.OWN_FIRST, epochs=1, batch_size=4, precision="float32")
    monkeypatch.setattr(recipe, "OWN_FIRST", first)
    monkeypatch.setattr(recipe, "OWN_TENSOR", replace(TINY, data_share=0.75))
    for folder in ("llama2c", "tinystories"):
        (tmp_path / folder).mkdir()
    llama2c.write(tmp_path / recipe.STORIES, llama2c.weights(True))
    llama2c.write_tokenizer(tmp_path / "llama2c" / f"tok{len(llama2c.ALL_PIECES)}.bin")
    stories = [f"the {'hare ' * (1 + i % 3)}ate {'tea ' * (i // 3)}there" for i in range(60)]
    for split, part in (("train", stories[:50]), ("valid", stories[50:])):
        with gzip.open(tmp_path / "tinystories" / f"{split}.txt.gz", "wt") as file:
            file.write("\n<|endoftext|>\n".join(part))
    return tmp_path


def test_every_variant_is_compared_with_the_original(data):
    outcome = recipe.run(RecipeContext("small", data / "models", data))
    numbers = json.loads(json.dumps(outcome.numbers, allow_nan=False))
    for model in ("stories260K", "two blocks"):
        rows = {name: numbers[f"{model}, {name}"] for name in recipe.VARIANTS}
        both = ["original", "gates", "attention", "distilled"]
        assert {name: [row["stage"] for row in part] for name, part in rows.items()} == {
            "gates": ["original", "gates", "distilled"],
            "attention": ["original", "attention", "distilled"],
            "both": both,
            "control": ["original", "distilled"],
            "both, without local stages": both,
        }
        assert rows["control"][1]["kl"] == pytest.approx(0, abs=1e-5)
        assert all(row["kl"] > 1e-6 for row in rows["both"][1:])


def test_the_model_has_to_be_there(tmp_path):
    with pytest.raises(DataError, match=r"stories260K.bin is missing"):
        recipe.run(RecipeContext("small", tmp_path, tmp_path))

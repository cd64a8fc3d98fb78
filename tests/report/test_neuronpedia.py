"""Batches for Neuronpedia have the fields of its converter, and the layer's outputs."""

import pytest
import torch

from bilens.data import Corpus
from bilens.read.language import read_direction
from bilens.report.exporters import feature_batch
from bilens.residual import ResidualModel
from tests.language import random_model, random_text, toy_tokenizer

FIELDS = {"feature_index", "frac_nonzero", "n_prompts_total", "n_tokens_in_prompt", "dataset"}
FIELDS |= {"decoder_weights_dist", "vector", "activations"}
FIELDS |= {f"{sign}_{part}" for sign in ("neg", "pos") for part in ("str", "values")}
FIELDS |= {
    f"{of}_hist_data_bar_{part}" for of in ("freq", "logits") for part in ("values", "heights")
}
FIELDS |= {f"neuron_alignment_{part}" for part in ("indices", "values", "l1")}
FIELDS |= {
    f"correlated_{of}_{part}"
    for of in ("neurons", "features")
    for part in ("indices", "l1", "pearson")
}


@pytest.mark.parametrize("bias", [True, False])
def test_activations_times_logits_are_what_the_layer_adds(bias):
    model = ResidualModel(random_model(bias=bias, n_layers=2, d_model=8), toy_tokenizer())
    rows = [{"input_ids": random_text(seed=seed)} for seed in range(4)]
    reading = read_direction(
        model,
        Corpus("w", model.tokenizer, rows, rows),
        "t3",
        minus="t4",
        layer=1,
        eigenvectors=99,
        k=4,
    )
    batch = feature_batch(model, reading, name="m", data="w", k=30)
    features = batch["features"]
    assert (batch["model_id"], batch["layer"], batch["sae_id_suffix"]) == ("m", 1, None)
    assert all(set(feature) == FIELDS for feature in features)
    total = 0.0
    for feature, value in zip(features, reading.spectrum.values, strict=True):
        assert sum(feature["logits_hist_data_bar_heights"]) == model.vocab_size
        logits = dict(zip(feature["pos_str"], feature["pos_values"], strict=True))
        assert logits == dict(zip(feature["neg_str"], feature["neg_values"], strict=True))
        assert logits["t3"] - logits["t4"] == pytest.approx(float(value))
        # The same text comes with each eigenvector: their sum is the whole form on it.
        for active in feature["activations"]:
            values = torch.tensor(active["values"])
            assert int(values.argmax()) == active["qualifying_token_index"]
            if active["tokens"] == [f"t{i}" for i in rows[0]["input_ids"]]:
                total += value * values
    z = model.mlp_inputs(1, rows[0]["input_ids"][None])[0]
    expected = model.mlp(1).interaction(model.direction("t3", minus="t4"))(z)
    # Lists of numbers become tensors of single precision.
    assert (total.double() - expected).abs().max() < 1e-5 * expected.abs().max()

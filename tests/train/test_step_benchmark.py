"""The benchmark of training steps, at a small size on the CPU."""

import pytest
import torch
from benchmarks import step

TINY = {"vocab_size": 20, "d_model": 16, "n_layers": 1, "n_heads": 2, "d_hidden": 24}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in (("SIZES", {"500m": TINY}), ("SIDE", {"cpu": 32}), ("ROUNDS", 1)):
        monkeypatch.setattr(step, name, value)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_every_attention_has_a_row_for_every_length(monkeypatch, capsys, precision):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, fullgraph: compiled.append(model) or model)
    assert step.product_rate(step.DTYPES[precision]) > 0
    # Of a slow machine, so that shares are not rounded to nothing.
    monkeypatch.setattr(step, "product_rate", lambda dtype: 1e5)
    options = ["--compile", "--length", "8", "16", "--tokens", "32", "--precision", precision]
    step.main(["--preset", "500m", "--attention", "squared", "bilinear", *options])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    names = "softmax", "squared", "bilinear"
    expected = [[name, *sizes] for sizes in (("8", "4"), ("16", "2")) for name in names]
    assert [row[:3] for row in rows] == expected
    assert all(float(row[4]) > 0 and float(row[5].rstrip("%")) > 0 for row in rows)
    assert rows[0][-1] == rows[3][-1] == "1.00"
    assert len(compiled) == 6


def test_operations_are_six_for_each_weight_and_token():
    small_step = step.Step({**TINY, "n_ctx": 8}, 4, torch.float32, compiled=False)
    # Four maps of attention, three of the MLP and the unembedding, which is not the embedding.
    weights = 4 * 16 * 16 + 3 * 16 * 24 + 20 * 16
    others = sum(x.numel() for x in small_step.model.parameters() if x.ndim == 1)
    assert small_step.operations() == 6 * (weights + others) * 32

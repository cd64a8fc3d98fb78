"""Every exact reading compares its sum with the model's own number, and says when they differ."""

from dataclasses import replace

import pytest
import torch

from bilens.checks import check_sum
from bilens.errors import BilensError
from bilens.read import bonds
from bilens.read.language import (
    contribution,
    following,
    head_outputs,
    read_direction,
    skip_trigrams,
    split_logits,
)
from bilens.read.language.contexts import Context
from bilens.read.language.stream import read_stream
from bilens.residual import ResidualModel
from bilens.residual.maps import InputNorm, LinearMap
from tests.models import digit_model, digits, random_model, random_text, small_corpus, toy_tokenizer

IDS = random_text(6)


def made():
    size = len(small_corpus().tokenizer)
    return random_model(norm="rms", n_layers=2, bias=True, vocab_size=size)


def one_context(view):
    spectrum = view.mlp(1).interaction(view.direction(3)).eigh(2)
    return contribution(view, spectrum, 0, Context(IDS, 4, 0.0), layer=1)


def a_direction(view):
    corpus = small_corpus()
    view.tokenizer = corpus.tokenizer
    return read_direction(view, corpus, "lily", layer=1, k=1, eigenvectors=1)


READINGS = {
    "split_logits": lambda view: split_logits(view, IDS),
    "read_stream": lambda view: read_stream(view, IDS, 5, layer=1),
    "contribution": one_context,
    "read_direction": a_direction,
    "following": lambda view: following(view, 3, layer=1, k=3),
    "skip_trigrams": lambda view: skip_trigrams(view, view.direction(3), 1, layer=1, k=3),
    "head_outputs": lambda view: head_outputs(view, layer=1),
}


def wrong_gain(name):
    """Make one norm's gain 0.5 % too large in the view of bilens."""
    gain = InputNorm.gain

    def patch(monkeypatch):
        wrong = lambda self: (1.005 if self.name == name else 1.0) * gain(self)  # noqa: E731
        monkeypatch.setattr(InputNorm, "gain", wrong)

    return patch


def lost_columns(name, columns):
    """Make columns of one map zero in the view of bilens."""
    weight = LinearMap.weight

    def patch(monkeypatch):
        def without(self):
            rows = weight(self).clone()
            if self.name == name:
                rows[:, columns] = 0
            return rows

        monkeypatch.setattr(LinearMap, "weight", without)

    return patch


lost_head = lost_columns("blocks.1.attn.out", slice(4, 8))
lost_hidden_unit = lost_columns("blocks.1.mlp.out", 3)
BREAKS = {
    "gain of the last norm": (wrong_gain("norm"), {"split_logits"}),
    "gain of an MLP's norm": (
        wrong_gain("blocks.1.mlp_norm"),
        {"split_logits", "read_direction", "skip_trigrams"},
    ),
    "gain of attention's norm": (
        wrong_gain("blocks.1.attn_norm"),
        {"split_logits", "read_stream", "contribution", "skip_trigrams", "head_outputs"},
    ),
    "lost head": (
        lost_head,
        {"split_logits", "read_stream", "contribution"} | {"skip_trigrams", "head_outputs"},
    ),
    "lost hidden unit": (lost_hidden_unit, {"split_logits", "read_direction", "skip_trigrams"}),
}
CASES = [(name, broken) for name, (_, readings) in BREAKS.items() for broken in sorted(readings)]
CASES += [("gain of the last norm", name) for name in ("following",)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", READINGS)
def test_readings_of_a_whole_model_add_up(name, dtype):
    view = ResidualModel(made().to(dtype), toy_tokenizer())
    if name != "flow of a vector" or dtype == torch.float64:
        READINGS[name](view)


@pytest.mark.parametrize(("way", "name"), CASES)
def test_a_reading_that_is_broken_says_so(way, name, monkeypatch):
    view = ResidualModel(made(), toy_tokenizer())
    BREAKS[way][0](monkeypatch)
    with pytest.raises(BilensError, match=r"(adds up to|_U n \+ b_U).* expected .*own number"):
        READINGS[name](view)


def test_bonds_that_lost_a_direction_say_so(monkeypatch):
    all_bonds = bonds.bonds

    def without(*args):
        result = all_bonds(*args)
        first, *others = result.cores
        return replace(result, cores=(replace(first, left=1.001 * first.left), *others))

    for metric in ("images", "weights"):
        bonds.classifier_bonds(digit_model(2), digits(), metric)
        with monkeypatch.context() as patch:
            patch.setattr(bonds, "bonds", without)
            with pytest.raises(BilensError, match=r"all directions of its bonds adds up to .* own"):
                bonds.classifier_bonds(digit_model(2), digits(), metric)


def test_both_numbers_are_named():
    check_sum("The sum", 1.0, 1.0 + 1e-6, size=1)
    with pytest.raises(BilensError, match=r"The sum adds up to 1, expected 1\.001, the model's ow"):
        check_sum("The sum", 1.0, 1.001, size=1)
    with pytest.raises(BilensError, match=r"adds up to nan, expected 2"):
        check_sum("The sum", torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), size=1)
    check_sum("The sum", 1.0, 1.004, size=1, dtype=torch.bfloat16)

"""Every exact reading compares its sum with the model's own number, and says when they differ."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from bilens.checks import check_sum
from bilens.convert import process
from bilens.errors import BilensError
from bilens.images import bonds
from bilens.language import (
    TokenDirection,
    contribution,
    following,
    head_outputs,
    read_direction,
    skip_trigrams,
)
from bilens.language.contexts import Context
from bilens.language.stream import read_stream
from bilens.transformer import ResidualModel
from bilens.transformer.maps import InputNorm, LinearMap
from tests.models import digit_model, digits, grammar_view, random_text, small_corpus

IDS = random_text(6)


def made(dtype=torch.float64):
    model = grammar_view(norm="rms", n_layers=2, bias=True).model
    return ResidualModel(model.to(dtype), small_corpus().tokenizer)


def one_context(view):
    spectrum = view.mlp(1).interaction(view.direction(3)).eigh(2)
    return contribution(view, spectrum, 0, Context(IDS, 4, 0.0), layer=1)


def a_direction(view):
    return read_direction(view, small_corpus(), "lily", layer=1, k=1, eigenvectors=1)


READINGS = {
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


OF_MLPS = ["read_direction", "skip_trigrams"]
OF_HEADS = ["read_stream", "contribution", "skip_trigrams", "head_outputs"]
BREAKS = {
    "gain of the last norm": (wrong_gain("norm"), ["following"]),
    "gain of an MLP's norm": (wrong_gain("blocks.1.mlp_norm"), OF_MLPS),
    "gain of attention's norm": (wrong_gain("blocks.1.attn_norm"), OF_HEADS),
    "lost head": (lost_columns("blocks.1.attn.out", slice(4, 8)), OF_HEADS),
    "lost hidden unit": (lost_columns("blocks.1.mlp.out", 3), OF_MLPS),
}
CASES = [(name, broken) for name, (_, readings) in BREAKS.items() for broken in readings]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", READINGS)
def test_readings_of_a_whole_model_add_up(name, dtype):
    READINGS[name](made(dtype))


@pytest.mark.parametrize(("way", "name"), CASES)
def test_a_reading_that_is_broken_says_so(way, name, monkeypatch):
    view = made()
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


@pytest.mark.parametrize("norm", ["none", "scalar", "rms", "layer"])
def test_all_readings_show_the_same_eigenvalues(norm):
    """Whatever shows the eigenvalues of a model, layer and direction shows the same ones."""
    corpus, direction = small_corpus(), TokenDirection("lily", ("tom", "ben"))
    model = grammar_view(norm=norm, n_layers=2)
    u = direction.vector(model)
    expected = torch.linalg.eigvalsh(model.mlp(1).interaction(u).dense())

    changed = deepcopy(model.model)
    process(changed)
    after = ResidualModel(changed, corpus.tokenizer)
    reading = read_direction(model, corpus, "lily", minus=("tom", "ben"), layer=1, k=1)
    shown = {
        "report, contexts": reading.all_eigenvectors.values,
        "behind process": after.mlp(1).interaction(direction.vector(after)).eigh().values,
    }
    for name, values in shown.items():
        result = values.double().sort().values
        assert torch.allclose(result, expected, rtol=1e-6, atol=1e-6 * expected.abs().max()), name

"""Odd values of every argument of every public function give a result or a refusal."""

from functools import cache

import pytest
import torch

from bilens.errors import BilensError
from tests.odd_values import PLACED, SKIPPED, Fault, World, check, functions, outcome, same_numbers


def test_every_public_function_is_called_or_says_why_not():
    skipped = [name for names in SKIPPED.values() for name in names.split()]
    called = World(30).samples().keys()
    assert not {*skipped} & {*called}
    assert functions().keys() - {*skipped} <= {*called}
    assert {name for name in PLACED if "." not in name} <= {*called}


def test_what_comes_back_is_told():
    def fail(error):
        raise error

    assert outcome(lambda: (1.0, {"a": torch.ones(2)})) == ""
    assert outcome(lambda: [torch.tensor([1.0, torch.nan])]) == "NaN in the result"
    assert outcome(lambda: fail(BilensError("x"))) == "refused"
    assert outcome(lambda: fail(IndexError("x"))) == "IndexError: x"
    assert same_numbers([torch.ones(2), 3], [torch.ones(2), 3])
    assert not same_numbers([torch.ones(2), 3], [torch.ones(2), 4])


@cache
def faults(n_tokens):
    return check(World(n_tokens))


@pytest.mark.slow
@pytest.mark.parametrize("n_tokens", [30, 7])
def test_each_call_is_a_result_without_nan_or_a_refusal(n_tokens, monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    n_functions, n_calls, found = faults(n_tokens)
    assert n_functions > 100
    assert n_calls > 3000
    assert not found, "\n".join(map(str, found))


@pytest.mark.long
def test_a_few_functions_by_day(monkeypatch, tmp_path):
    """Those of which a value of 0, NaN or infinity was an error or silently something else."""
    world = World(30)
    names = ("held_out", "explain", "fit_drawing", "new_figure", "heat_figure", "box_bounds")
    names += ("proved_agreement", "head_outputs", "generate_text", "bilinear_attention")
    samples = world.samples()
    monkeypatch.setattr(world, "samples", lambda: {name: samples[name] for name in names})
    monkeypatch.setattr("tests.odd_values.METHODS", {})
    n_functions, n_calls, found = check(world)
    assert (n_functions, n_calls > 200) == (len(names), True)
    assert found == list[Fault]()

"""Splits of one prediction and the index of contexts, against what they are shortcuts for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.errors import BilensError
from bilens.read.language import (
    ContextIndex,
    interaction,
    split_by_eigenvectors,
    split_logits,
    top_contexts,
)
from tests.language import parts, plain, random_model, random_text


@given(st.fixed_dictionaries(plain), st.integers(0, 29), st.integers(1, 40), st.integers(0, 100))
def test_a_logit_by_eigenvectors_is_the_models(settings, token, k, seed):
    model, ids = random_model(seed, **settings), random_text(seed=seed)
    terms = split_logits(model, ids)
    found = split_by_eigenvectors(model, ids, terms, token, k)
    logit = float(model(ids[None]).logits[0, -1, token])
    assert math.isclose(found.total(), logit, rel_tol=1e-8, abs_tol=1e-8)
    mlp = float(found.activations.sum()) + found.rest
    assert math.isclose(mlp, float(terms.pairs.sum((0, 1))[token]), rel_tol=1e-8, abs_tol=1e-8)
    assert (found.activations.abs().diff() <= 0).all()


@given(st.fixed_dictionaries(parts), st.integers(1, 12))
def test_the_index_finds_what_a_pass_finds(settings, k):
    model = random_model(**settings)
    texts = [random_text(10, seed) for seed in (*range(8), 3, 5)]
    spectrum = interaction(model, torch.eye(16).double()[2]).eigh().outermost(2)
    expected = top_contexts(model, spectrum, texts, k=k)
    for mine, other in zip(
        ContextIndex(model, texts).top_contexts(spectrum, k), expected, strict=True
    ):
        assert [c.position for c in mine] == [c.position for c in other]
        assert all(torch.equal(a.ids, b.ids) for a, b in zip(mine, other, strict=True))
        strengths = [torch.tensor([c.activation for c in some]) for some in (mine, other)]
        assert torch.allclose(*strengths)


def test_an_index_that_cannot_be_used():
    model = random_model()
    with pytest.raises(BilensError, match="texts is empty"):
        ContextIndex(model, [])
    index = ContextIndex(model, [random_text()])
    spectrum = interaction(model, torch.eye(16).double()[:2]).eigh()
    with pytest.raises(BilensError, match="reads a single form"):
        index.top_contexts(spectrum)
    with pytest.raises(BilensError, match="k=0, expected at least 1"):
        index.top_contexts(spectrum[0], 0)

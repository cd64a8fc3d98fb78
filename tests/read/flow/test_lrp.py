"""The flow of one text is one backward pass of LRP: the same totals of tokens and heads."""

import pytest
import torch

from bilens.read.flow import flow
from bilens.read.language import TokenDirection
from bilens.residual import ResidualModel
from tests.families import exact_norms, some_text, tiny
from tests.models import toy_tokenizer
from tests.read.flow.lrp import lrp


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "qwen3", "gemma", "gemma2-uncapped", "gemma3"]
)
def test_totals_are_those_of_a_backward_pass(name):
    model, ids = tiny(name), some_text()[0]
    relevance, heads = lrp(model, ids, 3, 7)
    with exact_norms():
        view = ResidualModel(model, toy_tokenizer())
        result = flow(view, ids, TokenDirection("t3", ("t7",)), ablate=0)
    for actual, expected in ((result.embeddings, relevance), (result.heads.sum(-1), heads)):
        size = float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * size)

"""The flow of one text is one backward pass of LRP: the same totals of tokens and heads."""

import pytest
import torch

from bilens.read.flow import Question
from bilens.read.flow.split import split
from bilens.residual import ResidualModel
from tests.families import exact_norms, some_text, tiny
from tests.language import toy_tokenizer
from tests.read.flow.lrp import lrp


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "qwen3", "gemma", "gemma2-uncapped", "gemma3"]
)
def test_totals_are_those_of_a_backward_pass(name):
    model, ids = tiny(name), some_text()[0]
    relevance, heads = lrp(model, ids, 3, 7)
    with exact_norms():
        parts = split(ResidualModel(model, toy_tokenizer()), Question(ids, "t3", ("t7",)))
    flows = parts.run(2, 0.0)
    tokens = torch.tensor([n.flow for n in flows.nodes if n.kind == "token"]).double()
    torch.testing.assert_close(tokens, relevance, rtol=1e-5, atol=1e-5 * float(tokens.abs().max()))
    plain = torch.stack([next(iter(layer.values())).sum(-1) for layer in parts.heads])
    torch.testing.assert_close(plain, heads, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))

"""A family of the user's own, in one call."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bilens.errors import BilensError
from bilens.testing import check_family
from bilens.transformer import Family, Pass, ResidualModel, register_family
from bilens.transformer.families import FAMILIES


class MadeAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        unseen = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        pattern = (q @ k.mT).masked_fill(unseen, -torch.inf).softmax(-1)
        return self.o((pattern @ v).transpose(1, 2).flatten(2)), pattern


class MadeMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.act = nn.Identity()

    def forward(self, x):
        return self.c(self.a(x) * self.act(self.b(x)))


class MadeLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = MadeAttention(), MadeMLP()
        self.n1, self.n2 = nn.RMSNorm(8, 1e-5), nn.LayerNorm(8)

    def forward(self, x):
        x = x + self.attn(self.n1(x))[0]
        return x + self.mlp(self.n2(x))


class MadeUp(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=2)
        self.tokens, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.stack, self.last = nn.ModuleList([MadeLayer(), MadeLayer()]), nn.LayerNorm(8)

    def forward(self, ids, **_):
        x = self.tokens(ids)
        for layer in self.stack:
            x = layer(x)
        return self.head(self.last(x))


FAMILY = Family(
    layers="stack",
    embed="tokens",
    norm="last",
    unembed="head",
    attn="attn",
    query="attn.q",
    key="attn.k",
    value="attn.v",
    out="attn.o",
    attn_norm="n1",
    gate="mlp.b",
    up="mlp.a",
    down="mlp.c",
    activation="act",
    mlp_norm="n2",
)


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr("bilens.transformer.families.FAMILIES", dict(FAMILIES))
    torch.manual_seed(0)
    model = MadeUp().double().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_()
    return model


def test_an_architecture_of_ones_own_is_read_like_any_other(made):
    with pytest.raises(BilensError, match=r"a MadeUp, whose structure is not known.*register_fam"):
        ResidualModel(made)
    register_family("MadeUp", FAMILY)
    view = ResidualModel(made)
    names = r"not read exactly.*\n- queries and keys make the pattern: MadeAttention is not built"
    with pytest.raises(BilensError, match=names):
        check_family(made)
    assert view.mlp(1).constant
    with pytest.raises(BilensError, match="architecture='MadeUp' is known already"):
        register_family("MadeUp", FAMILY)


def test_what_is_missing_is_listed_at_once(made):
    register_family("MadeUp", Family(layers="stack", attn="attn"))
    del made.config.num_attention_heads
    first = "MadeUp has no model.embed_tokens, model.norm, lm_head"
    with pytest.raises(
        BilensError, match=f"{first}.* stack.0.self_attn.q_proj, .*config.num_atten"
    ):
        ResidualModel(made)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"up": "mlp.c"}, r"stack.0.mlp has the parts of an MLP but computes something else"),
        ({"mlp_norm": "mlp"}, "stack.0.mlp is a MadeMLP, expected a norm with a gain"),
        ({"query": "n1"}, "stack.0.n1 is a RMSNorm, expected a plain linear map"),
        ({"embed": "head"}, "head is a Linear, expected an embedding"),
        ({"gate": None, "up": "mlp.a"}, "has the parts of an MLP but computes something else"),
    ],
)
def test_a_part_of_another_kind_is_named(made, changes, message):
    register_family("MadeUp", replace(FAMILY, **changes))
    with pytest.raises(BilensError, match=message):
        ResidualModel(made)


def test_queries_and_keys_of_ones_own(made):
    def scored_rows(attn, x, position):
        return [tuple(part(x).unflatten(-1, (2, 4)) for part in (attn.q, attn.k))]

    register_family("MadeUp", replace(FAMILY, queries_keys=scored_rows))
    check_family(made, torch.tensor([3, 1, 4, 1, 5]), rounding=1e-12)
    view, ids = ResidualModel(made), torch.tensor([3, 1, 4])
    of_text = Pass.of(view, ids)
    [(q, k)] = view.queries_keys(0, of_text.layer(0).attn_n[0], 0)
    scores = torch.einsum("thd,shd->hts", q, k).masked_fill(torch.ones(3, 3).triu(1).bool(), -1e9)
    torch.testing.assert_close(scores.softmax(-1), of_text.pattern(0)[0])

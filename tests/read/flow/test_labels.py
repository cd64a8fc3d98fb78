"""Labels of nodes against brute force: probabilities with and without a token, shares of paths."""

import pytest
import torch

from bilens.read.flow import flow
from bilens.read.flow.labels import sources, token_words
from bilens.read.flow.nodes import LEAVES
from tests.models import random_text
from tests.read.flow.flows import DIRECTION, nodes_of


def ranked(view, present, absent, likely):
    """Return the tokens that are raised and lowered, the most changed first, by the formula."""
    p1, p0 = (logits.softmax(-1) for logits in (present, absent))
    among = {*p1.topk(likely).indices.tolist(), *p0.topk(likely).indices.tolist()}
    scores = {f"t{i}": float((p1[i] / p0[i]).log() * ((p1[i] + p0[i]) / 2).sqrt()) for i in among}
    order = sorted(scores, key=scores.__getitem__)
    return (
        tuple(name for name in order[::-1] if scores[name] > 0)[:4],
        tuple(name for name in order if scores[name] < 0)[:4],
    )


def test_between_texts_the_changed_token_has_the_change_of_the_probabilities(biased, monkeypatch):
    """Exchanging the only token that differs turns one text into the other."""
    monkeypatch.setattr("bilens.read.flow.labels.LIKELY", 5)
    first = random_text()
    second = first.clone()
    second[4] = (first[4] + 1) % 20
    result = flow(biased, first, DIRECTION, against=second)
    (token,) = [node for node in result.nodes if node.kind == "token" and node.flow]
    logits = [biased.logits(ids[None])[0, -1] for ids in (first, second)]
    assert (token.raises, token.lowers) == ranked(biased, *logits, 5)
    assert token.measured == pytest.approx(result.value)
    named = [node for node in result.nodes if node.part and node.measured is not None]
    assert len(named) > 10
    assert {node.sources for node in named} == {(result.tokens[4],)}


def test_on_one_text_a_token_is_removed(biased):
    ids = random_text()
    result = flow(biased, ids, DIRECTION, ablate=200)
    embedding = biased.modules.embed.module

    def without(_, __, output):
        output = output.clone()
        output[:, 2] = 0
        return output

    with embedding.register_forward_hook(without):
        absent = biased.logits(ids[None])[0, -1]
    (token,) = nodes_of(result, kind="token", position=2)
    present = biased.logits(ids[None])[0, -1]
    assert (token.raises, token.lowers) == ranked(biased, present, absent, 30)


def test_sources_are_shares_of_all_paths(biased, monkeypatch):
    """The shares of the tokens are a row of the inverse of 1 - E, E the shares of each inflow."""
    monkeypatch.setattr("bilens.read.flow.labels.FOLLOWED", 10**6)
    monkeypatch.setattr("bilens.read.flow.graph.LEAST", 0)
    result = flow(biased, random_text(), DIRECTION, ablate=0)
    graph = result.graph(result.nodes_above(0))
    nodes = graph.nodes
    through = torch.tensor([node.flow for node in nodes]).double()
    inner = torch.tensor([node.kind not in LEAVES for node in nodes])
    E = torch.where(inner[:, None], graph.edges / through[:, None], 0).nan_to_num()
    shares = torch.linalg.inv(torch.eye(len(nodes)) - E)
    tokens = [i for i, node in enumerate(nodes) if node.kind == "token"]
    rows = [i for i, node in enumerate(nodes) if node.kind in ("head", "mlp")]
    rows = sorted(rows, key=lambda i: -abs(nodes[i].flow))[:30]
    for i, named in zip(rows, sources(result, [nodes[i] for i in rows], k=1), strict=True):
        strongest = tokens[int(shares[i, tokens].abs().argmax())]
        assert named == (result.tokens[nodes[strongest].position],)


def test_words_are_text_without_spaces_and_pieces_of_letters(biased, monkeypatch):
    names = {3: "Ġare", 4: "are", 5: "ãģ", 6: "Ċ"}
    texts = {3: " are", 4: "are", 5: "\ufffd", 6: "\n"}
    monkeypatch.setattr(
        "bilens.read.language.names.token_names", lambda _, ids: [names[i] for i in ids]
    )
    monkeypatch.setattr(biased.tokenizer, "decode", lambda ids: texts[ids[0]], raising=False)
    assert token_words(biased, torch.tensor([3, 4, 5, 6]), 4) == ("are", "\\n")

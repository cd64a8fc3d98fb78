"""A flow adds up to the logit of every family, conserves at every node, and is LRP of one text.

In long texts layers run again, heads come in blocks, and strong pairs are kept. Labels of nodes are
compared with brute force: probabilities with and without a token, and shares of paths.
"""

import pytest
import torch
from experiments.families import make, texts
from hypothesis import given
from hypothesis import strategies as st

from bilens.flows import flow
from bilens.flows import split as splitting
from bilens.flows.labels import sources, token_words
from bilens.flows.nodes import LEAVES
from bilens.language import TokenDirection
from bilens.transformer import ResidualModel, mixing
from tests.families import EACH_READ, exact_norms, family_view, some_text, tiny
from tests.flows.flows import DIRECTION, check, logit, nodes_of
from tests.flows.own_runs import lrp
from tests.models import TOKENS, parts, random_model, random_text, view_of


@pytest.mark.parametrize("name", EACH_READ)
def test_a_flow_adds_up_and_conserves(name):
    view, ids = family_view(name), some_text()[0]
    second = torch.cat([ids[:2], ids[4:5], ids[3:5], ids[2:3], ids[6:8]])
    with exact_norms():
        one = flow(view, ids, DIRECTION, position=7, ablate=0)
        two = flow(view, ids[:8], DIRECTION, against=second, ablate=0)
        values = [logit(view, text) for text in (ids[:8], second)]
        # Eager softmax and rotary positions round to float32 in some families.
        check(one, values[0], tolerance=1e-6)
        check(two, values[0] - values[1], tolerance=1e-6)
    assert {"token", "head", "mlp"} <= {node.kind for node in two.nodes}


@given(
    st.fixed_dictionaries({**parts, "attention_norm": st.sampled_from(["none", "sum", "rms"])}),
    st.sampled_from(["bilinear", "glu", "swiglu", "reglu", "relu2", "gelu"]),
    st.integers(0, 8),
    st.integers(0, 1000),
    st.booleans(),
)
def test_own_models_of_all_parts_flow(settings, mlp, position, seed, two_texts):
    norms = {"squared": ("none", "sum", "rms"), "bilinear": ("none", "rms")}
    if settings["attention_norm"] not in norms.get(settings["attention"], ("none",)):
        settings = {**settings, "attention_norm": "none"}
    view = view_of(n_layers=2, mlp=mlp, seed=seed % 7, **settings)
    ids, second = random_text(seed=seed), random_text(seed=seed + 1)
    against = second if two_texts else None
    result = flow(view, ids, DIRECTION, position=position, against=against, ablate=0)
    value = logit(view, ids[: position + 1])
    if two_texts:
        value -= logit(view, second[: position + 1])
    check(result, value, tolerance=1e-10 if two_texts else 1e-9)


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "qwen3", "gemma", "gemma2-uncapped", "gemma3"]
)
def test_totals_of_one_text_are_those_of_a_backward_pass(name):
    view, ids = family_view(name), some_text()[0]
    relevance, heads = lrp(view.model, ids, 3, 7)
    with exact_norms():
        result = flow(view, ids, TokenDirection("t3", ("t7",)), ablate=0)
    for actual, expected in ((result.embeddings, relevance), (result.heads.sum(-1), heads)):
        size = float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * size)


OWN = {
    "squared": {"n_layers": 2, "attention": "squared", "qk_norm": True},
    "mixed values": {"n_layers": 2, "value_mix": True, "bias": True},
    "three layers": {"n_layers": 3, "norm": "rms"},
}


def view_and_options(name, two_texts):
    ids, other, _ = some_text()
    model = random_model(**OWN[name]) if name in OWN else tiny(name)
    return ResidualModel(model, TOKENS), ids, {"against": other} if two_texts else {}


def flows(nodes):
    return {node.place: node.flow for node in nodes}


@pytest.mark.parametrize("two_texts", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo2", "neox", "mixtral", *OWN])
def test_a_long_text_has_the_flow_of_a_kept_one(name, two_texts, monkeypatch):
    view, ids, options = view_and_options(name, two_texts)
    kept = flow(view, ids, DIRECTION, ablate=3, **options)
    nodes = [x for x in kept.nodes_above(0) if x.is_removable and x.kind != "choice"][:40]
    assert kept.adjoints.keep
    expected, written = kept.graph(nodes).edges, kept.written(nodes)
    monkeypatch.setattr(splitting, "KEPT_BYTES", 0)
    monkeypatch.setattr(mixing, "PATTERN_BYTES", 0)
    again = flow(view, ids, DIRECTION, ablate=3, **options)
    assert not again.adjoints.keep
    close = {"rel": 1e-5, "abs": 1e-8 * kept.absolute}
    assert flows(again.nodes_above(0)) == pytest.approx(flows(kept.nodes_above(0)), **close)
    for a, b in zip(again.named, kept.named, strict=True):
        assert a.measured == pytest.approx(b.measured, **close)
        assert (a.place, a.sources) == (b.place, b.sources)
    close = {"rtol": 1e-5, "atol": 1e-8 * kept.absolute}
    torch.testing.assert_close(again.graph(nodes).edges, expected, **close)
    for a, b in zip(again.written(nodes), written, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("two_texts", [True, False])
@pytest.mark.parametrize("pattern_bytes", [0, 2**30])
def test_the_strongest_pairs_are_kept_and_all_are_counted(two_texts, pattern_bytes, monkeypatch):
    view, ids, options = view_and_options("gemma3", two_texts)
    whole = flow(view, ids, DIRECTION, ablate=0, **options)
    monkeypatch.setattr(splitting, "KEPT_PAIRS", 20)
    monkeypatch.setattr(mixing, "PATTERN_BYTES", pattern_bytes)
    some = flow(view, ids, DIRECTION, ablate=0, **options)
    assert some.absolute == pytest.approx(whole.absolute)
    torch.testing.assert_close(some.heads, whole.heads)
    for layer in range(2):
        heads = nodes_of(whole, kind="head", layer=layer)
        assert len(heads) > 20
        kept = nodes_of(some, kind="head", layer=layer)
        assert {node.place for node in kept} == {node.place for node in heads[:20]}
        torch.testing.assert_close(some.pairs[layer].attention, whole.pairs[layer].attention)


# Of the first, layers read keys of earlier ones, so that all graphs are kept; of the last, layers
# return a list.
@pytest.mark.parametrize(
    ("name", "crosses"), [("gemma4_text", True), ("gpt_neo", False), ("openai-gpt", False)]
)
def test_layers_run_again_unless_they_read_earlier_ones(name, crosses, monkeypatch):
    view = ResidualModel(make(name), TOKENS)
    assert view.places.crosses == crosses
    monkeypatch.setattr(splitting, "KEPT_BYTES", 0)
    first, second = (ids % 30 for ids in texts())
    assert flow(view, first, "t5", minus="t6", against=second, ablate=0).adjoints.keep == crosses


def ranked(view, present, absent, likely):
    """Return the tokens that are raised and lowered, the most changed first, by the formula."""
    p1, p0 = (logits.softmax(-1) for logits in (present, absent))
    among = {*p1.topk(likely).indices.tolist(), *p0.topk(likely).indices.tolist()}
    scores = {f"t{i}": float((p1[i] / p0[i]).log() * ((p1[i] + p0[i]) / 2).sqrt()) for i in among}
    order = sorted(scores, key=scores.__getitem__)
    raised = tuple(name for name in order[::-1] if scores[name] > 0)
    return raised[:4], tuple(name for name in order if scores[name] < 0)[:4]


def test_between_texts_the_changed_token_has_the_change_of_the_probabilities(biased, monkeypatch):
    """Exchanging the only token that differs turns one text into the other."""
    monkeypatch.setattr("bilens.flows.labels.LIKELY", 5)
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

    def without(_, __, output):
        output = output.clone()
        output[:, 2] = 0
        return output

    with biased.modules.embed.module.register_forward_hook(without):
        absent = biased.logits(ids[None])[0, -1]
    (token,) = nodes_of(result, kind="token", position=2)
    present = biased.logits(ids[None])[0, -1]
    assert (token.raises, token.lowers) == ranked(biased, present, absent, 30)


def test_sources_are_shares_of_all_paths(biased, monkeypatch):
    """The shares of the tokens are a row of the inverse of 1 - E, E the shares of each inflow."""
    monkeypatch.setattr("bilens.flows.labels.FOLLOWED", 10**6)
    monkeypatch.setattr("bilens.flows.graph.LEAST", 0)
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
    token_names = "bilens.language.names.token_names"
    monkeypatch.setattr(token_names, lambda _, ids: [names[i] for i in ids])
    monkeypatch.setattr(biased.tokenizer, "decode", lambda ids: texts[ids[0]], raising=False)
    assert token_words(biased, torch.tensor([3, 4, 5, 6]), 4) == ("are", "\\n")

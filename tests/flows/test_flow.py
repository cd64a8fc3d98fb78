"""A flow adds up to the change of the logit of every family, and conserves at every node.

In long texts layers run again, heads come in blocks, and strong pairs are kept. Labels of nodes are
compared with brute force: probabilities with and without a token, and shares of paths.
"""

import pytest
import torch
from experiments.families import make, texts
from hypothesis import given
from hypothesis import strategies as st

from bilens.errors import BilensError
from bilens.flows import flow
from bilens.flows import split as splitting
from bilens.flows.labels import token_words
from bilens.flows.nodes import LEAVES
from bilens.transformer import ResidualModel, mixing
from tests.families import EACH_READ, exact_norms, family_view, some_text, tiny
from tests.flows.flows import DIRECTION, check, flow_unless_rounded, leaves, logit, nodes_of
from tests.models import TOKENS, parts, random_model, random_text, view_of


@pytest.mark.parametrize("name", EACH_READ)
def test_a_flow_adds_up_and_conserves(name):
    view, ids = family_view(name), some_text()[0]
    second = torch.cat([ids[:2], ids[4:5], ids[3:5], ids[2:3], ids[6:8]])
    with exact_norms():
        two = flow(view, ids[:8], DIRECTION, against=second, labels=0)
        values = [logit(view, text) for text in (ids[:8], second)]
        # Eager softmax and rotary positions round to float32 in some families.
        check(two, values[0] - values[1], tolerance=1e-6)
    assert {"token", "head", "mlp"} <= {node.kind for node in two.nodes}


@pytest.mark.parametrize("name", EACH_READ)
@pytest.mark.parametrize("size", [1e-2, 1e-4])
def test_a_change_beside_rounding_is_no_unknown_operation(name, size):
    """The second run is so near that logits, or their large parts, are rounded by more."""
    view, ids = family_view(name, dtype=torch.float32), some_text()[0][:6]
    generator = torch.Generator().manual_seed(0)
    rows = view.places.rows(ids[None])[0].detach()
    second = rows * (1 + size * torch.randn(rows.shape, generator=generator))
    logits = view.logits(ids[None])[0, -1]
    order = logits.argsort()
    place = int(logits[order].diff().argmin())
    token, minus = (f"[{int(x)}]" for x in order[place : place + 2])
    result = flow_unless_rounded(view, ids, token, minus, second)
    if result is None:
        return
    allowed = 0.01 * abs(result.value) + 4e-6 * sum(map(abs, result.values))
    assert abs(leaves(result) - result.value) <= allowed


@given(
    st.fixed_dictionaries({**parts, "attention_norm": st.sampled_from(["none", "sum", "rms"])}),
    st.sampled_from(["bilinear", "glu", "swiglu", "reglu", "relu2", "gelu"]),
    st.integers(0, 8),
    st.integers(0, 1000),
)
def test_own_models_of_all_parts_flow(settings, mlp, position, seed):
    norms = {"squared": ("none", "sum", "rms"), "bilinear": ("none", "rms")}
    if settings["attention_norm"] not in norms.get(settings["attention"], ("none",)):
        settings = {**settings, "attention_norm": "none"}
    view = view_of(n_layers=2, mlp=mlp, seed=seed % 7, **settings)
    ids, second = random_text(seed=seed), random_text(seed=seed + 1)
    result = flow(view, ids, DIRECTION, position=position, against=second, labels=0)
    value = logit(view, ids[: position + 1]) - logit(view, second[: position + 1])
    check(result, value, tolerance=1e-10)


@pytest.mark.parametrize("name", ["gemma3", "granite", "own-layer", "opt"])
def test_without_a_second_text_it_is_the_neutral_one(name):
    view = ResidualModel(make(name), TOKENS) if name == "opt" else family_view(name)
    ids = some_text()[0]
    result = flow(view, ids, "t3", minus="t7", ablate=3)
    embed = view.places.embed
    # Some families scale embeddings after their module.
    scale = float((view.places.rows(ids) / embed(ids).detach()).nanmedian())
    mean = view.places.rows(torch.arange(view.vocab_size)).mean(0) / scale

    def neutral(_, __, output):
        output = output.clone()
        output[:, 1:] = mean
        return output

    with embed.register_forward_hook(neutral):
        logits = view.logits(ids[None])[0, -1]
    own = view.logits(ids[None])[0, -1]
    expected = [float(x[3] - x[7]) for x in (own, logits)]
    assert result.values == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert float(result.embeddings[0]) == 0
    total = float(result.embeddings.sum() + result.choices.sum())
    assert total == pytest.approx(result.value, abs=1e-5 * result.absolute)
    assert sum(node.measured is not None for node in result.nodes) == 3
    assert flow(view, ids, "t3", minus="t7", against="neutral", labels=0).value == result.value


def test_a_single_token_has_no_neutral_text(biased):
    with pytest.raises(BilensError, match="text has one token, and the neutral text differs from"):
        flow(biased, torch.tensor([3]), DIRECTION)


OWN = {
    "squared": {"n_layers": 2, "attention": "squared", "qk_norm": True},
    "mixed values": {"n_layers": 2, "value_mix": True, "bias": True},
    "three layers": {"n_layers": 3, "norm": "rms"},
}


def view_and_texts(name):
    model = random_model(**OWN[name]) if name in OWN else tiny(name)
    return ResidualModel(model, TOKENS), *some_text()[:2]


def flows(nodes):
    return {node.place: node.flow for node in nodes}


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo2", "neox", "mixtral", *OWN])
def test_a_long_text_has_the_flow_of_a_kept_one(name, monkeypatch):
    view, ids, other = view_and_texts(name)
    kept = flow(view, ids, DIRECTION, against=other, ablate=3)
    nodes = [x for x in kept.nodes_above(0) if x.is_removable and x.kind != "choice"][:40]
    assert kept.adjoints.keep
    expected, written = kept.graph(nodes).edges, kept.written(nodes)
    monkeypatch.setattr(splitting, "KEPT_BYTES", 0)
    monkeypatch.setattr(mixing, "PATTERN_BYTES", 0)
    again = flow(view, ids, DIRECTION, against=other, ablate=3)
    assert not again.adjoints.keep
    close = {"rel": 1e-5, "abs": 1e-8 * kept.absolute}
    assert flows(again.nodes_above(0)) == pytest.approx(flows(kept.nodes_above(0)), **close)
    for a, b in zip(again.named, kept.named, strict=True):
        assert (a.measured or 0) == pytest.approx(b.measured or 0, **close)
        assert (a.place, a.raises, a.lowers) == (b.place, b.raises, b.lowers)
    close = {"rtol": 1e-5, "atol": 1e-8 * kept.absolute}
    torch.testing.assert_close(again.graph(nodes).edges, expected, **close)
    for a, b in zip(again.written(nodes), written, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("pattern_bytes", [0, 2**30])
def test_the_strongest_pairs_are_kept_and_all_are_counted(pattern_bytes, monkeypatch):
    view, ids, other = view_and_texts("gemma3")
    whole = flow(view, ids, DIRECTION, against=other, labels=0)
    monkeypatch.setattr(splitting, "KEPT_PAIRS", 20)
    monkeypatch.setattr(mixing, "PATTERN_BYTES", pattern_bytes)
    some = flow(view, ids, DIRECTION, against=other, labels=0)
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
    assert flow(view, first, "t5", minus="t6", against=second, labels=0).adjoints.keep == crosses


def ranked(view, present, absent, likely):
    """Return the tokens that are raised and lowered, the most changed first, by the formula."""
    p1, p0 = (logits.softmax(-1) for logits in (present, absent))
    among = {*p1.topk(likely).indices.tolist(), *p0.topk(likely).indices.tolist()}
    scores = {f"t{i}": float((p1[i] / p0[i]).log() * ((p1[i] + p0[i]) / 2).sqrt()) for i in among}
    order = sorted(scores, key=scores.__getitem__)
    raised = tuple(name for name in order[::-1] if scores[name] > 0)
    return raised[:4], tuple(name for name in order if scores[name] < 0)[:4]


def test_between_texts_the_changed_token_has_the_change_of_the_probabilities(biased, monkeypatch):
    """The only token that differs turns one text into the other."""
    monkeypatch.setattr("bilens.flows.labels.LIKELY", 5)
    first = random_text()
    second = first.clone()
    second[4] = (first[4] + 1) % 20
    result = flow(biased, first, DIRECTION, against=second, ablate=20)
    (token,) = [node for node in result.nodes if node.kind == "token" and node.flow]
    logits = [biased.logits(ids[None])[0, -1] for ids in (first, second)]
    assert (token.raises, token.lowers) == ranked(biased, *logits, 5)
    assert token.measured == pytest.approx(result.value)
    named = [node for node in result.nodes if node.part and node.measured is not None]
    assert len(named) > 10
    graph = result.graph([token, *named])
    assert {node.sources for node in graph.nodes if node.part} == {(result.tokens[4],)}
    assert {node.sources for node in graph.named if node.part} == {(result.tokens[4],)}


def test_sources_are_shares_of_all_paths(biased, monkeypatch):
    """The shares of the tokens are a row of the inverse of 1 - E, E the shares of each inflow."""
    monkeypatch.setattr("bilens.flows.graph.LEAST", 0)
    result = flow(biased, random_text(), DIRECTION, labels=0)
    graph = result.graph(result.nodes_above(0))
    nodes = graph.nodes
    through = torch.tensor([node.flow for node in nodes]).double()
    inner = torch.tensor([node.kind not in LEAVES for node in nodes])
    E = torch.where(inner[:, None], graph.edges / through[:, None], 0).nan_to_num()
    shares = torch.linalg.inv(torch.eye(len(nodes)) - E)
    tokens = [i for i, node in enumerate(nodes) if node.kind == "token"]
    rows = [i for i, node in enumerate(nodes) if node.kind in ("head", "mlp")]
    for i in sorted(rows, key=lambda i: -abs(nodes[i].flow))[:30]:
        strongest = tokens[int(shares[i, tokens].abs().argmax())]
        assert nodes[i].sources[0] == result.tokens[nodes[strongest].position]


def test_words_are_text_without_spaces_and_pieces_of_letters(biased, monkeypatch):
    names = {3: "Ġare", 4: "are", 5: "ãģ", 6: "Ċ"}
    texts = {3: " are", 4: "are", 5: "\ufffd", 6: "\n"}
    token_names = "bilens.language.names.token_names"
    monkeypatch.setattr(token_names, lambda _, ids: [names[i] for i in ids])
    monkeypatch.setattr(biased.tokenizer, "decode", lambda ids: texts[ids[0]], raising=False)
    assert token_words(biased, torch.tensor([3, 4, 5, 6]), 4) == ("are", "\\n")

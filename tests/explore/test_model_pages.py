"""The readings of a site: those of commands, of what is typed."""

import html

import pytest
import torch

import bilens
from bilens.analyses import find_analysis
from bilens.circuits import circuit
from bilens.convert import save_model
from bilens.data.corpus import first_texts
from bilens.errors import BilensError
from bilens.explore import explorer
from bilens.explore.model_pages import LARGEST, ModelPages
from bilens.files import write_json
from bilens.flows import Question, flow, remove
from bilens.flows.reading import answer_question
from bilens.images.bonds import BONDS_NAME
from bilens.options import token_list
from bilens.pages.model import report_readings
from bilens.pages.page import render_report
from bilens.transformer import ResidualModel
from tests.families import tiny
from tests.models import digit_model, digits, grammar_view, small_corpus, small_model

TEXT, SECOND = "once lily ate", "once tom ate"
ASKED = {"prompt": TEXT, "against": SECOND, "token": "kite", "minus": "rice,ball"}


def reading(site: ModelPages, name: str, **texts: str):
    return site._read(name, texts.items())


def test_a_page_is_that_of_the_command(site):
    question = Question(TEXT, "kite", ("rice", "ball"), SECOND)
    expected = answer_question(site.model, question)
    assert site.page("flow", ASKED.items()) == render_report([expected])
    for name, words in (("ngrams", {"token": "lily", "layer": "1"}), ("circuit", ASKED)):
        entry = find_analysis(name)
        values = site.forms[name].values(site.forms[name].texts(words.items()))
        direct = entry.run(site.model, values, lambda *_: None)
        assert reading(site, name, **words).record() == direct.record()


def test_every_box_of_a_flow_changes_it(site):
    changes = [
        *({"prompt": "once ben ate"}, {"token": "ball", "minus": ""}, {"minus": ""}),
        *({"against": "once ben ate"}, {"target": "probability"}, {"ablate": "0"}),
        *({"against": "", "replace": "lily=the"}, {"against": "", "mean": "on"}),
        *({"shown": "5"}, {"token": "kite,the"}),
    ]
    records = [str(reading(site, "flow", **ASKED).record())]
    records += [str(reading(site, "flow", **ASKED | change).record()) for change in changes]
    assert len({*records}) == len(records)


def test_several_tokens_have_commas_between_them(site):
    several = reading(site, "flow", **ASKED | {"token": "kite,the", "minus": ""})
    assert several.question.tokens == ("kite", "the")
    expected = flow(site.model, TEXT, ("kite", "the"), against=SECOND)
    assert several.flow.value == pytest.approx(expected.value)


def test_the_mean_is_that_of_the_texts(site):
    asked = ASKED | {"against": "", "mean": "on"}
    texts = [*first_texts(small_corpus())]
    mean = torch.cat([site.model.W_E[ids] for ids in texts]).mean(0)
    expected = flow(site.model, TEXT, "kite", minus=("rice", "ball"), against=mean)
    assert reading(site, "flow", **asked).flow.value == pytest.approx(expected.value, rel=1e-4)


@pytest.mark.parametrize(("count", "against"), [(1, ""), (3, SECOND)])
def test_nodes_are_removed_from_the_running_model(site, count, against):
    asked = ASKED | {"against": against, "minus": ""}
    through = reading(site, "flow", **asked).flow
    nodes = [node for node in through.nodes if node.is_removable][:count]
    result = remove(site.model, through, nodes)
    names = [node.name(through.tokens, through.second) for node in nodes]
    message = site.removed("flow", asked.items(), names)
    assert f"a change of {result.actual:+#.3g}. The flow" in message
    assert f"predicts {result.predicted:+#.3g}" in message
    logit = through.top(3).nodes[0].name(through.tokens, through.second)
    for unknown in (["no such node"], [logit], []):
        with pytest.raises(BilensError, match="expected heads, MLPs or tokens of this flow"):
            site.removed("flow", asked.items(), unknown)
    with pytest.raises(BilensError, match="ngrams has no nodes to remove; flow has"):
        site.removed("ngrams", [("token", "kite")], names)


REFUSED = {
    "token='lilly', expected a single token of the vocabulary; .*the nearest are lily": [
        ("flow", {"token": "lilly"}),
        ("ngrams", {"token": "lilly", "minus": ""}),
    ],
    "'<b>', expected a single token": [("flow", {"minus": "<b>"})],
    "minus has the token 'kite' itself": [("flow", {"minus": "kite"})],
    "replace='lily', expected words as keys=key": [("flow", {"against": "", "replace": "lily"})],
    "each name the second run": [("flow", {"replace": "lily=ben"}), ("flow", {"mean": "on"})],
    "target='loss', expected one of logit": [("flow", {"target": "loss"})],
    "prompt.* needs prompt|flow needs prompt": [("flow", {"prompt": ""})],
    "layer=7": [("ngrams", {"layer": "7"})],
    "has 30 tokens, expected up to 12": [("flow", {"prompt": "once " * 30, "against": ""})],
}


@pytest.mark.parametrize(
    ("words", "name", "change"), [(w, *case) for w, cases in REFUSED.items() for case in cases]
)
def test_what_does_not_fit_is_said(site, words, name, change):
    with pytest.raises(BilensError, match=words):
        site.page(name, (ASKED | change).items())


def test_what_would_take_minutes_is_refused_or_waits_for_a_click(site, monkeypatch):
    assert not site.waits("flow")
    monkeypatch.setattr(site, "cost", LARGEST / 2)
    assert site.waits("flow")
    message = "prompt has 3 tokens, .* up to 2 are read here, `bilens flow` takes more"
    with pytest.raises(BilensError, match=message):
        site.page("flow", (ASKED | {"token": "the"}).items())


def test_it_begins_with_texts_of_as_many_tokens(site):
    texts = site.forms["circuit"].texts()
    ids = [site.model.ids(texts[name]) for name in ("prompt", "against")]
    assert len(ids[0]) == len(ids[1])
    question = Question(
        texts["prompt"], texts["token"], token_list(texts["minus"]), texts["against"]
    )
    expected = circuit(site.model, [question])
    shown = reading(site, "circuit", **texts).record()
    assert shown == expected.record()


def test_kinds_of_models_have_their_readings():
    assert [*ModelPages(digit_model(), digits(), (), {}).forms] == ["explain", "eigenvectors"]
    deep = ModelPages(small_model(n_layers=2), digits(), (), {})
    assert [*deep.forms] == ["bonds", "paths"]
    assert "image" not in deep.forms["bonds"].boxes
    assert [*ModelPages(grammar_view(), None, (), {}).forms] == ["flow", "circuit"]
    model, corpus = tiny("llama"), small_corpus()
    model.resize_token_embeddings(len(corpus.tokenizer))
    others = ModelPages(
        ResidualModel(model, corpus.tokenizer), corpus, [find_analysis("heads")], {}
    )
    assert [*others.forms] == ["flow", "circuit", "heads"]


def test_it_reads_what_the_report_reads(tmp_path):
    """With the settings that the run records, as the demo's does."""
    write_json(tmp_path / BONDS_NAME, {"drop": 0.03, "metric": "weights"})
    small_model(n_layers=2).save_files(tmp_path)
    site = explorer(tmp_path, data="digits").pages
    of_report, *_ = report_readings(bilens.load(tmp_path), {"data": "digits"}, source=tmp_path)
    assert reading(site, "bonds").record() == of_report.record()


def test_an_image_is_split_into_its_eigenvectors():
    site = ModelPages(digit_model(), digits(), (), {})
    found = reading(site, "explain", image="test-7", k="2")
    logits = digit_model()(digits().test_images[7]).detach()
    assert torch.allclose(found.logits.float(), logits, atol=1e-4)
    assert all(len(part.activations) == 2 for part in found.parts)
    with pytest.raises(BilensError, match="image='test-999' is neither a test image"):
        site.page("explain", [("image", "test-999")])


def test_without_texts_it_has_flows_and_circuits(tmp_path):
    view = grammar_view()
    save_model(tmp_path, view.model.float(), view.tokenizer)
    site = explorer(tmp_path).pages
    assert [*site.forms] == ["flow", "circuit"]
    assert "restore" in html.unescape(site.page("circuit", ASKED.items()))
    with pytest.raises(BilensError, match="is the folder of data; give data too"):
        explorer(tmp_path, data_dir=tmp_path)

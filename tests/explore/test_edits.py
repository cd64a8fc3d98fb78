"""Weights edited by nodes of a flow: the screen, the saved model, and a browser."""

import json
import re

import pytest
import torch

import bilens
from bilens.errors import BilensError
from bilens.explore import explorer
from bilens.explore.flows import EditView, FlowOf, FlowView
from bilens.read.flow import edit, edit_heads
from bilens.residual import ResidualModel
from tests.explore.browser import needs_chrome, served, visiting
from tests.language import random_model, small_corpus

OF = FlowOf("once lily ate", "lily", ("tom", "ben"))
OTHER = "lily ate"


def view_of(save_to=None, **parts):
    corpus = small_corpus()
    model = random_model(vocab_size=len(corpus.tokenizer), n_layers=2, **parts)
    return EditView(FlowView(ResidualModel(model, corpus.tokenizer), OF.prompt), save_to)


@pytest.fixture
def view(tmp_path):
    return view_of(tmp_path)


def selected(view):
    """Two heads of one layer and two directions of the other layer's MLP, with their names."""
    split, _ = view.flows.split(OF)
    nodes = [(name, split.nodes[i], i) for name, i in view.nodes(OF).items()]
    heads = [(name, node) for name, node, _ in nodes if node.kind == "head" and node.layer == 0]
    mlp = [(name, i) for name, node, i in nodes if node.kind == "direction" and node.layer == 1]
    vectors = torch.stack([split.vector(i) for _, i in mlp[:2]])
    return [*heads[:2], *mlp[:2]], [node.number for _, node in heads[:2]], vectors


def test_a_head_stands_once_and_nodes_come_by_what_flows_through_them(view):
    split, _ = view.flows.split(OF)
    places = view.nodes(OF)
    flows = [abs(split.nodes[i].flow) for i in places.values()]
    assert flows == sorted(flows, reverse=True)
    assert {split.nodes[i].kind for i in places.values()} == {"head", "direction"}
    heads = [split.nodes[i] for i in places.values() if split.nodes[i].kind == "head"]
    assert len({(node.layer, node.number) for node in heads}) == len(heads) == 8
    assert view.nodes(FlowOf("")) == {}


@pytest.mark.parametrize("percent", [0, 50])
def test_it_is_the_edit_of_the_weights(view, percent):
    picked, heads, vectors = selected(view)
    model, scale = view.flows.model, percent / 100
    names = (*(name for name, _ in picked), "no such node")
    result = view.edited(OF, names, percent)
    expected = edit(edit_heads(model, 0, heads, scale=scale), 1, vectors, scale=scale)
    ids = model.ids(OTHER)[None]
    torch.testing.assert_close(result.logits(ids), expected.logits(ids))
    assert (result.logits(ids) - model.logits(ids)).abs().max() > 1e-3


def test_both_texts_are_shown_before_and_after(view):
    names = tuple(name for name, _ in selected(view)[0])
    page = view.page(OF, names, 0, OTHER)
    model, edited = view.flows.model, view.edited(OF, names, 0)
    vector = model.direction(model.token("lily"), [model.token("tom"), model.token("ben")])
    weights = torch.linalg.lstsq(model.W_U, vector).solution
    for text in (OF.prompt, OTHER):
        ids = model.ids(text)[None]
        before, after = (m.logits(ids)[0, -1] for m in (model, edited))
        message = f"“{text}”, lily minus tom, ben: {before @ weights:+#.3g} before, "
        assert f"{message}{after @ weights:+#.3g} after" in page
        best = int(after.argmax())
        (name,) = model.tokenizer.convert_ids_to_tokens([best])
        row = rf">{name}</t[hd]>\s*<td[^>]*>{before.softmax(0)[best]:.1%}</td>\s*"
        assert re.search(rf"{row}<td[^>]*>{after.softmax(0)[best]:.1%}<", page)
    assert OTHER not in view.page(OF, names, 0, "").replace(OF.prompt, "")


def test_without_a_choice_it_asks_for_one(view):
    assert "Choose heads or directions" in view.page(OF, ("head 9.9",), 0, "")
    assert view.page(FlowOf(""), (), 0, OTHER) == ""
    assert "nothing is saved" in view.save(OF, ("head 9.9",), 0)
    assert "nothing is saved" in view_of().save(OF, ("head 0.0",), 0)


def test_what_no_weights_can_do_is_said():
    view = view_of(norm="layer")
    page = view.page(OF, tuple(view.nodes(OF)), 0, "")
    assert "bias" in page


def test_a_saved_edit_is_an_ordinary_model(view, tmp_path):
    names = tuple(name for name, _ in selected(view)[0])
    message = view.save(OF, names, 0)
    (folder,) = tmp_path.iterdir()
    assert f"Saved as {folder}: {names[0]}, " in message
    ids = view.flows.model.ids(OTHER)[None]
    opened = bilens.load(folder)
    expected = view.edited(OF, names, 0).logits(ids)
    torch.testing.assert_close(opened.logits(ids).to(expected), expected, rtol=1e-4, atol=1e-4)
    record = json.loads((folder / "edit.json").read_text())
    assert record["nodes"] == list(names)
    assert record["direction"] == "lily minus tom, ben"
    # The same edit is the same folder, another one another.
    view.save(OF, names, 0)
    view.save(OF, names, 50)
    assert len(list(tmp_path.iterdir())) == 2


def test_what_the_disk_refuses_is_said(view, tmp_path):
    view.save_to = tmp_path / "file"
    view.save_to.write_text("")
    assert str(view.save_to) in view.save(OF, ("head 0.0",), 0)


def test_a_classifier_is_not_edited(image_run, tmp_path):
    with pytest.raises(
        BilensError, match=r"save_to=.*, but .* is a classifier, which is not edited"
    ):
        explorer(image_run, save_to=tmp_path)


@needs_chrome
def test_weights_are_edited_in_the_browser(language_run, browser, tmp_path, monkeypatch):
    monkeypatch.setattr("bilens.data.corpus.GRAMMAR_SENTENCES", 400)
    with served(explorer(language_run, save_to=tmp_path)) as site, visiting(browser) as visit:
        page = visit.open(site, "#flow svg .node")
        page.locator("#edited input").click()
        page.get_by_role("option", name="direction").first.click()
        visit.wait("document.querySelector('#edit-page table')?.innerText.includes('after')")
        other = page.locator("#edit-prompt textarea")
        other.fill("lily ate")
        other.press("Enter")
        visit.wait("document.querySelectorAll('#edit-page table').length === 2")
        page.locator("#edit-save").click()
        visit.wait("document.querySelector('#edit-saved').innerText.startsWith('Saved as ')")
        assert next(tmp_path.iterdir()).name in page.inner_text("#edit-saved")
        assert "edited=" in page.url
        # Another direction has its nodes in another order,
        text, token = (page.locator(f"#flow-{name} textarea") for name in ("prompt", "token"))
        token.fill("kite")
        token.press("Enter")
        visit.wait("document.querySelector('#flow-text').innerText.includes('\"kite\": ')")
        view = EditView(FlowView(bilens.load(language_run), "lily"), None)
        names = list(view.nodes(FlowOf(text.input_value(), "kite")))
        page.locator("#edited input").click()
        options = "[...document.querySelectorAll('#edited [role=option]')].map(o => o.ariaLabel)"
        visit.wait(f"JSON.stringify({options}) === JSON.stringify({json.dumps(names)})")
        # and another text has other nodes, of which none is selected.
        text.fill("mia saw")
        text.press("Enter")
        visit.wait("document.querySelector('#edit-page').innerText.startsWith('Choose heads')")
        assert page.locator("#edited .token").count() == 0
        page.set_viewport_size({"width": 390, "height": 900})
        page.wait_for_timeout(300)
        visit.fits()

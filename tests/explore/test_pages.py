"""Pages of the explorer: a panel for each analysis, and the flow of two texts."""

from dataclasses import replace
from types import SimpleNamespace

import gradio as gr
import pytest
import torch

import bilens
from bilens.analyses import find_analysis
from bilens.circuits import circuit
from bilens.convert import save_model
from bilens.errors import BilensError
from bilens.explore import Explorer, explorer, pages
from bilens.explore.pages import ImagePage, LanguagePage
from bilens.explore.panels import sections_html, texts_and_figures
from bilens.explore.screen import StateError
from bilens.files import write_json
from bilens.flows import Question
from bilens.images.bonds import BONDS_NAME
from bilens.pages.model import report_readings
from bilens.sections import Picture
from bilens.transformer import ResidualModel
from tests.explore.browser import submit
from tests.families import tiny
from tests.models import digit_model, digits, grammar_view, small_corpus, small_model


def language_page(**parts) -> LanguagePage:
    return LanguagePage(grammar_view(**parts), small_corpus())


def panel_of(page, name):
    return next(panel for panel in page.panels if panel.analysis.name == name)


def test_an_image_is_split_into_its_eigenvectors():
    page = ImagePage(digit_model(), digits())
    reading = panel_of(page, "explain").reading(page.start)
    logits = digit_model()(digits().test_images[0]).detach()
    assert torch.allclose(reading.logits.float(), logits, atol=1e-4)
    for part in reading.parts:
        total = float(part.activations.sum()) + part.remainder
        assert total == pytest.approx(float(logits[part.label]), abs=1e-4)
    with pytest.raises(StateError, match="neither a test image"):
        page.checked(type(page.start)(input="test-999"))


def test_a_deep_model_has_its_bonds_and_no_sheet():
    page = ImagePage(small_model(n_layers=2), digits())
    assert [panel.analysis.name for panel in page.panels] == ["bonds", "paths"]
    with gr.Blocks():
        assert "input" not in page.screen().controls


def pictures_of(reading):
    parts = [part for section in reading.sections() for part in section.parts]
    return {part.name: part for part in parts if isinstance(part, Picture)}


def test_the_explorer_draws_the_networks_of_the_report(tmp_path, monkeypatch):
    """With the settings that the run records, as the demo's does."""
    write_json(tmp_path / BONDS_NAME, {"drop": 0.03, "metric": "weights"})
    small_model(n_layers=2).save_files(tmp_path)
    made = []
    monkeypatch.setattr(pages, "ImagePage", lambda *args: made.append(ImagePage(*args)) or made[0])
    explorer(tmp_path, data="digits")
    (page,) = made
    of_report, *_ = report_readings(bilens.load(tmp_path), {"data": "digits"}, source=tmp_path)
    of_page = panel_of(page, "bonds").reading(page.start)
    assert of_page.record() == of_report.record()
    pictures, expected = map(pictures_of, (of_page, of_report))
    assert pictures.keys() == expected.keys() > {f"network-{number}" for number in range(10)}
    assert pictures["network-3"].figure.to_json() == expected["network-3"].figure.to_json()


def test_texts_after_figures_without_a_place_are_shown(monkeypatch):
    monkeypatch.setattr("bilens.explore.panels.PLOTS", 1)
    page = ImagePage(small_model(n_layers=2), digits())
    panel, parts = panel_of(page, "bonds"), []
    panel.options = []
    with gr.Blocks():
        panel.lay_out(SimpleNamespace(part=lambda *part: parts.append(part)))
    ((_, places, show),) = parts
    sections = panel.reading(page.start).sections()
    texts, figures = texts_and_figures(sections, "bonds")
    assert len(figures) > 1
    assert any(texts[2:])
    updates = show(page.start)
    assert len(updates) == len(places)
    shown = "".join(update for update in updates if isinstance(update, str))
    assert shown == sections_html(sections, "bonds")


def test_the_page_of_a_bilinear_model_reads_its_weights():
    page = language_page(n_layers=2)
    assert [panel.analysis.name for panel in page.panels] == ["ngrams", "contexts"]
    state = type(page.start)("lily", ("tom", "ben"), 1)
    spectrum = panel_of(page, "contexts").reading(state).all_eigenvectors
    u = page.model.direction("lily", minus=["tom", "ben"])
    expected = torch.linalg.eigvalsh(page.model.mlp(1).interaction(u).dense())
    assert torch.allclose(spectrum.values.sort().values, expected)
    sections = panel_of(page, "ngrams").reading(state).sections()
    assert "N-grams of lily minus tom, ben" in sections_html(sections, "ngrams")


def test_without_texts_it_has_flows_and_circuits(tmp_path):
    view = grammar_view()
    page = LanguagePage(view, None)
    page.checked(replace(page.start, flow_prompt="once lily ate", flow_against="once tom ate"))
    assert not page.panels
    save_model(tmp_path, view.model.float(), view.tokenizer)
    assert isinstance(explorer(tmp_path), Explorer)
    with pytest.raises(BilensError, match="is the folder of data; give data too"):
        explorer(tmp_path, data_dir=tmp_path)


def test_it_opens_with_the_circuit_of_two_texts_of_as_many_tokens():
    page = language_page(n_layers=2)
    start, direction = page.start, page.flows.direction(page.start.flow)
    assert start.circuit
    ids = [page.model.ids(text) for text in (start.flow_prompt, start.flow_against)]
    assert len(ids[0]) == len(ids[1])
    assert not torch.equal(*ids)
    question = Question(start.flow_prompt, direction, (), start.flow_against)
    expected = circuit(page.model, [question])
    assert page.flows.circuit(start.flow).record() == expected.record()
    with gr.Blocks():
        screen = page.screen()
    show = next(show for names, show in screen.parts if "circuit" in names)
    plot, text = show(page.start).values()
    assert plot["visible"]
    assert "parts restore" in text
    plot, text = show(replace(page.start, flow_against="")).values()
    assert not plot["visible"]
    assert "need a second text" in text
    plot, text = show(replace(page.start, circuit=False)).values()
    assert (plot["visible"], text) == (False, "")


def test_what_needs_a_tensor_has_no_panel_and_no_control():
    corpus, model = small_corpus(), tiny("llama")
    model.resize_token_embeddings(len(corpus.tokenizer))
    page = LanguagePage(ResidualModel(model, corpus.tokenizer), corpus)
    with gr.Blocks():
        screen = page.screen()
    assert not page.panels
    assert not {"token", "minus", "layer"} & screen.controls.keys()
    added = LanguagePage(page.model, corpus, [find_analysis("heads")])
    assert [panel.analysis.name for panel in added.panels] == ["heads"]


def test_a_language_model_in_the_browser(language_site, visit):
    page = visit.open(language_site, "#reading-ngrams table")
    token = page.get_by_label("The next token")
    token.fill("kit")
    page.get_by_role("option", name="kite").click()
    visit.shows("#reading-ngrams", "of kite")
    visit.wait("location.search.includes('token=kite')")
    submit(token, "zebra")
    page.wait_for_selector("text=expected a single token of the vocabulary")
    assert token.input_value() == "zebra"
    with page.expect_download() as download:
        page.locator("#reading-ngrams .save").first.click()
    assert download.value.suggested_filename.startswith("ngrams-N-grams-of-kite")
    visit.fits_a_phone()

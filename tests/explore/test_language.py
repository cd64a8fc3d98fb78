"""The explorer's screens of a language model, without a browser and in one."""

import base64
import io
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from bilens.explore.language import LanguageState, LanguageView
from bilens.explore.readings import sections_html
from bilens.explore.screen import StateError, prompt_notice
from bilens.residual import ResidualModel
from tests.explore.browser import needs_chrome, visiting
from tests.language import random_model, small_corpus


def make(**parts) -> LanguageView:
    corpus = small_corpus()
    model = random_model(vocab_size=len(corpus.tokenizer), **parts)
    return LanguageView(ResidualModel(model, corpus.tokenizer), corpus)


@pytest.fixture(scope="module")
def view() -> LanguageView:
    return make()


STATE = LanguageState("lily", ("tom", "ben"), prompt="once lily ate")


def test_a_logit_is_the_sum_of_its_bars(view):
    state = view.checked(replace(STATE, next_token="soup"))
    _, likely, figure = view.prediction(state)
    *parts, full = figure.data[0].x
    logits = view.model.logits(view.model.ids(state.prompt)[None])[0, -1]
    assert np.isclose(sum(parts), float(logits[view.model.token("soup")]))
    assert np.isclose(full, sum(parts))
    best = logits.topk(8).indices
    assert likely == view.corpus.tokenizer.convert_ids_to_tokens(best.tolist())


def test_paths_of_the_table_add_up(view):
    page, _, _ = view.prediction(STATE)
    packed = re.search(r'href="data:text/csv;base64,([^"]+)"', page).group(1)
    frame = pd.read_csv(io.BytesIO(base64.b64decode(packed)))
    paths = frame[[name for name in frame.columns if name not in ("token", "probability", "logit")]]
    assert np.allclose(paths.sum(axis=1), frame.logit)
    assert (frame.probability.diff().dropna() <= 0).all()


def test_the_spectrum_is_that_of_the_direction(view):
    W_U, vocabulary = view.model.W_U.T, view.corpus.tokenizer.get_vocab()
    direction = W_U[vocabulary["lily"]] - W_U[[vocabulary["tom"], vocabulary["ben"]]].mean(0)
    Q = view.model.mlp(0).interaction(direction).dense()
    result = view.spectrum(STATE).values.sort().values
    assert torch.allclose(result, torch.linalg.eigvalsh(Q))
    assert view.title(STATE) == "lily minus tom, ben"


def test_eigenvectors_are_named_from_the_outside_in(view):
    names = view.eigenvectors(STATE)
    assert len(names) == 8
    assert names[0].startswith("P1  λ = +")
    assert names[4].startswith("N1  λ = -")


def test_contexts_are_of_the_chosen_eigenvector(view):
    first, last = (view.contexts_page(replace(STATE, number=n)) for n in (0, 4))
    assert first != last
    assert first.count("<details>") > 4
    assert all(value > 0 for value in map(float, re.findall(r"<b>([^<]+)</b>", first)))
    assert all(value < 0 for value in map(float, re.findall(r"<b>([^<]+)</b>", last)))


def test_the_text_is_coloured_by_what_feeds_each_eigenvector(view):
    """The sum over all tokens is the eigenvector's activation, biases aside."""
    page = view.fed_page(STATE)
    spectrum = view.spectrum(STATE).outermost(4)
    ids = view.model.ids(STATE.prompt)
    n = view.model.trace(ids).layers[0].mlp_input[-1]
    values = [float(value) for value in re.findall(r"<b>([^<]+)</b>", page)]
    assert np.allclose(values, spectrum.activations(n), rtol=0.006)
    assert page.count("[ate]") == 8
    assert [name for name in view.eigenvectors(STATE) if name not in page] == []


def test_attention_is_that_of_the_head(view):
    figure = view.attention_figure(replace(STATE, head=2))
    ids = view.model.ids(STATE.prompt)
    assert np.allclose(figure.data[0].z, view.model.trace(ids).layers[0].pattern[2])
    assert figure.layout.yaxis.ticktext[-1] == "ate"


@pytest.mark.parametrize(("attention", "lowest"), [("softmax", 0), ("bilinear", -1)])
def test_only_patterns_that_can_be_negative_are_drawn_as_if_they_could(attention, lowest):
    scale = make(attention=attention).attention_figure(STATE).data[0]
    assert scale.zmin == lowest * scale.zmax
    assert attention == "bilinear" or scale.zmax == 1


def ngrams(view) -> str:
    return sections_html(view.panels[0].reading(STATE).sections(), "ngrams")


def test_tables_of_ngrams(view):
    page = ngrams(view)
    assert page.count("<table>") == 2 + 4
    assert "before lily" in page
    assert "N-grams of lily minus tom, ben" in page
    assert "head 3" in page


def test_a_model_with_norms_is_read_too():
    view = make(norm="rms", n_layers=2)
    assert ngrams(view).count("<table>") == 2 + 4
    _, likely, figure = view.prediction(STATE)
    assert len(likely) == 8
    assert figure is not None
    assert view.contexts_page(STATE).count("<details>") > 4


def test_an_mlp_that_is_not_a_tensor_leaves_the_rest():
    view = make(mlp="relu")
    assert view.spectrum_picture(STATE) is None
    assert view.eigenvectors(STATE) == []
    assert "has no gate" in view.contexts_page(STATE)
    page = ngrams(view)
    assert page.count("<table>") == 2
    assert "has no gate" in page
    note, likely, figure = view.prediction(STATE)
    assert "has no gate" in note
    assert "<table" in note
    assert (len(likely), figure) == (8, None)


def test_later_layers_are_read_when_they_are_asked_for():
    view = make(n_layers=2)
    assert list(view._index_of) == []
    assert view.contexts_page(replace(STATE, layer=1)) != view.contexts_page(STATE)
    assert list(view._index_of) == [1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"token": "lilly"},
            "token: expected a single token of the vocabulary; .*the nearest are lily",
        ),
        ({"minus": ("<script>",)}, "minus: expected a single token of the vocabulary"),
        ({"next_token": "nothing at all"}, "next_token: expected a single token"),
        ({"layer": 1}, "layer: 1 is not a whole number from 0 to 0"),
        ({"head": 4}, "head: 4 is not a whole number from 0 to 3"),
        ({"number": 8}, "number: 8 is not a whole number from 0 to 7"),
        ({"prompt": "  "}, "prompt: .*holds no token that the model knows"),
        ({"prompt": "once " * 30}, "prompt: .*has 30 tokens, expected up to 12"),
        ({"prompt": "a" * 2001}, "prompt: 2,001 letters are too many, up to 2,000"),
    ],
)
def test_a_state_that_the_model_has_not(view, changes, message):
    with pytest.raises(StateError, match=message):
        view.checked(replace(STATE, **changes))


def test_words_that_the_model_knows_need_no_notice(view):
    assert prompt_notice(view.model, "once lily ate") == ""


def test_unknown_words_are_said(view):
    page = prompt_notice(view.model, "once <i>zebra ate <i>zebra")
    assert "Not in the vocabulary, and read as [UNK]: &lt;i&gt;zebra." in page
    words = " ".join(f"zebra{letter}" for letter in "abcdefghij")
    assert "zebraa, zebrab" in prompt_notice(view.model, words)
    assert "and 2 more" in prompt_notice(view.model, words)


@needs_chrome
def test_a_language_model_in_the_browser(language_site, browser):
    with visiting(browser) as visit:
        page = visit.open(language_site, "#parts .main-svg")
        token = page.get_by_label("The next token")
        token.fill("kit")
        page.get_by_role("option", name="kite").click()
        title = "document.querySelector('#spectrum .gtitle').textContent"
        visit.wait(f"{title} === 'Spectrum of kite'")
        minus = page.get_by_label("minus the mean of")
        minus.fill("dol")
        page.get_by_role("option", name="doll").click()
        visit.wait(f"{title} === 'Spectrum of kite minus doll'")
        visit.wait("location.search.includes('token=kite&minus=doll')")
        token.fill("zebra")
        token.press("Enter")
        page.wait_for_selector("text=expected a single token of the vocabulary")
        assert token.input_value() == "kite"
        page.locator("#eigenvector label").nth(4).click()
        visit.wait("document.querySelector('#contexts h3').textContent.startsWith('N1')")
        page.locator("#prompt textarea").fill("<b>lily</b> ate")
        visit.wait("location.search.includes('prompt=%3Cb')")
        visit.wait("document.querySelector('#prompt-notice').innerText.includes('<b>lily</b>')")
        with page.expect_download() as download:
            page.locator("#reading-ngrams .save").first.click()
        assert (
            download.value.suggested_filename == "ngrams-N-grams-of-kite-minus-doll-before-kite.csv"
        )
        page.reload()
        page.wait_for_selector("#spectrum .gtitle")
        visit.wait(f"{title} === 'Spectrum of kite minus doll'")
        assert page.locator("#prompt textarea").input_value() == "<b>lily</b> ate"
        page.set_viewport_size({"width": 390, "height": 900})
        page.wait_for_timeout(300)
        visit.fits()

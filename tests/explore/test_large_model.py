"""The screen of a model without tensors opens on its flow, and hides absent parts."""

import gradio as gr
import pytest

from bilens.explore.language import LanguageView, language_screen
from bilens.residual import ResidualModel
from tests.families import tiny
from tests.language import small_corpus


@pytest.fixture(scope="module")
def screen():
    corpus = small_corpus()
    model = tiny("llama")
    model.resize_token_embeddings(len(corpus.tokenizer))
    with gr.Blocks():
        return language_screen(LanguageView(ResidualModel(model, corpus.tokenizer), corpus))


def shown(updates):
    return {getattr(c, "elem_id", None) for c in updates}


def test_the_flow_comes_first_and_what_needs_a_tensor_is_hidden(screen):
    updates = screen.on_change(None, *values(screen, ""))
    assert "flow" in shown(updates)
    assert "contexts" not in shown(updates)
    assert not screen.view.panels
    names = {getattr(output, "elem_id", None) for output in screen.outputs}
    assert {"flow", "attention"} <= names
    assert not names & {"spectrum", "parts", "fed"}
    # A token and others to subtract change nothing there, so they have no controls.
    assert not {"token", "minus"} & screen.controls.keys()
    assert {"layer", "head"} <= screen.controls.keys()


def test_a_step_back_is_complete(screen):
    asked = values(screen, "flow_token=lily&head=1")
    state = screen.on_change(screen.view.start, *asked)[screen.seen]
    assert (state.flow_token, state.head) == ("lily", 1)
    assert screen.on_change(state, *asked) == {}


def values(screen, query):
    fields = screen.on_address(query)
    return [fields[c.component].get("value") for c in screen.controls.values()]

"""The screen of a model without tensors opens on its flow, and hides absent parts."""

import gradio as gr
import pytest

from bilens.explore.language import LanguageView
from bilens.explore.language_screen import language_screen
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
    steps = list(screen.address_steps(""))
    # The controls come before anything is computed, so that Back restores them at once.
    assert screen.controls["flow_prompt"].component in steps[0]
    assert "flow" in shown(steps[1])
    assert "contexts" not in shown(s for step in steps for s in step)
    assert not screen.view.panels
    names = {getattr(output, "elem_id", None) for output in screen.outputs}
    assert {"flow", "attention"} <= names
    assert not names & {"spectrum", "parts", "fed"}


def test_a_step_back_is_complete(screen):
    updates = screen.on_address("flow_token=lily&head=1")
    assert updates[screen.controls["flow_token"].component]["value"] == "lily"
    assert updates[screen.seen].head == 1
    assert screen.on_change(updates[screen.seen], *_values(screen, updates[screen.seen])) == {}


def _values(screen, state):
    return [c.write(getattr(state, name)).get("value") for name, c in screen.controls.items()]

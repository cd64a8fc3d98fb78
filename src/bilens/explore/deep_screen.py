"""The screen of a classifier of several layers: controls, figures, and what changes what."""

from html import escape
from typing import Any

from bilens.explore.deep import DeepState, DeepView
from bilens.explore.gradio_import import gradio as gr
from bilens.explore.layout import facts_html, heading, html
from bilens.explore.plots import picture, plot_of
from bilens.explore.screen import Screen
from bilens.explore.sketchpad import sketchpad

__all__ = ["deep_screen"]

TOGGLE = """
element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-node]");
  if (!button) return;
  const node = button.dataset.node;
  const opened = props.value.split(" ").filter(Boolean);
  // Closing a node closes all below it.
  const others = opened.filter((name) => name !== node && !name.startsWith(node + "."));
  props.value = (opened.includes(node) ? others : [...opened, node]).join(" ");
  trigger("input");
});
"""


def deep_screen(view: DeepView) -> Screen[DeepState]:
    """Lay the screen out inside of a `gr.Blocks`.

    Args:
        view: the classifier, read.
    """
    screen = Screen(view)
    html("facts", facts_html(view.facts))
    _tree(view, screen)
    _input(view, screen)
    screen.connect()
    return screen


def _tree(view: DeepView, screen: Screen[DeepState]) -> None:
    heading(
        "The tree of a logit",
        "Every eigenvector of a layer is a direction in the layer below, with eigenvectors of its "
        "own, down to the pixels. Press one to see what it branches into. λ is its eigenvalue: "
        "blue is positive, red negative, for pixels as well. Effective is the eigenvalue of the "
        "whole path, which says how much it can weigh. On the right stand the strongest paths, "
        "with the test images that each eigenvector reacts to most.",
    )
    screen.choice("output", view.names, label="Class")
    with gr.Row():
        with gr.Column(scale=3, min_width=320):
            branches = html(
                "branches",
                " ".join(view.start.opened),
                html_template='${branches}<p class="bilens-refused" role="alert">${message}</p>',
                branches="",
                message="",
                js_on_load=TOGGLE,
            )
        with gr.Column(scale=4, min_width=320):
            tree = picture("tree")

    def drawn(state: DeepState) -> list[Any]:
        figure = view.tree_picture(state)
        return [plot_of(figure, "tree") if figure else None]

    screen.control(
        "opened",
        branches,
        read=lambda text: tuple(str(text).split()),
        write=lambda opened: {"value": " ".join(opened)},
        say=lambda text: {"message": escape(text)},
    )
    screen.part(
        "output opened", [branches], lambda state: [gr.update(branches=view.tree_html(state))]
    )
    screen.part("output", [tree], drawn)


def _input(view: DeepView, screen: Screen[DeepState]) -> None:
    heading(
        "One image, taken apart",
        "Each logit is a sum over the eigenvectors of the last layer; the bold number is what one "
        "of them adds, blue where it raises the logit and red where it lowers it. What it looks "
        "for is a sum over eigenvectors of the layer below: the pictures above the number are "
        "those that weigh most for this image, each with its share. Rest is what all others add.",
    )
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            sketchpad(screen, view.data)
        with gr.Column(scale=5, min_width=320):
            explanation = picture("explanation")
    heading("How many paths it takes")
    kept = gr.Slider(
        1,
        view.found,
        value=view.start.kept,
        step=1,
        label="Strongest paths kept, over all classes",
        elem_id="kept",
    )
    screen.control("kept", kept)
    with gr.Row():
        with gr.Column(min_width=320):
            logits = picture("logits")
        with gr.Column(min_width=320):
            picture("paths", view.paths_picture())
    screen.part(
        "input",
        [explanation],
        lambda state: [plot_of(view.explanation_figure(state), "explanation")],
    )
    screen.part("kept input", [logits], lambda state: [plot_of(view.input_figure(state), "logits")])

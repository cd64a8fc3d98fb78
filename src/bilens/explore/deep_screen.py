"""The screen of a classifier of several layers: controls, figures, and what changes what."""

from collections.abc import Callable
from html import escape
from typing import Any

from bilens.explore.deep import DeepState, DeepView
from bilens.explore.gradio_import import gradio as gr
from bilens.explore.layout import facts_html, heading, html, note_html
from bilens.explore.plots import picture, plot_of
from bilens.explore.screen import Screen
from bilens.explore.sketchpad import sketchpad

__all__ = ["deep_screen"]

# What was pressed keeps the focus when the page is drawn anew.
PRESSED = """
const press = (button) => {
  const node = button.dataset.node;
  const value = changed(props.value.split(" ").filter(Boolean), node).join(" ");
  if (value === props.value) return;
  props.value = value;
  trigger("input");
  new MutationObserver((_, seen) => {
    element.querySelector(`[data-node="${node}"]`)?.focus({ preventScroll: true });
    seen.disconnect();
  }).observe(element, { childList: true, subtree: true });
};
element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-node]");
  if (button) press(button);
});
element.addEventListener("keydown", (event) => {
  const button = event.target.closest("g[data-node]");
  if (!button || !["Enter", " "].includes(event.key)) return;
  event.preventDefault();
  press(button);
});
"""
TOGGLE = """
// Closing a node closes all below it.
const changed = (opened, node) => {
  const others = opened.filter((name) => name !== node && !name.startsWith(node + "."));
  return opened.includes(node) ? others : [...opened, node];
};
"""
# A step back in a walk forgets what came after it, and a logit starts anew.
STEP = """
const depth = props.depth + ".";
const changed = (walk, node) => {
  if (node.startsWith(depth)) return [node];
  return walk.includes(node) ? walk.slice(0, walk.indexOf(node) + 1) : [...walk, node];
};
"""


def deep_screen(view: DeepView) -> Screen[DeepState]:
    """Lay the screen out inside a `gr.Blocks`.

    Args:
        view: the classifier, read.
    """
    screen = Screen(view)
    html("facts", facts_html(view.facts))
    _bonds(view, screen)
    _tree(view, screen)
    _input(view, screen)
    for panel in view.panels:
        panel.lay_out(screen)
    screen.connect()
    return screen


def _nodes(
    screen: Screen[DeepState], field: str, names: str, show: Callable[[DeepState], str], **how: Any
) -> None:
    """Lay out HTML whose pressed nodes are a field of the state, joined by spaces."""
    component = html(
        field,
        " ".join(getattr(screen.view.start, field)),
        html_template='${page}<p class="bilens-refused" role="alert">${message}</p>',
        page="",
        message="",
        **how,
    )
    screen.control(
        field,
        component,
        read=lambda text: tuple(str(text).split()),
        write=lambda nodes: {"value": " ".join(nodes)},
        say=lambda text: {"message": escape(text)},
    )
    screen.part(names, [component], lambda state: [gr.update(page=show(state))])


def _bonds(view: DeepView, screen: Screen[DeepState]) -> None:
    bonds = view.bonds
    heading(
        "The few directions that it uses",
        "What one layer hands to the next passes through a bond, and the model uses few directions "
        "of it, here turned so that few products are large, and numbered by share of its squared "
        "norm over the training images; in a report made with --metric weights they have others. "
        "The drawing shows the products of two directions that make up most of a logit, and those "
        "that make up most of these, down to the pixels: blue adds and red takes away, a "
        "percentage is the share of what it adds to, and one line instead of two is a square. "
        "Pixels of a direction are blue where they go with it and red where they go against it; "
        "one behind the first layer shows the test images where it is largest (+) and smallest "
        "(−). Press a direction to look at it, and walk on from there.",
    )
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            kept = gr.Slider(
                0,
                bonds.most,
                value=view.start.directions,
                step=1,
                label="Directions kept at each bond; 0 for as few as a report keeps",
                elem_id="directions",
            )
            text = html("directions-text")
        with gr.Column(scale=3, min_width=320):
            curve = picture("directions-curve")
    screen.control("directions", kept)
    _nodes(
        screen,
        "walk",
        "directions walk",
        lambda state: bonds.page(state.directions, state.walk),
        js_on_load=STEP + PRESSED,
        depth=bonds.depth,
    )
    names = {"ends": bonds.ends, "made": bonds.made, "used": bonds.used}
    with gr.Row():
        plots = []
        for name in names:
            with gr.Column(min_width=320):
                plots.append(picture(name))

    def figures(state: DeepState) -> list[Any]:
        found = [show(state.directions, state.walk) for show in names.values()]
        return [
            gr.update(value=figure and plot_of(figure, name), visible=figure is not None)
            for name, figure in zip(names, found, strict=True)
        ]

    screen.part("directions walk", plots, figures)
    screen.part(
        "directions",
        [text, curve],
        lambda state: [
            note_html(bonds.text(state.directions)),
            plot_of(bonds.curve(state.directions), "directions-curve"),
        ],
    )


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
            _nodes(screen, "opened", "output opened", view.tree_html, js_on_load=TOGGLE + PRESSED)
        with gr.Column(scale=4, min_width=320):
            tree = picture("tree")

    def drawn(state: DeepState) -> list[Any]:
        figure = view.tree_picture(state)
        return [plot_of(figure, "tree") if figure else None]

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

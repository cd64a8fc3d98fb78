"""The screen of a classifier of one layer: its controls, its figures, and what changes what."""

from typing import Any

from bilens.explore.gradio_import import gradio as gr
from bilens.explore.images import BY, ImageState, ImageView
from bilens.explore.layout import facts_html, heading, html, note_html
from bilens.explore.plots import picture, plot_of
from bilens.explore.screen import Screen
from bilens.explore.sketchpad import sketchpad

__all__ = ["image_screen"]

CHOICES = {
    "class": "a class",
    "difference": "one class minus another",
    "component": "a component of the SVD",
}


def image_screen(view: ImageView) -> Screen[ImageState]:
    """Lay the screen out inside a `gr.Blocks`.

    Args:
        view: the classifier, read.
    """
    screen = Screen(view)
    html("facts", facts_html(view.facts))
    _direction(view, screen)
    _kept(view, screen)
    _input(view, screen)
    for panel in view.panels:
        panel.lay_out(screen)
    screen.connect()
    return screen


def _direction(view: ImageView, screen: Screen[ImageState]) -> None:
    start = view.start
    components = [
        (f"{number + 1} (σ = {value:.3g})", number)
        for number, value in enumerate(view.svd.values.tolist())
    ]
    heading(
        "A direction and its eigenvectors",
        "The logit of a class, the difference of two, or another direction in the logits is "
        "exactly a sum of activations λ (v·x)², one for each eigenvector v. P1, P2, ... have a "
        "positive eigenvalue λ and only ever raise it; N1, N2, ... have a negative one and only "
        "ever lower it. Blue pixels of an eigenvector are positive, red ones negative, each "
        "picture on its own scale; beside it stand the three test images that it reacts to most.",
    )
    with gr.Row():
        by = gr.Radio(
            [(CHOICES[name], name) for name in BY],
            value=start.by,
            label="Direction",
            min_width=320,
        )
        screen.control("by", by)
        output = screen.choice("output", view.names, label="Class")
        minus = screen.choice("minus", view.names, label="Minus", visible=False)
        component = screen.choice("component", components, label="Component", visible=False)
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            spectrum, weights = picture("spectrum"), picture("direction")
        with gr.Column(scale=5, min_width=320):
            vectors = picture("eigenvectors")

    def controls(state: ImageState) -> list[Any]:
        return [
            gr.update(visible=state.by != "component"),
            gr.update(visible=state.by == "difference"),
            gr.update(visible=state.by == "component"),
        ]

    def figures(state: ImageState) -> list[Any]:
        eigenvalues, eigenvectors = view.direction_figures(state)
        bars = view.weights_figure(state)
        return [
            plot_of(eigenvalues, "spectrum"),
            plot_of(eigenvectors, "eigenvectors"),
            gr.update(value=bars and plot_of(bars, "direction"), visible=bars is not None),
        ]

    screen.part("by", [output, minus, component], controls)
    screen.part("by output minus component", [spectrum, vectors, weights], figures)


def _kept(view: ImageView, screen: Screen[ImageState]) -> None:
    heading("How many eigenvectors it takes")
    kept = gr.Slider(
        1,
        view.reading.spectrum.k,
        value=view.start.kept,
        step=1,
        label="Eigenvectors kept of each class",
        elem_id="kept",
    )
    text, curve = html("accuracy-text"), picture("accuracy")
    screen.control("kept", kept)
    screen.part(
        "kept",
        [text, curve],
        lambda state: [
            note_html(view.accuracy_text(state)),
            plot_of(view.curve_figure(state), "accuracy"),
        ],
    )


def _input(view: ImageView, screen: Screen[ImageState]) -> None:
    heading(
        "One image, taken apart",
        "One row for each of the three highest logits: the eigenvectors that move it most for this "
        "image, and by how much. Rest is what all others that are kept add.",
    )
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            sketchpad(screen, view.data)
        with gr.Column(scale=5, min_width=320):
            logits, explanation = picture("logits"), picture("explanation")

    def figures(state: ImageState) -> list[Any]:
        bars, parts = view.input_figures(state)
        return [plot_of(bars, "logits"), plot_of(parts, "explanation")]

    screen.part("kept input", [logits, explanation], figures)

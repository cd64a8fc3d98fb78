"""The screen of a classifier of one layer: its controls, its figures, and what changes what."""

from dataclasses import replace
from typing import Any

from bilens.explore.address import write_address
from bilens.explore.framework import gradio as gr
from bilens.explore.images import BY, ImageState, ImageView
from bilens.explore.ink import test_number
from bilens.explore.input_panel import InputPanel
from bilens.explore.plots import plot_of
from bilens.explore.wiring import QUIET, address_bar, facts_html, guarded, picture, restored

__all__ = ["ImageScreen"]

CHOICES = {
    "class": "a class",
    "difference": "one class minus another",
    "component": "a component of the SVD",
}


class ImageScreen:
    """Lays itself out inside of a `gr.Blocks`; its handlers take the values of the controls.

    Args:
        view: the classifier, read.
    """

    def __init__(self, view: ImageView) -> None:
        self.view = view
        gr.HTML(facts_html(view.facts), apply_default_css=False)
        self._lay_out_direction()
        self._lay_out_kept()
        self._lay_out_input()
        self.query = address_bar()
        self.controls = [
            *(self.by, self.output, self.minus, self.component),
            *(self.kept, self.panel.source),
        ]
        self._connect()

    def _lay_out_direction(self) -> None:
        view, start = self.view, self.view.start
        classes = [(name, number) for number, name in enumerate(view.names)]
        components = [
            (f"{number + 1} (σ = {value:.3g})", number)
            for number, value in enumerate(view.svd.values.tolist())
        ]
        gr.Markdown("## A direction and its eigenvectors")
        with gr.Row():
            self.by = gr.Radio(
                [(CHOICES[name], name) for name in BY],
                value=start.by,
                label="Direction",
                min_width=320,
            )
            self.output = gr.Dropdown(classes, value=start.output, label="Class", min_width=120)
            self.minus = gr.Dropdown(
                classes, value=start.minus, label="Minus", visible=False, min_width=120
            )
            self.component = gr.Dropdown(
                components, value=start.component, label="Component", visible=False, min_width=120
            )
        with gr.Row():
            with gr.Column(scale=2, min_width=280):
                self.spectrum, self.direction = picture("spectrum"), picture("direction")
            with gr.Column(scale=5, min_width=320):
                self.vectors = picture("eigenvectors")

    def _lay_out_kept(self) -> None:
        gr.Markdown("## How many eigenvectors it takes")
        self.kept = gr.Slider(
            1,
            self.view.reading.spectrum.k,
            value=self.view.start.kept,
            step=1,
            label="Eigenvectors kept of each class",
            elem_id="kept",
        )
        self.accuracy = gr.Markdown(elem_id="accuracy-text")
        self.curve = picture("accuracy")

    def _lay_out_input(self) -> None:
        gr.Markdown("## One image, taken apart")
        with gr.Row():
            with gr.Column(scale=2, min_width=280):
                self.panel = InputPanel(self.view.data, self.view.start.input)
            with gr.Column(scale=5, min_width=320):
                self.logits, self.explanation = picture("logits"), picture("explanation")

    def _connect(self) -> None:
        choice = [self.by, self.output, self.minus, self.component]
        figures = [self.spectrum, self.vectors, self.direction]
        cut = [self.accuracy, self.curve]
        apart = [self.logits, self.explanation]
        gr.on(
            [self.by.input, self.output.input, self.minus.input, self.component.input],
            guarded(self.on_direction),
            self.controls,
            [*choice, *figures, self.query],
            **QUIET,
        )
        self.kept.input(guarded(self.on_kept), self.controls, [*cut, *apart, self.query], **QUIET)
        self.panel.connect(self.on_input, self.controls, [*apart, self.panel.source, self.query])
        everything = [*choice, *figures, self.kept, *cut, *apart, self.panel.source]
        everything += [self.panel.number, self.query]
        gr.on(None, self.on_load, None, everything, **QUIET)

    def on_direction(self, *values: Any) -> list[Any]:
        """Another direction: its controls, its figures, the address."""
        state = self._asked(values)
        return [*self._choice(state), *self._figures(state), self._address(state)]

    def on_kept(self, *values: Any) -> list[Any]:
        """Another number of eigenvectors: accuracy, logits, the address."""
        state = self._asked(values)
        return [*self._cut(state), *self._apart(state), self._address(state)]

    def on_input(self, source: str, *values: Any) -> list[Any]:
        """Another input: logits, what makes them, the address."""
        state = self.view.checked(replace(self._asked(values), input=source))
        return [*self._apart(state), state.input, self._address(state)]

    def on_load(self, request: gr.Request) -> list[Any]:
        """What the page's address asks for."""
        state = restored(self.view.start, self.view.checked, request)
        return [
            *self._choice(state),
            *self._figures(state),
            state.kept,
            *self._cut(state),
            *self._apart(state),
            state.input,
            test_number(state.input) or 0,
            self._address(state),
        ]

    def _asked(self, values: tuple[Any, ...]) -> ImageState:
        return self.view.checked(ImageState(*values))

    def _address(self, state: ImageState) -> str:
        return write_address(state, self.view.start)

    def _choice(self, state: ImageState) -> list[Any]:
        """The controls of the direction; those that do not matter are hidden."""
        return [
            state.by,
            gr.update(value=state.output, visible=state.by != "component"),
            gr.update(value=state.minus, visible=state.by == "difference"),
            gr.update(value=state.component, visible=state.by == "component"),
        ]

    def _figures(self, state: ImageState) -> list[Any]:
        spectrum, vectors = self.view.direction_figures(state)
        weights = self.view.weights_figure(state)
        return [
            plot_of(spectrum, "spectrum"),
            plot_of(vectors, "eigenvectors"),
            gr.update(value=weights and plot_of(weights, "direction"), visible=weights is not None),
        ]

    def _cut(self, state: ImageState) -> list[Any]:
        return [
            self.view.accuracy_text(state),
            plot_of(self.view.curve_figure(state), "accuracy"),
        ]

    def _apart(self, state: ImageState) -> list[Any]:
        logits, explanation = self.view.input_figures(state)
        return [plot_of(logits, "logits"), plot_of(explanation, "explanation")]

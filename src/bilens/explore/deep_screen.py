"""The screen of a classifier of several layers: controls, figures, and what changes what."""

from dataclasses import replace
from typing import Any

from bilens.explore.address import write_address
from bilens.explore.deep import DeepState, DeepView
from bilens.explore.framework import gradio as gr
from bilens.explore.ink import test_number
from bilens.explore.input_panel import InputPanel
from bilens.explore.plots import plot_of
from bilens.explore.wiring import QUIET, address_bar, facts_html, guarded, picture, restored

__all__ = ["DeepScreen"]

HAND_OVER = """
element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-node]");
  if (button) trigger("click", { node: button.dataset.node });
});
"""


class DeepScreen:
    """Lays itself out inside of a `gr.Blocks`; its handlers take the values of the controls.

    Args:
        view: the classifier, read.
    """

    def __init__(self, view: DeepView) -> None:
        self.view = view
        gr.HTML(facts_html(view.facts), apply_default_css=False)
        gr.Markdown(
            "## The tree of a logit\n"
            "Every eigenvector of a layer is a direction in the layer below, with eigenvectors of "
            "its own, down to the pixels. Click one to see what it branches into."
        )
        classes = [(name, number) for number, name in enumerate(view.names)]
        self.output = gr.Dropdown(classes, value=view.start.output, label="Class")
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                self.branches = gr.HTML(
                    elem_id="branches", js_on_load=HAND_OVER, apply_default_css=False
                )
            with gr.Column(scale=4, min_width=320):
                self.tree = picture("tree")
        gr.Markdown("## How many paths it takes")
        self.kept = gr.Slider(
            1,
            view.found,
            value=view.start.kept,
            step=1,
            label="Strongest paths kept, over all classes",
            elem_id="kept",
        )
        with gr.Row():
            with gr.Column(scale=2, min_width=280):
                self.panel = InputPanel(view.data, view.start.input)
            with gr.Column(scale=5, min_width=320):
                self.logits, self.paths = picture("logits"), picture("paths")
        self.opened = gr.State(view.start.opened)
        self.query = address_bar()
        self.controls = [self.output, self.opened, self.kept, self.panel.source]
        self._connect()

    def _connect(self) -> None:
        self.output.input(
            guarded(self.on_class),
            self.controls,
            [self.branches, self.opened, self.tree, self.query],
            **QUIET,
        )
        # Each click opens or closes something: none may be left out.
        self.branches.click(
            guarded(self.on_node),
            self.controls,
            [self.branches, self.opened, self.query],
            **{**QUIET, "trigger_mode": "multiple"},
        )
        self.kept.input(guarded(self.on_kept), self.controls, [self.logits, self.query], **QUIET)
        self.panel.connect(
            self.on_input, self.controls, [self.logits, self.panel.source, self.query]
        )
        everything = [*self.controls, self.branches, self.tree, self.logits, self.paths]
        everything += [self.panel.number, self.query]
        gr.on(None, self.on_load, None, everything, **QUIET)

    def on_class(self, *values: Any) -> list[Any]:
        """Another class: its tree with the first branch open, its picture, the address."""
        state = replace(self._asked(values), opened=self.view.start.opened)
        return [self.view.tree_html(state), state.opened, self._tree(state), self._address(state)]

    def on_node(self, event: gr.EventData, *values: Any) -> list[Any]:
        """A click on a node opens or closes it."""
        state = self.view.toggled(self._asked(values), str(event.node))
        return [self.view.tree_html(state), state.opened, self._address(state)]

    def on_kept(self, *values: Any) -> list[Any]:
        """Another number of paths: logits, the address."""
        state = self._asked(values)
        return [self._logits(state), self._address(state)]

    def on_input(self, source: str, *values: Any) -> list[Any]:
        """Another input: logits, the address."""
        state = self.view.checked(replace(self._asked(values), input=source))
        return [self._logits(state), state.input, self._address(state)]

    def on_load(self, request: gr.Request) -> list[Any]:
        """What the page's address asks for."""
        state = restored(self.view.start, self.view.checked, request)
        return [
            *(state.output, state.opened, state.kept, state.input),
            self.view.tree_html(state),
            self._tree(state),
            self._logits(state),
            plot_of(self.view.paths_picture(), "paths"),
            test_number(state.input) or 0,
            self._address(state),
        ]

    def _asked(self, values: tuple[Any, ...]) -> DeepState:
        output, opened, kept, source = values
        return self.view.checked(DeepState(output, tuple(opened), kept, source))

    def _address(self, state: DeepState) -> str:
        return write_address(state, self.view.start)

    def _tree(self, state: DeepState) -> Any:
        figure = self.view.tree_picture(state)
        return plot_of(figure, "tree") if figure else None

    def _logits(self, state: DeepState) -> Any:
        return plot_of(self.view.input_figure(state), "logits")

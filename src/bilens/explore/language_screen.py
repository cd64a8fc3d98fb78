"""The screen of a language model: its controls, its figures, and what changes what."""

from typing import Any

from bilens.explore.address import write_address
from bilens.explore.framework import gradio as gr
from bilens.explore.language import LanguageState, LanguageView
from bilens.explore.plots import plot_of
from bilens.explore.wiring import QUIET, address_bar, facts_html, guarded, picture, restored

__all__ = ["LanguageScreen"]


class LanguageScreen:
    """Lays itself out inside of a `gr.Blocks`; its handlers take the values of the controls.

    Args:
        view: the model, read.
    """

    def __init__(self, view: LanguageView) -> None:
        self.view = view
        gr.HTML(facts_html(view.facts), apply_default_css=False)
        self._lay_out_direction()
        self._lay_out_prompt()
        self.query = address_bar()
        self.controls = [
            *(self.token, self.minus, self.layer),
            *(self.number, self.prompt, self.asked),
        ]
        self._connect()

    def _lay_out_direction(self) -> None:
        view, start = self.view, self.view.start
        gr.Markdown("## A direction and its eigenvectors")
        with gr.Row():
            self.token = gr.Dropdown(
                view.names, value=start.token, label="The next token", min_width=200
            )
            self.minus = gr.Dropdown(
                view.names,
                value=list(start.minus),
                multiselect=True,
                label="minus the mean of",
                scale=3,
                min_width=280,
            )
            self.layer = gr.Slider(
                0,
                max(1, view.model.n_layers - 1),
                value=0,
                step=1,
                label="Layer",
                visible=view.model.n_layers > 1,
            )
        with gr.Row():
            with gr.Column(scale=2, min_width=280):
                self.spectrum = picture("spectrum")
            with gr.Column(scale=5, min_width=320):
                self.number = gr.Radio([], label="Eigenvector", elem_id="eigenvector")
                self.contexts = gr.HTML(elem_id="contexts", apply_default_css=False)
        gr.Markdown("## N-grams, from the weights alone")
        self.ngrams = gr.HTML(elem_id="ngrams", apply_default_css=False)

    def _lay_out_prompt(self) -> None:
        gr.Markdown("## One prediction, taken apart")
        self.prompt = gr.Textbox(
            value=self.view.start.prompt, label="A text", elem_id="prompt", lines=2, max_lines=4
        )
        self.seen = gr.State(self.view.start.prompt)
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                self.table = gr.HTML(elem_id="next", apply_default_css=False)
            with gr.Column(scale=4, min_width=320):
                # What somebody chose; the control also shows the most likely token.
                self.asked = gr.State("")
                self.chosen = gr.Dropdown(
                    self.view.names, value=None, label="Next token whose logit is split"
                )
                self.parts = picture("parts")

    def _connect(self) -> None:
        about = [self.spectrum, self.number, self.contexts, self.ngrams]
        said = [self.table, self.chosen, self.asked, self.parts]
        gr.on(
            [self.token.input, self.minus.input, self.layer.input],
            guarded(self.on_direction),
            self.controls,
            [*about, self.query],
            **QUIET,
        )
        self.number.input(
            guarded(self.on_number), self.controls, [self.contexts, self.query], **QUIET
        )
        # `input` leaves out what is pasted; `change` also comes when the page itself sets the text.
        self.prompt.change(
            guarded(self.on_prompt),
            [self.seen, *self.controls],
            [self.seen, *said, self.query],
            **QUIET,
        )
        self.chosen.input(
            guarded(self.on_chosen), [self.chosen, *self.controls], [*said, self.query], **QUIET
        )
        everything = [self.token, self.minus, self.layer, self.prompt, self.seen]
        everything += [*about, *said, self.query]
        gr.on(None, self.on_load, None, everything, **QUIET)

    def on_direction(self, *values: Any) -> list[Any]:
        """Another direction: its spectrum, contexts and n-grams, the address."""
        token, minus, layer, _, *others = values
        state = self._asked((token, minus, layer, 0, *others))
        return [*self._about(state), self._address(state)]

    def on_number(self, *values: Any) -> list[Any]:
        """Another eigenvector: its contexts, the address."""
        state = self._asked(values)
        return [self.view.contexts_page(state), self._address(state)]

    def on_prompt(self, seen: str, *values: Any) -> list[Any]:
        """Another text: its most likely next token taken apart, the address."""
        *others, _ = values
        state = self._asked((*others, ""))
        if state.prompt == seen:
            return [gr.skip()] * 6
        return [state.prompt, *self._said(state), self._address(state)]

    def on_chosen(self, chosen: str, *values: Any) -> list[Any]:
        """Another next token of the same text."""
        *others, _ = values
        state = self._asked((*others, chosen))
        return [*self._said(state), self._address(state)]

    def on_load(self, request: gr.Request) -> list[Any]:
        """What the page's address asks for."""
        state = restored(self.view.start, self.view.checked, request)
        return [
            *(state.token, list(state.minus), state.layer, state.prompt, state.prompt),
            *self._about(state),
            *self._said(state),
            self._address(state),
        ]

    def _asked(self, values: tuple[Any, ...]) -> LanguageState:
        token, minus, layer, number, prompt, chosen = values
        return self.view.checked(
            LanguageState(token, tuple(minus), layer, number or 0, prompt, chosen or "")
        )

    def _address(self, state: LanguageState) -> str:
        return write_address(state, self.view.start)

    def _about(self, state: LanguageState) -> list[Any]:
        choices = [(name, i) for i, name in enumerate(self.view.eigenvectors(state))]
        figure = self.view.spectrum_picture(state)
        return [
            gr.update(value=figure and plot_of(figure, "spectrum"), visible=figure is not None),
            gr.update(choices=choices, value=state.number, visible=bool(choices)),
            self.view.contexts_page(state),
            self.view.ngram_page(state),
        ]

    def _said(self, state: LanguageState) -> list[Any]:
        table, likely, figure = self.view.prediction(state)
        chosen = state.chosen or (likely[0] if likely else None)
        return [
            table,
            gr.update(value=chosen, visible=bool(likely)),
            state.chosen,
            gr.update(value=figure and plot_of(figure, "parts"), visible=figure is not None),
        ]

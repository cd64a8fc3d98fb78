"""The screen of a language model: its controls, its figures, and the effects of the controls."""

from typing import Any

from bilens.explore.edits import edit_screen
from bilens.explore.flows import flow_screen
from bilens.explore.language import LanguageState, LanguageView
from bilens.explore.layout import heading, html, picture, plot_of, prompt_notice
from bilens.explore.readings import lay_out
from bilens.explore.screen import Screen
from bilens.lazy_imports import gradio as gr
from bilens.read.language.names import in_words


def language_screen(view: LanguageView) -> Screen[LanguageState]:
    """Lay the screen out inside a `gr.Blocks`.

    Args:
        view: the model, read.
    """
    # A flow is made for any model; eigenvectors are those of tensors only.
    parts = (_direction, _prompt, _flow) if view.is_bilinear else (_flow, _texts)
    return lay_out(view, view.facts, *parts, _edits)


def _flow(view: LanguageView, screen: Screen[LanguageState]) -> None:
    flow_screen(view.flows, screen)


def _edits(view: LanguageView, screen: Screen[LanguageState]) -> None:
    edit_screen(view.edits, screen)


def _direction(view: LanguageView, screen: Screen[LanguageState]) -> None:
    heading(
        "A direction and its eigenvectors",
        "What the MLP adds to the logit of a token, or to its difference from others, is a sum of "
        "squares, one for each eigenvector. P1, P2, ... have a positive eigenvalue λ and only ever "
        "raise it; N1, N2, ... only ever lower it. Below the list are the texts in which the "
        "chosen one is most active, and how much; the next token is predicted at the one in "
        "brackets. Tokens in blue make the number larger, those in red smaller.",
    )
    _tokens(view, screen)
    direction = "token minus layer"
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            screen.picture("spectrum", direction, view.spectrum_picture)
        with gr.Column(scale=5, min_width=320):
            number = gr.Radio([], label="Eigenvector", elem_id="eigenvector")
            screen.content("contexts", f"{direction} number", view.contexts_page)

    def names(state: LanguageState) -> list[Any]:
        choices = [(name, i) for i, name in enumerate(view.eigenvectors(state))]
        return [gr.update(choices=choices, value=state.number, visible=bool(choices))]

    screen.control("number", number)
    screen.part(direction, [number], names)


def _tokens(view: LanguageView, screen: Screen[LanguageState]) -> None:
    """Lay out the choice of a token, of others to subtract, and of a layer."""
    names = [(in_words(name), name) for name in view.choices]
    with gr.Row():
        screen.choice("token", names, label="The next token")
        minus = gr.Dropdown(
            names,
            value=list(view.start.minus),
            multiselect=True,
            allow_custom_value=True,
            label="minus the mean of",
            scale=3,
            min_width=280,
        )
        _layer(view, screen)
    screen.control("minus", minus, read=tuple, write=lambda names: {"value": list(names)})


def _layer(view: LanguageView, screen: Screen[LanguageState]) -> None:
    last = view.model.n_layers - 1
    layer = gr.Slider(0, max(1, last), value=0, step=1, label="Layer", visible=last > 0)
    screen.control("layer", layer)


def _texts(view: LanguageView, screen: Screen[LanguageState]) -> None:
    """Lay out the attention in a text, which every model has."""
    heading("Attention in a text", "Each row is a token, and shows the tokens that it attends to.")
    with gr.Row():
        _text(view, screen)
        _layer(view, screen)
        _head(view, screen)
    screen.picture("attention", "prompt layer head", view.attention_figure)


def _text(view: LanguageView, screen: Screen[LanguageState]) -> None:
    prompt = gr.Textbox(
        value=view.start.prompt, label="A text", elem_id="prompt", lines=2, max_lines=4
    )
    # `input` leaves out what is pasted.
    screen.control("prompt", prompt, event="change")


def _head(view: LanguageView, screen: Screen[LanguageState]) -> None:
    heads = view.model.n_heads
    head = gr.Slider(0, max(1, heads - 1), value=0, step=1, label="Head", visible=heads > 1)
    screen.control("head", head)


def _prompt(view: LanguageView, screen: Screen[LanguageState]) -> None:
    heading("One prediction, taken apart")
    _text(view, screen)
    notice = html("prompt-notice")
    with gr.Row():
        with gr.Column(scale=3, min_width=320):
            table = html("next")
        with gr.Column(scale=4, min_width=320):
            likely = [
                ("the most likely one", ""),
                *((in_words(name), name) for name in view.choices),
            ]
            next_token = screen.choice("next_token", likely, label="Next token that is split")
            parts = picture("parts")

    heading(
        "The text, token by token",
        "On the left the text once for each eigenvector of the direction above, coloured by what "
        "feeds it at the last token: blue raises what it adds to the logit, the number in bold, "
        "and red lowers it; a line that is opened lists the numbers. On the right where a head of "
        "the layer looks.",
    )
    _head(view, screen)
    with gr.Row():
        with gr.Column(min_width=320):
            screen.content("fed", "prompt token minus layer", view.fed_page)
        with gr.Column(min_width=320):
            screen.picture("attention", "prompt layer head", view.attention_figure)

    def prediction(state: LanguageState) -> list[Any]:
        page, _, figure = view.prediction(state)
        bars = figure and plot_of(figure, "parts")
        return [
            prompt_notice(view.model, state.prompt),
            page,
            gr.update(visible=figure is not None),
            gr.update(value=bars, visible=figure is not None),
        ]

    screen.part("prompt next_token", [notice, table, next_token, parts], prediction)

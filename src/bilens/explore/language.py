"""Views of a language model: functions from a state to figures and tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Int
from torch import Tensor

from bilens.data import Corpus
from bilens.errors import NotBilinearError
from bilens.explore.flows import (
    FIELDS,
    MOST_PERCENT,
    EditView,
    FlowOf,
    FlowView,
    edit_screen,
    flow_screen,
)
from bilens.explore.readings import PanelView, lay_out
from bilens.explore.screen import (
    Screen,
    StateError,
    check_ranges,
    check_tokens,
    heading,
    html,
    note_html,
    picture,
    plot_of,
    prompt_notice,
    said_of,
)
from bilens.lazy_imports import gradio as gr
from bilens.read.flow.contrast import Target
from bilens.read.flow.graph import first_texts
from bilens.read.language import (
    Context,
    ContextIndex,
    FoundContext,
    LogitTerms,
    TokenDirection,
    contribution,
    example_directions,
    model_facts,
    split_by_eigenvectors,
    split_logits,
    token_names,
)
from bilens.read.language.names import in_words
from bilens.read.language.reading import context_line
from bilens.read.summary import LARGE_VOCABULARY, example_prompt, is_bilinear
from bilens.reading import ContextLine, ContextList, Table, signed
from bilens.registry import Analysis, analysis
from bilens.report import contexts_html, heat_figure, spectrum_figure, summands_figure, table_html
from bilens.residual import ResidualModel
from bilens.tensor import Spectrum

PLACES = 40_000
"""Places of the validation texts that contexts are looked up in."""

FREQUENT = 500
"""Tokens that skip-trigrams are made of: all pairs of a large vocabulary take seconds."""

OUTERMOST, CONTEXTS, NGRAMS, NEXT, NAMED = 4, 8, 10, 8, 8
LONGEST_PROMPT = 2000
PAGE_FIELDS = {name: name for name in ("token", "minus", "layer", "prompt")}
"""Settings that the whole page has."""
NEXT_CAPTION = "The most likely next tokens, by path"


@dataclass(frozen=True)
class LanguageState:
    """State of the screen.

    Attributes:
        token: the predicted one.
        minus: tokens whose mean is subtracted.
        layer: number of the block.
        number: which of the outermost eigenvectors' contexts are shown.
        head: number of the head whose attention in the text is shown.
        prompt: the text whose next token is split.
        next_token: the next token whose logit is split; empty for the most likely one.
        flow_prompt: the text whose flow is shown.
        flow_token: its next token; empty for the most likely one, minus the next likely one.
        flow_minus: tokens whose mean is subtracted.
        flow_against: a second text, or several; empty for the flow of one text.
        flow_replace: words and their replacements in a second text.
        flow_mean: take the mean embedding as the second run.
        flow_target: the number whose change is split.
        removed: names of the nodes of the flow that are removed from the running model.
        lookup: whether texts are searched for contexts of these nodes.
        edited: names of heads and eigenvectors of the flow that are scaled in the weights.
        edit_percent: how much of them is kept.
        edit_prompt: another text that the edited model is tried on.
    """

    token: str
    minus: tuple[str, ...] = ()
    layer: int = 0
    number: int = 0
    head: int = 0
    prompt: str = ""
    next_token: str = ""
    flow_prompt: str = ""
    flow_token: str = ""
    flow_minus: tuple[str, ...] = ()
    flow_against: str = ""
    flow_replace: str = ""
    flow_mean: bool = False
    flow_target: Target = "logit"
    removed: tuple[str, ...] = ()
    lookup: bool = False
    edited: tuple[str, ...] = ()
    edit_percent: int = 0
    edit_prompt: str = ""

    @property
    def flow(self) -> FlowOf:
        """The text and the logit whose flow is shown."""
        return FlowOf(*(getattr(self, name) for name in FIELDS.split()))


class LanguageView(PanelView):
    """A language model read once, and the views of each state.

    Args:
        model: any; eigenvectors and logits by path take bilinear MLPs.
        corpus: texts in its tokens.
        save_to: folder for edited models; None for none.
        added: further analyses, each with a panel.
    """

    def __init__(
        self,
        model: ResidualModel,
        corpus: Corpus,
        save_to: Path | None = None,
        added: Sequence[Analysis] = (),
    ) -> None:
        self.corpus = corpus
        self.names = token_names(model, torch.arange(model.vocab_size))
        self.is_bilinear = is_bilinear(model)
        self.is_large = model.vocab_size > LARGE_VOCABULARY
        first, split = example_prompt(model, corpus)
        direction = split or example_directions(model, corpus)[0]
        self.flows = FlowView(model, first, list(first_texts(corpus)))
        self.edits = EditView(self.flows, save_to)
        self.start = LanguageState(
            direction.token,
            direction.minus,
            prompt=first,
            flow_prompt=self.flows.start,
            flow_token=split.token if split else "",
            flow_minus=split.minus if split else (),
        )
        positions = model.parts.positions or model.parts.hidden_positions
        # All pairs of a large vocabulary would take minutes a head.
        fixed = {"among": self.frequent, "position": 1 if positions else None}
        # N-grams are those of one layer: of a deep model they say little, and take half a minute.
        first_panels = [analysis("ngrams")] if self.is_bilinear or model.n_layers == 1 else []
        self.add_panels(first_panels, [corpus], PAGE_FIELDS, fixed, {"k": NGRAMS})
        self.add_panels(added, [corpus], PAGE_FIELDS, fixed)

    @property
    def choices(self) -> list[str]:
        """Tokens that lists offer: browsers take long over lists of a large vocabulary."""
        if not self.is_large:
            return self.names
        start = [self.start.token, *self.start.minus]
        return [*start, *(self.names[number] for number in self.frequent)]

    @property
    def model(self) -> ResidualModel:
        """The model, for this thread."""
        return self.flows.model

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """A name and a value each."""
        return model_facts(self.model, self.corpus)

    def checked(self, state: LanguageState) -> LanguageState:
        """Return the state, if it fits the model.

        Raises:
            StateError: it has no such token, layer or eigenvector, or cannot read the prompt.
        """
        split = filter(None, [state.next_token])
        check_tokens(self.model, token=[state.token], minus=state.minus, next_token=split)
        eigenvectors = min(2 * OUTERMOST, self.model.d_model)
        check_ranges(
            state,
            layer=(0, self.model.n_layers - 1),
            number=(0, eigenvectors - 1),
            head=(0, self.model.n_heads - 1),
            edit_percent=(0, MOST_PERCENT),
        )
        if len(state.prompt) > LONGEST_PROMPT:
            raise StateError(
                "prompt",
                f"{len(state.prompt):,} letters are too many, up to {LONGEST_PROMPT:,} are read",
            )
        with said_of("prompt", "prompt="):
            self.model.ids(state.prompt)
        self.flows.check(state.flow)
        if state.edit_prompt:
            with said_of("edit_prompt", "prompt="):
                self.model.ids(state.edit_prompt)
        return state

    def index(self, layer: int) -> ContextIndex:
        """Texts with the inputs of the layer's MLP, run once."""
        if layer not in self._index_of:
            rows = (row["input_ids"] for row in self.corpus.validation)
            length = len(self.corpus.validation[0]["input_ids"])
            texts = islice(rows, max(1, PLACES // length))
            self._index_of[layer] = ContextIndex(self.model, texts, layer=layer)
        return self._index_of[layer]

    @cached_property
    def _index_of(self) -> dict[int, ContextIndex]:
        return {}

    @cached_property
    def frequent(self) -> list[int]:
        """The most frequent tokens of the texts, the most frequent first."""
        ids = self.corpus.validation[:200]["input_ids"].flatten()
        counts = torch.bincount(ids, minlength=len(self.names))
        return counts.argsort(descending=True)[:FREQUENT].tolist()

    def spectrum(self, state: LanguageState) -> Spectrum:
        """All eigenvectors of the direction.

        Raises:
            NotBilinearError: the layer's MLP is not a tensor.
        """
        return self._spectrum(state.token, state.minus, state.layer)

    @lru_cache(maxsize=8)  # noqa: B019  a view lives as long as its app
    def _spectrum(self, token: str, minus: tuple[str, ...], layer: int) -> Spectrum:
        direction = TokenDirection(token, minus).vector(self.model)
        return self.model.mlp(layer).interaction(direction).eigh()

    def _outermost(self, state: LanguageState) -> tuple[Spectrum | None, str]:
        """Return the eigenvectors that have names, or the reason for their absence, as HTML."""
        try:
            return self.spectrum(state).outermost(OUTERMOST), ""
        except NotBilinearError as error:
            return None, note_html(str(error))

    def title(self, state: LanguageState) -> str:
        """Return the name of the direction."""
        return str(TokenDirection(state.token, state.minus))

    def spectrum_picture(self, state: LanguageState) -> go.Figure | None:
        """Draw the eigenvalues of the direction; None if the MLP is not a tensor."""
        try:
            return spectrum_figure(self.spectrum(state), title=f"Spectrum of {self.title(state)}")
        except NotBilinearError:
            return None

    def eigenvectors(self, state: LanguageState) -> list[str]:
        """Return the names of the outermost eigenvectors; empty if the MLP is not a tensor."""
        outermost, _ = self._outermost(state)
        values = [] if outermost is None else outermost.values.tolist()
        signs = ["P" if value > 0 else "N" for value in values]
        return [
            f"{sign}{signs[: i + 1].count(sign)}  λ = {signed(value)}"
            for i, (sign, value) in enumerate(zip(signs, values, strict=True))
        ]

    def contexts_page(self, state: LanguageState) -> str:
        """Return the texts in which the eigenvector is most active, coloured by contribution."""
        spectrum, note = self._outermost(state)
        if spectrum is None:
            return note
        selected = spectrum.select([state.number])
        (contexts,) = self.index(state.layer).top_contexts(selected, CONTEXTS)
        lines = [self._line(selected, 0, context, state.layer) for context in contexts]
        return contexts_html(ContextList(self.eigenvectors(state)[state.number], lines))

    def attention_figure(self, state: LanguageState) -> go.Figure:
        """Draw the head's pattern: from each token, a row, to itself and the earlier ones."""
        ids = self.model.ids(state.prompt)
        pattern = self.model.trace(ids).layers[state.layer].pattern[state.head]
        names = [in_words(name) for name in token_names(self.model, ids)]
        return heat_figure(
            pattern,
            names,
            names,
            title=f"Attention of head {state.head} in layer {state.layer}",
            across="attends to",
            down="from",
            shares=self.model.parts.attention == "softmax",
        )

    def fed_page(self, state: LanguageState) -> str:
        """Return the text, coloured by its contributions to each eigenvector at its end."""
        spectrum, note = self._outermost(state)
        if spectrum is None:
            return note
        ids = self.model.ids(state.prompt)
        place = Context(ids, len(ids) - 1, 0.0)
        return "".join(
            contexts_html(ContextList(name, [self._line(spectrum, number, place, state.layer)]))
            for number, name in enumerate(self.eigenvectors(state))
        )

    def _line(self, spectrum: Spectrum, number: int, place: Context, layer: int) -> ContextLine:
        parts = contribution(self.model, spectrum, number, place, layer=layer)
        context = replace(place, activation=parts.total())
        return context_line(self.model, FoundContext(context, parts))

    def prediction(self, state: LanguageState) -> tuple[str, list[str], go.Figure | None]:
        """Return the most likely next tokens by path, their names, and a token by eigenvectors."""
        terms = split_logits(self.model, self.model.ids(state.prompt))
        logits = terms.total()
        best = logits.topk(min(NEXT, len(logits))).indices
        frame = self._by_path(terms, logits, best)
        likely = token_names(self.model, best)
        token = state.next_token or likely[0]
        table = table_html(Table(frame, NEXT_CAPTION, {"probability": ".1%"}), "next-token")
        try:
            parts = split_by_eigenvectors(terms, token, k=NAMED)
        except NotBilinearError as error:
            return table + note_html(str(error)), likely, None
        summands = [
            *zip(parts.sources, parts.residual.tolist(), strict=True),
            *(
                (f"MLP, {number}. of λ = {signed(value, '.2g')}", active)
                for number, (value, active) in enumerate(
                    zip(parts.eigenvalues.tolist(), parts.activations.tolist(), strict=True), 1
                )
            ),
            ("MLP, all others", parts.remainder),
        ]
        names, values = zip(*summands, strict=True)
        return (table, likely, summands_figure(names, values, title=f"The logit of {token}"))

    def _by_path(self, terms: LogitTerms, logits: Tensor, best: Int[Tensor, " n"]) -> pd.DataFrame:
        residual = terms.residual[:, best].tolist()
        paths = dict(zip(terms.sources, residual, strict=True))
        return pd.DataFrame(
            {
                "token": token_names(self.model, best),
                "probability": logits.softmax(0)[best].tolist(),
                "logit": logits[best].tolist(),
                **paths,
                "MLP": terms.through_mlp()[best].tolist(),
            }
        )


def language_screen(view: LanguageView) -> Screen[LanguageState]:
    """Lay the screen out inside a `gr.Blocks`.

    Args:
        view: the model, read.
    """

    def flows(view: LanguageView, screen: Screen[LanguageState]) -> None:
        flow_screen(view.flows, screen)

    def edits(view: LanguageView, screen: Screen[LanguageState]) -> None:
        edit_screen(view.edits, screen)

    # A flow is made for any model; eigenvectors are those of tensors only.
    parts = (_direction, _prompt, flows) if view.is_bilinear else (flows, _texts)
    return lay_out(view, view.facts, *parts, edits)


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

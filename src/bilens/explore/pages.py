"""Pages of the explorer: panels of the registered analyses, and the flow of a text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from bilens.analyses import find_analysis
from bilens.analysis import Analysis
from bilens.data import Corpus, ImageData
from bilens.data.corpus import first_texts
from bilens.explore.flows import FIELDS, FlowRequest, FlowView, circuit_screen, flow_screen
from bilens.explore.panels import NO_SETTINGS, ReadingPanel, lay_out, with_settings
from bilens.explore.screen import Screen, check_ranges, check_tokens, error_beside, heading
from bilens.explore.sketchpad import sketchpad, unpack_input
from bilens.flows.summary import example_of, is_bilinear
from bilens.language import TokenDirection
from bilens.language.contexts import example_directions
from bilens.language.names import exact_names, in_words
from bilens.language.outputs import model_facts
from bilens.lazy_imports import gradio as gr
from bilens.options import Target
from bilens.sections import Fact
from bilens.tensor import TensorChain
from bilens.transformer import ResidualModel


@dataclass(frozen=True)
class ImageState:
    """State of the page of a classifier: the image that is explained, a text of `sketchpad`."""

    input: str = "test-0"


class ImagePage:
    """The page of a classifier: its analyses, and an image to draw if it has one layer."""

    def __init__(
        self,
        model: TensorChain,
        data: ImageData,
        added: Sequence[Analysis] = (),
        recorded: Mapping[str, Any] = NO_SETTINGS,
    ) -> None:
        self.model, self.data = model, data
        self.is_deep = len(model.layer_tensors()) > 1
        names = ["bonds", "paths"] if self.is_deep else ["explain", "eigenvectors"]
        analyses = [*map(find_analysis, names), *added]
        image = {"image": lambda text: unpack_input(text, data)}
        options: dict[str, Any] = {"readers": image, "recorded": recorded}
        panel = partial(ReadingPanel, lambda: model, [data], {"image": "input"}, **options)
        self.panels = list(map(panel, analyses))
        self.start = with_settings(ImageState(), self.panels)

    def checked(self, state: ImageState) -> ImageState:
        """Return the state, if its input is an image of this data set."""
        unpack_input(state.input, self.data)
        return state

    def screen(self) -> Screen:
        """Lay the page out inside a `gr.Blocks`."""
        facts: list[Fact] = [("images", self.data.name), ("classes", len(self.data.class_names))]
        return lay_out(self, facts, *([] if self.is_deep else [partial(sketchpad, self.data)]))


@dataclass(frozen=True)
class LanguageState:
    """State of the page of a language model.

    Attributes:
        token: the predicted one, of panels on the weights.
        minus: tokens whose mean is subtracted.
        layer: number of the block.
        flow_prompt: of the flow that is shown, as all fields of `FlowRequest` after flow_.
        removed: names of the nodes of the flow that are removed from the running model.
        circuit: find the circuit of the flow's question.
    """

    token: str
    minus: tuple[str, ...] = ()
    layer: int = 0
    flow_prompt: str = ""
    flow_token: str = ""
    flow_minus: tuple[str, ...] = ()
    flow_against: str = ""
    flow_replace: str = ""
    flow_mean: bool = False
    flow_target: Target = "logit"
    removed: tuple[str, ...] = ()
    circuit: bool = False

    @property
    def flow(self) -> FlowRequest:
        """The text and the logit whose flow is shown."""
        return FlowRequest(*(getattr(self, name) for name in FIELDS.split()))


class LanguagePage:
    """The page of a language model: the flow of a text, then panels of the registered analyses."""

    def __init__(
        self, model: ResidualModel, corpus: Corpus | None, added: Sequence[Analysis] = ()
    ) -> None:
        self.corpus = corpus
        example = example_of(model, corpus)
        split = example.direction
        texts = [] if corpus is None else list(first_texts(corpus))
        self.flows = FlowView(model, example.prompt, texts)
        direction = split
        if direction is None and corpus is not None:
            direction = example_directions(model, corpus)[0]
        if direction is None:
            direction = TokenDirection(exact_names(model, [0])[0])
        start = LanguageState(
            direction.token,
            direction.minus,
            flow_prompt=self.flows.start,
            flow_token=split.token if split else "",
            flow_minus=split.minus if split else (),
            flow_against=example.against if self.flows.start else "",
            circuit=self.flows.has_circuit,
        )
        positions = model.modules.positions or model.modules.hidden_positions
        # All pairs of a large vocabulary would take minutes a head.
        fixed = {"among": self.frequent, "position": 1 if positions else None}
        # Eigenvectors and n-grams are those of one layer, whose MLP is a tensor.
        names = ["ngrams", "contexts"] if corpus is not None and is_bilinear(model) else []
        fields = {"token": "token", "minus": "minus", "layer": "layer", "prompt": "flow_prompt"}
        data = [] if corpus is None else [corpus]
        # Several threads read a model of their own, which is asked for each time.
        panel = partial(ReadingPanel, lambda: self.model, data, fields, fixed=fixed)
        self.panels = list(map(panel, [*map(find_analysis, names), *added]))
        self.start = with_settings(start, self.panels)

    @property
    def model(self) -> ResidualModel:
        """The model, for this thread."""
        return self.flows.model

    @cached_property
    def frequent(self) -> list[int]:
        """The most frequent tokens of the texts; without texts, the first of all."""
        if self.corpus is None:
            return list(range(min(500, self.model.vocab_size)))
        ids = self.corpus.validation[:200]["input_ids"].flatten()
        counts = torch.bincount(ids, minlength=self.model.vocab_size)
        return counts.argsort(descending=True)[:500].tolist()

    def checked(self, state: LanguageState) -> LanguageState:
        """Return the state, if it fits the model."""
        check_tokens(self.model, token=[state.token], minus=state.minus)
        with error_beside("minus", "minus "):
            self.model.direction(state.token, state.minus)
        check_ranges(state, layer=(0, self.model.n_layers - 1))
        self.flows.check(state.flow)
        return state

    def screen(self) -> Screen:
        """Lay the page out inside a `gr.Blocks`."""
        used = {field for panel in self.panels for field in panel.page_fields.values()}
        parts = [partial(flow_screen, self.flows), partial(circuit_screen, self.flows)]
        if used & {"token", "minus", "layer"}:
            parts.append(partial(_direction, self))
        return lay_out(self, model_facts(self.model, self.corpus), *parts)


def _direction(page: LanguagePage, screen: Screen) -> None:
    """Lay out the token, the tokens to subtract, and the layer of the panels below."""
    heading("A direction", "The token and the layer that the panels below read, from the weights.")
    offered = list(range(page.model.vocab_size))
    if page.model.vocab_size > 5000:
        # Browsers take long over lists of a large vocabulary.
        offered = page.frequent
    names = [page.start.token, *page.start.minus, *exact_names(page.model, offered)]
    choices = [(in_words(name), name) for name in dict.fromkeys(names)]
    last = page.model.n_layers - 1
    with gr.Row():
        screen.choice("token", choices, label="The next token")
        minus = gr.Dropdown(
            choices,
            value=list(page.start.minus),
            multiselect=True,
            allow_custom_value=True,
            label="minus the mean of",
            scale=3,
            min_width=280,
        )
        layer = gr.Slider(0, max(1, last), value=0, step=1, label="Layer", visible=last > 0)
    screen.control(
        "minus", minus, takes=(list,), read=tuple, write=lambda names: {"value": list(names)}
    )
    screen.control("layer", layer)

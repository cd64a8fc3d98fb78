"""The flow of a text in the explorer, and the circuit of its question."""

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any, get_args

from jaxtyping import Int
from torch import Tensor

from bilens.circuits import circuit
from bilens.circuits.edits import sharing_weights
from bilens.circuits.reading import CircuitReading
from bilens.errors import BilensError
from bilens.explore.panels import sections_html
from bilens.explore.screen import (
    Screen,
    StateError,
    check_sent,
    check_tokens,
    error_beside,
    heading,
    html,
    note_html,
    picture,
    shown_plot,
)
from bilens.flows import FlowReading, remove
from bilens.flows.fitted import fit
from bilens.flows.question import Against, Question, likely_answer, second_run
from bilens.flows.reading import answer_question
from bilens.language import TokenDirection
from bilens.language.names import shown_tokens
from bilens.lazy_imports import gradio as gr
from bilens.options import Target, token_list
from bilens.question_files import written_names
from bilens.sections import signed
from bilens.transformer import ResidualModel


class ThreadModel(threading.local):
    """A model for each thread: modules of its own, which share their weights.

    Reading a run sets hooks on modules, and removing a part of it changes their output. Others who
    run them at that moment must not see this.
    """

    # Python calls this anew in each thread that looks.
    def __init__(self, model: ResidualModel) -> None:
        self.model = sharing_weights(model)


LARGEST, AT_ONCE = 2.5e11, 1e11
"""Layers times tokens times d_model^3: of a flow at most, and of one made before the page opens."""


@dataclass(frozen=True)
class FlowRequest:
    """A text and the logit that is split.

    Attributes:
        prompt: the text; nothing is split if it is empty.
        token: its next token; empty for the most likely one, minus its rival.
        minus: tokens whose mean is subtracted.
        against: a second text of as many tokens, if the change between both is split; of several,
            separated by |, the mean embedding is taken.
        replace: words and their replacements in a second text, as keys=key,was=is.
        mean: take the mean embedding of the texts as the second run.
        target: the number whose change is split.
    """

    prompt: str
    token: str = ""
    minus: tuple[str, ...] = ()
    against: str = ""
    replace: str = ""
    mean: bool = False
    target: Target = "logit"

    @property
    def has_two_runs(self) -> bool:
        """True if a change between two runs is split, false for a logit on one text."""
        return bool(self.against or self.replace or self.mean)


FIELDS = " ".join(f"flow_{field.name}" for field in fields(FlowRequest))
"""Fields of a state that name its flow."""


class FlowView:
    """The flows of a model's logits, on texts that are short enough for it.

    It starts with a text, if that is quick. The mean embedding of `texts` is that of
    `FlowRequest.mean`.
    """

    def __init__(
        self, model: ResidualModel, start: str, texts: Sequence[Int[Tensor, " _"]] = ()
    ) -> None:
        self._models, self.texts = ThreadModel(model), texts
        self.cost = model.n_layers * model.d_model**3
        cost = self.cost * len(model.ids(start)) if start else 0
        # A circuit takes as long as twenty flows.
        self.start, self.has_circuit = start if cost <= AT_ONCE else "", 20 * cost <= AT_ONCE

    @property
    def model(self) -> ResidualModel:
        """The model, for this thread."""
        return self._models.model

    def check(self, request: FlowRequest) -> None:
        """Raise if the text, or a token, is not one for this model."""
        check_tokens(self.model, flow_token=filter(None, [request.token]), flow_minus=request.minus)
        if not request.prompt:
            return
        with error_beside("flow_prompt", "prompt="):
            n = len(self.model.ids(request.prompt))
        with error_beside("flow_replace" if request.replace else "flow_against", "against "):
            second, _ = self.second_run(request)
            if isinstance(second, str):
                self._check_lengths(request, second)
            if second is not None:
                fit(self.model, Question(request.prompt, 0, against=second))
        # The second run decides which tokens are the likeliest.
        with error_beside("flow_minus", "minus "):
            self.direction(request).vector(self.model)
        if request.target not in get_args(Target):
            raise StateError(
                "flow_target", f"{request.target[:40]} is not one of {', '.join(get_args(Target))}"
            )
        if request.target != "logit" and not request.has_two_runs:
            raise StateError("flow_target", "expected a second run, or the logit")
        most = int(LARGEST / self.cost)
        if n > most:
            raise StateError(
                "flow_prompt",
                f"{n} tokens would take minutes: for a model of {self.model.n_layers} layers and "
                f"width {self.model.d_model} up to {most} are split here, `bilens flow` takes more",
            )

    def _check_lengths(self, request: FlowRequest, second: str) -> None:
        """Raise if both texts have other numbers of tokens, in words for either of their boxes."""
        names = [
            shown_tokens(self.model, self.model.ids(text)) for text in (request.prompt, second)
        ]
        if len(names[0]) != len(names[1]):
            first, other = (f"{len(tokens)} tokens |{'|'.join(tokens)}|" for tokens in names)
            raise StateError(
                "flow_replace" if request.replace else "flow_against",
                f"The first text has {first}, the second {other}. The picture waits until both "
                "have as many.",
                others=("flow_prompt",),
            )

    @lru_cache(maxsize=8)  # noqa: B019  a view lives as long as its app
    def direction(self, request: FlowRequest) -> TokenDirection:
        """Return the tokens, the most likely ones if none are given."""
        if request.token:
            return TokenDirection(request.token, request.minus)
        likely = likely_answer(self.model, request.prompt, self.second_run(request)[0])
        return TokenDirection(likely.token, request.minus or likely.minus)

    @lru_cache(maxsize=8)  # noqa: B019
    def second_run(self, request: FlowRequest) -> tuple[Against | None, str]:
        """Return the second run and its name; None if a logit on one text is split."""
        return second_run(
            self.model,
            request.prompt,
            against=request.against,
            mean=request.mean,
            replace=request.replace,
            texts=self.texts,
        )

    @lru_cache(maxsize=8)  # noqa: B019
    def split(self, request: FlowRequest) -> FlowReading:
        """Return the flow with its answer, and the data of its drawing."""
        # With the same prompt, direction and text the nodes have the same numbers, which edits use.
        second, other = self.second_run(request)
        question = Question(
            request.prompt, self.direction(request), (), second, target=request.target
        )
        return answer_question(self.model, question, other, shown=150)

    @lru_cache(maxsize=8)  # noqa: B019
    def circuit(self, request: FlowRequest) -> CircuitReading:
        """Return the circuit of the question."""
        second, _ = self.second_run(request)
        question = Question(
            request.prompt, self.direction(request), (), second, target=request.target
        )
        return circuit(self.model, [question])

    def page(self, request: FlowRequest) -> tuple[str, str]:
        """Return the answer of the flow, as HTML, and its graph, as JSON."""
        if not request.prompt:
            return note_html("Write a text, and press Enter."), ""
        reading = self.split(request)
        page = reading.page
        text = reading.answer
        text += f" Held fixed: {', '.join(page.frozen)}." if page.frozen else ""
        question = f'<h3 class="bilens-question">{escape(reading.title)}</h3>'
        return question + note_html(" ".join([text, *reading.notes])), json.dumps(asdict(page))

    def removed(self, request: FlowRequest, names: tuple[str, ...]) -> str:
        """Return a sentence on the logit after nodes were removed from the running model."""
        if not (request.prompt and names):
            return ""
        reading = self.split(request)
        tokens = reading.flow.tokens
        nodes = [x for x in reading.flow.nodes if x.is_removable and x.name(tokens) in names]
        if not nodes:
            return ""
        value, result = reading.flow.value, remove(self.model, reading.flow, nodes)
        shown = value, value + result.actual, result.actual, result.predicted
        before, after, change, predicted = (signed(x, "#.3g") for x in shown)
        quantity = "The change between the runs" if request.has_two_runs else "The logit"
        return note_html(
            f"{quantity} is {before}, and {after} without {result.part}: a change of {change}. "
            f"The flow through them predicts {predicted}."
        )


def flow_screen(view: FlowView, screen: Screen) -> None:
    """Lay the controls and the graph out; the state has `flow` and its fields, and `removed`."""
    with gr.Row():
        prompt = gr.Textbox(value=view.start, label="A text", elem_id="flow-prompt", min_width=300)
        against = gr.Textbox(
            label="and a second text, of as many tokens",
            placeholder="none: the flow of one text",
            elem_id="flow-against",
            min_width=300,
        )
    with gr.Row():
        token = gr.Textbox(
            label="its next token", placeholder="the likeliest", elem_id="flow-token", min_width=100
        )
        minus = gr.Textbox(
            label="minus others", placeholder="the next likely", elem_id="flow-minus", min_width=100
        )
        button = gr.Button("Show", elem_id="flow-show", min_width=80, scale=0)
    text = html("flow-text")
    graph, script = f'<div class="flow">{_shared("flow.html")}</div>', _shared("flow.js")
    script += Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
    drawing = html("flow", html_template=graph, js_on_load=script, graph="")
    html(
        "flow-note",
        note_html(
            "Enter or Show reads all boxes together. Tokens are written with the space before "
            "them, several with commas between them; several second texts, whose mean is taken, "
            "with | between them. Pin nodes to remove them from the running model."
        ),
    )
    more = gr.Accordion("Other second runs, and probabilities", open=False, elem_id="flow-more")
    with more, gr.Row():
        replace = gr.Textbox(
            label="Words of the text to replace in the second",
            placeholder="keys=key",
            elem_id="flow-replace",
            min_width=150,
        )
        mean = gr.Checkbox(
            label="the mean of all texts as the second", elem_id="flow-mean", min_width=150
        )
        screen.choice(
            "flow_target",
            [(name, name) for name in get_args(Target)],
            label="Number to split",
            elem_id="flow-target",
        )
    note = html("flow-removed")
    screen.part(f"{FIELDS} removed", [note], lambda s: [view.removed(s.flow, s.removed)])

    def drawn(state: Any) -> list[Any]:
        summary, graph = view.page(state.flow)
        return [summary, gr.update(graph=graph)]

    # Each change takes a pass through the model and more: only a finished text is split.
    boxes = {"prompt": prompt, "against": against, "replace": replace, "token": token}
    for name, box in boxes.items():
        screen.control(f"flow_{name}", box, event="submit")
    screen.control("flow_mean", mean)
    screen.control(
        "flow_minus",
        minus,
        takes=(str,),
        read=_minus,
        write=lambda names: {"value": written_names(names)},
        event="submit",
    )
    screen.control(
        "removed",
        drawing,
        takes=(str,),
        read=_names,
        write=lambda names: {"value": json.dumps(names)},
        say=_warn,
        is_typed=False,
    )
    screen.part(FIELDS, [text, drawing], drawn)
    # A circuit that is asked for while texts wait for each other would be of other ones.
    screen.together(f"{FIELDS} circuit", button)


def circuit_screen(view: FlowView, screen: Screen) -> None:
    """Lay out the circuit of the flow's question; the state has `circuit`."""
    heading(
        "The few parts that answer",
        "Heads and MLPs that restore most of the change between the two texts, measured. A large "
        "model takes half a minute.",
    )
    box = gr.Checkbox(view.has_circuit, label="Find the circuit", elem_id="circuit")
    drawing = picture("circuit-plot")
    content = html("circuit-text")

    def drawn(state: Any) -> list[Any]:
        hidden = gr.update(value=None, visible=False)
        if not (state.circuit and state.flow.prompt):
            return [hidden, ""]
        try:
            reading = view.circuit(state.flow)
        except BilensError as error:
            return [hidden, note_html(str(error))]
        figure = shown_plot(reading.plot(), "circuit")
        return [gr.update(value=figure, visible=True), sections_html(reading.sections(), "circuit")]

    screen.control("circuit", box)
    screen.part(f"{FIELDS} circuit", [drawing, content], drawn)


def _minus(names: str) -> tuple[str, ...]:
    """Return the names of the tokens to subtract."""
    with error_beside("flow_minus", ""):
        return token_list(names)


def _names(text: str) -> tuple[str, ...]:
    """Return the names of the nodes that the page asks to remove."""
    try:
        names = json.loads(text or "[]")
    except (ValueError, RecursionError):
        names = None
    check_sent("removed", names, (list,))
    return tuple(names)


def _warn(text: str) -> dict[str, Any]:
    """Say a message over the page, as the drawing has no place for it."""
    if text:
        gr.Warning(escape(text))
    return {}


def _shared(name: str) -> str:
    """Return the text of a file that pages have too."""
    return (Path(__file__).parent.parent / "pages" / name).read_text(encoding="utf-8")

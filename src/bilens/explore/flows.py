"""Flows and edited models in the explorer."""

import json
import threading
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import Any

from bilens.explore.layout import note_html
from bilens.explore.screen import StateError, check_tokens, said_of
from bilens.read.flow import Flow, ablate, flow
from bilens.read.flow.editing import sharing_weights
from bilens.read.flow.figures import flow_data, flow_tree, shown_tokens
from bilens.read.language import TokenDirection, token_names
from bilens.reading import signed
from bilens.residual import ResidualModel


class ThreadModel(threading.local):
    """A model for each thread: modules of its own, which share their weights.

    Reading a run sets hooks on modules, and removing a part of it changes their output. Others who
    run them at that moment must not see this.

    Args:
        model: any.

    Attributes:
        model: the model, for the thread that asks.
    """

    # Python calls this anew in each thread that looks.
    def __init__(self, model: ResidualModel) -> None:
        self.model = sharing_weights(model)


SHOWN = 150
LARGEST, AT_ONCE = 2.5e11, 1e11
"""Layers times tokens times d_model^3 of a flow: at most, and of one made before the page opens."""


@dataclass(frozen=True)
class FlowOf:
    """A text and the logit that is split.

    Attributes:
        prompt: the text; nothing is split if it is empty.
        token: its next token; empty for the most likely one, minus the next likely one.
        minus: tokens whose mean is subtracted.
    """

    prompt: str
    token: str = ""
    minus: tuple[str, ...] = ()


class FlowView:
    """The flows of a model's logits, on texts that are short enough for it.

    Args:
        model: any, with its tokenizer.
        start: a text to begin with, if it is quick.
    """

    def __init__(self, model: ResidualModel, start: str) -> None:
        self._models = ThreadModel(model)
        self.cost = model.n_layers * model.d_model**3
        self.start = start if self.cost * len(model.ids(start)) <= AT_ONCE else ""

    @property
    def model(self) -> ResidualModel:
        """The model, for this thread."""
        return self._models.model

    def check(self, of: FlowOf) -> None:
        """Raise if the text, or a token, is not one for this model.

        Raises:
            StateError: a token is unknown, or the text is empty, unknown or too long.
        """
        check_tokens(self.model, flow_token=filter(None, [of.token]), flow_minus=of.minus)
        if not of.prompt:
            return
        with said_of("flow_prompt", "prompt="):
            n = len(self.model.ids(of.prompt))
        most = int(LARGEST / self.cost)
        if n > most:
            raise StateError(
                "flow_prompt",
                f"{n} tokens would take minutes: for a model of {self.model.n_layers} layers and "
                f"width {self.model.d_model} up to {most} are split here, `bilens flow` takes more",
            )

    @lru_cache(maxsize=8)  # noqa: B019  a view lives as long as its app
    def direction(self, of: FlowOf) -> TokenDirection:
        """Return the tokens, the most likely ones if none are given."""
        if of.token:
            return TokenDirection(of.token, of.minus)
        ids = self.model.ids(of.prompt)
        likely = self.model.logits(ids[None])[0, -1].topk(2).indices
        token, second = token_names(self.model, likely)
        return TokenDirection(token, of.minus or (second,))

    @lru_cache(maxsize=8)  # noqa: B019
    def split(self, of: FlowOf) -> tuple[Flow, dict[str, Any]]:
        """Return the flow, and the data of its drawing."""
        direction = self.direction(of)
        split = flow(self.model, self.model.ids(of.prompt), direction)
        tokens = shown_tokens(self.model, split.ids)
        return split, flow_data(split, tokens, direction=str(direction), k=SHOWN)

    def page(self, of: FlowOf) -> tuple[str, str, str]:
        """Return a sentence on the flow and the tree of its strongest nodes, and its graph."""
        if not of.prompt:
            return note_html("Write a text, and press Enter."), "", ""
        _, data = self.split(of)
        frozen = ", ".join(data["frozen"]) or "nothing"
        value = signed(data["value"], "#.3g")
        text = f"{data['direction']}: {value}. Held fixed on this text: {frozen}."
        return note_html(text), _branches(flow_tree(data)), json.dumps(data)

    def removed(self, of: FlowOf, name: str) -> str:
        """Return a sentence on the logit after a node was removed from the running model."""
        if not (of.prompt and name):
            return ""
        split, data = self.split(of)
        tokens = data["tokens"]
        number = next((i for i, node in enumerate(split.nodes) if node.name(tokens) == name), 0)
        if not number or not split.nodes[number].is_removable:
            return ""
        (result,) = ablate(self.model, split, [number])
        actual, predicted = (signed(x, "#.3g") for x in (result.actual, result.predicted))
        return note_html(
            f"Without {name} the running model changes by {actual}; its flow, with everything else "
            f"held fixed, predicts {predicted}."
        )


def _branches(tree: Any) -> str:
    value, _, name = tree.label.plain.partition(" ")
    sign = "negative" if value.startswith("-") else "positive"
    below = "".join(map(_branches, tree.children))
    inner = f'<b class="{sign}">{value}</b> {escape(name)}' + (f"<ul>{below}</ul>" if below else "")
    return f"<li>{inner}</li>"

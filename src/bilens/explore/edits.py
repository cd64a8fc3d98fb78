"""Edits of the weights by nodes of a flow, their predictions, and their screen."""

import hashlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from bilens.convert import save_model
from bilens.errors import BilensError
from bilens.explore.flows import FIELDS, SHOWN, FlowOf, FlowView
from bilens.explore.layout import heading, html, note_html
from bilens.explore.screen import Screen
from bilens.files import write_json
from bilens.lazy_imports import gradio as gr
from bilens.read.flow import edit, edit_heads
from bilens.read.language import token_names
from bilens.reading import Table, signed
from bilens.report import table_html
from bilens.residual import ResidualModel

NEXT = 6
MOST_PERCENT = 200


class EditView:
    """Copies of a model in which nodes of a flow are scaled in the weights, at every position.

    Args:
        flows: of the model.
        save_to: folder for edited models; None for none.
    """

    def __init__(self, flows: FlowView, save_to: Path | None) -> None:
        self.flows, self.save_to = flows, save_to

    def nodes(self, of: FlowOf) -> dict[str, int]:
        """Return the numbers of the strongest heads and directions among all nodes, by name."""
        if not of.prompt:
            return {}
        split, _ = self.flows.split(of)
        numbers: dict[str, int] = {}
        for number in sorted(range(len(split.nodes)), key=lambda i: -abs(split.nodes[i].flow)):
            node = split.nodes[number]
            if node.kind == "direction":
                numbers.setdefault(node.name(split.tokens), number)
            elif node.kind == "head":
                numbers.setdefault(f"head {node.layer}.{node.number}", number)
        return dict(list(numbers.items())[:SHOWN])

    def _numbers(self, of: FlowOf, names: tuple[str, ...]) -> dict[str, int]:
        """Return the names that are nodes of this flow, and their numbers."""
        places = self.nodes(of)
        return {name: places[name] for name in names if name in places}

    def edited(self, of: FlowOf, names: tuple[str, ...], percent: int) -> ResidualModel:
        """Return the model with nodes scaled; names that are not of this flow are left out.

        Raises:
            BilensError: only a bias that the model has no place for could do it.
        """
        # Nodes of a layer are edited together: one after the other, the second edit would scale
        # the part that it shares with the first once more.
        model, scale = self.flows.model, percent / 100
        split, _ = self.flows.split(of)
        heads: dict[int, list[int]] = defaultdict(list)
        vectors: dict[int, list[Tensor]] = defaultdict(list)
        for number in self._numbers(of, names).values():
            node = split.nodes[number]
            assert node.layer is not None
            if node.kind == "head":
                assert node.number is not None
                heads[node.layer].append(node.number)
            else:
                vectors[node.layer].append(split.vector(number))
        for layer, numbers in heads.items():
            model = edit_heads(model, layer, numbers, scale=scale)
        for layer, rows in vectors.items():
            model = edit(model, layer, torch.stack(rows), scale=scale)
        return model

    def page(self, of: FlowOf, names: tuple[str, ...], percent: int, other: str) -> str:
        """Return the predictions for the flow's text and another, before and after the edit."""
        if not self._numbers(of, names):
            return note_html("Choose heads or directions of the flow above.") if of.prompt else ""
        try:
            edited = self.edited(of, names, percent)
        except BilensError as error:
            return note_html(str(error))
        texts = filter(None, (of.prompt, other))
        shown = (self._compared(edited, of, text, i) for i, text in enumerate(texts))
        return f'<div class="tables">{"".join(shown)}</div>'

    def _compared(self, edited: ResidualModel, of: FlowOf, text: str, number: int) -> str:
        model, direction = self.flows.model, self.flows.direction(of)
        ids = model.ids(text)[None]
        before, after = (m.logits(ids)[0, -1] for m in (model, edited))
        token, minus = model.token(direction.token), [model.token(n) for n in direction.minus]

        def value(logits: Tensor) -> str:
            difference = logits[token] - logits[minus].mean() if minus else logits[token]
            return signed(difference.item(), "#.3g")

        likely = torch.cat([x.topk(min(NEXT, len(x))).indices for x in (before, after)]).unique()
        likely = likely[after[likely].argsort(descending=True)]
        parts = [x.softmax(0)[likely].tolist() for x in (before, after)]
        frame = pd.DataFrame(
            zip(token_names(model, likely), *parts, strict=True),
            columns=["next token", "before", "after"],
        )
        caption = f"“{text}”, {direction}: {value(before)} before, {value(after)} after"
        table = Table(frame, caption, {"before": ".1%", "after": ".1%"})
        return table_html(table, f"edited-{number + 1}")

    def save(self, of: FlowOf, names: tuple[str, ...], percent: int) -> str:
        """Write the edited model as a new folder, and return a note with its name, as HTML."""
        names = tuple(self._numbers(of, names))
        if self.save_to is None or not names:
            return note_html("Nothing is selected, so nothing is saved.")
        record = {
            "prompt": of.prompt,
            "direction": str(self.flows.direction(of)),
            "nodes": names,
            "scale": percent / 100,
        }
        # The same edit has the same name, and no visitor a say in it.
        folder = self.save_to / f"edited-{hashlib.sha256(repr(record).encode()).hexdigest()[:8]}"
        try:
            model = self.edited(of, names, percent)
            save_model(folder, model.model, model.tokenizer)
            write_json(folder / "edit.json", record)
        except BilensError as error:
            return note_html(str(error))
        return note_html(f"Saved as {folder}: {', '.join(names)} at {percent} %.")


def edit_screen(view: EditView, screen: Screen[Any]) -> None:
    """Lay the controls out; the state has `flow`, `edited`, `edit_percent` and `edit_prompt`."""
    heading(
        "The weights, edited",
        "Heads and directions of the flow above, scaled in the weights: the output of a head, and "
        "the input of the MLP along a direction, at every position of every text. The result is "
        "an ordinary model. Below are its predictions.",
    )
    with gr.Row():
        names = gr.Dropdown(
            [],
            multiselect=True,
            label="Heads and directions, the strongest first",
            elem_id="edited",
            scale=3,
            min_width=280,
        )
        percent = gr.Slider(
            0,
            MOST_PERCENT,
            value=0,
            step=10,
            label="Percent kept of them; 0 removes them",
            scale=2,
            min_width=280,
        )
        prompt = gr.Textbox(
            label="Another text to try it on", elem_id="edit-prompt", scale=2, min_width=240
        )
    screen.control(
        "edited",
        names,
        read=lambda values: tuple(values or ()),
        write=lambda values: {"value": list(values)},
    )
    screen.control("edit_percent", percent)
    screen.control("edit_prompt", prompt, event="submit")

    def choices(state: Any) -> list[Any]:
        nodes = view.nodes(state.flow)
        remaining = [name for name in state.edited if name in nodes]
        return [gr.update(choices=list(nodes), value=remaining)]

    screen.part(FIELDS, [names], choices)
    screen.content(
        "edit-page",
        f"{FIELDS} edited edit_percent edit_prompt",
        lambda s: view.page(s.flow, s.edited, s.edit_percent, s.edit_prompt),
    )
    if view.save_to is not None:
        button = gr.Button("Save the edited model", elem_id="edit-save")
        screen.action(
            button.click,
            html("edit-saved"),
            lambda state: view.save(state.flow, state.edited, state.edit_percent),
        )

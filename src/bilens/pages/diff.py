"""The page of a difference of two models: weights by layer, tokens and heads."""

import re
from functools import partial
from typing import Any

import torch

from bilens.figures.plots import heat_figure
from bilens.figures.sheet import Figure
from bilens.flows.both_models import layer_of
from bilens.flows.interval import interval_columns
from bilens.flows.tuning import DiffReading, ModelDiff
from bilens.pages.layout import plot_of, sections_of
from bilens.sections import Picture, Section, Table, by_column, signed

SHOWN, STRONGEST = 30, 10
PLACES = r"\d+|weight|layers|model|h|transformer"
"""Parts of names that are of no kind of weight."""


@sections_of.register
def diff_sections(reading: DiffReading) -> list[Section]:
    """Return the map of weights by layer, and the strongest weights with what they read."""
    frame = reading.frame().head(SHOWN)
    parts = []
    if reading.undone:
        pairs = [x for row in reading.undone for x in row.items()]
        rows = {"weights": [x.weights for _, x in pairs], "chosen by": [by for by, _ in pairs]}
        rows |= interval_columns("lost", [x.lost for _, x in pairs])
        rows |= interval_columns("won", [x.won for _, x in pairs])
        text = (
            "Shares of the change on the texts, with intervals over questions: lost by the tuned "
            "model without some weights, and won by the base model with only these. Flows choose "
            "the strongest, and their rivals as many."
        )
        formats = dict.fromkeys([*rows][2:], ".2f")
        parts.append(Section("What undoing them does", text, [[Table(rows, "", formats)]]))
    if reading.weights:
        layers = reading.models.layers
        table: dict[str, list[Any]] = {
            "weights of": [f"layer {layer}" if layer >= 0 else "no layer" for layer in layers],
            "flow": [*reading.layers().values()],
        }
        if reading.of_weights:
            table |= interval_columns("share", [reading.share(names) for names in layers.values()])
        text = "The flow of each layer's weights, and its share, with an interval over questions."
        if reading.shapley:
            table["Shapley value"] = [*reading.shapley.values()]
            text += (
                " The Shapley value is the mean change over random orders, in runs of the model."
            )
        formats = {**reading.formats, "Shapley value": reading.formats["flow"]}
        parts.append(Section("By layer", text, [[Table(table, "", formats)]]))
    return [
        Section(
            reading.title,
            reading.answer(),
            [[Picture("weights", partial(diff_figure, reading))]] if reading.weights else [],
            reading.facts(),
        ),
        Section(
            "The strongest weights",
            "The flow of each weight, its share of what all weights change, and of one question "
            f"the token at which most of it is read. {len(reading.weights):,} weights differ; "
            f"their flows, with those of tokens and choices, add up to {signed(reading.value)}.",
            [[Table(frame, "", reading.formats)]],
        ),
        *([_inside(reading)] if isinstance(reading, ModelDiff) and reading.weights else []),
        *parts,
        Section(
            "What a share does not say",
            "The flow of a weight is its share of the change, as a Shapley value is. It is not the "
            "effect of undoing this weight alone: single swaps may add up to a small part of the "
            "change, or to a multiple. `--undo` measures what is lost without the strongest ones.",
        ),
    ]


def _inside(reading: ModelDiff) -> Section:
    """Return the flows of the tokens, heads and ranks of a question, the strongest of each."""
    of_tokens = torch.stack([reading.of_tokens, *reading.by_token.values()]).sum(0)
    tokens = [f"{token}@{place}" for place, token in enumerate(reading.tokens)]
    views: dict[str, list[tuple[str, float]]] = {
        "token": [*zip(tokens, of_tokens.tolist(), strict=True)],
        "head": [],
        "rank": [],
    }
    for layer, of_layer in enumerate(reading.heads.tolist()):
        views["head"] += [(f"head.{layer}.{i}", flow) for i, flow in enumerate(of_layer)]
    for weight, of_weight in reading.ranks.items():
        views["rank"] += [(f"{i} of {weight}", flow) for i, flow in enumerate(of_weight.tolist())]
    tables = []
    for name, of_view in views.items():
        rows = sorted((x for x in of_view if x[1]), key=lambda x: -abs(x[1]))[:STRONGEST]
        if rows:
            tables.append([Table(by_column([name, "flow"], rows), f"By {name}", reading.formats)])
    text = (
        f"The {STRONGEST} strongest of each: tokens of the text at which linear maps and "
        "embeddings read, heads in the map that reads their values, and ranks of an adapter."
    )
    return Section("By token, head and rank", text, tables)


@plot_of.register
def diff_figure(reading: DiffReading) -> Figure:
    """Draw the flow of weights by layer and by kind of weight."""
    kinds = list(dict.fromkeys(kind_of(name) for name in reading.weights))
    layers = sorted({layer_of(name) for name in reading.weights})
    flows = torch.zeros(len(kinds), len(layers))
    for name, flow in reading.weights.items():
        flows[kinds.index(kind_of(name)), layers.index(layer_of(name))] += flow
    names = ["none" if layer < 0 else str(layer) for layer in layers]
    return heat_figure(flows, kinds, names, title="", across="layer", down="weight")


def kind_of(name: str) -> str:
    """Return the name of a weight without the numbers of layers and experts."""
    parts = [part for part in name.split(".") if not re.fullmatch(PLACES, part)]
    return ".".join(parts[-2:])

"""The page of a difference of two models: weights by layer, tokens and heads."""

import re
from functools import partial

import torch

from bilens.figures.plots import heat_figure
from bilens.figures.sheet import Figure
from bilens.flows.tuning import ModelDiff, Undone, layer_of
from bilens.pages.layout import plot_of, sections_of
from bilens.sections import Picture, Section, Table

SHOWN = 30
PLACES = r"\d+|weight|layers|model|h|transformer"
"""Parts of names that are of no kind of weight."""


@sections_of.register
def diff_sections(reading: ModelDiff) -> list[Section]:
    """Return the map of weights by layer, and the strongest weights with what they read."""
    frame = reading.frame().head(SHOWN)
    measured = []
    if reading.undone:
        rows = {name: [getattr(row, name) for row in reading.undone] for name in Undone._fields}
        formats = dict.fromkeys(("lost", "won", "lost_by_size"), ".2f")
        text = (
            "Shares of the change on the text: lost by the tuned model without the strongest "
            "weights, won by the base model with only these, and lost without as many weights "
            "whose difference is the largest."
        )
        measured.append(Section("What undoing them does", text, [[Table(rows, "", formats)]]))
    if reading.shapley:
        layers = reading.layers()
        table = {
            "layer": [*reading.shapley],
            "Shapley value": [*reading.shapley.values()],
            "flow": [layers[layer] for layer in reading.shapley],
        }
        text = "The mean change by a layer's weights over random orders, in runs of the model."
        formats = {"Shapley value": "+.3f", "flow": "+.3f"}
        measured.append(Section("Measured by layer", text, [[Table(table, "", formats)]]))
    return [
        Section(
            reading.title,
            reading.answer(),
            [[Picture("weights", partial(diff_figure, reading))]] if reading.weights else [],
            reading.facts(),
        ),
        Section(
            "The strongest weights",
            "The flow of each weight, its share of the change, and the token at which most of it "
            f"is read. {len(reading.weights):,} weights differ; their flows, with those of tokens "
            f"and choices, add up to {reading.value:+.4f}.",
            [[Table(frame, "", reading.formats)]],
        ),
        *measured,
        Section(
            "What a share does not say",
            "The flow of a weight is its share of the change, as a Shapley value is. It is not the "
            "effect of undoing this weight alone: single swaps may add up to a small part of the "
            "change, or to a multiple. `--undo` measures what is lost without the strongest ones.",
        ),
    ]


@plot_of.register
def diff_figure(reading: ModelDiff) -> Figure:
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

"""The page of the lens: which tokens the change of the stream raises, by layer and position."""

from functools import partial

import torch

from bilens.figures.plots import heat_figure
from bilens.figures.sheet import Figure
from bilens.flows.stream_lens import LensReading
from bilens.pages.layout import plot_of, sections_of
from bilens.sections import Picture, Section, Table


@sections_of.register
def lens_sections(reading: LensReading) -> list[Section]:
    """Return the map of tokens, and the cells as a table with the sum of each layer."""
    text = (
        "Each cell is the change of the stream between both texts before a layer, at a position, "
        "carried forward to all logits: the token that it raises most. Colour is the change of "
        f"{reading.difference} by it. The cells of a layer add up to the change of every logit, "
        f"within {reading.error:.0e} of the largest."
    )
    picture = Picture("lens", partial(lens_figure, reading))
    table = Table(reading.frame(), "", reading.formats)
    return [
        Section(reading.title, text, [[picture]], reading.facts()),
        Section("Layer by layer", "", [[table]]),
    ]


@plot_of.register
def lens_figure(reading: LensReading) -> Figure:
    """Draw the token that each cell raises most, the last layer on top."""
    layers = reading.layers[::-1]
    values = torch.full((len(layers), len(reading.tokens)), torch.nan)  # blank: equal streams
    words = [[""] * len(reading.tokens) for _ in layers]
    for cell in reading.cells:
        row = layers.index(cell.layer)
        values[row, cell.position] = cell.answer
        words[row][cell.position] = (cell.raises or ("",))[0]
    # Positions before the first change are left out.
    first = min(cell.position for cell in reading.cells)
    return heat_figure(
        values[:, first:],
        [str(layer) for layer in layers],
        list(reading.tokens[first:]),
        title="",
        across="token",
        down="layer",
        words=[row[first:] for row in words],
    )

import base64
import io
import re

import pytest
import torch
from PIL import Image

from bilens.figures.sheet import svg_of
from bilens.pages import heat_figure

VALUES = torch.tensor([[1.0, -2.0, torch.nan], [0.5, 0.0, 0.25]])


def names(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_blank_cells_are_blank_on_a_page():
    """A palette without transparency made them black."""
    words = [["one", "two", ""], ["three", "four", "five"]]  # so that there is no colour bar
    figure = heat_figure(VALUES, ["a", "b"], ["x", "y", "z"], title="", words=words)
    pictures = re.findall(rb'data:image/png;base64,([^"]*)', svg_of(figure))
    (table,) = [Image.open(io.BytesIO(base64.b64decode(x))).convert("RGBA") for x in pictures]
    width, height = table.size
    blank, drawn = ((x * width // 6, height // 4) for x in (5, 1))
    assert (table.getpixel(blank)[3], table.getpixel(drawn)[3]) == (0, 255)


def test_a_table_keeps_its_numbers_names_and_blanks():
    figure = heat_figure(VALUES, ["a", "<b>"], ['" x"', "$x$", "z"], title="<t>", down="looks")
    axes = figure.axes[0]
    (cells,) = axes.images
    assert cells.get_array().filled(-9).tolist() == [[1, -2, -9], [0.5, 0, 0.25]]
    assert cells.get_clim() == (-2, 2)
    assert cells.cmap(1.0) == pytest.approx((5 / 255, 48 / 255, 97 / 255, 1))
    assert names(axes.yaxis) == ["a", "<b>"]
    assert names(axes.xaxis) == ['" x"', "$x$", "z"]
    top, bottom = axes.get_ylim()[::-1]
    assert top < bottom  # read from the top
    assert (figure.get_suptitle(), axes.get_ylabel()) == ("<t>", "looks")


def test_words_can_be_read_on_their_cells():
    words = [[f"{x:.2f}" for x in row] for row in VALUES[:, :2].tolist()]
    figure = heat_figure(VALUES[:, :2], ["a", "b"], ["x", "y"], title="", words=words)
    shown = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
    assert shown == {"1.00": "#111111", "-2.00": "#fefefe", "0.50": "#111111", "0.00": "#111111"}


def test_many_rows_have_no_names():
    figure = heat_figure(torch.zeros(60, 2), [f"r{i}" for i in range(60)], ["a", "b"], title="")
    assert names(figure.axes[0].yaxis) == []
    assert names(figure.axes[0].xaxis) == ["a", "b"]

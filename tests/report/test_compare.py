"""The page of a comparison: the table, the curves, and text that stays text."""

import numpy as np
import pandas as pd
import pytest

from bilens.report import ComparisonReading, loss_figure, write_report
from bilens.train.language import Comparison


def curve(losses, seed, mlp="swiglu", attention="softmax"):
    number = np.arange(1, len(losses) + 1)
    about = {"mlp": mlp, "attention": attention, "d_hidden": 20, "parameters": 11_000}
    took = {"steps": 10 * number, "tokens": 8e4 * number, "seconds": 5.0 * number}
    return pd.DataFrame({**about, "seed": seed, **took, "loss": losses})


CURVES = [
    curve([4.0, 2.0], 0),
    curve([4.0, 2.0], 1),
    curve([4.0, 3.0, 2.0], 0, "<b>", "bilinear"),
    curve([4.0, 2.75, 2.25], 1, "<b>", "bilinear"),
    curve([4.0, 3.0], 0, "swiglu", "bilinear"),
    curve([4.0, 2.0], 1, "swiglu", "bilinear"),
]
COMPARISON = Comparison("<data>", 2.5, pd.concat(CURVES, ignore_index=True))
SINGLE = Comparison("data", 2.5, CURVES[0])


def test_the_table_gives_steps_tokens_and_seconds_with_ratios_to_the_first():
    reading = ComparisonReading(COMPARISON)
    assert dict(reading.facts())["target"] == 2.5
    (table,) = reading.sections()[0].parts
    assert table.header[3:6] == ["steps", "±", "ratio of steps"]
    assert list(table.rows[0][3:6]) == ["18", "0.0", "1.000"]
    assert list(table.rows[1]) == [
        *("<b>", "bilinear", "11,000", "25", "0.0", "1.429", "200,000", "0.5", "12.5", "1.429"),
        *("2.125", "0"),
    ]
    assert list(table.rows[2][3:10]) == ["", "", "", "", "0.5", "", ""]
    assert table.rows[2][-1] == "1"


def test_a_single_seed_has_no_spread():
    (table,) = ComparisonReading(SINGLE).sections()[0].parts
    assert table.rows[0][3:5] == ("18", "")


@pytest.mark.parametrize("axis", ["steps", "tokens", "seconds"])
def test_each_seed_is_thin_and_the_mean_is_thick(axis):
    figure = loss_figure(COMPARISON, axis)
    thin = [line for line in figure.data if line.line.width == 1]
    thick = [line for line in figure.data if line.line.width > 2]
    assert (len(thin), len(thick)) == (6, 3)
    assert [line.name for line in thick] == [
        "swiglu MLP, softmax attention",
        "&lt;b&gt; MLP, bilinear attention",
        "swiglu MLP, bilinear attention",
    ]
    assert not any(line.showlegend for line in thin)
    assert list(thick[1].y) == [4.0, 2.875, 2.125]
    scale = {"steps": 10, "tokens": 8e4, "seconds": 5.0}[axis]
    assert list(thick[1].x) == [scale, 2 * scale, 3 * scale]
    # Colours tell attentions apart and dashes MLPs.
    looks = [(line.line.color, line.line.dash) for line in thick]
    assert looks[0][1] == looks[2][1] != looks[1][1]
    assert looks[1][0] == looks[2][0] != looks[0][0]
    assert figure.layout.shapes[0].y0 == 2.5
    assert figure.layout.xaxis.title.text == axis


def test_a_single_seed_is_drawn_once():
    assert len(loss_figure(SINGLE, "steps").data) == 1


def test_the_page(tmp_path):
    path = tmp_path / "page.html"
    reading = ComparisonReading(COMPARISON, {"batch_size": "<8>"})
    figures = write_report(path, [reading], title="Comparison")
    assert list(figures) == ["steps", "tokens", "seconds"]
    assert [row["steps"] for row in reading.record()["summary"]][2] is None
    page = path.read_text()
    body = page[page.index("<body>") :]
    assert body.count('class="figure"') == 3
    for text in ("<data>", "<b> ", "<b><", "<8>"):
        assert text not in body.replace("<b>+", "")
    assert "&lt;data&gt;" in body

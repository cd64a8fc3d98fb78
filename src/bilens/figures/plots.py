"""Plots of numbers: curves of accuracy, bars of logits, spectra and matrices."""

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from torch import Tensor

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.figures.canvas import DIVERGING
from bilens.figures.sheet import BLUE, CHART, GREY, LINE, RED, Figure, new_figure, styled
from bilens.tensor import Spectrum

MARKED = 60
"""Most points of a curve that have a mark each."""


@styled
def accuracy_curve(
    counts: Sequence[int],
    accuracies: Sequence[float],
    full: float,
    *,
    unit: str,
    kept_by: str,
    label: str = "the model",
    band: Sequence[tuple[float, float]] = (),
) -> Figure:
    """Draw accuracy against the number of units kept, and a dotted line for the full model's.

    `kept_by` continues the unit's name in the title of the axis, as in "paths kept over all
    classes". `band` has the low and high end of each accuracy.
    """
    title = f"{unit} kept {kept_by}"
    figure, axes = new_figure(alt=f"Test accuracy against the {title}")
    shares = [100 * accuracy for accuracy in accuracies]
    marker = "o" if len(shares) <= MARKED else ""
    axes.plot(list(counts), shares, color=BLUE, marker=marker, markersize=4)
    if band:
        low, high = ([100 * x for x in ends] for ends in zip(*band, strict=True))
        axes.fill_between(list(counts), low, high, color=BLUE, alpha=0.15, linewidth=0)
    axes.axhline(100 * full, linestyle=":", color=GREY)
    axes.annotate(
        f"{label}: {full:.2%}",
        (0, 100 * full),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3),
        textcoords="offset points",
    )
    # The first few units matter most, so the axis is logarithmic.
    count_axis(axes, counts, title)
    axes.set_ylabel("test accuracy (%)")
    # Room for the name above the line.
    axes.margins(y=0.12)
    return figure


def log_axis(axis: Axis) -> None:
    """Let the numbers beside a logarithmic axis be plain text, such as 0.001."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def count_axis(axes: Axes, counts: Sequence[int], title: str) -> None:
    """Make the axis of counts logarithmic, with marks at 1, 2, 5, 10 and so on."""
    axes.set_xscale("log")
    marks = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
    axes.set_xticks([mark for mark in marks if mark <= max(counts)])
    log_axis(axes.xaxis)
    axes.set_xlabel(title)


@checked
def path_figure(by_paths: Sequence[tuple[int, float]], full: float) -> Figure:
    """Plot the test accuracy of the tree pruned to its best k paths, against k."""
    if not by_paths:
        raise BilensError("by_paths is empty, expected at least one point")
    counts, accuracies = zip(*by_paths, strict=True)
    return accuracy_curve(counts, accuracies, full, unit="paths", kept_by="over all classes")


@checked
@styled
def spectrum_figure(spectrum: Spectrum, *, title: str) -> Figure:
    """Draw the eigenvalues of a form from the outside in, up to 20 of either sign."""
    figure, axes = new_figure(width=340, height=260, title=title)
    # Either sign by itself, since most spectra have both.
    values = spectrum.values.detach().cpu().double()
    axes.axhline(0, color=LINE, linewidth=1)
    for color, side in (
        (BLUE, values[values > 0].sort(descending=True).values[:20]),
        (RED, values[values < 0].sort().values[:20]),
    ):
        axes.plot(range(1, len(side) + 1), side.tolist(), color=color, marker="o", markersize=4)
    axes.set_xlabel("rank")
    axes.set_ylabel("eigenvalue")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


@checked
@styled
def heat_figure(
    values: Float[Tensor, "n_rows n_columns"],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    across: str = "",
    down: str = "",
    words: Sequence[Sequence[str]] | None = None,
) -> Figure:
    """Draw positive numbers in blue, negative ones in red, NaN left blank; the first row on top.

    `across` and `down` are titles of the columns and rows. With `words` each cell has its own. More
    than 40 rows or columns have no names.
    """
    if values.shape != (len(rows), len(columns)):
        raise BilensError(
            f"values has shape {tuple(values.shape)}, with {len(rows)} names of rows and "
            f"{len(columns)} of columns; expected one for each"
        )
    entries = values.detach().cpu().double()
    if entries.isinf().any():
        raise BilensError("values holds infinite numbers, expected finite ones, or NaN for none")
    # The same limit on both sides, so that white is zero.
    top = float(entries.nan_to_num(0).abs().max()) or 1.0
    most = 40
    names = [[*side] * (len(side) <= most) for side in (rows, columns)]
    across_of_cell, down_of_cell = 16, 10 + 12 * (len(rows) <= most)
    if words is not None:
        names = [["\n".join(wrap(name, 12)) for name in side] for side in names]
        across_of_cell, down_of_cell = 76, 34
    width = max(CHART, 180 + across_of_cell * len(columns))
    figure, axes = new_figure(width=width, height=140 + down_of_cell * len(rows), title=title)
    cells = axes.imshow(
        entries.numpy(),
        cmap=LinearSegmentedColormap.from_list("values", DIVERGING),
        vmin=-top,
        vmax=top,
        aspect="auto",
    )
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_yticks(range(len(names[0])), names[0])
    # Names stand where they would run into each other.
    room = 0.7 * width / max(1, len(columns))
    stands = words is None and 7.5 * max(map(len, names[1]), default=0) > room
    axes.set_xticks(range(len(names[1])), names[1], rotation=90 if stands else 0)
    axes.set_xlabel(across)
    axes.set_ylabel(down)
    if words is None:
        figure.colorbar(cells, ax=axes, aspect=30, pad=0.02).outline.set_visible(False)
        return figure
    for (row, column), value in np.ndenumerate(entries.numpy()):
        ink = "#fefefe" if abs(value) > 0.6 * top else "#111111"
        look: dict[str, Any] = {"ha": "center", "va": "center", "color": ink}
        text = axes.text(column, row, words[row][column], **look)
        text.set_gid(f"cell-{row}-{column}")
    return figure

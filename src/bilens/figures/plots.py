"""Plots of numbers: curves of accuracy, bars of logits, spectra and matrices."""

from collections.abc import Sequence
from textwrap import wrap

from jaxtyping import Float
from torch import Tensor

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.figures.canvas import BLUE, DIVERGING, GREY, LINE, RED, dress, new_figure
from bilens.lazy_imports import go
from bilens.sections import plotly_text
from bilens.tensor import Spectrum


def accuracy_curve(
    counts: Sequence[int],
    accuracies: Sequence[float],
    full: float,
    *,
    unit: str,
    kept_by: str,
    label: str = "the model",
    beside: str = "top left",
) -> "go.Figure":
    """Draw accuracy against the number of units kept, and a dotted line for the full model's.

    `kept_by` continues the unit's name in the title of the axis, as in "paths kept over all
    classes".
    """
    figure = new_figure()
    figure.add_scatter(
        x=list(counts),
        y=[100 * accuracy for accuracy in accuracies],
        mode="lines+markers",
        line={"color": BLUE, "width": 2},
        hovertemplate=f"%{{x}} {unit}: %{{y:.2f}} %<extra></extra>",
    )
    figure.add_hline(
        y=100 * full,
        line={"dash": "dot", "color": GREY, "width": 1.5},
        opacity=1,
        annotation_text=f"{label}: {full:.2%}",
        annotation_position=beside,
        annotation_xshift=4 if beside.endswith("left") else 0,  # beside the axis, not on it
    )
    # The first few units matter most, so the axis is logarithmic.
    count_axis(figure, counts, f"{unit} kept {kept_by}")
    figure.update_yaxes(title="test accuracy (%)")
    alt = f"Test accuracy against the {unit} kept {kept_by}"
    return dress(figure, height=340, alt=alt).update_layout(showlegend=False)


def count_axis(figure: "go.Figure", counts: Sequence[int], title: str) -> None:
    """Make the axis of counts logarithmic, with marks at 1, 2, 5, 10 and so on."""
    # Plotly's own marks between the powers of 10 are too small to be read.
    marks = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
    ticks = [mark for mark in marks if mark <= max(counts)]
    figure.update_xaxes(title=title, type="log", tickvals=ticks)


@checked
def path_figure(by_paths: Sequence[tuple[int, float]], full: float) -> "go.Figure":
    """Plot the test accuracy of the tree pruned to its best k paths, against k."""
    if not by_paths:
        raise BilensError("by_paths is empty, expected at least one point")
    counts, accuracies = zip(*by_paths, strict=True)
    return accuracy_curve(counts, accuracies, full, unit="paths", kept_by="over all classes")


@checked
def spectrum_figure(spectrum: Spectrum, *, title: str) -> "go.Figure":
    """Draw the eigenvalues of a form from the outside in, up to 20 of either sign."""
    figure = new_figure()
    # Either sign by itself, since most spectra have both.
    values = spectrum.values.detach().cpu().double()
    for name, color, indices in (
        ("positive", BLUE, values[values > 0].sort(descending=True).values[:20]),
        ("negative", RED, values[values < 0].sort().values[:20]),
    ):
        figure.add_scatter(
            x=list(range(1, len(indices) + 1)),
            y=indices.tolist(),
            name=name,
            mode="lines+markers",
            line={"color": color, "width": 1.5},
            marker={"size": 5},
            hovertemplate="%{x}: λ = %{y:.4g}<extra></extra>",
        )
    figure.add_hline(y=0, line={"width": 1, "color": LINE})
    figure.update_xaxes(title="rank")
    figure.update_yaxes(title="eigenvalue")
    dress(figure, height=260, title=plotly_text(title))
    return figure.update_layout(showlegend=False)


@checked
def heat_figure(
    values: Float[Tensor, "n_rows n_columns"],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    across: str = "",
    down: str = "",
    shares: bool = False,
    numbers: bool = False,
) -> "go.Figure":
    """Draw positive numbers in blue, negative ones in red, NaN left blank; the first row on top.

    `across` and `down` are titles of the columns and rows. If all are shares, none below 0, the
    scale is from 0 to 1 instead of as far to either side of 0 as the largest |number|. With
    `numbers` the cells say them.
    """
    if values.shape != (len(rows), len(columns)):
        raise BilensError(
            f"values has shape {tuple(values.shape)}, with {len(rows)} names of rows and "
            f"{len(columns)} of columns; expected one for each"
        )
    entries = values.detach().cpu().double()
    # The same limit on both sides, so that white is zero.
    top = 1.0 if shares else float(entries.nan_to_num(0).abs().max()) or 1.0
    colors = DIVERGING[len(DIVERGING) // 2 :] if shares else DIVERGING
    text = []
    for row in map(plotly_text, rows):
        text.append([f"{row} · {plotly_text(column)}" for column in columns])
    figure = new_figure(
        go.Heatmap(
            z=entries.tolist(),
            zmin=0 if shares else -top,
            zmax=top,
            colorscale=[[i / (len(colors) - 1), color] for i, color in enumerate(colors)],
            # Names may repeat, so that they are labels and no coordinates.
            text=text,
            hovertemplate="%{text}: %{z:.3g}<extra></extra>",
            hoverongaps=False,
            texttemplate="%{z:.2f}" if numbers else None,
            showscale=not numbers,
            xgap=1,
            ygap=1,
            colorbar={"thickness": 10, "outlinewidth": 0, "len": 1},
        )
    )
    named = 40
    for update, names, heading in (
        (figure.update_xaxes, columns, across),
        (figure.update_yaxes, rows, down),
    ):
        # Too many names would be unreadable; the hover text has them all.
        shown = [plotly_text(name) for name in names] if len(names) <= named else []
        if numbers:
            shown = ["<br>".join(map(plotly_text, wrap(name, 12))) for name in names]
        update(title=plotly_text(heading), tickvals=list(range(len(shown))), ticktext=shown)
        update(ticks="", showline=False, automargin=True)
    # Matrices are read from the top.
    figure.update_yaxes(autorange="reversed")
    height = 130 + len(rows) * (34 if numbers else 22 if len(rows) <= named else 10)
    dress(figure, height=height, title=plotly_text(title))
    if numbers:
        # Names have room, or the figure scrolls.
        figure.update_layout(meta={**figure.layout.meta, "least": 120 + 76 * len(columns)})
    return figure

"""Spectra, eigenvectors and matrices."""

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.read import top_inputs
from bilens.read.figures.canvas import Canvas
from bilens.read.figures.style import BLUE, DIVERGING, LINE, RED, dress
from bilens.reading import signed
from bilens.settings import Count
from bilens.tensor import Spectrum

TOP_INPUTS, SHOWN = 3, 20
CELL, LABEL = 1.42, 0.3


@checked
def spectrum_figure(spectrum: Spectrum, *, title: str) -> go.Figure:
    """Draw the eigenvalues of a form from the outside in, up to 20 of either sign."""
    figure = go.Figure()
    values = spectrum.values.detach().cpu().double()
    for name, color, indices in (
        ("positive", BLUE, values[values > 0].sort(descending=True).values[:SHOWN]),
        ("negative", RED, values[values < 0].sort().values[:SHOWN]),
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
    dress(figure, height=260, title=escape(title))
    return figure.update_layout(showlegend=False)


@checked
def eigenvector_figure(
    spectrum: Spectrum,
    x: Float[Tensor, "samples n_in"],
    shape: tuple[int, int],
    *,
    title: str,
    k: Count = 4,
) -> go.Figure:
    """Draw the first k eigenvectors of either sign of a form, with the top inputs of each.

    Positive ones are in the upper row, in the spectrum's order; order it by eigenvalue or by
    mean activation before.

    Raises:
        BilensError: the spectrum is a batch, or its vectors are not images of that shape.
    """
    if spectrum.batch_shape:
        raise BilensError("eigenvector_figure() shows a single form: index the spectrum's batch")
    best = top_inputs(spectrum, x, min(TOP_INPUTS, len(x)))
    aspect = shape[0] / shape[1]
    canvas = Canvas(CELL * k, 2 * (aspect + LABEL), unit=120, title=title)
    for row, (sign, color) in enumerate(((1, BLUE), (-1, RED))):
        members = [item for item in enumerate(spectrum.values.tolist()) if sign * item[1] > 0]
        top = row * (aspect + LABEL)
        for column, (i, value) in enumerate(members[:k]):
            left = column * CELL
            canvas.eigenvector(spectrum.vectors[i], shape, x=left, y=top)
            canvas.thumbnails(x[best[i]], shape, x=left + 1.03, y=top)
            text = f"{'P' if sign > 0 else 'N'}{column + 1}  λ = {signed(value)}"
            canvas.label(text, x=left + 0.5, y=top + aspect + 0.01, color=color)
    return canvas.figure()


ROW_HEIGHT, NARROW = 22, 10
"""Pixels of height of a row: with a name, and with too many rows for names."""
NAMED = 40


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
) -> go.Figure:
    """Draw positive numbers in blue, negative ones in red, NaN left blank; the first row on top.

    `across` and `down` are titles of the columns and rows. If all are shares, none below 0, the
    scale is from 0 to 1 instead of as far to either side of 0 as the largest |number|.

    Raises:
        BilensError: the names are not as many as the rows and columns.
    """
    if values.shape != (len(rows), len(columns)):
        raise BilensError(
            f"values has shape {tuple(values.shape)}, with {len(rows)} names of rows and "
            f"{len(columns)} of columns; expected one for each"
        )
    numbers = values.detach().cpu().double()
    top = 1.0 if shares else float(numbers.nan_to_num(0).abs().max()) or 1.0
    colors = DIVERGING[len(DIVERGING) // 2 :] if shares else DIVERGING
    figure = go.Figure(
        go.Heatmap(
            z=numbers.tolist(),
            zmin=0 if shares else -top,
            zmax=top,
            colorscale=[[i / (len(colors) - 1), color] for i, color in enumerate(colors)],
            # Names may repeat, so that they are labels and no coordinates.
            text=[[f"{escape(row)} · {escape(column)}" for column in columns] for row in rows],
            hovertemplate="%{text}: %{z:.3g}<extra></extra>",
            hoverongaps=False,
            xgap=1,
            ygap=1,
            colorbar={"thickness": 10, "outlinewidth": 0, "len": 1},
        )
    )
    for axis, names, heading in (("xaxis", columns, across), ("yaxis", rows, down)):
        shown = len(names) <= NAMED
        figure.update_layout(
            {
                axis: {
                    "title": escape(heading),
                    "tickvals": list(range(len(names))) if shown else [],
                    "ticktext": [escape(name) for name in names] if shown else [],
                    "ticks": "",
                    "showline": False,
                }
            }
        )
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(automargin=True)
    height = 130 + len(rows) * (ROW_HEIGHT if len(rows) <= NAMED else NARROW)
    return dress(figure, height=height, title=escape(title))

"""A table of numbers with names on both sides, as colours."""

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.report.style import DIVERGING, dress

__all__ = ["heat_figure"]

CELL, NARROW = 22, 10
"""Pixels of height of a row: where each has its name, and where there are too many for that."""
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
    """Positive numbers in blue, negative ones in red, NaN left blank; the first row on top.

    `across` and `down` say what columns and rows are. Where all are shares, none below 0, the
    scale is from 0 to 1 instead of as far to either side of 0 as the largest |number|.

    Raises:
        BilensError: there is not one name for each row and column.
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
    for axis, names, what in (("xaxis", columns, across), ("yaxis", rows, down)):
        shown = len(names) <= NAMED
        figure.update_layout(
            {
                axis: {
                    "title": escape(what),
                    "tickvals": list(range(len(names))) if shown else [],
                    "ticktext": [escape(name) for name in names] if shown else [],
                    "ticks": "",
                    "showline": False,
                }
            }
        )
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(automargin=True)
    height = 130 + len(rows) * (CELL if len(rows) <= NAMED else NARROW)
    return dress(figure, height=height, title=escape(title))

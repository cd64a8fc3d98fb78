"""Spectra and eigenvectors of one class, as in figures 2, 9 and 10 of Pearce et al. 2024."""

from html import escape

import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.read import top_inputs
from bilens.reading import signed
from bilens.report.canvas import Canvas
from bilens.report.style import BLUE, LINE, RED, dress
from bilens.settings import Count
from bilens.tensor import Spectrum

__all__ = ["eigenvector_figure", "spectrum_figure"]

TOP_INPUTS, SHOWN = 3, 20
CELL, LABEL = 1.42, 0.3


@checked
def spectrum_figure(spectrum: Spectrum, *, title: str) -> go.Figure:
    """The eigenvalues of one form from the outside in, up to 20 of either sign."""
    figure = go.Figure()
    values = spectrum.values.detach().cpu().double()
    for name, color, chosen in (
        ("positive", BLUE, values[values > 0].sort(descending=True).values[:SHOWN]),
        ("negative", RED, values[values < 0].sort().values[:SHOWN]),
    ):
        figure.add_scatter(
            x=list(range(1, len(chosen) + 1)),
            y=chosen.tolist(),
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
    """The first k eigenvectors of either sign of one form, each with its top inputs beside it.

    Positive ones stand in the upper row, in the spectrum's order; order it by eigenvalue or by
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

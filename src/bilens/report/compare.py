"""The report of a comparison of architectures: the cost of the target, and loss curves."""

from collections.abc import Sequence
from html import escape
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import plotly.graph_objects as go

from bilens.lazy_imports import pd
from bilens.read.figures.style import BLUE, GREY, RED, dress
from bilens.reading import Section, Table
from bilens.report.page import write_page

if TYPE_CHECKING:  # pandas takes its time to import
    from bilens.train.compare import Comparison

Axis = Literal["steps", "tokens", "seconds"]
"""Axes of validation losses."""

NBSP = "\N{NO-BREAK SPACE}"
COLORS = (BLUE, RED, "#1b7837", "#b35806")
"""One for each attention."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""One for each MLP."""


def comparison_table(comparison: "Comparison") -> Table:
    """Return the cost of the target for each architecture; ratios are to the first."""
    header = "MLP attention params steps ratio tokens s/step seconds ratio best"
    rows = [_row(row) for row in comparison.summary().itertuples()]
    return Table(
        pd.DataFrame(rows, columns=header.split()),
        f"To a validation loss of {comparison.target:g} nats a token",
        words=2,
    )


def loss_figure(comparison: "Comparison", axis: Axis) -> go.Figure:
    """Draw validation losses: a thin line for each seed, a thick line for their mean."""
    figure = go.Figure()
    several = comparison.validations["seed"].nunique() > 1
    mlps, attentions = (list(comparison.validations[n].unique()) for n in ("mlp", "attention"))
    thin: dict[str, Any] = {"line": {"width": 1}, "opacity": 0.4, "showlegend": False}
    kinds = [(comparison.validations, thin)] if several else []
    kinds += [(comparison.mean_curves().assign(seed=None), {"line": {"width": 2.5}})]
    for curves, look in kinds:
        parts = ["mlp", "attention", "d_hidden", "parameters", "seed"]
        for (mlp, attention, _, _, seed), curve in curves.groupby(parts, sort=False, dropna=False):
            name = escape(f"{mlp} MLP, {attention} attention")
            line = {
                "color": COLORS[attentions.index(attention) % len(COLORS)],
                "dash": DASHES[mlps.index(mlp) % len(DASHES)],
            }
            figure.add_scatter(
                **{**look, "line": {**line, **look["line"]}},
                x=curve[axis],
                y=curve["loss"],
                mode="lines",
                hovertemplate="%{x:.4g}: %{y:.4f}",
                name=name if look is not thin else f"{name}, seed {seed}",
                legendgroup=name,
            )
    figure.add_hline(
        y=comparison.target,
        line={"dash": "dot", "color": GREY, "width": 1.5},
        opacity=1,
        annotation_text=f"target {comparison.target:g}",
        annotation_position="bottom left",
    )
    figure.update_xaxes(title=axis, rangemode="tozero")
    figure.update_yaxes(title="validation loss (nats a token)")
    dress(figure, height=420, alt=f"Validation losses against {axis}")
    legend = {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0}
    return figure.update_layout(legend=legend, margin={"t": 60})


def write_comparison_report(
    path: Path, comparison: "Comparison", facts: Sequence[tuple[str, str]]
) -> dict[str, go.Figure]:
    """Write the page of a comparison and return its figures by their axes."""
    figures = {axis: loss_figure(comparison, axis) for axis in get_args(Axis)}
    sections = [
        Section(
            "What the target cost",
            "All were trained on the same texts in the same order, and ratios are to the first. "
            "Where the loss crosses the target is read off the straight line between two "
            "validations. The ratio of steps is the ratio of seconds if a step took all of them "
            "equally long, as with equally good kernels; the ratio of seconds is as measured here, "
            "without validations and checkpoints.",
            [[comparison_table(comparison)]],
        ),
        Section(
            "Validation loss",
            "Thin lines are single seeds, thick ones their means.",
            [[figure] for figure in figures.values()],
        ),
    ]
    summary = (
        f"How much training on {comparison.data} each architecture needs for a validation loss of "
        f"{comparison.target:g} nats a token."
    )
    write_page(path, "Architectures compared", summary, facts, sections)
    return figures


def _row(row: Any) -> tuple[str, ...]:
    """Return the table's cells for a row of the summary."""
    about = (row.mlp, row.attention, f"{row.parameters / 1e6:.3g}M")
    pace, best = f"{row.seconds_per_step:.3g}", f"{row.best:.3f}"
    if row.reached < row.seeds:
        missed = f"missed by {row.seeds - row.reached} of {row.seeds}"
        return (*about, missed, "", "", pace, "", "", best)
    spread = f"{NBSP}±{NBSP}{row.deviation:.1f}" if row.seeds > 1 else ""
    return (
        *about,
        f"{row.steps:,.0f}{spread}",
        _ratio(row.steps_ratio),
        f"{row.tokens / 1e6:.3g}M",
        pace,
        f"{row.seconds:,.1f}",
        _ratio(row.seconds_ratio),
        best,
    )


def _ratio(value: float) -> str:
    return "" if isnan(value) else f"{value:.3f}"

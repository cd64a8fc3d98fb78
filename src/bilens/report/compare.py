"""The report of a comparison of architectures: what the target cost, and loss curves."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Literal, get_args

import plotly.graph_objects as go

from bilens.report.page import Section, Table, write_page
from bilens.report.style import BLUE, GREY, RED, dress
from bilens.train.comparison import Comparison, Point, Summary

__all__ = ["Axis", "comparison_table", "loss_figure", "write_comparison_report"]

Axis = Literal["steps", "tokens", "seconds"]
"""What validation losses are drawn against."""

NBSP = "\N{NO-BREAK SPACE}"
COLORS = (BLUE, RED, "#1b7837", "#b35806")
"""One for each attention."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""One for each MLP."""


def comparison_table(comparison: Comparison) -> Table:
    """What each architecture needed for the target; ratios are to the first one."""
    header = (
        "MLP",
        "attention",
        "params",
        "steps",
        "ratio",
        "tokens",
        "s/step",
        "seconds",
        "ratio",
        "best",
    )
    return Table(
        header,
        [_row(summary) for summary in comparison.summaries()],
        f"To a validation loss of {comparison.target:g} nats a token",
        words=2,
    )


def loss_figure(comparison: Comparison, axis: Axis) -> go.Figure:
    """Validation losses: a thin line for each seed, a thick one for their mean.

    Args:
        comparison: architectures and their losses.
        axis: what they are drawn against.
    """
    figure = go.Figure()
    attentions, mlps = (
        list(
            dict.fromkeys(
                getattr(architecture, name) for architecture in comparison.by_architecture
            )
        )
        for name in ("attention", "mlp")
    )
    for architecture, curves in comparison.by_architecture.items():
        line = {
            "color": COLORS[attentions.index(architecture.attention) % len(COLORS)],
            "dash": DASHES[mlps.index(architecture.mlp) % len(DASHES)],
        }
        name = escape(str(architecture))
        for curve in curves if len(curves) > 1 else []:
            figure.add_scatter(
                **_line(curve.points, axis),
                line={**line, "width": 1},
                opacity=0.4,
                name=f"{name}, seed {curve.seed}",
                legendgroup=name,
                showlegend=False,
            )
        figure.add_scatter(
            **_line(comparison.mean(architecture), axis),
            line={**line, "width": 2.5},
            name=name,
            legendgroup=name,
        )
    figure.add_hline(
        y=comparison.target,
        line={"dash": "dot", "color": GREY, "width": 1.5},
        opacity=1,
        annotation_text=f"target {comparison.target:g}",
        annotation_position="bottom left",
    )
    figure.update_xaxes(title=axis, fixedrange=True, rangemode="tozero")
    figure.update_yaxes(title="validation loss (nats a token)", fixedrange=True)
    dress(figure, height=420, alt=f"Validation losses against {axis}")
    legend = {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0}
    return figure.update_layout(legend=legend, margin={"t": 60})


def write_comparison_report(
    path: Path, comparison: Comparison, facts: Sequence[tuple[str, str]]
) -> dict[str, go.Figure]:
    """Write the page of a comparison and give back its figures, by what they are drawn against.

    Args:
        path: the page.
        comparison: what it shows.
        facts: about the training, a name and a value each.
    """
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


def _row(summary: Summary) -> tuple[str, ...]:
    architecture, cost = summary.architecture, summary.cost
    about = (architecture.mlp, architecture.attention, f"{architecture.parameters / 1e6:.3g}M")
    pace, best = f"{summary.seconds_per_step:.3g}", f"{summary.best:.3f}"
    if cost is None:
        missed = f"missed by {summary.seeds - summary.reached} of {summary.seeds}"
        return (*about, missed, "", "", pace, "", "", best)
    spread = f"{NBSP}±{NBSP}{cost.deviation:.1f}" if summary.seeds > 1 else ""
    return (
        *about,
        f"{cost.steps:,.0f}{spread}",
        _ratio(cost.steps_ratio),
        f"{cost.tokens / 1e6:.3g}M",
        pace,
        f"{cost.seconds:,.1f}",
        _ratio(cost.seconds_ratio),
        best,
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _line(points: Sequence[Point], axis: Axis) -> dict[str, object]:
    return {
        "x": [getattr(point, axis) for point in points],
        "y": [point.loss for point in points],
        "mode": "lines",
        "hovertemplate": "%{x:.4g}: %{y:.4f}",
    }

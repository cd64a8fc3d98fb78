"""Figures as Gradio's plots: drawn by its own copy of plotly, saved by a button in their corner."""

import re
from typing import Any

import plotly.graph_objects as go
from plotly.io.json import to_json_plotly

from bilens.explore.gradio_import import gradio as gr
from bilens.report.page import CONFIG

__all__ = ["picture", "plot_of"]


def picture(name: str, figure: go.Figure | None = None) -> gr.Plot:
    """A place for a figure."""
    return gr.Plot(
        figure and plot_of(figure, name),
        show_label=False,
        container=False,
        label=name,
        elem_id=name,
        elem_classes="bilens-plot",
    )


def plot_of(figure: go.Figure, name: str) -> Any:
    """A figure for `gr.Plot`, with the page's own settings instead of plotly's.

    Args:
        figure: what is drawn.
        name: what a saved picture is called.
    """
    shown: dict[str, Any] = figure.to_plotly_json()
    saving = {**CONFIG["toImageButtonOptions"], "filename": re.sub(r"\W+", "-", name)}  # type: ignore[dict-item]
    shown["config"] = {**CONFIG, "displayModeBar": True, "toImageButtonOptions": saving}
    return gr.components.plot.PlotData(type="plotly", plot=to_json_plotly(shown))

"""What readings show, by their types: pages, pictures and reports."""

from typing import TYPE_CHECKING

from bilens.lazy_imports import lazy_names

if TYPE_CHECKING:
    from bilens.figures.canvas import Canvas, tree_figure
    from bilens.figures.plots import heat_figure, log_axis, path_figure, spectrum_figure
    from bilens.figures.sheet import add_legend, new_figure, save_figure, styled
    from bilens.pages.classifier import eigenvector_figure, truncation_figure
    from bilens.pages.cuts import network_figure
    from bilens.pages.explanation import explanation_figure, shared_figure
    from bilens.pages.flows import ablation_figure
    from bilens.pages.layout import plot_of, sections_of
    from bilens.pages.page import report, write_page, write_report
else:  # Pages of language models import transformers, which takes seconds.
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "Canvas",
    "ablation_figure",
    "add_legend",
    "eigenvector_figure",
    "explanation_figure",
    "heat_figure",
    "log_axis",
    "network_figure",
    "new_figure",
    "path_figure",
    "plot_of",
    "report",
    "save_figure",
    "sections_of",
    "shared_figure",
    "spectrum_figure",
    "styled",
    "tree_figure",
    "truncation_figure",
    "write_page",
    "write_report",
]

"""From readings to pictures and pages."""

from bilens.figures.canvas import Canvas, dress, tree_figure
from bilens.figures.plots import heat_figure, path_figure, spectrum_figure
from bilens.paper.sheet import save_figure, save_figures
from bilens.read.classifier import eigenvector_figure
from bilens.read.cuts import network_figure
from bilens.read.explanation import explanation_figure, shared_figure
from bilens.read.fidelity import truncation_figure
from bilens.read.flow.reading import ablation_figure
from bilens.report.page import report, write_page, write_report

__all__ = [
    "Canvas",
    "ablation_figure",
    "dress",
    "eigenvector_figure",
    "explanation_figure",
    "heat_figure",
    "network_figure",
    "path_figure",
    "report",
    "save_figure",
    "save_figures",
    "shared_figure",
    "spectrum_figure",
    "tree_figure",
    "truncation_figure",
    "write_page",
    "write_report",
]

"""From findings to pictures and pages."""

from bilens.report.accuracy import kept_figure, path_figure, truncation_figure, truncation_table
from bilens.report.bonds import bond_figure, kept_directions_figure
from bilens.report.branches import Branch, branches_html
from bilens.report.classifier import (
    Order,
    classifier_figures,
    save_figures,
    write_classifier_report,
)
from bilens.report.compare import Axis, comparison_table, loss_figure, write_comparison_report
from bilens.report.deep import deep_figures, write_deep_report
from bilens.report.directions import directions_figure, matrices_figure
from bilens.report.explanation import explanation_figure
from bilens.report.heat import heat_figure
from bilens.report.logits import direction_figure, logits_figure, summands_figure
from bilens.report.network import network_figure
from bilens.report.page import (
    ContextLine,
    ContextList,
    Section,
    Table,
    contexts_html,
    render_page,
    table_html,
    write_page,
)
from bilens.report.save import save_figure
from bilens.report.shared import shared_figure
from bilens.report.spectra import eigenvector_figure, spectrum_figure
from bilens.report.tree import tree_figure

__all__ = [
    "Axis",
    "Branch",
    "ContextLine",
    "ContextList",
    "Order",
    "Section",
    "Table",
    "bond_figure",
    "branches_html",
    "classifier_figures",
    "comparison_table",
    "contexts_html",
    "deep_figures",
    "direction_figure",
    "directions_figure",
    "eigenvector_figure",
    "explanation_figure",
    "heat_figure",
    "kept_directions_figure",
    "kept_figure",
    "logits_figure",
    "loss_figure",
    "matrices_figure",
    "network_figure",
    "path_figure",
    "render_page",
    "save_figure",
    "save_figures",
    "shared_figure",
    "spectrum_figure",
    "summands_figure",
    "table_html",
    "tree_figure",
    "truncation_figure",
    "truncation_table",
    "write_classifier_report",
    "write_comparison_report",
    "write_deep_report",
    "write_page",
]

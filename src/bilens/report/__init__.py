"""From findings to pictures and pages."""

from bilens.report.classifier import (
    Order,
    classifier_figures,
    save_figures,
    write_classifier_report,
)
from bilens.report.explanation import explanation_figure
from bilens.report.page import Section, render_page, write_page
from bilens.report.save import save_figure
from bilens.report.spectra import eigenvector_figure, spectrum_figure
from bilens.report.truncation import truncation_figure, truncation_table

__all__ = [
    "Order",
    "Section",
    "classifier_figures",
    "eigenvector_figure",
    "explanation_figure",
    "render_page",
    "save_figure",
    "save_figures",
    "spectrum_figure",
    "truncation_figure",
    "truncation_table",
    "write_classifier_report",
    "write_page",
]

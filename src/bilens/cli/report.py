"""`bilens report`: what a run computes, as one page."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import plotly.graph_objects as go

from bilens.cli.console import DataDir, RunDir
from bilens.cli.decompose import read_images
from bilens.cli.terminal import out
from bilens.errors import BilensError
from bilens.lazy_imports import lazy_import
from bilens.models import load
from bilens.nn import ImageClassifier, SparseAutoencoder
from bilens.read import Basis, DeepReading
from bilens.report import Order, save_figures, write_classifier_report, write_deep_report

if TYPE_CHECKING:
    from bilens.cli import language
else:  # transformers takes seconds to import, and classifiers do without it.
    language = lazy_import("bilens.cli.language")

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """Write the report of a trained model: one HTML file that works offline.

    Attributes:
        run_dir: directory that `bilens train` wrote.
        data_dir: where the data is; see `bilens train images --help` and `train language --help`.
        output: the page; by default report.html in the run directory.
        figures: also save every figure in this format into the folder figures beside the page;
            needs Chrome or Chromium.
        basis: (images) eigenvectors orthonormal behind the embedding, as in the paper, or in
            pixels; for models of one layer.
        paths: (images) how many of the strongest paths to find in a model of several layers.
        order: (images) eigenvectors by eigenvalue, or by mean activation over the test set.
        token: (language) the output to explain; by default one that the paper explains, or else
            the most frequent word.
        minus: (language) tokens to take the mean of away from it, separated by commas.
    """

    run_dir: RunDir
    data_dir: DataDir = None
    output: Path | None = None
    figures: Literal["png", "svg", "pdf"] | None = None
    basis: Basis = "model"
    paths: int = 1000
    order: Order = "eigenvalue"
    token: str | None = None
    minus: str = ""

    def run(self) -> None:
        """Read the run and write its page."""
        model = load(self.run_dir)
        page = self.output or self.run_dir / "report.html"
        title = f"What {self.run_dir.name} computes"
        if isinstance(model, SparseAutoencoder):
            raise BilensError(f"{self.run_dir} holds a sparse autoencoder, which has no report")
        if isinstance(model, ImageClassifier):
            drawn = self._images(model, page, title)
        else:
            drawn = language.report_language(
                model, self.run_dir, self.data_dir, self.token, self.minus, page, title
            )
        out.print(f"report: {page}", highlight=False)
        if self.figures:
            save_figures(drawn, page.parent / "figures", self.figures)
            out.print(f"figures: {page.parent / 'figures'}", highlight=False)

    def _images(self, model: ImageClassifier, page: Path, title: str) -> dict[str, go.Figure]:
        reading = read_images(model, self.run_dir, self.data_dir, self.basis, self.paths)
        if isinstance(reading, DeepReading):
            return write_deep_report(page, reading, title=title)
        return write_classifier_report(page, reading, title=title, order=self.order)

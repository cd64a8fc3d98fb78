"""`bilens report`: what a run computes, as one page."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import plotly.graph_objects as go

from bilens.cli.console import DataDir, Device, ModelName, choose_device
from bilens.cli.decompose import read_images
from bilens.cli.language import trained_on
from bilens.cli.terminal import out
from bilens.errors import BilensError
from bilens.lazy_imports import lazy_import
from bilens.models import load
from bilens.nn import ImageClassifier, SparseAutoencoder
from bilens.read import Basis, DeepReading, Metric, read_bonds
from bilens.report import Order, save_figures, write_classifier_report, write_deep_report

if TYPE_CHECKING:
    from bilens.read import language
    from bilens.report import language as pages
    from bilens.residual import ResidualModel
else:  # transformers takes seconds to import, and classifiers do without it.
    language = lazy_import("bilens.read.language")
    pages = lazy_import("bilens.report.language")

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """Write the report of a trained model: one HTML file that works offline.

        bilens report runs/mnist --figures png
        bilens report runs/grammar --token soup --minus rice,jam

    Attributes:
        model: run directory, or folder or name of a model of a known family.
        data: name of the data; by default what the model was trained on.
        data_dir: where the data is; see `bilens train images --help` and `train language --help`.
        output: the page; by default report.html in the run directory, or runs/report-NAME.html.
        figures: also save every figure in this format into the folder figures beside the page;
            needs Chrome or Chromium.
        basis: (images) eigenvectors orthonormal behind the embedding, as in the paper, or in
            pixels; for models of one layer.
        paths: (images) how many of the strongest paths to find in a model of several layers.
        drop: (images) accuracy that the cut to few directions may lose, as a share of the images;
            for models of several layers.
        metric: (images) directions for the training images, or from weights alone; likewise.
        order: (images) eigenvectors by eigenvalue, or by mean activation over the test set.
        token: (language) the output to explain; by default one that the paper explains, or else
            the most frequent word.
        minus: (language) tokens whose mean is subtracted from it, separated by commas.
        layer: (language) number of the layer whose heads and MLP are read, from 0.
        among: (language) read heads and bigrams of this many tokens, the first of the vocabulary.
    """

    model: ModelName
    data: str | None = None
    data_dir: DataDir = None
    output: Path | None = None
    figures: Literal["png", "svg", "pdf"] | None = None
    basis: Basis = "model"
    paths: int = 1000
    drop: float = 0.01
    metric: Metric = "images"
    order: Order = "eigenvalue"
    token: str | None = None
    minus: str = ""
    layer: int = 0
    among: int | None = 5000
    device: Device = "auto"

    def run(self) -> dict[str, Any]:
        """Read the model and write its page."""
        if self.minus and self.token is None:
            raise BilensError(f"--minus={self.minus} takes the mean of tokens away from --token")
        device = choose_device(self.device)
        model = load(self.model, device=device)
        folder = Path(self.model)
        page = self.output or (
            folder / "report.html"
            if folder.is_dir()
            else Path("runs") / f"report-{folder.stem}.html"
        )
        title = f"What {folder.name} computes"
        if isinstance(model, SparseAutoencoder):
            raise BilensError(f"{self.model} holds a sparse autoencoder, which has no report")
        if isinstance(model, ImageClassifier):
            drawn = self._images(model, page, title)
        else:
            drawn = pages.write_language_report(page, self._language(model), title=title)
        out.print(f"report: {page}")
        if self.figures:
            save_figures(drawn, page.parent / "figures", self.figures)
            out.print(f"figures: {page.parent / 'figures'}")
        return {"report": page, "figures": list(drawn)}

    def _images(self, model: ImageClassifier, page: Path, title: str) -> dict[str, go.Figure]:
        reading = read_images(
            model, Path(self.model), self.data_dir, self.basis, self.paths, self.data
        )
        if isinstance(reading, DeepReading):
            found = read_bonds(model, reading.data, drop=self.drop, metric=self.metric)
            return write_deep_report(page, reading, found, title=title)
        return write_classifier_report(page, reading, title=title, order=self.order)

    def _language(self, model: "ResidualModel") -> "language.LanguageReading":
        corpus = language.corpus_for(model, self.data or trained_on(self.model), self.data_dir)
        minus = tuple(name for name in self.minus.split(",") if name)
        chosen = [language.TokenDirection(self.token, minus)] if self.token is not None else []
        return language.read_language(model, corpus, chosen, self.layer, among=self.among)

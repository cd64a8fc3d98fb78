"""The report on an image classifier."""

from functools import partial
from pathlib import Path
from typing import Literal

import plotly.graph_objects as go
import torch

from bilens.checks import checked
from bilens.read import ClassifierReading, explain
from bilens.read.chain import size_facts
from bilens.reading import shown, signed
from bilens.report.accuracy import truncation_figure, truncation_table
from bilens.report.explanation import explanation_figures
from bilens.report.page import Section, Table, write_page
from bilens.report.save import save_figure
from bilens.report.shared import shared_figure, shared_section
from bilens.report.spectra import eigenvector_figure, spectrum_figure
from bilens.tensor import Spectrum

__all__ = ["Order", "classifier_figures", "save_figures", "write_classifier_report"]

Order = Literal["eigenvalue", "activation"]
"""Eigenvectors by eigenvalue, or by mean activation over the data."""


@checked
def classifier_figures(
    reading: ClassifierReading, order: Order = "eigenvalue"
) -> dict[str, go.Figure]:
    """Every figure of the report, by the name of the file it would be saved as.

    Raises:
        BilensError: the model's inputs have no image shape.
    """
    shape = reading.data.shape
    names, x = reading.data.class_names, reading.data.test_images
    figures = {"truncation": truncation_figure(reading.curve)}
    for label, name in enumerate(names):
        spectrum = _ordered(reading.spectrum[label], x, order)
        figures[f"spectrum-{label}"] = spectrum_figure(spectrum, title=f"Spectrum of {name}")
        figures[f"eigenvectors-{label}"] = eigenvector_figure(
            spectrum, x, shape, title=f"Eigenvectors of {name}"
        )
    if reading.shared.features:
        figures["shared"] = shared_figure(reading.shared, shape, names)
    return figures | explanation_figures(reading, partial(explain, reading.spectrum), shape)


@checked
def write_classifier_report(
    path: Path, reading: ClassifierReading, *, title: str, order: Order = "eigenvalue"
) -> dict[str, go.Figure]:
    """Write the report page and give back its figures.

    Raises:
        BilensError: the model's inputs have no image shape.
    """
    figures = classifier_figures(reading, order)
    data, curve = reading.data, reading.curve.accuracy
    rank = float(reading.spectrum.effective_rank().mean())
    facts = [
        ("data", data.name),
        ("test accuracy", f"{reading.accuracy:.2%}"),
        ("with 10 eigenvectors a class", f"{curve[min(10, len(curve)) - 1]:.2%}"),
        ("effective rank of a class", f"{rank:.1f}"),
        *((name, shown(value)) for name, value in size_facts(reading.model)),
    ]
    table = [
        (str(k), f"{accuracy:.2%}", signed(100 * drop, ".2f"))
        for k, accuracy, drop in truncation_table(reading.curve)
    ]
    sections = [
        Section(
            "How few eigenvectors are enough",
            "Each logit is a sum of activations λ (v·x)², one for each eigenvector v: λ is its "
            "eigenvalue and v·x its overlap with the image x. Keeping only those of largest |λ| "
            "shows how many of them do the work. The effective rank, (Σ|λ|)² / Σλ², says how many "
            "equally strong eigenvectors would weigh as much as all of a class's together.",
            rows=[[Table(("kept", "accuracy", "drop (points)"), table), figures["truncation"]]],
        ),
        Section(
            "Why these logits",
            "One row for each of the three highest logits of an image. The pictures are the "
            "eigenvectors that move the logit most for this image, with blue pixels where they are "
            "positive and red ones where they are negative, each on its own scale. The number "
            "below is the activation: blue raises the logit, red lowers it. Rest is what all other "
            "eigenvectors add, so that a row adds up to its logit.",
            rows=[[figure] for name, figure in figures.items() if name.startswith("explanation")],
        ),
        shared_section(reading.shared, figures.get("shared"), "eigenvectors"),
        Section(
            "The eigenvectors of each class",
            "Read from the weights alone; no data chose them. P1, P2, ... are the eigenvectors of "
            "positive eigenvalue λ, which only ever raise the logit; N1, N2, ... are those of "
            "negative λ, which only ever lower it. An eigenvector reacts to its blue part or to "
            "its red part, but not to both at once: overlaps cancel before they are squared. "
            "Beside each stand the three test images that it reacts to most. Ordered by "
            f"{_ORDER_TEXT[order]}.",
            rows=[
                [figures[f"spectrum-{label}"], figures[f"eigenvectors-{label}"]]
                for label in range(data.n_classes)
            ],
        ),
    ]
    summary = (
        "This classifier's only non-linearity is a product, so each logit is exactly a quadratic "
        "form of the pixels. Its eigenvectors are the computation."
    )
    write_page(path, title, summary, facts, sections)
    return figures


@checked
def save_figures(figures: dict[str, go.Figure], folder: Path, kind: str) -> None:
    """Save each figure under its name in `folder` as png, svg or pdf."""
    for name, figure in figures.items():
        save_figure(figure, folder / f"{name}.{kind}")


_ORDER_TEXT = {"eigenvalue": "eigenvalue", "activation": "mean activation over the test images"}


def _ordered(spectrum: Spectrum, x: torch.Tensor, order: Order) -> Spectrum:
    scores = spectrum.values if order == "eigenvalue" else spectrum.activations(x).mean(0)
    # From the outside in: the most positive and the most negative come first in their rows.
    return spectrum.ordered_by(scores.abs())

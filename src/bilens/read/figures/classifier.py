"""Sections of a page on an image classifier: of one layer, or of several."""

from collections.abc import Mapping
from functools import partial

import plotly.graph_objects as go
import torch

from bilens.checks import checked
from bilens.read import ClassifierReading, DeepReading, class_paths, explain, explain_deep
from bilens.read.figures.curves import path_figure, truncation_figure
from bilens.read.figures.explanation import explanation_figures, shared_figure, shared_section
from bilens.read.figures.spectra import eigenvector_figure, spectrum_figure
from bilens.read.figures.trees import tree_figure
from bilens.reading import Picture, Section, Table
from bilens.tensor import Spectrum

DRAWN, SEEN = 6, 2000
"""Paths of a class that are drawn, and test images that the images beside them are chosen from."""

ORDER_TEXT = {"eigenvalue": "eigenvalue", "activation": "mean activation over the test images"}


@checked
def classifier_figures(reading: ClassifierReading) -> dict[str, go.Figure]:
    """Draw every figure of the page, by the name of the file that it is saved as."""
    shape = reading.data.shape
    names, x = reading.data.class_names, reading.data.test_images
    figures = {"truncation": truncation_figure(reading.curve)}
    for label, name in enumerate(names):
        spectrum = _ordered(reading, label)
        figures[f"spectrum-{label}"] = spectrum_figure(spectrum, title=f"Spectrum of {name}")
        figures[f"eigenvectors-{label}"] = eigenvector_figure(
            spectrum, x, shape, title=f"Eigenvectors of {name}"
        )
    if reading.shared.features:
        figures["shared"] = shared_figure(reading.shared, shape, names)
    return figures | explanation_figures(reading, partial(explain, reading.spectrum), shape)


def classifier_sections(reading: ClassifierReading) -> list[Section]:
    """Return the sections on a classifier of one layer."""
    figures = reading.figures()
    return [
        Section(
            "How few eigenvectors are enough",
            "Each logit is a sum of activations λ (v·x)², one for each eigenvector v: λ is its "
            "eigenvalue and v·x its overlap with the image x. Keeping only those of largest |λ| "
            "shows how many of them do the work. The effective rank, (Σ|λ|)² / Σλ², is the number "
            "of equally strong eigenvectors that would weigh as much as all of a class's together.",
            [[*_tables(reading), Picture("truncation", figures["truncation"])]],
        ),
        Section(
            "Why these logits",
            "One row for each of the three highest logits of an image. The pictures are the "
            "eigenvectors that move the logit most for this image, with blue pixels where they are "
            "positive and red ones where they are negative, each on its own scale. The number "
            "below is the activation: blue raises the logit, red lowers it. Rest is the sum over "
            "all other eigenvectors, so that a row adds up to its logit.",
            _rows(figures, "explanation"),
        ),
        shared_section(reading.shared, figures.get("shared"), "eigenvectors"),
        Section(
            "The eigenvectors of each class",
            "Read from the weights; no data chose them. P1, P2, ... are the eigenvectors of "
            "positive eigenvalue λ, which only ever raise the logit; N1, N2, ... are those of "
            "negative λ, which only ever lower it. An eigenvector reacts to its blue part or to "
            "its red part, but not to both at once: overlaps cancel before they are squared. "
            "Beside each are the three test images that it reacts to most. Ordered by "
            f"{ORDER_TEXT[reading.order]}.",
            [
                [
                    Picture(name, figures[name])
                    for name in (f"spectrum-{label}", f"eigenvectors-{label}")
                ]
                for label in range(reading.data.n_classes)
            ],
        ),
    ]


@checked
def deep_figures(reading: DeepReading) -> dict[str, go.Figure]:
    """Draw every figure of paths, by the name of the file that it is saved as."""
    shape = reading.data.shape
    names, x = reading.data.class_names, reading.data.test_images
    figures = {"paths": path_figure(reading.by_paths, reading.accuracy)}
    figures |= explanation_figures(reading, partial(explain_deep, reading.tree), shape)
    for label, name in enumerate(names):
        paths = reading.search.paths.of(label)
        if len(paths):
            drawn = class_paths(reading.tree, paths.truncate(min(DRAWN, len(paths))), x[:SEEN])
            title = f"Strongest paths of {name}"
            figures[f"tree-{label}"] = tree_figure(
                drawn.paths, shape, title=title, root=name, inputs=drawn.inputs
            )
    if reading.shared.features:
        figures["shared"] = shared_figure(reading.shared, shape, names)
    return figures


def deep_sections(reading: DeepReading) -> list[Section]:
    """Return the sections on the paths of a classifier of several layers."""
    figures = reading.figures()
    return [
        Section(
            "Why these logits",
            "One row for each of the three highest logits of an image. Each logit is a sum of "
            "activations λ (v·h)², one for each eigenvector v of the last layer, where h is the "
            "output of the layer below for the image and λ the eigenvalue. The bold number is the "
            "activation: blue raises the logit, red lowers it; rest is the sum over all other "
            "eigenvectors. The input of such an eigenvector is itself a sum over eigenvectors of "
            "the layer below, down to the pixels. The pictures are those that weigh most for this "
            "image, each with its share; blue pixels are positive, red ones negative.",
            _rows(figures, "explanation"),
        ),
        Section(
            "How few paths are enough",
            "Each logit is a tree: an eigenvector of the last layer is a direction in the one "
            "before, with eigenvectors of its own, down to the pixels. The paths are ranked over "
            "all classes by effective eigenvalue, and the tree is cut to the best k.",
            [[*_tables(reading), Picture("paths", figures["paths"])]],
        ),
        Section(
            "The strongest paths of each class",
            "From the logit on the left to the pixels on the right. An edge is an eigenvector, and "
            "carries its eigenvalue, blue where positive and red where negative. Beside each are "
            "the test images that it reacts to most. A picture on the right is an eigenvector of "
            "the first layer, blue where it is positive and red where it is negative; below it "
            "is the effective eigenvalue of the whole path, which says how much it can weigh. "
            "A path through a red edge of the last layer lowers the logit. Further down a sign "
            "says less: with the eigenvector above turned around, all below it change theirs.",
            _rows(figures, "tree"),
        ),
        shared_section(reading.shared, figures.get("shared"), "ends of paths"),
    ]


def _tables(reading: ClassifierReading | DeepReading) -> list[Table]:
    return [Table(frame, "", reading.formats, 0) for frame in reading.tables().values()]


def _rows(figures: Mapping[str, go.Figure], start: str) -> list[list[Picture]]:
    return [[Picture(name, figures[name])] for name in figures if name.startswith(start)]


def _ordered(reading: ClassifierReading, label: int) -> Spectrum:
    spectrum = reading.spectrum[label]
    scores = spectrum.values
    if reading.order == "activation":
        scores = spectrum.activations(reading.data.test_images).mean(0)
    # From the outside in: the most positive and the most negative come first in their rows.
    return spectrum.ordered_by(torch.as_tensor(scores).abs())

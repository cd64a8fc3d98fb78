"""The page of a classifier of one layer: accuracy by eigenvectors, examples, and each class."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.figures.canvas import Canvas
from bilens.figures.plots import accuracy_curve, spectrum_figure
from bilens.figures.sheet import BLUE, RED, Figure
from bilens.images.classifier import ClassifierReading, top_inputs
from bilens.images.fidelity import TruncationCurve, clopper_pearson
from bilens.pages.explanation import explanation_pictures, shared_section
from bilens.pages.layout import sections_of
from bilens.sections import Columns, Picture, Section, Table, eigenvector_names
from bilens.settings import Count
from bilens.tensor import Spectrum


@sections_of.register
def classifier_sections(reading: ClassifierReading) -> list[Section]:
    """Return the accuracy by eigenvectors, examples, and the eigenvectors of each class."""
    shape, names = reading.data.shape, reading.data.class_names
    n_images, rank = len(reading.data.test_labels), reading.spectrum.effective_rank().mean()
    low, high = clopper_pearson(round(reading.accuracy * n_images), n_images)
    classes = []
    for label in range(len(names)):
        bars = Picture(f"spectrum-{label}", partial(_draw_spectrum, reading, label))
        vectors = Picture(f"eigenvectors-{label}", partial(_draw_eigenvectors, reading, label))
        classes.append([bars, vectors])
    examples = explanation_pictures(reading.model, reading.data, reading.spectrum)
    order = "eigenvalue"
    if reading.order == "activation":
        order = "mean activation over the test images"
    return [
        Section(
            reading.title,
            reading.answer(),
            [[Picture("truncation", partial(truncation_figure, reading.curve, n_images))]],
        ),
        Section(
            "How well it holds",
            f"On {n_images:,} test images the model is right for {reading.accuracy:.2%} (95 % "
            f"interval {low:.2%} to {high:.2%}). Each logit is a sum of activations λ (v·x)², "
            "one for each eigenvector v, and the table keeps those of largest |λ|. "
            f"{float(rank):.1f} equally strong eigenvectors would weigh as much as all of a "
            "class's together (effective rank, mean over classes).",
            [[accuracy_table(reading.curve.columns())]],
        ),
        Section(
            "Why these logits",
            "One row for each of the three highest logits of an image. The pictures are the "
            "eigenvectors that move the logit most for this image, with blue pixels where "
            "they are positive and red ones where they are negative, each on its own scale. "
            "The number below is the activation: blue raises the logit, red lowers it. Rest "
            "is the sum over all other eigenvectors, so that a row adds up to its logit.",
            [[picture] for picture in examples],
        ),
        shared_section(reading.shared, shape, names, "eigenvectors"),
        Section(
            "The eigenvectors of each class",
            "Read from the weights; no data chose them. P1, P2, ... are the eigenvectors of "
            "positive eigenvalue λ, which only ever raise the logit; N1, N2, ... are those of "
            "negative λ, which only ever lower it. An eigenvector reacts to its blue part or "
            "to its red part, but not to both at once: overlaps cancel before they are "
            "squared. Beside each are the three test images that it reacts to most. Ordered "
            f"by {order}.",
            classes,
        ),
    ]


def _ordered(reading: ClassifierReading, label: int) -> Spectrum:
    spectrum = reading.spectrum[label]
    scores = spectrum.values
    if reading.order == "activation":
        scores = spectrum.activations(reading.data.test_images).mean(0)
    # From the outside in: the most positive and the most negative come first in their rows.
    return spectrum.ordered_by(torch.as_tensor(scores).abs())


def _draw_spectrum(reading: ClassifierReading, label: int) -> Figure:
    title = f"Spectrum of {reading.data.class_names[label]}"
    return spectrum_figure(_ordered(reading, label), title=title)


def _draw_eigenvectors(reading: ClassifierReading, label: int) -> Figure:
    x, shape = reading.data.test_images, reading.data.shape
    title = f"Eigenvectors of {reading.data.class_names[label]}"
    return eigenvector_figure(_ordered(reading, label), x, shape, title=title)


@checked
def eigenvector_figure(
    spectrum: Spectrum,
    x: Float[Tensor, "samples n_in"],
    shape: tuple[int, int],
    *,
    title: str,
    k: Count = 4,
) -> Figure:
    """Draw the first k eigenvectors of either sign of a form, with the top inputs of each.

    Positive ones are in the upper row, in the spectrum's order; order it by eigenvalue or by
    mean activation before.
    """
    if spectrum.batch_shape:
        raise BilensError("eigenvector_figure() shows a single form: index the spectrum's batch")
    shown_inputs = 3
    best = top_inputs(spectrum, x, min(shown_inputs, len(x)))
    aspect = shape[0] / shape[1]
    # Of a picture with its inputs, and with the line below it, in widths of a picture.
    cell, rise = 1.42, aspect + 0.3
    canvas = Canvas(cell * k, 2 * rise, unit=120, title=title)
    values = spectrum.values.tolist()
    names = eigenvector_names(values)
    for row, (sign, color) in enumerate(((1, BLUE), (-1, RED))):
        members = [i for i, value in enumerate(values) if sign * value > 0]
        top = row * rise
        for column, i in enumerate(members[:k]):
            left = column * cell
            canvas.eigenvector(spectrum.vectors[i], shape, x=left, y=top)
            canvas.thumbnails(x[best[i]], shape, x=left + 1.03, y=top)
            canvas.label(names[i], x=left + 0.5, y=top + aspect + 0.03, color=color)
    return canvas.figure()


@checked
def truncation_figure(curve: TruncationCurve, n_images: Count | None = None) -> Figure:
    """Plot the test accuracy of the model cut to the first k eigenvectors of each class.

    With the number of test images, a band shows the 95 % interval of each accuracy.
    """
    band = []
    if n_images is not None:
        band = [clopper_pearson(round(share * n_images), n_images) for share in curve.accuracy]
    counts = range(1, len(curve.accuracy) + 1)
    names = {"unit": "eigenvectors", "kept_by": "for each class", "label": "all of them"}
    return accuracy_curve(counts, curve.accuracy, curve.full, band=band, **names)


def accuracy_table(columns: Columns) -> Table:
    """Return the table of an `accuracy_columns`."""
    formats = {"accuracy": ".2%", "drop (points)": "+.2f", "error of the logits": ".3g"}
    return Table(columns, "", formats, 0)

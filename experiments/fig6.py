"""Figure 6: the eigenvectors of a two-layer model, from the logit of a digit to the pixels.

Reproduces figure 6 of Pearce et al. 2024 for a two-layer MNIST model of d = 300 (weight decay 0.5,
input noise 1.0, 8 epochs). For each digit the outermost positive (P) and negative (N) eigenvector
of the last layer are followed into the first layer. There each is a direction with positive (+) and
negative (-) eigenvectors of its own.

The sign of an eigenvector of the last layer is arbitrary, and the other sign exchanges + and -. It
is chosen as in figure 2B, so that the images with the largest activation have a positive value.

The source says that there is typically one prominent eigenvalue of either sign in the last layer.
Recorded is, for every digit, the ratio of the first of a sign to the second. The source sees the
digit itself in P+ and N-, sharp in the first and vague in the second, and other digits in P- and
N+. Recorded is the share of top images that are of the digit itself, three images for each of the
first four eigenvectors of a kind.

Drawn are 6, which both versions of the source show, 9 of its first, and 1, of the first model.

Small: 3 initialisations, about 2 minutes for each on one core. Paper: 5.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from bilens.data import ImageData
from bilens.images import top_inputs
from bilens.pages import Canvas, spectrum_figure
from bilens.tensor import BilinearTensor, Spectrum
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext
from experiments.curves import BLUE, RED
from experiments.results import Row

SEEDS = (3, 5)
"""Initialisations at either scale."""
TRAINING = ClassifierTraining(epochs=8, decay=0.7)
DRAWN, SHOWN = (1, 6, 9), 4
ROOT, STEP, GAP, LABEL, THICKEST = 0.15, 1.5, 1.08, 0.34, 7.0
Branches = Mapping[str, tuple[float, Spectrum]]


def run(context: RecipeContext) -> Outcome:
    """Follow the outermost eigenvectors of each digit."""
    data, figures = context.mnist, dict[str, Figure]()
    models = context.classifiers(data, TRAINING, context.seed_range(SEEDS), layers=2)
    of_models = list[dict[str, dict[str, Any]]]()
    for model in models:
        first, last = model.tensors()
        spectra = last.interaction(output=range(data.n_classes)).eigh()
        digits = dict[str, dict[str, Any]]()
        for label, name in enumerate(data.class_names):
            parts = branches(spectra[label], first, data.test_images)
            digits[name] = {
                "prominence": prominence(spectra[label]),
                "own_digit_share": own_shares(parts, data, label),
            }
            if label in DRAWN and model is models[0]:
                title = f"The last layer's spectrum of {name}"
                figures[f"spectrum-{label}"] = spectrum_figure(spectra[label], title=title)
                figures[f"branches-{label}"] = _drawing(parts, data, name)
        of_models.append(digits)
    accuracies = [model.accuracy(data.test_images, data.test_labels) for model in models]
    ratios, shares = (_means(of_models, key) for key in ("prominence", "own_digit_share"))
    rows = [
        Row.of_shares("accuracy", accuracies, scale=100, unit="%"),
        *(Row.of(f"first eigenvalue over the second, {name}", ratios[name]) for name in ratios),
        *(Row.of_shares(f"images of the own digit among those of {x}", shares[x]) for x in shares),
    ]
    return Outcome({"accuracies": accuracies, "models": of_models}, figures, rows=rows)


def branches(
    spectrum: Spectrum, first: BilinearTensor, x: Float[Tensor, "samples n_in"]
) -> Branches:
    """Return the eigenvalue of P and of N in the last layer, each with its spectrum in the first.

    The spectrum is of one direction, and the inputs choose all signs.
    """
    turned = spectrum.oriented(first(x))
    parts = {}
    for name, part in (("P", turned.positive()), ("N", turned.negative())):
        if part.values[0] != 0:
            below = first.interaction(part.vectors[0]).eigh().oriented(x)
            parts[name] = (float(part.values[0]), below)
    return parts


def prominence(spectrum: Spectrum) -> dict[str, float]:
    """Return the ratio of the outermost eigenvalue of either sign to the next."""
    parts = {}
    for name, sign in (("P", 1), ("N", -1)):
        top = (sign * spectrum.values).sort(descending=True).values[:2].tolist()
        if top[-1] > 0:
            parts[name] = top[0] / top[-1]
    return parts


def own_shares(parts: Branches, data: ImageData, label: int) -> dict[str, float]:
    """Return the share of the class among the top images of P+, P-, N+ and N-."""
    shares = {}
    for branch, (_, below) in parts.items():
        best = top_inputs(below, data.test_images)
        for sign, kind in ((1, "+"), (-1, "-")):
            order = (sign * below.values).argsort(descending=True)[:SHOWN]
            images = best[[row for row in order.tolist() if sign * below.values[row] > 0]]
            if len(images):
                is_label = data.test_labels[images] == label
                shares[branch + kind] = float(is_label.double().mean())
    return shares


def _means(of_models: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[float]]:
    """Return the mean over digits for each model, of each number; a digit may lack one."""
    digits = [[digit[key] for digit in of_model.values()] for of_model in of_models]
    names = sorted({name for of_model in digits for digit in of_model for name in digit})
    return {
        name: [fmean(digit[name] for digit in of_model if name in digit) for of_model in digits]
        for name in names
    }


def _drawing(parts: Branches, data: ImageData, name: str) -> Figure:
    """Draw a tree with the logit on the left and a row of pictures for P+, P-, N+ and N-."""
    aspect = data.shape[0] / data.shape[1]
    rise, left = aspect + LABEL, ROOT + 2 * STEP
    height = 2 * rise * len(parts) - 0.04
    canvas = Canvas(left + GAP * SHOWN, height, unit=92, title=f"From the logit of {name}")
    root = (ROOT, height / 2)
    largest = max(abs(value) for value, _ in parts.values())
    for place, (branch, (value, below)) in enumerate(parts.items()):
        node = (ROOT + STEP, (2 * place + 1) * rise - LABEL / 2)
        _edge(canvas, root, node, value, largest)
        for row, (sign, text) in enumerate(((1, "+"), (-1, "-"))):
            shown = below.ordered_by(sign * below.values)
            top = (2 * place + row) * rise
            end = (left - 0.4, top + aspect / 2)
            _edge(canvas, node, end, float(shown.values[0]), float(below.values.abs().max()))
            y = top + aspect / 2 - 0.1
            canvas.label(f"{branch}{text}", x=left - 0.2, y=y, size=14, bold=True)
            pairs = zip(shown.values.tolist(), shown.vectors, strict=True)
            for column, (eigenvalue, vector) in enumerate(list(pairs)[:SHOWN]):
                x = left + GAP * column
                canvas.eigenvector(vector, data.shape, x=x, y=top)
                canvas.label(f"{eigenvalue:+.2g}", x=x + 0.5, y=top + aspect + 0.01)
        canvas.label(branch, x=node[0], y=node[1], size=14, bold=True, on_line=True)
    canvas.label(name, x=root[0], y=root[1], size=16, bold=True, on_line=True)
    return canvas.figure()


def _edge(
    canvas: Canvas,
    start: tuple[float, float],
    end: tuple[float, float],
    value: float,
    largest: float,
) -> None:
    """Draw a line for an eigenvalue, with a thickness by its size."""
    color = BLUE if value > 0 else RED
    canvas.line(start, end, color=color, width=THICKEST * max(abs(value) / largest, 1 / 7))
    x, y = ((a + b) / 2 for a, b in zip(start, end, strict=True))
    canvas.label(f"{value:+.2g}", x=x, y=y, color=color, on_line=True)

"""Figure 2: eigenvectors of single-layer models of MNIST and Fashion-MNIST.

Reproduces figure 2 of Pearce et al. 2024. Panel A has the first seven classes of either data set:
the positive eigenvector of largest mean activation over the test images, beside the three images of
its largest activation. Panel C has the spectrum of digit 1 and its three outermost eigenvectors of
either sign. P1 is the eigenvector of the largest eigenvalue everywhere. The models have the
settings of Table 2: d = 300, 20 epochs, input noise 1.0, and weight decay 0.5 for MNIST and 1.0 for
Fashion-MNIST. Beside them are models of MNIST without regularisation.

The source says that the most active eigenvector is often the first or second by eigenvalue, that P1
of digit 1 reacts most to three 4s, and that N1 likely cancels it there. Measured is the share of
classes, that of 4s, and what N1 takes away on the 50 test images of a 4 where P1 is largest. The
source has an accuracy of 98.05 % for MNIST (section 5.2) and none for Fashion-MNIST.

Pictures are of the first seed, numbers of all (the source may train for up to 100 epochs).

Small: 3 initialisations, about 1.5 minutes for each of the 9 models on one core. Paper: 5.
"""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from bilens.data import ImageData
from bilens.images import class_spectra, top_inputs
from bilens.nn import ImageClassifier
from bilens.pages import Canvas
from bilens.tensor import Spectrum
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext
from experiments.fig9 import class_figures
from experiments.results import Row

SEEDS = (3, 5)
"""Initialisations at either scale."""
CLASSES, SHOWN, ONE, FOUR, FOURS = 7, 3, 1, 4, 50
PLAIN = "MNIST, neither noise nor decay"
REGULARISATION = {"MNIST": (0.5, 1.0), PLAIN: (0.0, 0.0), "Fashion-MNIST": (1.0, 1.0)}
"""Weight decay and input noise."""
NAME, CELL, RISE = 1.1, 2.7, 1.3


def run(context: RecipeContext) -> Outcome:
    """Decompose the models, and draw the first of each data set."""
    rows = list[Row]()
    drawn = dict[str, tuple[Spectrum, ImageData]]()
    for name, (decay, noise) in REGULARISATION.items():
        data = context.fashion if name == "Fashion-MNIST" else context.mnist
        training = ClassifierTraining(weight_decay=decay, input_noise=noise)
        models = context.classifiers(data, training, context.seed_range(SEEDS))
        rows += rows_of(name, models, data)
        drawn[name] = class_spectra(models[0]), data
    spectra, data = drawn["MNIST"]
    figures = class_figures(spectra[ONE], data, ONE, k=SHOWN)
    del drawn[PLAIN]
    figures["eigenvectors"] = most_active_figure(drawn)
    settings = {"regularisation": REGULARISATION, "fours": FOURS}
    return Outcome({}, figures, rows=rows, settings=settings)


def rows_of(name: str, models: Sequence[ImageClassifier], data: ImageData) -> list[Row]:
    """Return what models of one kind say of the source's claims."""
    source = 98.05 if name == "MNIST" else None
    accuracies = [model.accuracy(data.test_images, data.test_labels) for model in models]
    spectra = [class_spectra(model) for model in models]
    ranks = [[rank_of_most_active(s[label], data) for label in range(CLASSES)] for s in spectra]
    often = [sum(rank <= 2 for rank in of_model) / CLASSES for of_model in ranks]
    rows = [
        Row.of_shares(f"{name}: accuracy", accuracies, scale=100, unit="%", source=source),
        Row.of_shares(
            f"{name}: share of classes whose most active eigenvector is the first or second", often
        ),
    ]
    if name == "Fashion-MNIST":
        return rows
    shares, taken = zip(*(on_fours(s[ONE], data) for s in spectra), strict=True)
    of_top = "share of fours among the top images of the first eigenvector of a one"
    of_negative = "share of P1 of a one that N1 takes away on fours"
    return [
        *rows,
        Row.of_shares(f"{name}: {of_top}", shares, source=1),
        Row.of(f"{name}: {of_negative}", taken),
    ]


def rank_of_most_active(spectrum: Spectrum, data: ImageData) -> int:
    """Return the rank by eigenvalue, from 1, of the eigenvector of largest mean activation."""
    most = spectrum.activations(data.test_images).mean(0).argmax()
    return 1 + int((spectrum.values > spectrum.values[most]).sum())


def on_fours(spectrum: Spectrum, data: ImageData) -> tuple[float, float]:
    """Return the share of 4s among the top images of P1, and what N1 takes of P1 on 4s.

    The 4s are those where P1 is largest.
    """
    positive, negative = spectrum.outermost(1).activations(data.test_images).unbind(-1)
    is_four = data.test_labels == FOUR
    top = positive.topk(SHOWN).indices
    fours = is_four.nonzero()[:, 0]
    fours = fours[positive[fours].topk(min(FOURS, len(fours))).indices]
    taken = -negative[fours].sum() / positive[fours].sum()
    return float(is_four[top].double().mean()), float(taken)


def most_active_figure(drawn: Mapping[str, tuple[Spectrum, ImageData]]) -> Figure:
    """Draw a row for each class and a column for each data set: panel A."""
    canvas = Canvas(CELL * len(drawn), RISE * CLASSES, unit=90, title="Most active eigenvectors")
    for column, (spectra, data) in enumerate(drawn.values()):
        left, aspect = NAME + CELL * column, data.shape[0] / data.shape[1]
        for label in range(CLASSES):
            top, rank = RISE * label, rank_of_most_active(spectra[label], data)
            by_value = spectra[label].ordered_by(spectra[label].values)
            shown = by_value.select([rank - 1]).oriented(data.test_images)
            (images,) = top_inputs(shown, data.test_images, SHOWN)
            canvas.label(data.class_names[label], x=left - NAME / 2, y=top + aspect / 2 - 0.1)
            canvas.eigenvector(shown.vectors[0], data.shape, x=left, y=top)
            canvas.thumbnails(data.test_images[images], data.shape, x=left + 1.03, y=top)
            text = f"P{rank}  λ = {float(shown.values[0]):+.2g}"
            canvas.label(text, x=left + 0.5, y=top + aspect + 0.03)
    return canvas.figure()

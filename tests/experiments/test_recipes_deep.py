"""The recipes for deep models and attacks, on the bundled digits with tiny models."""

from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
import torch
from experiments.bonds import DROP, MODELS, needed_products, product_counts
from experiments.context import Outcome
from experiments.fig6 import branches, own_shares, prominence

from bilens.figures.sheet import svg_of
from bilens.images import classifier_bonds
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.tensor import Spectrum
from bilens.train import ClassifierTraining, train_classifier
from tests.experiments.test_recipes_single_layer import TinyContext
from tests.experiments.tiny import check_outcome
from tests.models import digit_model, digits
from tests.nightly import nightly

pytestmark = pytest.mark.long

FIGURES = {
    "fig6": {"spectrum-3", "branches-3"},
    "masks": {"targeted", "fooled", "masks"},
    "bonds": {"directions", "network"},
}
THREE = ("three layers", "three layers, biases and residuals")
SMALLER = {
    "fig6": {"DRAWN": (3,), "SHOWN": 2},
    "masks": {"NORMS": (1.0, 3.0), "DRAWS": 2},
    "bonds": {"MODELS": {name: MODELS[name] for name in THREE}, "INSIDE": 3, "MOST": 4},
}


@cache
def tiny_model(
    width: int, layers: int, training: ClassifierTraining, affine: bool = False
) -> ImageClassifier:
    names = {"image_shape": (8, 8), "class_names": tuple(f"<{number}>" for number in range(10))}
    config = ClassifierConfig(64, 10, width, layers, bias=affine, residual=affine, **names)
    short = ClassifierTraining(epochs=2, batch_size=50, weight_decay=0.0, seed=training.seed)
    return train_classifier(config, digits(), short)[0].requires_grad_(False)


class DeepContext(TinyContext):
    """The tiny context, with deep models too."""

    def classifiers(self, data, training, seeds, *, d_model=300, layers=1, affine=False):
        width = {300: 5, 128: 4, 100: 3}[d_model]
        several = [replace(training, seed=seed) for seed in seeds[:2]]
        return [tiny_model(width, layers, single, affine) for single in several]


@cache
def ran(name: str, scale: str) -> Outcome:
    recipe = import_module(f"experiments.{name}")
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in SMALLER[name].items():
            patch.setattr(recipe, constant, value)
        return recipe.run(DeepContext(scale, Path(mkdtemp())))


# Figure 6 does the same at both scales.
SMALL = [*product(FIGURES, ["small"])]


@pytest.mark.parametrize(("name", "scale"), nightly([*SMALL, ("masks", "paper")], SMALL))
def test_recipes_run(name, scale):
    outcome = check_outcome(ran(name, scale), FIGURES[name])
    assert not any(b"&lt;3&gt;" in svg_of(figure) for figure in outcome.figures.values())


def test_figure_6_follows_the_outermost_eigenvectors():
    x = digits().test_images
    first, last = tiny_model(10, 2, ClassifierTraining()).tensors()
    spectrum = last.interaction(output=6).eigh()
    result = branches(spectrum, first, x)
    activations = spectrum.activations(first(x))
    for name, sign in (("P", 1), ("N", -1)):
        value, below = result[name]
        outer = int((sign * spectrum.values).argmax())
        assert value == float(spectrum.values[outer])
        hidden = below(x)
        assert torch.allclose(value * hidden**2, activations[:, outer], rtol=1e-3, atol=1e-3)
        assert hidden[hidden.abs().topk(3).indices].sum() > 0
    turned = Spectrum(spectrum.values, -spectrum.vectors, spectrum.residuals)
    again = branches(turned, first, x)["N"][1]
    assert torch.allclose(again.values, result["N"][1].values, atol=1e-4)


def test_figure_6_counts_by_hand():
    spectrum = Spectrum(torch.tensor([4.0, -6.0, 1.0, -2.0, 0.5]), torch.eye(5), torch.zeros(5))
    assert prominence(spectrum) == {"P": 4.0, "N": 3.0}
    assert prominence(spectrum.truncate(3)) == {"P": 4.0}

    # Image i reacts to eigenvector i alone; two more with nothing on them.
    images = torch.cat([torch.eye(5).repeat(3, 1), torch.zeros(2, 5)])
    labels = torch.tensor([7, 1, 2, 3, 4] * 3 + [7, 7])
    planted = SimpleNamespace(test_images=images, test_labels=labels)
    assert own_shares({"P": (1.0, spectrum)}, planted, 7) == {"P+": pytest.approx(1 / 3), "P-": 0.0}


def test_bonds_measures_the_models():
    numbers = ran("bonds", "small").numbers
    three = numbers["three layers"]
    for needed in three["uniform"].values():
        assert all(1 <= k <= 4 for k in needed if k)
    for cut in (cut for cuts in three["cut"].values() for cut in cuts):
        assert len(cut["ranks"]) == 3
        assert sum(cut["ranks"]) == cut["total"]
    assert numbers["inside a cut"][0]["products"] == 3 * 6 + 3 * 6 + 10 * 6


def test_products_are_counted_from_all_of_them_down():
    data = digits()
    cut = classifier_bonds(digit_model(n_layers=2), data).cut(8)

    def accuracy(k):
        outputs = data.test_images.double()
        for tensor in cut.keep_products(k):
            outputs = tensor(outputs)
        return (outputs.argmax(-1) == data.test_labels).double().mean()

    needed, most = needed_products(cut, data), len(cut.products())
    assert needed < most
    assert accuracy(most) - accuracy(needed) <= DROP + 1e-9
    assert accuracy(most) - accuracy(max(n for n in product_counts(most) if n < needed)) > DROP

"""The recipes for Pearce et al. 2024, on the bundled digits with tiny models."""

from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from experiments.context import Outcome, RecipeContext
from experiments.curves import confidence_line, line_figure, spread_line
from experiments.fig2 import FOUR, on_fours, rank_of_most_active
from experiments.fig3 import needed_under
from experiments.fig4 import matches, positive_vectors, similarity_curves
from experiments.fig5 import border_share
from experiments.fig9 import describe_ends

from bilens.images import TruncationCurve, class_spectra
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.tensor import Spectrum
from bilens.train import ClassifierTraining, train_classifier
from experiments import fig5
from tests.experiments.tiny import check_one_seed, check_outcome
from tests.models import digit_model, digits
from tests.nightly import nightly
from tests.tensor.factors import normal

pytestmark = pytest.mark.long

FIGURES = {
    "fig2": {"eigenvectors", "spectrum-1", "eigenvectors-1"},
    "fig3": {"truncation"},
    "fig4": {"similarity", "digit-3"},
    "fig5": {"eigenvectors", "accuracy", "effective_rank"},
    "fig9": {f"{kind}-{label}" for kind in ("spectrum", "eigenvectors") for label in range(10)},
    "noises": {"accuracy", "drop_at_10", "match"},
}


@cache
def tiny_model(d_model: int, training: ClassifierTraining) -> ImageClassifier:
    """Two epochs of a model whose size tells the sizes of the recipes apart."""
    width = {30: 12, 50: 14, 100: 16, 300: 18, 1000: 20}[d_model]
    config = ClassifierConfig(64, 10, width, image_shape=(8, 8))
    return train_classifier(config, digits(), training)[0].requires_grad_(False)


@dataclass(frozen=True)
class TinyContext(RecipeContext):
    """Digits for all data, and at most two initialisations of two epochs for all models."""

    mnist = fashion = property(lambda self: digits())

    def classifiers(self, data, training, seeds, *, d_model=300, layers=1):
        assert layers == 1
        brief = replace(training, epochs=2)
        return [tiny_model(d_model, replace(brief, seed=seed)) for seed in seeds[:2]]


@cache
def ran(name: str, scale: str) -> Outcome:
    recipe = import_module(f"experiments.{name}")
    with pytest.MonkeyPatch.context() as patch:
        # Plotly takes its time over pictures.
        if name in ("fig2", "fig9"):
            patch.setattr(recipe, "SHOWN", 1)
        if name == "fig2":
            patch.setattr(recipe, "CLASSES", 2)
        return recipe.run(TinyContext(scale, Path("nowhere")))


# Figures 2 and 9 do the same at both scales, and there are only more noises at the larger one.
@pytest.mark.parametrize(
    ("name", "scale"), nightly(product(FIGURES, ["small", "paper"]), [*product(FIGURES, ["small"])])
)
def test_recipes_run(name, scale):
    check_outcome(ran(name, scale), FIGURES[name])


@pytest.mark.parametrize("name", [name for name in FIGURES if name not in ("fig2", "fig9")])
def test_recipes_run_from_one_seed_or_say_why_not(name, tmp_path):
    check_one_seed(name, TinyContext("small", Path("nowhere"), seeds=1), tmp_path)


def test_figure_2_counts_ranks_by_eigenvalue():
    spectrum = Spectrum(torch.tensor([-9.0, 4.0, 3.0, 1.0]), torch.eye(4), torch.zeros(4))
    for most in (1, 2, 3):
        x = torch.zeros(5, 4)
        x[:, [0, most]] = 1.0
        assert rank_of_most_active(spectrum, SimpleNamespace(test_images=x)) == most


def test_figure_2_counts_fours_and_what_the_first_negative_takes_there():
    spectrum = Spectrum(torch.tensor([-2.0, 3.0, 1.0]), torch.eye(3), torch.zeros(3))
    x = torch.tensor([[0.0, 5, 0], [1, 4, 0], [2, 3, 9], [9, 1, 0]])
    data = SimpleNamespace(test_images=x, test_labels=torch.tensor([1, FOUR, FOUR, 1]))
    share, taken = on_fours(spectrum, data)
    assert share == pytest.approx(2 / 3)
    assert taken == pytest.approx(2 * (1 + 4) / (3 * (16 + 9)))


def test_figure_3_stays_strictly_under():
    # 10 000 samples: exactly one point is lost with two, and 99 of them with three eigenvectors.
    full = 0.9811
    accuracy = (0.5, full - 0.01, full - 0.0099, full - 0.0010, full - 0.0009, full)
    curve = TruncationCurve(accuracy, full)
    assert needed_under(curve, 0.01, 10_000) == 3
    assert needed_under(curve, 0.001, 10_000) == 5
    assert needed_under(TruncationCurve((full, 0.9, full), full), 0.01, 10_000) == 3
    for right, (lost, needed) in product(range(9000, 10_000), ((100, 2), (99, 1))):
        curve = TruncationCurve(((right - lost) / 10_000, right / 10_000), right / 10_000)
        assert needed_under(curve, 0.01, 10_000) == needed


def test_figure_4_finds_what_was_planted():
    basis = torch.linalg.qr(normal(12, 12).float()).Q
    # Two classes, two ranks. The other models hold each vector turned by a known angle.
    models = [[basis[:2], basis[2:4]] for _ in range(3)]
    cosines = torch.tensor([[0.9, 0.5], [0.7, 0.3]])
    shared = (1 - cosines[..., None] ** 2) ** 0.5 * basis[8]
    turned = -3 * (cosines[..., None] * basis[:4].unflatten(0, (2, 2)) + shared)
    others = [[*turned]] * 2
    curves = similarity_curves(models, others, ranks=2)
    # The shared part makes the other class's vectors no better matches: each only has its own.
    assert torch.allclose(torch.tensor(curves), torch.tensor([[0.8, 0.4]] * 2))
    assert [len(c) for c in similarity_curves(models, others, ranks=1)] == [1, 1]
    assert [len(c) for c in similarity_curves(models, others)] == [2, 2]
    vectors, texts = zip(*matches(basis[:2], others[0][0]), strict=True)
    assert texts == ("0.90", "0.50")
    assert ((torch.stack(vectors) * basis[:2]).sum(-1) > 0).all()


def test_figure_4_never_pairs_models_of_the_same_seed():
    a, b = torch.eye(4)[:2], torch.eye(4)[2:]
    assert similarity_curves([[a], [b]], [[a], [b]], ranks=2) == [[0, 0], [0, 0]]
    assert similarity_curves([[a], [b]], [[b], [a]], ranks=2) == [[1, 1], [1, 1]]


def test_figure_4_orders_positive_eigenvectors_by_eigenvalue():
    model = digit_model()
    spectrum = class_spectra(model)
    for label, vectors in enumerate(positive_vectors(model)):
        values = spectrum.values[label]
        order = values.argsort(descending=True)[: int((values > 0).sum())]
        assert torch.equal(vectors, spectrum.vectors[label, order])


def test_figure_5_measures_the_border():
    middle, edge = torch.zeros(2, 28, 28)
    middle[4:-4, 4:-4] = 2.0
    edge[3, 10] = edge[-4, 10] = edge[10, 3] = edge[10, -4] = 5.0
    vectors = torch.stack([middle, edge]).reshape(2, -1)
    shares = [border_share(some, (28, 28)) for some in (vectors[:1], vectors[1:], vectors)]
    assert shares == [0, 1, 0.5]
    assert border_share(torch.ones(1, 64), (8, 8)) == pytest.approx(28 / 64)


@pytest.mark.parametrize(
    ("accuracy", "rank", "held"), [(0.9796, 40.0, [True, True]), (0.9794, 41.0, [False, False])]
)
def test_figure_5_says_whether_the_source_held(accuracy, rank, held):
    model = {"accuracy": accuracy, "effective_rank": rank, "drop": 0.02, "border_share": 0.1}
    assert [row.held for row in fig5._rows("none", [model, model])] == [*held, False, None]


def test_figure_9_reads_the_ends_of_the_spectrum():
    spectrum = class_spectra(digit_model())[3]
    values = spectrum.values.sort().values
    result = describe_ends(spectrum, digits())
    for kind, ends in (("positive", values.flip(0)[:3]), ("negative", values[:3])):
        assert [end["eigenvalue"] for end in result[kind]] == ends.tolist()
    strongest = spectrum.activations(digits().test_images)[:, spectrum.values.argmax()].topk(3)
    labels = digits().test_labels[strongest.indices].tolist()
    assert result["positive"][0]["top_inputs"] == [str(label) for label in labels]


def test_lines_and_their_bands():
    samples = [[1.0, 10.0], [3.0, 10.0], [2.0, 10.0]]
    spread = spread_line("a", (0, 1), samples)
    assert (spread.low, spread.middle, spread.high) == ([1, 10], [2, 10], [3, 10])
    confident = confidence_line("b", (0, 1), samples)
    # Student's t for two degrees of freedom, 4.3027, over the root of three.
    assert confident.high[0] == pytest.approx(2 + 4.302653 / 3**0.5)
    assert confident.low[0] == pytest.approx(2 - 4.302653 / 3**0.5)
    alone = confidence_line("c", (0, 1), samples[:1])
    assert alone.low == alone.middle == alone.high == [1, 10]
    figure = line_figure([spread], title="t", x_title="x", y_title="y", floor=2.0)
    (axes,) = figure.axes
    assert list(axes.lines[0].get_ydata()) == [2, 10]
    ends = axes.collections[0].get_datalim(axes.transData).extents
    assert ends.tolist() == [0, 2, 1, 10]
    assert (axes.get_yscale(), axes.get_ylim()) == ("log", (2, 20))


def test_noises_are_held_against_all_three_goals():
    numbers = dict(ran("noises", "small").numbers)
    training = ClassifierTraining(input_noise=0.0, latent_noise=0.33)
    models = TinyContext("small", Path("nowhere")).classifiers(digits(), training, range(5))
    vectors = [positive_vectors(model, "pixels") for model in models]
    expected = sum(sum(curve[:5]) / 5 for curve in similarity_curves(vectors, vectors)) / 2
    assert numbers["latent_noise=0.33"]["match_in_pixels"]["mean"] == pytest.approx(expected)
    goals = numbers.pop("goals")
    for single in numbers.values():
        best = max(single["match"]["mean"], single["match_in_pixels"]["mean"])
        met = [single["accuracy"]["mean"] >= goals["accuracy"], best >= goals["match"]]
        met.append(single["drop_at_10"]["mean"] < goals["drop_at_10"])
        assert single["goals_met"] == sum(met)
    assert numbers["input_noise=0.0"] == numbers["latent_noise=0.0"]

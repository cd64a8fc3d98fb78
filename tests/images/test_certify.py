"""Certified radii, against a solver that knows nothing of their theory, and against attacks."""

import math

import pytest
import torch
from experiments.certify import run
from experiments.context import RecipeContext
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.optimize import minimize

import bilens
from bilens.images import box_bounds, certify, proved_agreement
from bilens.images.bounds import margins_and_slopes
from bilens.images.chain import open_layer
from bilens.images.nearest import forms_of, smallest_changes
from bilens.images.radii import read_certificates
from bilens.nn import ClassifierConfig, ImageClassifier
from experiments import every_text
from tests.experiments.tiny import check_rows
from tests.models import digit_model, digits
from tests.nightly import nightly
from tests.tensor.factors import normal, random_tensor

KINDS = ("any", "positive", "equal", "hard", "semidefinite", "nothing")


def problem(kind: str, n: int, seed: int):
    """Return a margin that a theory might get wrong: A, g and m."""
    values = normal(n, seed=seed)
    vectors = torch.linalg.qr(normal(n, n, seed=seed + 1))[0]
    g, m = normal(1, n, seed=seed + 2), normal(1, seed=seed + 3).abs() + 0.01
    if kind == "positive":
        values = values.abs() + 0.1
    if kind == "equal":
        values = values[:1].expand(n)
    if kind in ("semidefinite", "nothing"):
        values = values.abs() * (kind == "semidefinite")
        values[0] = 0
    if kind == "hard":
        lowest = vectors[:, values.argmin()]
        g = g - (g @ lowest) * lowest
    return (vectors * values) @ vectors.T, g, m


def shortest_by_search(margin, n: int, starts: int = 12) -> float:
    """Return the length of the shortest d with margin(d) <= 0 that a general solver finds."""
    best = math.inf
    for start in normal(starts, n, seed=7).mul(3).numpy():
        found = minimize(
            lambda d: d @ d,
            start,
            jac=lambda d: 2 * d,
            constraints=[{"type": "ineq", "fun": lambda d: -margin(d)}],
            method="SLSQP",
            options={"ftol": 1e-12, "maxiter": 500},
        )
        # Status 8: no step is shorter, to rounding.
        if (found.success or found.status == 8) and margin(found.x) < 1e-7:
            best = min(best, math.sqrt(found.fun))
    return best


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, 5), st.integers(0, 10**6))
def test_the_smallest_change_is_that_of_a_general_solver(kind, n, seed):
    A, g, m = problem(kind, n, seed)
    (d,) = smallest_changes(A, g, m)
    expected = shortest_by_search(lambda d: d @ A.numpy() @ d + g[0].numpy() @ d + float(m), n)
    assert math.isclose(float(d.norm()), expected, rel_tol=1e-4) or d.isinf().all()
    if d.isinf().all():
        assert expected > 1e3  # a margin that nearly touches 0, or never does
    else:
        assert abs(float(d @ A @ d + g[0] @ d + m)) < 1e-9 * float(m + 1)


def test_a_margin_that_never_falls_to_zero_has_no_change():
    assert (
        smallest_changes(torch.eye(3).double(), torch.zeros(1, 3).double(), torch.ones(1))
        .isinf()
        .all()
    )


@pytest.mark.long
@pytest.mark.parametrize("hidden", [None, 12])
@pytest.mark.parametrize("norm", ["none", "scalar"])
@pytest.mark.parametrize("bias", [False, True])
def test_answers_change_beyond_the_radius_only(bias, norm, hidden):
    torch.manual_seed(int(bias))
    settings = {"bias": bias, "residual": True, "norm": norm, "d_hidden": hidden}
    model = ImageClassifier(ClassifierConfig(4, 3, 8, **settings)).double().eval()
    model.requires_grad_(False)
    for parameter in model.parameters():  # biases begin at 0
        parameter.add_(torch.randn_like(parameter), alpha=0.3)
    x = normal(30, 4)
    labels = model(x).argmax(-1)
    reading = certify(model, x, labels)
    found = reading.change.isfinite().all(-1)
    assert found.sum() > 20
    x, change, labels = x[found], reading.change[found], labels[found]
    assert (model(x + 1.001 * change).argmax(-1) != labels).all()
    assert (model(x + 0.999 * change).argmax(-1) == labels).all()
    assert (model(x + 1.001 * change).argmax(-1) == reading.other[found]).all()
    for row in range(5):

        def margin(d, row=row):
            logits = model(x[row] + torch.as_tensor(d))
            others = logits.clone()
            others[labels[row]] = -math.inf
            return float(logits[labels[row]] - others.max())

        shortest = shortest_by_search(margin, 4)
        assert float(reading.radius[found][row]) <= shortest * (
            1 + 1e-5
        )  # of the solver's constraint


def test_nothing_inside_a_bound_changes_the_answer():
    data = digits()
    x, labels = data.test_images[:60], data.test_labels[:60]
    for layers in (1, 2, 3):
        model = digit_model(layers) if layers < 3 else digit_model(3, bias=True)
        reading = certify(model, x, labels)
        right = reading.right
        assert (reading.radius[right] > 0).all()
        inside = 0.999 * reading.radius[right, None].float()
        step = torch.zeros_like(x[right])
        for _ in range(30):
            point = (x[right] + step).requires_grad_()
            logits = model(point)
            others = logits.scatter(1, labels[right, None], -math.inf).amax(1)
            (slope,) = torch.autograd.grad(
                (logits.gather(1, labels[right, None])[:, 0] - others).sum(), point
            )
            step = step - inside / 4 * slope / slope.norm(dim=-1, keepdim=True)
            step = step * (inside / step.norm(dim=-1, keepdim=True)).clamp_max(1)
            assert (model(x[right] + step).argmax(-1) == labels[right]).all()


def test_pictures_within_their_range_are_between_both_bounds():
    data, model = digits(), digit_model()
    x, labels = data.test_images[:40], data.test_labels[:40]
    right = certify(model, x, labels).right
    bounds = box_bounds(model, x[right], labels[right])
    for low, high in (bounds.euclidean, bounds.largest):
        assert (low > 0).all()
        assert (low <= high).all()
        assert high.isfinite().double().mean() > 0.9
    # The upper bounds are pictures: a margin that is still positive is no change.
    forms = forms_of(*open_layer(model))
    margin, _ = margins_and_slopes(forms, x[right].double(), labels[right])
    assert (margin > 0).all()


@pytest.mark.parametrize("k", nightly([3, 8, 24], [8]))
def test_cut_models_answer_alike_within_the_proved_radius(k):
    data, model = digits(), digit_model()
    x = data.test_images[:80]
    shares = proved_agreement(model, k, x, (0.0, 0.2, 0.5))
    assert 1 >= shares[0.0] >= shares[0.2] >= shares[0.5]
    spectrum = model.tensor().interaction(output=range(10)).eigh().truncate(k)
    logits, cut = model(x), spectrum(x)
    assert math.isclose(shares[0.0], float((logits.argmax(1) == cut.argmax(1)).double().mean()))
    assert proved_agreement(model, model, x, (0.0,)) == {0.0: 1.0}


def test_a_reading_says_what_is_proved():
    data, model = digits(), digit_model()
    reading = certify(model, data.test_images, data.test_labels)
    share, low, high = reading.certified(0.2)
    kept = (reading.radius > 0.2) & (reading.predicted == reading.labels)
    assert share == float(kept.double().mean())
    assert low < share < high
    assert "Half of the" in reading.answer()
    assert "lower bound" in certify(digit_model(2), data.test_images, data.test_labels).answer()
    wrong = certify(model, data.test_images, (reading.predicted + 1) % 10)
    assert (wrong.radius == 0).all()
    assert "no picture right" in wrong.answer()


def test_the_answer_to_a_picture_of_a_file_is_certified(tmp_path):
    data, model, path = digits(), digit_model(), str(tmp_path / "own.png")
    pixels = (data.test_images[4].reshape(8, 8) * 255).round().to(torch.uint8)
    Image.fromarray(pixels.numpy()).save(path)
    reading = read_certificates(model, data, 10, path)
    x = pixels.flatten()[None] / 255
    label = model(x).argmax(-1)
    expected = certify(model, x, label)
    assert torch.equal(reading.radius, expected.radius)
    assert 0 < float(reading.radius) < math.inf
    assert reading.answer() == (
        f"The answer {int(label)} holds for every change of the picture that is shorter than "
        f"{float(expected.radius):.2f}. This is exact: a change of the radius's length gives "
        f"another answer. The nearest other class is {int(expected.other)}."
    )


def test_what_cannot_be_certified_is_refused():
    model, x = digit_model(), digits().test_images[:3]
    with pytest.raises(bilens.BilensError, match="labels"):
        certify(model, x, torch.tensor([0, 1, 10]))
    with pytest.raises(bilens.BilensError, match="x holds"):
        certify(model, torch.full_like(x, math.nan), torch.tensor([0, 1, 2]))
    assert forms_of(random_tensor(3, 4, 2, 0)).basis.shape == (3, 3)


@pytest.mark.long
def test_the_recipe_states_what_it_measured(monkeypatch):
    for name, value in (("ATTACKED", 40), ("RESTARTS", 2), ("STEPS", 3), ("RANKS", (3,))):
        monkeypatch.setattr(f"experiments.certify.{name}", value)

    for name, value in (("STEPS", 2), ("WORDS", 40), ("LISTED", (30, 300))):
        monkeypatch.setattr(every_text, name, value)
    named = dict.fromkeys(word for last, pair in every_text.AFTER.items() for word in (last, *pair))
    numbers = {word: number for number, word in enumerate(named)}
    ids = torch.randint(0, 40, (3000,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(every_text, "words", lambda _: (ids, ids[:2000], numbers))

    class Context(RecipeContext):
        mnist = fashion = property(lambda self: digits())

        def classifiers(self, data, training, seeds, layers=1):
            return [digit_model(layers) if layers < 3 else digit_model(3, bias=True)]

    outcome = check_rows(run(Context("small", models=None)))
    by_claim = {row.claim.removeprefix("digits: "): row.value for row in outcome.rows}
    assert by_claim["answers that change at 1.001 of the radius"] == 1
    assert by_claim["answers that change at 0.999 of the radius"] == 0
    assert by_claim["attacks inside the radius that succeed"] == 0

from dataclasses import dataclass
from itertools import combinations

import pytest
import torch
from experiments.context import RecipeContext
from experiments.extrema import Extrema, local_extrema, run
from hypothesis import given
from hypothesis import strategies as st

from bilens.errors import BilensError
from bilens.tensor import BilinearTensor, QuadraticForm
from tests.models import digit_model, digits
from tests.tensor.factors import close, normal, random_tensor


def form_of(Q: torch.Tensor) -> QuadraticForm:
    eye = torch.eye(len(Q), dtype=Q.dtype)
    return QuadraticForm(eye.repeat_interleave(len(Q), 0), eye.repeat(len(Q), 1), Q.flatten())


def symmetric(n: int, seed: int) -> torch.Tensor:
    A = normal(n, n, seed=seed)
    return A + A.T


def by_supports(Q: torch.Tensor) -> list[tuple[float, torch.Tensor]]:
    """Every strict local maximum on x >= 0: the top eigenvector of each block, if it is one."""
    result = []
    for size in range(1, len(Q) + 1):
        for support in map(list, combinations(range(len(Q)), size)):
            values, columns = torch.linalg.eigh(Q[support][:, support])
            top = columns[:, -1] * columns[:, -1].sum().sign()
            x = torch.zeros(len(Q), dtype=Q.dtype)
            x[support] = top
            outside = [i for i in range(len(Q)) if i not in support]
            if (top > 0).all() and ((Q @ x)[outside] <= 0).all():
                result.append((float(values[-1]), x))
    return sorted(result, key=lambda pair: -pair[0])


def assert_first_order(result: Extrema, Q: torch.Tensor, sign: int) -> None:
    x = result.points
    slope = sign * x @ Q
    tangent = slope - (slope * x).sum(-1, keepdim=True) * x
    scale = torch.linalg.matrix_norm(Q, 2)
    assert (x >= 0).all()
    assert close(x.norm(dim=-1), torch.ones(len(x), dtype=x.dtype))
    assert (tangent[x > 0].abs() <= 1e-5 * scale).all()
    assert (tangent <= 1e-5 * scale).all()
    assert close(result.values, torch.einsum("mi,ij,mj->m", x, Q, x))
    assert (sign * result.values.diff() <= 0).all()


@given(st.integers(1, 5), st.integers(0, 10_000), st.sampled_from([1, -1]))
def test_all_maxima_on_the_non_negative_sphere(n, seed, sign):
    Q = symmetric(n, seed)
    extrema = local_extrema(form_of(Q), sign=sign)
    expected = by_supports(sign * Q)
    assert len(extrema) == len(expected)
    assert close(extrema.values, sign * torch.tensor([e[0] for e in expected], dtype=Q.dtype), 1e-8)
    assert ((extrema.points * torch.stack([e[1] for e in expected])).sum(-1) > 1 - 1e-8).all()
    assert extrema.converged.all()
    assert extrema.hits.sum() == 256
    assert_first_order(extrema, Q, sign)


@pytest.mark.parametrize("seed", range(5))
def test_against_a_grid_on_the_quarter_circle(seed):
    Q = symmetric(2, seed)
    angle = torch.linspace(0, torch.pi / 2, 2001, dtype=torch.float64)
    x = torch.stack([angle.cos(), angle.sin()], 1)
    height = torch.einsum("si,ij,sj->s", x, Q, x)
    padded = torch.nn.functional.pad(height, (1, 1), value=-torch.inf)
    peaks = x[(height > padded[:-2]) & (height > padded[2:])]
    extrema = local_extrema(form_of(Q), n_starts=64)
    assert len(extrema) == len(peaks)
    assert ((extrema.points @ peaks.T).amax(0) > 1 - 1e-6).all()


@pytest.mark.parametrize("seed", range(3))
def test_nothing_on_a_grid_of_the_octant_is_higher(seed):
    Q = symmetric(3, seed)
    line = torch.linspace(0, 1, 60, dtype=torch.float64)
    x = torch.cartesian_prod(line, line, line)[1:]
    x = x / x.norm(dim=1, keepdim=True)
    height = torch.einsum("si,ij,sj->s", x, Q, x)
    for sign in (1, -1):
        best = sign * local_extrema(form_of(Q), sign=sign, n_starts=64).values[0]
        assert 0 <= best - (sign * height).max() < 0.01


def test_the_minimum_of_a_copositive_form_is_zero():
    # Horn's form: never negative on x >= 0, though it has negative eigenvalues.
    row = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    Q = torch.stack([row.roll(i) for i in range(5)])
    assert torch.linalg.eigvalsh(Q)[0] < -1
    values = local_extrema(form_of(Q), sign=-1).values
    assert values[0].abs() < 1e-9
    assert local_extrema(form_of(Q), sign=-1, nonnegative=False).values[0] < -1


@given(st.integers(1, 9), st.integers(0, 10_000), st.sampled_from([1, -1]))
def test_on_the_whole_sphere_only_the_end_of_the_spectrum_is_left(n, seed, sign):
    Q = torch.linalg.qr(normal(n, n, seed=seed)).Q
    Q = Q @ torch.diag(torch.arange(n, dtype=torch.float64) - n / 2 + 0.2) @ Q.T
    extrema = local_extrema(form_of(Q), sign=sign, nonnegative=False, n_starts=32)
    values, columns = torch.linalg.eigh(Q)
    end = -1 if sign == 1 else 0
    assert len(extrema) == 1
    assert extrema.hits.tolist() == [32]
    assert extrema.converged.all()
    assert close(extrema.values[0], values[end], 1e-8)
    projector = torch.outer(extrema.points[0], extrema.points[0])
    assert close(projector, torch.outer(columns[:, end], columns[:, end]), 1e-4)


@pytest.mark.parametrize("nonnegative", [True, False])
def test_no_step_goes_down(nonnegative):
    for seed in range(5):
        form = random_tensor(20, 15, 1, seed).interaction(output=0)
        values = [
            local_extrema(form, nonnegative=nonnegative, n_starts=1, steps=steps, seed=seed).values
            for steps in (*range(1, 12), 100, 2000)
        ]
        climb = torch.cat(values)
        assert (climb.diff() >= -1e-12 * climb.abs().max()).all()
        assert climb[-1] > climb[0]


def test_a_larger_form():
    form = random_tensor(60, 40, 1, 3).interaction(output=0)
    Q = form.dense()
    extrema = local_extrema(form, seed=1)
    assert extrema.converged.all()
    assert (extrema.residuals <= 1e-6).all()
    assert_first_order(extrema, Q, 1)
    again = local_extrema(form, seed=1)
    assert torch.equal(extrema.points, again.points)
    cosines = extrema.points @ extrema.points.T - torch.eye(len(extrema), dtype=torch.float64)
    assert (cosines < 0.999).all()


def test_inputs_that_do_not_interact_are_no_trap():
    # Each axis is stationary, but only the largest entry is a maximum.
    extrema = local_extrema(form_of(torch.diag(torch.tensor([1.0, 3.0, 0.0, 2.0]))))
    assert extrema.hits.tolist() == [256]
    assert close(extrema.points[0], torch.tensor([0.0, 1.0, 0.0, 0.0]), 1e-5)
    assert extrema.values.dtype == torch.float32


def test_maxima_that_resemble_each_other_stay_apart():
    Q = torch.tensor([[1.64, 0.48, 0.48], [0.48, 1.36, -5.0], [0.48, -5.0, 1.36]]).double()
    extrema = local_extrema(form_of(Q), n_starts=32)
    assert close(extrema.values, torch.tensor([2.0, 2.0]).double(), 1e-6)
    assert close(extrema.points[0] @ extrema.points[1], torch.tensor(0.64).double(), 1e-4)


def test_small_basins_are_found_beside_a_broad_one():
    # Ten inputs that go together, and ten more that go with nothing.
    Q = torch.full((20, 20), -0.2, dtype=torch.float64)
    Q[:10, :10] = 0.3
    Q.diagonal()[10:] = torch.arange(1.0, 2.0, 0.1)
    extrema = local_extrema(form_of(Q))
    assert len(extrema) == 11
    assert close(extrema.values[0], torch.tensor(3.0).double())
    assert close(extrema.values[1:], Q.diagonal()[10:].flip(0))


def test_single_precision_climbs_in_double():
    form = random_tensor(20, 15, 1, 0).to(torch.float32).interaction(output=0)
    extrema = local_extrema(form, tolerance=1e-10)
    assert extrema.converged.all()
    assert extrema.points.dtype == extrema.residuals.dtype == torch.float32


def test_running_out_of_steps_is_told():
    form = random_tensor(30, 20, 1, 0).interaction(output=0)
    extrema = local_extrema(form, steps=1, n_starts=4)
    assert not extrema.converged.any()
    assert (extrema.residuals > 1e-6).all()
    assert extrema.hits.sum() == 4


NAN = BilinearTensor(torch.full((1, 2), torch.nan), torch.ones(1, 2), torch.ones(1, 1))
MISUSES = [
    (lambda t: local_extrema(t.interaction(output=[0, 1])), r"batch of shape \(2,\).*form\[0\]"),
    (lambda t: local_extrema(t.with_bias().interaction(output=0)), "constant coordinate"),
    (lambda t: local_extrema(t.interaction(output=0), sign=2), "sign=2, expected one of 1, -1"),
    (lambda t: local_extrema(t.interaction(output=0), n_starts=0), "n_starts=0"),
    (lambda t: local_extrema(t.interaction(output=0), steps=0), "steps=0"),
    (lambda t: local_extrema(t.interaction(output=0), tolerance=0.0), "tolerance=0.0"),
    (lambda t: local_extrema(t.interaction(torch.zeros(3).double())), "form is zero"),
    (lambda t: local_extrema(NAN.interaction(output=0)), "left holds NaN"),
]


@pytest.mark.parametrize(("misuse", "message"), MISUSES)
def test_misuse_is_explained(misuse, message):
    with pytest.raises(BilensError, match=message):
        misuse(random_tensor(4, 5, 3, 0))


@dataclass(frozen=True)
class TinyContext(RecipeContext):
    """Digits and a model of a few steps."""

    @property
    def mnist(self):
        return digits()

    def classifiers(self, data, training, seeds, **how):
        return [digit_model()]


def test_the_recipe_counts_the_maxima_of_each_class(tmp_path):
    outcome = run(TinyContext("small", tmp_path))
    classes = outcome.numbers["classes"]
    assert list(classes) == list(digits().class_names)
    assert all(1 <= found["maxima"] <= 64 for found in classes.values())
    assert all(found["values"] == sorted(found["values"])[::-1] for found in classes.values())
    assert len(outcome.figures["maxima"].layout.images) >= 10

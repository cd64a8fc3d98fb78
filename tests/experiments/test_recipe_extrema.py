from itertools import combinations

import pytest
import torch
from experiments.context import RecipeContext
from experiments.extrema import in_random_directions, local_maxima, run
from hypothesis import given
from hypothesis import strategies as st

from bilens.tensor import QuadraticForm
from tests.models import digit_model, digits
from tests.tensor.factors import close, normal, random_tensor

pytestmark = pytest.mark.long


def form_of(Q: torch.Tensor) -> QuadraticForm:
    eye = torch.eye(len(Q), dtype=Q.dtype)
    return QuadraticForm(eye.repeat_interleave(len(Q), 0), eye.repeat(len(Q), 1), Q.flatten())


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


@given(st.integers(1, 5), st.integers(0, 10_000))
def test_all_maxima_on_the_non_negative_sphere(n, seed):
    Q = normal(n, n, seed=seed)
    Q = Q + Q.T
    values, points = local_maxima(form_of(Q), n_starts=256)
    expected, ends = zip(*by_supports(Q), strict=True)
    assert len(values) == len(expected)
    assert close(values, torch.tensor(expected, dtype=Q.dtype), 1e-8)
    assert ((points * torch.stack(ends)).sum(-1) > 1 - 1e-8).all()


def test_a_larger_form_is_stationary_at_its_ends():
    form = random_tensor(60, 40, 1, 3).interaction(output=0)
    Q = form.dense()
    values, x = local_maxima(form, 256)
    tangent = x @ Q - values[:, None] * x
    scale = torch.linalg.matrix_norm(Q, 2)
    assert (x >= 0).all()
    assert close(x.norm(dim=-1), torch.ones(len(x), dtype=x.dtype))
    assert (tangent[x > 0].abs() <= 1e-5 * scale).all()
    assert (tangent <= 1e-5 * scale).all()
    assert (values.diff() <= 0).all()
    assert (x @ x.T - torch.eye(len(x), dtype=x.dtype) < 0.999).all()


def test_small_basins_are_found_beside_a_broad_one():
    # Ten inputs that go together, and ten more that go with nothing.
    Q = torch.full((20, 20), -0.2, dtype=torch.float64)
    Q[:10, :10] = 0.3
    Q.diagonal()[10:] = torch.arange(1.0, 2.0, 0.1)
    values, _ = local_maxima(form_of(Q), n_starts=256)
    assert len(values) == 11
    assert close(values[0], torch.tensor(3.0).double())
    assert close(values[1:], Q.diagonal()[10:].flip(0))


def test_the_recipe_counts_the_maxima_of_each_class(tmp_path, monkeypatch):
    monkeypatch.setattr(RecipeContext, "mnist", digits())
    monkeypatch.setattr(RecipeContext, "classifiers", lambda *_, **how: [digit_model()])
    outcome = run(RecipeContext("small", tmp_path))
    classes = outcome.numbers["classes"]
    assert list(classes) == list(digits().class_names)
    for kind, sign in (("maxima", 1), ("minima", -1)):
        for found in (of_class[kind] for of_class in classes.values()):
            assert 1 <= found["count"] <= 64
            heights = [sign * value for value in found["values"]]
            assert heights == sorted(heights)[::-1]
        assert len(outcome.figures[kind].axes[0].images) >= 10


def test_random_directions_keep_eigenvalues():
    forms = random_tensor(12, 8, 3, 5).interaction(output=range(3))
    for number, turned in enumerate(in_random_directions(forms)):
        Q, P = forms[number].dense(), turned.dense()
        assert close(torch.linalg.eigvalsh(P), torch.linalg.eigvalsh(Q))
        assert not close(P, Q)

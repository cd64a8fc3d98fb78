import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.tensor.features import cluster
from tests.tensor.factors import SEEDS, close, normal


def by_definition(v: torch.Tensor, w: torch.Tensor, threshold: float) -> list[list[int]]:
    """Return the groups, one row after another."""
    units = v / v.norm(dim=1, keepdim=True)
    waiting, groups = sorted(range(len(v)), key=lambda i: -w[i]), []
    while waiting:
        led = [i for i in waiting if abs(units[i] @ units[waiting[0]]) >= threshold - 1e-12]
        groups.append(led)
        waiting = [i for i in waiting if i not in led]
    moments = [sum(w[i] * torch.outer(units[i], units[i]) for i in rows) for rows in groups]
    result = [torch.linalg.eigh(M).eigenvectors[:, -1] for M in moments]
    moved = [max(range(len(result)), key=lambda g: abs(u @ result[g])) for u in units]
    groups = [[i for i in range(len(v)) if moved[i] == g] for g in range(len(result))]
    return sorted([g for g in groups if g], key=lambda g: -sum(w[i] for i in g))


@given(st.integers(1, 12), st.integers(1, 4), SEEDS, st.sampled_from([0.3, 0.7, 0.9, 1.0]))
def test_against_the_definition(m, n, seed, threshold):
    v, w = normal(m, n, seed=seed), normal(m, seed=1).abs() + 0.1
    features = cluster(v, w, threshold)
    assert [rows.tolist() for rows in features.members] == by_definition(v, w, threshold)
    assert len(features) == len(features.members)
    units = v / v.norm(dim=1, keepdim=True)
    for f, rows, share, agreement in zip(
        features.vectors, features.members, features.coverage, features.agreement, strict=True
    ):
        M = (w[rows, None] * units[rows]).T @ units[rows]
        assert close(f @ M @ f, torch.linalg.eigvalsh(M)[-1])
        assert close(f.norm(), torch.ones((), dtype=torch.float64))
        assert close(share, w[rows].sum() / w.sum())
        assert close(agreement, (units[rows] @ f).abs().min())
    assert close(features.coverage.sum(), torch.ones((), dtype=torch.float64))
    assert (features.coverage.diff() <= 0).all()


def test_planted_clusters_are_recovered():
    centres, planted = torch.linalg.qr(normal(20, 4)).Q.T, torch.arange(40) % 4
    signs, lengths = normal(40, 1, seed=2).sign(), normal(40, 1, seed=3).abs() + 0.1
    v = lengths * signs * (centres[planted] + 0.02 * normal(40, 20, seed=4))
    features = cluster(v, torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64)[planted])
    assert [set(planted[rows].tolist()) for rows in features.members] == [{0}, {1}, {2}, {3}]
    assert sum(len(rows) for rows in features.members) == 40
    assert close(features.coverage, torch.tensor([8, 4, 2, 1], dtype=torch.float64) / 15)
    assert ((features.vectors * centres).sum(-1).abs() > 0.999).all()
    assert (features.agreement > 0.95).all()


def test_lengths_signs_and_order_play_no_part():
    v, w = normal(12, 3), normal(12, seed=1).abs()
    features = cluster(v, w, 0.8)
    other = cluster(v * normal(12, 1, seed=2), w, 0.8)
    assert [a.tolist() for a in features.members] == [b.tolist() for b in other.members]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    shuffled = cluster(v[order], w[order], 0.8)
    for a, b in zip(features.members, shuffled.members, strict=True):
        assert a.tolist() == order[b].sort().values.tolist()
    cosines = (features.vectors * shuffled.vectors).sum(-1)
    assert close(cosines, torch.ones(len(features), dtype=torch.float64))


def test_a_feature_is_signed_like_its_heaviest_member():
    v = torch.tensor([[1.0, 0.1], [-1.0, 0.1], [-1.0, 0.0]])
    assert cluster(v, torch.tensor([1.0, 3.0, 1.0])).vectors[0, 0] < 0
    assert cluster(v, torch.tensor([3.0, 1.0, 1.0])).vectors[0, 0] > 0


def test_a_row_moves_to_the_feature_that_it_resembles_most():
    # The leader at 0 takes in 24 (cosine 0.91), and so do not 40 and 30, which lies closer to it.
    angles = torch.tensor([0.0, 40.0, 24.0, 30.0]).deg2rad()
    v = torch.stack([angles.cos(), angles.sin()], -1)
    features = cluster(v, torch.tensor([4.0, 3.0, 0.1, 1.0]), 0.9)
    assert [rows.tolist() for rows in features.members] == [[1, 2, 3], [0]]


def test_threshold_one_joins_equal_directions_alone():
    v = normal(5, 3).float()
    features = cluster(torch.cat([v, -7 * v]), torch.ones(10), 1.0)
    assert sorted(rows.tolist() for rows in features.members) == [[i, i + 5] for i in range(5)]
    assert features.vectors.dtype == torch.float32


def test_rows_without_weight_belong_somewhere():
    features = cluster(torch.eye(3), torch.tensor([0.0, 2.0, 0.0]))
    assert features.coverage.tolist() == [1.0, 0.0, 0.0]
    assert [rows.tolist() for rows in features.members] == [[1], [0], [2]]
    assert close(features.vectors @ features.vectors.T, torch.eye(3))

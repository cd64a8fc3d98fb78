import pytest
import torch

from bilens.read import class_spectra, shared_by_classes, shared_by_paths
from bilens.tensor import Spectrum, cluster, decompile
from tests.models import digit_model


def planted() -> Spectrum:
    """Three classes: the first two use e0, up to sign, and the last uses e1 twice."""
    e = torch.eye(6)
    vectors = torch.stack([e[[0, 2]], torch.stack([-2 * e[0], e[3]]), e[[1, 1]]])
    values = torch.tensor([[4.0, -1.0], [-2.0, 1.0], [3.0, 2.0]])
    return Spectrum(values, vectors, torch.zeros(3, 2))


def test_what_was_planted_is_found():
    shared = shared_by_classes(planted())
    assert (shared.compared, shared.groups) == (6, 4)
    (feature,) = shared.features
    assert torch.allclose(feature.vector.abs(), torch.eye(6)[0])
    # Weights |lambda| |v|^2 are 4 + 2 * 4 of 4 + 1 + 8 + 1 + 3 + 2.
    assert feature.weight == pytest.approx(12 / 19)
    assert shared.weight == pytest.approx(12 / 19)
    assert [(u.label, u.place, u.raises) for u in feature.uses] == [
        (1, (0,), False),
        (0, (0,), True),
    ]
    assert feature.agreement == pytest.approx(1)
    assert not shared_by_classes(planted()[2:]).features
    assert shared_by_classes(planted(), k=1).compared == 3


def test_eigenvectors_without_weight_are_left_out():
    spectrum = planted()
    silent = Spectrum(spectrum.values * 0, spectrum.vectors * 0, spectrum.residuals)
    assert shared_by_classes(silent).compared == 0
    assert shared_by_classes(silent).weight == 0
    spectrum.vectors[2, 1] = 0
    assert shared_by_classes(spectrum).compared == 5


def test_the_paths_of_a_deep_model_share_their_ends():
    paths = decompile(digit_model(n_layers=2).tensors(), torch.eye(10), 60)
    shared = shared_by_paths(paths)
    assert shared.compared == 60
    features = cluster(paths.vectors, paths.effective.abs(), 0.7)
    several = [
        i for i, rows in enumerate(features.members) if len(set(paths.roots[rows].tolist())) > 1
    ]
    assert shared.groups == len(features)
    assert len(shared.features) == len(several)
    assert shared.weight == pytest.approx(float(features.coverage[several].sum()), rel=1e-4)
    numbers = {
        (int(r), *p): i
        for i, (r, p) in enumerate(zip(paths.roots, paths.indices.tolist(), strict=True))
    }
    for feature in shared.features:
        weights = [use.weight for use in feature.uses]
        assert weights == sorted(weights, reverse=True)
        for use in feature.uses:
            row = numbers[use.label, *use.place]
            assert use.raises == (paths.eigenvalues[row, 0] > 0)
            assert abs(paths.vectors[row] @ feature.vector) >= feature.agreement - 1e-5


def test_features_have_a_row_each():
    shared = shared_by_classes(class_spectra(digit_model()))
    frame = shared.frame()
    assert frame.weight.sum() == pytest.approx(shared.weight)
    for row, feature in zip(frame.itertuples(), shared.features, strict=True):
        labels = {*row.raises.split(", "), *row.lowers.split(", ")} - {""}
        assert labels == {str(use.label) for use in feature.uses}
    assert shared.record()["shared features"] == len(shared.features)

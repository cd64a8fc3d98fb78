"""Small readings of classifiers show their numbers: a line, a table, JSON, a section."""

import pytest

from bilens.read import attack, class_mask, explain, shared_by_classes, spectra
from tests.models import digit_model, digits


def test_an_attack_has_two_shares():
    data, of_classes = digits(), spectra(digit_model())
    result = attack(
        digit_model(),
        data.test_images,
        data.test_labels,
        class_mask(of_classes)[3],
        label=3,
        norm=3.0,
    )
    assert list(result.record().values()) == [result.targeted, result.fooled]
    assert f"{result.targeted:.2%}" in repr(result)


def test_rows_of_an_explanation_add_up_to_its_logits():
    x, model = digits().test_images[0], digit_model()
    result = explain(spectra(model), x, k=3)
    frame, logits = result.frame(), model(x).detach()
    for part in result.parts:
        rows = frame[frame["class"] == str(part.label)]
        assert rows.activation.sum() == pytest.approx(logits[part.label].item(), abs=1e-3)
    assert result.record()[f"logit of class {result.parts[0].label}"] == result.parts[0].logit
    assert len(result.plot().data) == 3


def test_shared_features_have_a_row_each():
    shared = shared_by_classes(spectra(digit_model()))
    frame = shared.frame()
    assert frame.weight.sum() == pytest.approx(shared.weight)
    for row, feature in zip(frame.itertuples(), shared.features, strict=True):
        labels = {*row.raises.split(", "), *row.lowers.split(", ")} - {""}
        assert labels == {str(use.label) for use in feature.uses}
    assert shared.record()["shared features"] == len(shared.features)

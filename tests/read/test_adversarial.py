import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.read import attack, class_mask
from bilens.tensor import Spectrum
from tests.models import digit_model, digits
from tests.tensor.factors import close, normal, random_tensor


@given(st.integers(1, 6), st.booleans(), st.integers(0, 10_000))
def test_a_mask_is_two_steps_uphill_in_the_positive_part(n_in, constant, seed):
    tensor = random_tensor(n_in, 4, 2, seed)
    if constant:
        tensor = tensor.with_bias(normal(4, seed=seed), normal(4, seed=seed + 1))
    form = tensor.interaction(torch.eye(2, dtype=torch.float64))
    values, vectors = torch.linalg.eigh(form.dense())
    positive = vectors @ (values.clamp_min(0)[..., None] * vectors.mT)
    expected = (positive @ positive).sum(-1)[..., :n_in]
    spectrum = form.eigh()
    if (expected.norm(dim=-1) < 1e-6).any():
        return
    masks = class_mask(spectrum)
    assert close(masks, expected / expected.norm(dim=-1, keepdim=True))
    assert close(class_mask(spectrum[1]), masks[1])
    turned = Spectrum(spectrum.values, -spectrum.vectors, spectrum.residuals, spectrum.constant)
    assert close(class_mask(turned), masks)


def test_an_attack_by_hand(monkeypatch):
    monkeypatch.setattr("bilens.read.chain.BATCH", 50)
    model, data = digit_model(), digits()
    x, labels = data.test_images, data.test_labels
    mask = class_mask(model.tensor().interaction(output=3).eigh())
    result = attack(model, x, labels, 7 * mask, label=3, norm=2.0)
    targeted, fooled, others = 0, 0, 0
    for image, label in zip(x, labels.tolist(), strict=True):
        if label != 3:
            others += 1
            predicted = int(model(torch.clip(image + 2 * mask, 0, 1)[None]).argmax())
            targeted += predicted == 3
            fooled += predicted != label
    assert result.targeted == pytest.approx(targeted / others)
    assert result.fooled == pytest.approx(fooled / others)
    assert list(result.record().values()) == [result.targeted, result.fooled]
    assert f"{result.targeted:.2%}" in repr(result)


def test_masks_beat_random_ones_of_equal_norm():
    model, data = digit_model(), digits()
    x, labels = data.test_images, data.test_labels
    masks = class_mask(model.tensor().interaction(output=range(10)).eigh())
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(10, 64, generator=generator)
    wins = 0
    for label in range(10):
        ours, random = (
            attack(model, x, labels, m[label], label=label, norm=2.0) for m in (masks, noise)
        )
        assert ours.targeted <= ours.fooled
        wins += ours.targeted > random.targeted + 0.1
    assert wins >= 9


def test_no_mask_is_no_attack():
    model, data = digit_model(), digits()
    x, labels = data.test_images, data.test_labels
    nothing = attack(model, x, labels, torch.ones(64), label=0, norm=0.0)
    others = labels != 0
    assert nothing.fooled == pytest.approx(1 - model.accuracy(x[others], labels[others]))

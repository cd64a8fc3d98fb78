import pytest
import torch

from bilens.data import load_images, modular_addition


@pytest.mark.parametrize("p", [2, 5, 59])
def test_every_pair_is_there_once_with_its_sum(p):
    data = modular_addition(p)
    assert (data.name, data.shape, data.n_classes) == (f"modular-{p}", (2, p), p)
    images = torch.cat([data.train_images, data.test_images]).reshape(-1, 2, p)
    assert torch.equal(images.sum(-1), torch.ones(p * p, 2))
    a, b = images.argmax(-1).T
    assert len({(int(x), int(y)) for x, y in zip(a, b, strict=True)}) == p * p
    assert torch.equal((a + b) % p, torch.cat([data.train_labels, data.test_labels]))
    assert len(data.train_labels) == round(0.8 * p * p)


def test_by_name_and_by_seed():
    first, again, other = (load_images("modular-7", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.train_images, again.train_images)
    assert not torch.equal(first.train_images, other.train_images)
    assert torch.equal(first.train_images, modular_addition(7, seed=1).train_images)

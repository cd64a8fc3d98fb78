"""Addition of two numbers modulo a third, as images: every pair once, and their sum as class."""

import torch
from torch.nn.functional import one_hot

from bilens.checks import check_count, checked
from bilens.data.image_data import ImageData
from bilens.settings import Seed

__all__ = ["modular_addition"]

TRAIN_SHARE = 0.8


@checked
def modular_addition(p: int, seed: Seed = 0) -> ImageData:
    """All pairs (a, b) with a + b mod p as the class; 80 % of them for training.

    An image has two rows of p pixels, of which pixel a is white in the first, b in the second. What
    tells the classes apart is known: sums over frequencies w of cos(2 pi w (a + b - c) / p).

    Args:
        p: the modulus, up to 256.
        seed: draws which pairs are for training.

    Raises:
        BilensError: p is out of range, or has no pairs for both splits.

    Source: Nanda et al. 2023, "Progress measures for grokking via mechanistic interpretability",
    arXiv:2301.05217.
    """
    check_count("p", p, 256)
    a, b = torch.arange(p).repeat_interleave(p), torch.arange(p).repeat(p)
    images, sums = torch.cat([one_hot(a, p), one_hot(b, p)], dim=1).float(), (a + b) % p
    order = torch.randperm(p * p, generator=torch.Generator().manual_seed(seed))
    train, test = order.tensor_split([round(TRAIN_SHARE * p * p)])
    return ImageData(
        name=f"modular-{p}",
        train_images=images[train],
        train_labels=sums[train],
        test_images=images[test],
        test_labels=sums[test],
        shape=(2, p),
        class_names=tuple(str(number) for number in range(p)),
    )

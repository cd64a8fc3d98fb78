"""Test images that are worth explaining."""

import torch

from bilens.data import ImageData
from bilens.nn import ImageClassifier

__all__ = ["telling_examples"]


@torch.no_grad()
def telling_examples(model: ImageClassifier, data: ImageData) -> dict[str, int]:
    """A clear case, a close call and a mistake, where there is one: numbers of test images."""
    logits = model(data.test_images)
    best = logits.topk(2, dim=-1)
    margin = best.values[:, 0] - best.values[:, 1]
    right = best.indices[:, 0] == data.test_labels
    examples = {"clear": int(torch.where(right, margin, -torch.inf).argmax())}
    if right.any():
        examples["close"] = int(torch.where(right, margin, torch.inf).argmin())
    if (~right).any():
        examples["mistaken"] = int(torch.where(right, -torch.inf, margin).argmax())
    return examples

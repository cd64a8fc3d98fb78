"""Weights have to be numbers before anything is made of them."""

import torch
from torch import nn

from bilens.errors import CheckpointError

__all__ = ["check_finite"]


def check_finite(model: nn.Module, name: str = "") -> None:
    """See that every weight of a model, or of a part called `name`, is a finite number.

    Raises:
        CheckpointError: one is not.
    """
    for part, parameter in model.named_parameters(prefix=name):
        if not torch.isfinite(parameter).all():
            raise CheckpointError(
                f"{part} holds NaN or infinite values. Fetch the model again; if it was trained "
                "here, its training has diverged."
            )

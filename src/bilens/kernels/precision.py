"""Arithmetic that autocast leaves alone."""

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["no_autocast"]


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Products of tensors on a device are in their own dtype, as a backward pass's are too."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)

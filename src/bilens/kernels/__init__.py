"""Causal attention without softmax: kernels that agree, behind one function that picks."""

from bilens.kernels.attention import (
    KERNELS,
    KernelName,
    bilinear_attention,
    resume_attention,
)

__all__ = ["KERNELS", "KernelName", "bilinear_attention", "resume_attention"]

"""Causal attention without softmax: kernels that agree, and a function that picks one."""

from bilens.kernels.attention import (
    KERNELS,
    KernelName,
    bilinear_attention,
    resume_attention,
    triton_problem,
)

__all__ = ["KERNELS", "KernelName", "bilinear_attention", "resume_attention", "triton_problem"]

"""Causal attention without softmax: kernels that agree, and a function that picks one."""

from bilens.kernels.attention import bilinear_attention, resume_attention

__all__ = ["bilinear_attention", "resume_attention"]

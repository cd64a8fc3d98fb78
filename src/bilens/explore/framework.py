"""Gradio, which is optional: the first use says how to install it."""

from typing import TYPE_CHECKING

from bilens.lazy_imports import lazy_import

if TYPE_CHECKING:
    import gradio
else:
    gradio = lazy_import("gradio", install="gradio>=6.31")

__all__ = ["gradio"]

"""Gradio, or a message that says how to install it."""

from bilens.errors import BilensError

try:
    import gradio
except ImportError as error:
    raise BilensError(
        'The explorer needs Gradio, which is not installed: pip install "bilens[explore]"'
    ) from error

__all__ = ["gradio"]

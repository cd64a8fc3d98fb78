"""Gradio, which is optional, and its server's parts: the first use says how to install them."""

from typing import TYPE_CHECKING

from bilens.lazy_imports import lazy_import

if TYPE_CHECKING:
    import gradio as gradio  # noqa: PLC0414  exported
    from starlette import middleware as middleware  # noqa: PLC0414
else:
    gradio = lazy_import("gradio", install="bilens[explore]")
    middleware = lazy_import("starlette.middleware", install="bilens[explore]")

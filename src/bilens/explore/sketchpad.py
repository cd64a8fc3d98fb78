"""An image as an input of a reading: drawn, uploaded or chosen from the test set."""

import base64
import binascii
import io
import time
import zlib
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from bilens.data import ImageData, fit_drawing
from bilens.data.images import ink_of
from bilens.explore.screen import Screen, StateError, heading
from bilens.figures.canvas import as_image, data_address, grey
from bilens.lazy_imports import gradio as gr

TEST, DRAWN = "test-", "drawn-"


def pack_drawing(x: Float[Tensor, " pixels"]) -> str:
    """Return a drawing in 255 levels of grey, compressed."""
    levels = (255 * x.clamp(0, 1)).round().byte().cpu().numpy()
    return DRAWN + base64.urlsafe_b64encode(zlib.compress(levels.tobytes(), 9)).decode().rstrip("=")


def read_sketch(text: str, data: ImageData) -> str:
    """Return the input of a sketchpad: a drawing as a picture, or a text as here.

    A drawing is framed as the images of the data set are; an empty sheet is an empty image.
    """
    sketch = "data:image/png;base64,"
    if not text.startswith(sketch):
        return text
    ink = ink_of(_read_picture(text.removeprefix(sketch)))
    return pack_drawing(fit_drawing(ink, data) if ink.max() > 0.05 else torch.zeros(data.n_inputs))


def unpack_input(text: str, data: ImageData) -> Float[Tensor, " pixels"]:
    """Return the image of a text."""
    if text.startswith(TEST):
        digits = text.removeprefix(TEST)
        if digits.isascii() and digits.isdigit() and len(digits) < 10:
            number = int(digits)
            if number < len(data.test_images):
                return data.test_images[number]
    elif text.startswith(DRAWN):
        packed = text.removeprefix(DRAWN)
        try:
            raw = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
            # Never more than an image, whatever the address claims to hold.
            levels = zlib.decompressobj().decompress(raw, data.n_inputs + 1)
        except (binascii.Error, ValueError, zlib.error):
            levels = b""
        if len(levels) == data.n_inputs:
            return torch.from_numpy(np.frombuffer(levels, np.uint8) / np.float32(255))
    raise StateError(
        "input",
        f"{text[:40]!r} is neither a test image from 0 to {len(data.test_images) - 1} nor a "
        f"drawing of {data.n_inputs} pixels",
    )


def _read_picture(packed: str) -> Image.Image:
    side = 1024
    try:
        picture = Image.open(io.BytesIO(base64.b64decode(packed)), formats=["PNG"])
        # The size is in the file's head: a file that is too large is never unpacked.
        if max(picture.size) > side:
            raise ValueError("too large")
        picture.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise StateError(
            "input", f"the drawing is not a picture of up to {side} pixels on a side; draw again"
        ) from error
    return picture


def sketchpad(data: ImageData, screen: Screen) -> None:
    """Lay out a sheet like the images of a data set, the control of the field `input`.

    Its component sends the sheet as a data address, whenever it has changed, or the text of a test
    image.
    """
    heading(
        "An image", "Draw on it, use a picture, or choose a test image; the panel below reads it."
    )
    height, width = data.shape
    scale = max(1, 280 // max(data.shape))  # 280 is the width of a sheet on the page

    def drawn(text: str) -> dict[str, Any]:
        # The fragment makes it another address each time: the sheet may have been drawn on since.
        picture = data_address(grey(as_image(unpack_input(text, data), data.shape)))
        return {"picture": f"{picture}#{time.monotonic_ns()}"}

    def shown(text: str) -> dict[str, Any]:
        return {"value": text, **drawn(text)}

    here, kinds = Path(__file__), (".html", ".css", ".js")
    page = {kind: here.with_suffix(kind).read_text(encoding="utf-8") for kind in kinds}
    # Gradio's own sketch sends whole layers as files, which the guard of requests refuses.
    component = gr.HTML(
        **shown(screen.view.start.input),
        html_template=page[".html"],
        css_template=page[".css"],
        js_on_load=page[".js"],
        apply_default_css=False,
        container=True,
        padding=True,
        elem_id="sketchpad",
        width=scale * width,
        height=scale * height,
        last=len(data.test_images) - 1,
        message="",
    )
    screen.control(
        "input",
        component,
        read=lambda text: read_sketch(text, data),
        write=shown,
        say=lambda text: {"message": escape(text)},
        is_typed=False,
    )
    # A drawing is on the sheet already, and may have gone on meanwhile.
    screen.part(
        "input",
        [component],
        lambda state: [gr.update(**drawn(state.input) if state.input.startswith(TEST) else {})],
    )

"""Where an input is chosen: a sheet to draw on, a picture of your own, or a test image."""

import time
from html import escape
from pathlib import Path
from typing import Any

from bilens.data import ImageData
from bilens.explore.gradio_import import gradio as gr
from bilens.explore.input_codec import is_test_image, read_sketch, unpack_input
from bilens.explore.screen import Screen
from bilens.read.figures.canvas import as_image, grey

__all__ = ["sketchpad"]

SIDE = 280
TEMPLATE = """
<p class="label">The image that is explained: draw on it</p>
<canvas width="${width}" height="${height}" role="img"
  aria-label="A sheet to draw on"></canvas>
<div class="row">
  <button type="button" class="clear">Clear</button>
  <label class="button">Use a picture<input type="file" accept="image/*"></label>
</div>
<label class="test">Test image
  <input type="number" min="0" max="${last}" step="1" value="0" inputmode="numeric"></label>
<input type="range" min="0" max="${last}" step="1" value="0" aria-label="Test image">
<p class="message" role="alert">${message}</p>
"""
STYLE = """
.label { margin: 0 0 8px; font-size: .85rem; color: var(--block-label-text-color); }
canvas { display: block; width: 100%; max-width: 280px; background: #fff;
  border: 1px solid var(--border-color-primary); border-radius: 8px; cursor: crosshair;
  touch-action: none; }
.row { display: flex; flex-wrap: wrap; gap: 8px; margin: 8px 0; }
button, .button { padding: 4px 10px; border-radius: 6px; cursor: pointer; font-size: .85rem;
  color: var(--button-secondary-text-color); background: var(--button-secondary-background-fill);
  border: 1px solid var(--border-color-primary); }
.button:focus-within { outline: 2px solid var(--color-accent); }
input[type=file] { position: absolute; opacity: 0; width: 1px; }
.test { display: flex; align-items: center; gap: 8px; font-size: .85rem;
  color: var(--body-text-color); }
input[type=number] { width: 6em; padding: 2px 6px; border-radius: 6px;
  border: 1px solid var(--border-color-primary); color: var(--body-text-color);
  background: var(--input-background-fill); }
input[type=range] { width: 100%; max-width: 280px; accent-color: var(--color-accent); }
.message { margin: 4px 0 0; font-size: .85rem; color: var(--error-text-color, #b2182b); }
.message:empty { display: none; }
"""


def sketchpad(screen: Screen[Any], data: ImageData) -> None:
    """Lay out a control of the field `input`.

    Its component hands over what is on the sheet, as a data address, whenever that has changed, or
    the text of a test image.

    Args:
        screen: whose state has the field.
        data: whose images a drawing is made to look like.
    """
    height, width = data.shape
    scale = max(1, SIDE // max(data.shape))

    def drawn(text: str) -> dict[str, Any]:
        # The fragment makes it another address each time: the sheet may have been drawn on since.
        picture = grey(as_image(unpack_input(text, data), data.shape))
        return {"picture": f"{picture}#{time.monotonic_ns()}"}

    def shown(text: str) -> dict[str, Any]:
        return {"value": text, **drawn(text)}

    component = gr.HTML(
        **shown(screen.view.start.input),
        html_template=TEMPLATE,
        css_template=STYLE,
        js_on_load=Path(__file__).with_name("sketchpad.js").read_text(encoding="utf-8"),
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
    )
    # A drawing is on the sheet already, and may have gone on meanwhile.
    screen.part(
        "input",
        [component],
        lambda state: [gr.update(**drawn(state.input) if is_test_image(state.input) else {})],
    )

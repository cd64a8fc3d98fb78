"""The screen of a classifier of one layer, and an image to draw, upload or choose."""

import base64
import binascii
import io
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from bilens.data import ImageData, fit_drawing, ink_of
from bilens.explore.readings import PanelView, lay_out
from bilens.explore.screen import Screen, StateError, check_ranges, heading, note_html
from bilens.lazy_imports import gradio as gr
from bilens.read import Explanation, explain, read_classifier, spectra
from bilens.read.chain import input_tensors
from bilens.read.figures.canvas import as_image, grey
from bilens.registry import Analysis
from bilens.report import (
    direction_figure,
    eigenvector_figure,
    explanation_figure,
    kept_figure,
    logits_figure,
    spectrum_figure,
)
from bilens.tensor import Spectrum, TensorChain

TEST, DRAWN, SKETCH = "test-", "drawn-", "data:image/png;base64,"

LARGEST = 1024
"""Pixels of a side of a drawing that is read."""


def pack_drawing(x: Float[Tensor, " pixels"]) -> str:
    """Return a drawing in 255 levels of grey, compressed."""
    levels = (255 * x.clamp(0, 1)).round().byte().cpu().numpy()
    return DRAWN + base64.urlsafe_b64encode(zlib.compress(levels.tobytes(), 9)).decode().rstrip("=")


def read_sketch(text: str, data: ImageData) -> str:
    """Return the input of a sketchpad: a drawing as a picture, or a text as here.

    A drawing is framed as the images of the data set are; an empty sheet is an empty image.

    Raises:
        StateError: the picture cannot be read.
    """
    if not text.startswith(SKETCH):
        return text
    ink = ink_of(_read_picture(text.removeprefix(SKETCH)))
    return pack_drawing(fit_drawing(ink, data) if ink.max() > 0.05 else torch.zeros(data.n_inputs))


def unpack_input(text: str, data: ImageData) -> Float[Tensor, " pixels"]:
    """Return the image of a text.

    Raises:
        StateError: it names no image of this data set.
    """
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
    try:
        picture = Image.open(io.BytesIO(base64.b64decode(packed)), formats=["PNG"])
        # The size is in the file's head: a file that is too large is never unpacked.
        if max(picture.size) > LARGEST:
            raise ValueError("too large")
        picture.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise StateError(
            "input", f"the drawing is not a picture of up to {LARGEST} pixels on a side; draw again"
        ) from error
    return picture


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

    Its component sends the sheet as a data address, whenever it has changed, or
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

    # Gradio's own sketch sends whole layers as files, which the guard of requests refuses.
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
        lambda state: [gr.update(**drawn(state.input) if state.input.startswith(TEST) else {})],
    )


BY = ("class", "difference", "component")
"""Kinds of directions: a class, one minus another, or a component of the SVD."""

SHOWN = 4


@dataclass(frozen=True)
class ImageState:
    """State of the screen.

    Attributes:
        by: how the direction is chosen.
        output: number of the class.
        minus: number of the class that is subtracted.
        component: number of the singular component, from 0.
        n_eigenvectors: eigenvectors kept of each class.
        input: the image that is explained.
    """

    by: str = "class"
    output: int = 0
    minus: int = 1
    component: int = 0
    n_eigenvectors: int = 10
    input: str = "test-0"


class ImageView(PanelView):
    """A classifier read once, and the views of each state.

    Args:
        model: of one layer, whose inputs are images.
        data: images to measure it on, the source of its top inputs.
        added: further analyses, each with a panel.

    Raises:
        NotBilinearError: the model is not one tensor.
        BilensError: its inputs have no image shape, or the data does not fit it.
    """

    def __init__(self, model: TensorChain, data: ImageData, added: Sequence[Analysis] = ()) -> None:
        self.model, self.data, self.shape = model, data, data.shape
        self.names = data.class_names
        self.reading = read_classifier(model, data)
        self.svd = input_tensors(model)[0].svd()
        self.start = ImageState(n_eigenvectors=min(10, self.reading.spectrum.k))
        self.add_panels(added, [data])

    def checked(self, state: ImageState) -> ImageState:
        """Return the state, if it fits the model.

        Raises:
            StateError: it has no such class, component, number of eigenvectors or input.
        """
        if state.by not in BY:
            raise StateError("by", f"{str(state.by)[:40]!r} is not one of {', '.join(BY)}")
        classes = (0, len(self.names) - 1)
        check_ranges(
            state,
            output=classes,
            minus=classes,
            component=(0, len(self.svd) - 1),
            n_eigenvectors=(1, self.reading.spectrum.k),
        )
        unpack_input(state.input, self.data)
        return state

    def direction(self, state: ImageState) -> tuple[Float[Tensor, " classes"], str]:
        """Return the direction in the logits, and its name."""
        # Each kind is a direction of the logits, so that one page serves all three.
        unit = torch.eye(len(self.names))
        if state.by == "component":
            return self.svd.outputs[state.component], f"component {state.component + 1}"
        name = self.names[state.output]
        if state.by == "difference":
            return unit[state.output] - unit[state.minus], f"{name} minus {self.names[state.minus]}"
        return unit[state.output], name

    @lru_cache(maxsize=8)  # noqa: B019  a view lives as long as its app
    def spectrum(self, state: ImageState) -> tuple[Spectrum, str]:
        """Return all eigenvectors of the direction, and its name."""
        direction, title = self.direction(state)
        return spectra(self.model, direction), title

    def spectrum_figure(self, state: ImageState) -> go.Figure:
        """Draw the eigenvalues."""
        return spectrum_figure(self.spectrum(state)[0], title="Spectrum")

    def eigenvectors_figure(self, state: ImageState) -> go.Figure:
        """Draw the outermost eigenvectors with their top inputs."""
        spectrum, title = self.spectrum(state)
        x = self.data.test_images
        outermost = spectrum.outermost(SHOWN).oriented(x)
        return eigenvector_figure(
            outermost, x, self.shape, title=f"Eigenvectors of {title}", k=SHOWN
        )

    def weights_figure(self, state: ImageState) -> go.Figure | None:
        """Draw the weight of each logit in the direction; None if its name says it."""
        if state.by != "component":
            return None
        return direction_figure(self.direction(state)[0], self.names, title="Weights of the logits")

    def curve_figure(self, state: ImageState) -> go.Figure:
        """Accuracy against the number of eigenvectors, with a mark at the number kept."""
        return kept_figure(self.reading.curve, state.n_eigenvectors)

    def accuracy_text(self, state: ImageState) -> str:
        """Return a sentence on the accuracy with this number of eigenvectors."""
        curve, k = self.reading.curve, state.n_eigenvectors
        return (
            f"With {k} of {len(curve.accuracy)} eigenvectors for each class the model gets "
            f"{curve.accuracy[k - 1]:.2%} of the test images right, with all of them "
            f"{curve.full:.2%}."
        )

    def logits_figure(self, state: ImageState) -> go.Figure:
        """Draw the logits of the input, and their parts that the eigenvectors kept add up to."""
        x = unpack_input(state.input, self.data)
        with torch.no_grad():
            logits = self.model(x)
        title = f"Logits: {state.n_eigenvectors} kept, and all"
        return logits_figure(logits, self._explanation(state).logits, self.names, title=title)

    def explanation_figure(self, state: ImageState) -> go.Figure:
        """Draw the eigenvectors that make the highest logits of the input."""
        title = "What makes the highest logits"
        return explanation_figure(self._explanation(state), self.shape, self.names, title=title)

    def _explanation(self, state: ImageState) -> Explanation:
        truncated = self.reading.spectrum.truncate(state.n_eigenvectors)
        return explain(truncated, unpack_input(state.input, self.data))


CHOICES = {
    "class": "a class",
    "difference": "one class minus another",
    "component": "a component of the SVD",
}


def image_screen(view: ImageView) -> Screen[ImageState]:
    """Lay the screen out inside a `gr.Blocks`.

    Args:
        view: the classifier, read.
    """
    return lay_out(view, view.reading.facts(), _direction, _truncation, _input)


def _direction(view: ImageView, screen: Screen[ImageState]) -> None:
    start = view.start
    components = [
        (f"{number + 1} (σ = {value:.3g})", number)
        for number, value in enumerate(view.svd.values.tolist())
    ]
    heading(
        "A direction and its eigenvectors",
        "The logit of a class, the difference of two, or another direction in the logits is "
        "exactly a sum of activations λ (v·x)², one for each eigenvector v. P1, P2, ... have a "
        "positive eigenvalue λ and only ever raise it; N1, N2, ... have a negative one and only "
        "ever lower it. Blue pixels of an eigenvector are positive, red ones negative, each "
        "picture on its own scale; beside it are the three test images that it reacts to most.",
    )
    with gr.Row():
        by = gr.Radio(
            [(CHOICES[name], name) for name in BY], value=start.by, label="Direction", min_width=320
        )
        screen.control("by", by)
        output = screen.choice("output", view.names, label="Class")
        minus = screen.choice("minus", view.names, label="Minus", visible=False)
        component = screen.choice("component", components, label="Component", visible=False)
    screen.part(
        "by",
        [output, minus, component],
        lambda state: [
            gr.update(visible=state.by != "component"),
            gr.update(visible=state.by == "difference"),
            gr.update(visible=state.by == "component"),
        ],
    )
    fields = "by output minus component"
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            screen.picture("spectrum", fields, view.spectrum_figure)
            screen.picture("direction", fields, view.weights_figure)
        with gr.Column(scale=5, min_width=320):
            screen.picture("eigenvectors", fields, view.eigenvectors_figure)


def _truncation(view: ImageView, screen: Screen[ImageState]) -> None:
    heading("How many eigenvectors it takes")
    count = gr.Slider(
        1,
        view.reading.spectrum.k,
        value=view.start.n_eigenvectors,
        step=1,
        label="Eigenvectors kept of each class",
        elem_id="n_eigenvectors",
    )
    screen.control("n_eigenvectors", count)
    screen.content(
        "accuracy-text", "n_eigenvectors", lambda state: note_html(view.accuracy_text(state))
    )
    screen.picture("accuracy", "n_eigenvectors", view.curve_figure)


def _input(view: ImageView, screen: Screen[ImageState]) -> None:
    heading(
        "One image, taken apart",
        "One row for each of the three highest logits: the eigenvectors that move it most for this "
        "image, and by how much. Rest is what all others that are kept add.",
    )
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            sketchpad(screen, view.data)
        with gr.Column(scale=5, min_width=320):
            screen.picture("logits", "n_eigenvectors input", view.logits_figure)
            screen.picture("explanation", "n_eigenvectors input", view.explanation_figure)

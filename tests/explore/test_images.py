"""The explorer's screens of a classifier of one layer, without a browser."""

import base64
import io
import json
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from bilens.data import fit_drawing, ink_of
from bilens.errors import BilensError
from bilens.explore.images import ImageState, ImageView, pack_drawing, read_sketch, unpack_input
from bilens.explore.screen import StateError, plot_of
from tests.models import digit_model, digits


@pytest.fixture(scope="module")
def view() -> ImageView:
    return ImageView(digit_model(), digits())


def sketch(picture: Image.Image, kind: str = "PNG") -> str:
    """Return a picture as the sketchpad returns it."""
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def test_a_spectrum_rebuilds_its_direction(view):
    """Class, difference and component: the eigenvectors add up to the model's output along each."""
    x = digits().test_images[:20]
    logits = digit_model()(x)
    svd = digit_model().tensor().svd()
    for state, expected in (
        (ImageState(output=3), logits[:, 3]),
        (ImageState("difference", output=3, minus=8), logits[:, 3] - logits[:, 8]),
        (ImageState("component", component=2), logits @ svd.outputs[2]),
    ):
        spectrum, _ = view.spectrum(state)
        assert torch.allclose(spectrum(x), expected, atol=1e-3)


def test_titles_say_what_is_shown(view):
    assert view.direction(ImageState(output=3))[1] == "3"
    assert view.direction(ImageState("difference", 3, 8))[1] == "3 minus 8"
    assert view.direction(ImageState("component", component=1))[1] == "component 2"


def test_keeping_all_eigenvectors_gives_the_models_logits(view):
    every = ImageState(n_eigenvectors=view.reading.spectrum.k)
    figure, explanation = view.logits_figure(every), view.explanation_figure(every)
    remaining, full = (np.array(trace.y) for trace in figure.data)
    assert np.allclose(remaining, full, atol=1e-3)
    figure = view.logits_figure(ImageState(n_eigenvectors=1))
    remaining, full = (np.array(trace.y) for trace in figure.data)
    assert not np.allclose(remaining, full, atol=1e-1)
    assert len(explanation.layout.images) == 2 + 3 * 5  # the input and the colour scale


def test_the_slider_moves_the_mark(view):
    figure = view.curve_figure(ImageState(n_eigenvectors=3))
    assert figure.data[-1].x == (3,)
    assert figure.data[-1].y == (100 * view.reading.curve.accuracy[2],)
    assert "With 3 of 24 eigenvectors" in view.accuracy_text(ImageState(n_eigenvectors=3))


def test_a_drawing_has_an_address(view):
    picture = Image.new("L", (50, 50), 255)
    picture.paste(0, (20, 10, 25, 40))
    text = read_sketch(sketch(picture), digits())
    x = unpack_input(text, digits())
    assert torch.allclose(x, fit_drawing(ink_of(picture), digits()), atol=1 / 255)
    assert view.checked(ImageState(input=text)).input == text
    assert len(text) < 120


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"by": "magic"}, "by: 'magic' is not one of class, difference, component"),
        ({"output": 10}, "output: 10 is not a whole number from 0 to 9"),
        ({"minus": 99}, "minus: 99 is not a whole number from 0 to 9"),
        ({"component": 10}, "component: 10 is not a whole number from 0 to 9"),
        ({"n_eigenvectors": 0}, "n_eigenvectors: 0 is not a whole number from 1 to 24"),
        ({"input": "test-360"}, "neither a test image from 0 to 359 nor a drawing of 64 pixels"),
        ({"input": "test-²"}, "neither a test image"),
        ({"input": "../../etc/passwd"}, "neither a test image"),
        ({"input": "drawn-!!!"}, "neither a test image"),
        ({"input": "drawn-AAAA"}, "neither a test image"),
    ],
)
def test_a_state_that_the_model_has_not(view, changes, message):
    with pytest.raises(StateError, match=message):
        view.checked(ImageState(**changes))


def test_an_address_cannot_fill_the_memory():
    bomb = base64.urlsafe_b64encode(zlib.compress(bytes(10**8), 9)).decode()
    tracemalloc.start()
    with pytest.raises(BilensError, match="nor a drawing of 64 pixels"):
        unpack_input("drawn-" + bomb, digits())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10**6


def test_an_empty_sheet_is_an_empty_image():
    blank = read_sketch(sketch(Image.new("L", (50, 50), 255)), digits())
    assert not unpack_input(blank, digits()).any()


def test_what_is_not_a_drawing_is_passed_on():
    assert read_sketch("test-3", digits()) == "test-3"
    assert read_sketch("drawn-x", digits()) == "drawn-x"


@pytest.mark.parametrize(
    "sheet",
    [
        "data:image/png;base64,A",
        "data:image/png;base64,PHN2ZyBvbmxvYWQ9YWxlcnQoMSk+",
        sketch(Image.new("L", (20, 20)), "GIF"),
        sketch(Image.new("L", (1025, 1))),
    ],
    ids=["no base64", "svg", "gif", "large"],
)
def test_a_sheet_that_is_not_a_picture_is_refused(sheet):
    message = "input: the drawing is not a picture of up to 1024 pixels"
    with pytest.raises(StateError, match=message):
        read_sketch(sheet, digits())


def test_figures_come_with_their_own_settings(view):
    plot = plot_of(view.curve_figure(view.start), "accuracy of <b>")
    shown = json.loads(plot.plot)
    assert plot.type == "plotly"
    assert shown["config"]["modeBarButtons"] == [["toImage"]]
    assert shown["config"]["toImageButtonOptions"]["filename"] == "accuracy-of-b-"


def test_a_packed_drawing_is_exact_to_a_level():
    x = torch.arange(64) / 63
    assert torch.allclose(unpack_input(pack_drawing(x), digits()), x, atol=0.5 / 255 + 1e-6)

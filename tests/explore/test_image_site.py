"""The explorer of a classifier in a browser, as a user meets it."""

import base64
import io
import json
import time
import urllib.error
import urllib.request
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from PIL import Image

from bilens.data import ink_of
from bilens.explore.images import ImageView, read_sketch, unpack_input
from tests.explore.browser import DRAWN, needs_chrome, visiting
from tests.models import digit_model, digits


def read_png(address: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))


def status(address: str) -> int:
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return int(error.code)


@needs_chrome
def test_choosing_a_direction_changes_figures_and_address(image_site, browser):
    with visiting(browser) as visit:
        page = visit.open(image_site, "#explanation .main-svg")
        before = page.evaluate("document.querySelector('#eigenvectors .gtitle').textContent")
        assert before == "Eigenvectors of 0"
        page.get_by_label("one class minus another").click()
        visit.wait("document.querySelector('#eigenvectors .gtitle').textContent.includes('minus')")
        assert page.get_by_label("Minus", exact=True).is_visible()
        visit.wait("location.search === '?by=difference'")
        page.get_by_label("a component of the SVD").click()
        visit.wait("document.querySelector('#direction .main-svg')")
        visit.wait("location.search === '?by=component'")
        page.reload()
        visit.wait("document.querySelector('#direction .main-svg')")
        assert page.get_by_label("a component of the SVD").is_checked()


@needs_chrome
def test_an_address_is_a_view(image_site, browser):
    with visiting(browser) as visit:
        query = "?by=difference&output=3&minus=8&n_eigenvectors=2&input=test-7"
        page = visit.open(image_site + query, "#explanation .main-svg")
        visit.wait("document.querySelector('#accuracy-text').textContent.includes('With 2 of')")
        title = page.evaluate("document.querySelector('#eigenvectors .gtitle').textContent")
        assert title == "Eigenvectors of 3 minus 8"
        assert page.locator("#sketchpad input[type=number]").input_value() == "7"
        assert page.url.endswith(query)
        with page.expect_download() as download:
            page.locator("#eigenvectors .modebar-btn").click()
        assert download.value.suggested_filename == "eigenvectors.svg"


@needs_chrome
def test_an_address_that_makes_no_sense_warns_and_starts_anew(image_site, browser):
    with visiting(browser) as visit:
        # On a busy machine the warning has gone before the figures are there.
        address = image_site + "?n_eigenvectors=<img src=x onerror=alert(1)>"
        page = visit.open(address, "text=The address cannot be shown")
        page.wait_for_selector(DRAWN)
        assert page.locator("img[src=x]").count() == 0


SHEET = "document.querySelector('#sketchpad canvas').toDataURL('image/png')"
INPUT = "new URLSearchParams(location.search).get('input')"


def draw_three(page, steps: int, pause: int) -> None:
    """Draw a 3 in one stroke, with n moves of the pointer on each of its lines."""
    page.locator("#sketchpad canvas").scroll_into_view_if_needed()
    box = page.locator("#sketchpad canvas").bounding_box()
    first, *others = [(70, 60), (200, 60), (130, 130), (200, 190), (130, 240), (70, 210)]
    page.mouse.move(box["x"] + first[0], box["y"] + first[1])
    page.mouse.down()
    for x, y in others:
        page.mouse.move(box["x"] + x, box["y"] + y, steps=steps)
        page.wait_for_timeout(pause)
    page.mouse.up()


@needs_chrome
@pytest.mark.parametrize(
    ("steps", "pause", "taken"),
    [
        pytest.param(1, 0, 0.0, id="in one move", marks=pytest.mark.slow),
        pytest.param(8, 60, 0.0, id="fast", marks=pytest.mark.slow),
        pytest.param(8, 200, 0.0, id="slow", marks=pytest.mark.slow),
        pytest.param(4, 150, 0.9, id="faster than the answers"),
    ],
)
def test_the_last_state_of_the_sheet_wins(image_site, browser, monkeypatch, steps, pause, taken):
    """The explanation and the address are those of the final drawing."""
    plain = ImageView.logits_figure

    def slow(view, state):
        time.sleep(taken)
        return plain(view, state)

    monkeypatch.setattr(ImageView, "logits_figure", slow)
    with visiting(browser) as visit:
        page = visit.open(image_site, "#explanation .main-svg")
        page.locator("#sketchpad .clear").click()
        draw_three(page, steps, pause)
        page.wait_for_timeout(400)
        text = read_sketch(page.evaluate(SHEET), digits())
        visit.wait(f"{INPUT} === '{text}'")
        logits = digit_model()(unpack_input(text, digits())).detach()
        shown = "document.querySelector('#logits .js-plotly-plot').data[1].y"
        visit.wait(f"Math.abs({shown}[3] - {float(logits[3])}) < 1e-3")
        page.wait_for_timeout(500)
        assert page.evaluate(INPUT) == text


@needs_chrome
def test_an_address_of_a_drawing_opens_with_it_on_the_sheet(image_site, browser):
    with visiting(browser) as visit:
        page = visit.open(image_site, "#explanation .main-svg")
        page.locator("#sketchpad .clear").click()
        draw_three(page, 5, 0)
        visit.wait(f"({INPUT} ?? '').length > 30")
        address = page.url
    (text,) = parse_qs(urlsplit(address).query)["input"]
    with visiting(browser) as visit:
        page = visit.open(address, "#explanation .main-svg")
        page.wait_for_timeout(300)
        x = unpack_input(text, digits()).reshape(8, 8)
        ink = ink_of(read_png(page.evaluate(SHEET)))
        cells = torch.tensor(ink).reshape(8, 35, 8, 35).mean((1, 3))
        assert torch.allclose(cells.float(), x, atol=0.02)


@needs_chrome
def test_test_images_and_pictures_are_put_on_the_sheet(image_site, browser, tmp_path):
    with visiting(browser) as visit:
        page = visit.open(image_site, "#explanation .main-svg")
        page.locator("#sketchpad input[type=number]").fill("5")
        visit.wait("location.search === '?input=test-5'")
        before = page.evaluate(SHEET)
        page.locator("#sketchpad .clear").click()
        visit.wait("location.search.startsWith('?input=drawn-')")
        page.locator("#sketchpad input[type=range]").fill("5")
        visit.wait(f"{SHEET} === '{before}'")
        picture = Image.new("L", (120, 60), 255)
        picture.paste(0, (20, 10, 100, 20))
        picture.save(tmp_path / "bar.png")
        page.locator("#sketchpad input[type=file]").set_input_files(tmp_path / "bar.png")
        visit.wait("location.search.startsWith('?input=drawn-')")
        assert page.evaluate(INPUT) == read_sketch(page.evaluate(SHEET), digits())
        (tmp_path / "bar.png").write_text("<svg onload=alert(1)>")
        page.locator("#sketchpad input[type=file]").set_input_files(tmp_path / "bar.png")
        visit.wait("document.querySelector('#sketchpad .message').textContent.includes('not a')")
        page.locator("#sketchpad input[type=number]").fill("360")
        visit.wait("document.querySelector('#sketchpad .message').textContent.includes('0 to 359')")
        assert page.locator("#sketchpad input[type=number]").input_value() == "5"


@needs_chrome
def test_what_is_refused_is_said_where_it_was_typed(image_site, browser):
    with visiting(browser) as visit:
        page = visit.open(image_site, "#explanation .main-svg")
        box = page.locator("#n_eigenvectors input[type=number]")
        for typed in ("0", "100000", "2.5"):
            box.fill(typed)
            visit.wait(
                f"document.querySelector('#n_eigenvectors').innerText.includes('{typed} is not')"
            )
            assert box.input_value() == "10"
        box.fill("7")
        visit.wait("!document.querySelector('#n_eigenvectors').innerText.includes('is not')")
        visit.wait("location.search === '?n_eigenvectors=7'")
        class_ = page.get_by_label("Class", exact=True)
        class_.fill("banana <b>")
        class_.press("Enter")
        page.wait_for_selector("text=banana <b> is not one of the choices")
        assert class_.input_value() == "0"


@needs_chrome
def test_back_goes_through_the_views_and_stays_in_the_explorer(image_site, browser):
    with visiting(browser) as visit:
        page = visit.open(image_site, "#explanation .main-svg")
        box = page.locator("#n_eigenvectors input[type=number]")
        for remaining in range(1, 4):
            box.fill(str(remaining))
            visit.wait(f"location.search === '?n_eigenvectors={remaining}'")
            page.wait_for_timeout(1100)
        for remaining in range(2, 0, -1):
            page.go_back()
            visit.wait(
                f"document.querySelector('#accuracy-text').innerText.includes('With {remaining}')"
            )
            assert box.input_value() == str(remaining)
        page.go_back()
        visit.wait("document.querySelector('#accuracy-text').innerText.includes('With 10')")
        assert page.url == image_site
        page.go_forward()
        visit.wait("document.querySelector('#accuracy-text').innerText.includes('With 1 ')")
        assert page.url.endswith("?n_eigenvectors=1")


@needs_chrome
def test_figures_fit_a_window_that_is_made_narrower(image_site, browser):
    with visiting(browser) as visit:
        page = visit.open(image_site + "?by=component", "#explanation .main-svg")
        visit.wait("document.querySelector('#direction .main-svg')")
        for width in (1400, 1000, 390, 1000):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(700)
            visit.fits()
            sizes = page.evaluate(
                "[...document.querySelectorAll('.js-plotly-plot')].map(e => [e.clientWidth, "
                "e.querySelector('.main-svg').clientWidth, e.clientHeight])"
            )
            assert len(sizes) == 6
            assert all(abs(place - drawn) <= 1 for place, drawn, _ in sizes)
            assert min(height for *_, height in sizes) > 80


@pytest.mark.parametrize("folder", ["image_run", "/etc"])
def test_files_outside_of_the_page_are_refused(image_site, image_run, folder):
    name = str(image_run / "model.safetensors") if folder == "image_run" else "/etc/hostname"
    for path in (name, "../../../../../../../" + name, "..%2f..%2f..%2f" + name, name + "%00"):
        for route in ("gradio_api/file=", "file=", "gradio_api/file/", "assets/../", "static/"):
            assert status(f"{image_site}{route}{path}") in (400, 403, 404), route + path


def test_the_page_tells_nobody_of_itself(image_site):
    with urllib.request.urlopen(image_site + "config", timeout=60) as answer:
        config = json.load(answer)
    assert config["analytics_enabled"] is False
    assert image_site.startswith("http://127.0.0.1:")

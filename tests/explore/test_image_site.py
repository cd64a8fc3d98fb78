"""The explorer of a classifier in a browser, as a user meets it."""

import json
import urllib.error
import urllib.request

import pytest
from PIL import Image

from bilens.explore.ink import drawn_input
from tests.explore.browser import needs_chrome, visiting
from tests.models import digits


def status(address: str) -> int:
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
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
        query = "?by=difference&output=3&minus=8&kept=2&input=test-7"
        page = visit.open(image_site + query, "#explanation .main-svg")
        visit.wait("document.querySelector('#accuracy-text').textContent.includes('With 2 of')")
        title = page.evaluate("document.querySelector('#eigenvectors .gtitle').textContent")
        assert title == "Eigenvectors of 3 minus 8"
        assert page.locator("#test-image input[type=number]").input_value() == "7"
        assert page.url.endswith(query)
        with page.expect_download(timeout=15_000) as download:
            page.locator("#eigenvectors .modebar-btn").click()
        assert download.value.suggested_filename == "eigenvectors.svg"


@needs_chrome
def test_an_address_that_makes_no_sense_warns_and_starts_anew(image_site, browser):
    with visiting(browser) as visit:
        page = visit.open(image_site + "?kept=<img src=x onerror=alert(1)>")
        page.wait_for_selector("text=The address cannot be shown", timeout=10_000)
        assert page.locator("img[src=x]").count() == 0


@needs_chrome
def test_what_is_drawn_or_uploaded_is_taken_apart_live(image_site, browser, tmp_path):
    with visiting(browser) as visit:
        page = visit.open(image_site, "#explanation .main-svg")
        page.locator("#paper canvas").scroll_into_view_if_needed()
        box = page.locator("#paper canvas").bounding_box()
        middle = box["x"] + box["width"] / 2
        page.mouse.move(middle, box["y"] + 60)
        page.mouse.down()
        page.mouse.move(middle, box["y"] + 220, steps=5)
        # The pen is still on the paper.
        visit.wait("location.search.includes('input=drawn-')")
        page.mouse.up()
        address = page.url
        page.locator("#kept input[type=number]").fill("1")
        visit.wait("document.querySelector('#accuracy-text').textContent.includes('With 1 of')")
        visit.wait("location.search.startsWith('?kept=1&input=drawn-')")
        assert address.split("input=")[1] in page.url
        picture = Image.new("L", (60, 60), 255)
        picture.paste(0, (10, 10, 50, 20))
        picture.save(tmp_path / "seven.png")
        page.locator("input[type=file]").set_input_files(tmp_path / "seven.png")
        text = drawn_input(picture, digits())
        visit.wait(f"location.search.endsWith('input={text}')")


@needs_chrome
def test_nothing_is_wider_than_the_window(image_site, browser):
    with visiting(browser) as visit:
        page = visit.open(image_site + "?by=component", "#explanation .main-svg")
        visit.wait("document.querySelector('#direction .main-svg')")
        for width in (1400, 390):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(500)
            assert visit.overflow() <= 0
            sizes = page.evaluate(
                "[...document.querySelectorAll('.js-plotly-plot')].map(e => e.clientHeight)"
            )
            assert len(sizes) == 6
            assert min(sizes) > 80


@pytest.mark.parametrize("folder", ["image_run", "/etc"])
def test_files_outside_of_the_page_are_refused(image_site, image_run, folder):
    name = str(image_run / "model.safetensors") if folder == "image_run" else "/etc/hostname"
    for path in (name, "../../../../../../../" + name, "..%2f..%2f..%2f" + name, name + "%00"):
        for route in ("gradio_api/file=", "file=", "gradio_api/file/", "assets/../", "static/"):
            assert status(f"{image_site}{route}{path}") in (400, 403, 404), route + path


def test_the_page_tells_nobody_of_itself(image_site):
    with urllib.request.urlopen(image_site + "config", timeout=10) as answer:
        config = json.load(answer)
    assert config["analytics_enabled"] is False
    assert image_site.startswith("http://127.0.0.1:")

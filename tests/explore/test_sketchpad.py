"""Images as inputs: their addresses, drawings that are refused, and a sheet in a browser."""

import base64
import io
import time
import tracemalloc
import zlib

import pytest
import torch
from PIL import Image

from bilens.data import fit_drawing
from bilens.data.pictures import ink_of
from bilens.errors import BilensError
from bilens.explore.model_pages import ModelPages
from bilens.explore.sketchpad import pack_drawing, picture_of, read_sheet, unpack_input
from tests.explore.browser import submit, visiting
from tests.models import digit_model, digits
from tests.refusals import refused


def sketch(picture: Image.Image, kind: str = "PNG") -> str:
    """Return a picture as the sheet sends it."""
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def test_a_drawing_has_an_address():
    levels = torch.arange(64) / 63
    packed = unpack_input(pack_drawing(levels), digits())
    assert torch.allclose(packed, levels, atol=0.5 / 255 + 1e-6)
    picture = Image.new("L", (50, 50), 255)
    picture.paste(0, (20, 10, 25, 40))
    text = read_sheet(sketch(picture), digits())
    x = unpack_input(text, digits())
    assert torch.allclose(x, fit_drawing(ink_of(picture), digits()), atol=1 / 255)
    assert len(text) < 120
    blank = read_sheet(sketch(Image.new("L", (50, 50), 255)), digits())
    assert not unpack_input(blank, digits()).any()
    assert torch.equal(unpack_input("test-3", digits()), digits().test_images[3])


REFUSED = {
    "neither a test image from 0 to 359 nor a drawing of 64": [
        lambda text=text: picture_of(text, digits())
        for text in ("test-360", "test-²", "../../etc/passwd", "drawn-!!!", "drawn-AAAA", "")
    ],
    "image is not a picture of up to 1024 pixels": [
        lambda sheet=sheet: read_sheet(sheet, digits())
        for sheet in (
            "data:image/png;base64,A",
            "data:image/png;base64,PHN2ZyBvbmxvYWQ9YWxlcnQoMSk+",
            sketch(Image.new("L", (20, 20)), "GIF"),
            sketch(Image.new("L", (1025, 1))),
            "test-3",
            "",
        )
    ],
}
test_what_is_no_image_is_refused = refused(REFUSED)


def test_an_address_cannot_fill_the_memory():
    bomb = base64.urlsafe_b64encode(zlib.compress(bytes(10**8), 9)).decode()
    tracemalloc.start()
    with pytest.raises(BilensError, match="nor a drawing of 64 pixels"):
        unpack_input("drawn-" + bomb, digits())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10**6


SHEET = "document.querySelector('canvas').toDataURL('image/png')"
READY = "main h1"
INPUT = "new URLSearchParams(location.search).get('image')"


def draw_three(page, steps: int, pause: int) -> None:
    """Draw a 3 on an empty sheet in one stroke, with n moves of the pointer on each line."""
    page.locator(".clear").click()
    sheet = page.locator("canvas")
    sheet.scroll_into_view_if_needed()
    box = sheet.bounding_box()
    first, *others = [(70, 60), (200, 60), (130, 130), (200, 190), (130, 240), (70, 210)]
    page.mouse.move(box["x"] + first[0], box["y"] + first[1])
    page.mouse.down()
    for x, y in others:
        page.mouse.move(box["x"] + x, box["y"] + y, steps=steps)
        page.wait_for_timeout(pause)
    page.mouse.up()


@pytest.mark.parametrize(("steps", "pause", "taken"), [(8, 60, 0.0), (4, 150, 0.9)])
def test_the_last_state_of_the_sheet_wins(image_site, visit, monkeypatch, steps, pause, taken):
    """The explanation and the address are those of the final drawing, also if answers are slow."""
    plain = ModelPages.page

    def slow(site, *asked):
        time.sleep(taken)
        return plain(site, *asked)

    monkeypatch.setattr(ModelPages, "page", slow)
    page = visit.open(image_site, READY)
    draw_three(page, steps, pause)
    page.wait_for_timeout(400)
    text = read_sheet(page.evaluate(SHEET), digits())
    visit.wait(f"{INPUT} === '{text}'")
    logits = digit_model()(unpack_input(text, digits())).detach()
    visit.shows("main", f"logit of class {int(logits.argmax())} {float(logits.max()):.4g}")
    page.wait_for_timeout(500)
    assert page.evaluate(INPUT) == text


def test_an_address_of_a_drawing_opens_with_it_on_the_sheet(image_site, browser, visit):
    drawn = visit.open(image_site, READY)
    draw_three(drawn, 5, 0)
    visit.wait(f"({INPUT} ?? '').length > 30")
    x = unpack_input(drawn.evaluate(INPUT), digits()).reshape(8, 8)
    with visiting(browser) as other:
        page = other.open(drawn.url, READY)
        for _ in range(40):  # ten seconds, since the sheet is drawn after the page is ready
            shown = base64.b64decode(page.evaluate(SHEET).partition(",")[2])
            ink = ink_of(Image.open(io.BytesIO(shown)))
            cells = torch.tensor(ink).reshape(8, 35, 8, 35).mean((1, 3)).float()
            if torch.allclose(cells, x, atol=0.02):
                break
            page.wait_for_timeout(250)
    assert torch.allclose(cells, x, atol=0.02)


def test_test_images_and_pictures_are_put_on_the_sheet(image_site, visit, tmp_path):
    page = visit.open(image_site, READY)
    number, file = (page.locator(f".sheet input[type={kind}]") for kind in ("number", "file"))
    number.fill("5")
    visit.wait("location.search === '?image=test-5'")
    page.wait_for_timeout(300)
    before = page.evaluate(SHEET)
    page.locator(".clear").click()
    visit.wait("location.search.startsWith('?image=drawn-')")
    number.fill("5")
    visit.wait("location.search === '?image=test-5'")
    visit.wait(f"{SHEET} === '{before}'")
    picture = Image.new("L", (120, 60), 255)
    picture.paste(0, (20, 10, 100, 20))
    picture.save(tmp_path / "bar.png")
    file.set_input_files(tmp_path / "bar.png")
    visit.wait("location.search.startsWith('?image=drawn-')")
    assert page.evaluate(INPUT) == read_sheet(page.evaluate(SHEET), digits())
    (tmp_path / "bar.png").write_text("<svg onload=alert(1)>")
    file.set_input_files(tmp_path / "bar.png")
    visit.shows(".message", "not a picture")
    number.fill("360")
    visit.shows(".message", "0 to 359")


def test_a_setting_that_is_refused_is_said_and_goes_back(image_site, visit):
    page = visit.open(image_site, READY)
    visit.open_details()
    k = page.locator("[name=k]")
    for typed in ("2.5", "1e9999"):
        submit(k, typed)
        visit.shows(".message", f"k='{typed}', expected a whole number")
        assert k.get_attribute("aria-invalid") == "true"
    submit(k, "2")
    visit.wait("location.search === '?k=2'")
    page.go_back()
    visit.wait("location.search === ''")
    for width in (1400, 390):
        page.set_viewport_size({"width": width, "height": 900})
        visit.fits()

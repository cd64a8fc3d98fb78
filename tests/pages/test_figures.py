"""Figures: all of the demo can be saved, text is text, the same each time, nothing is cut off."""

import base64
import io
import re
import zlib
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

import bilens.pages
from bilens.cli import main, running
from bilens.errors import BilensError
from bilens.figures.canvas import Canvas
from bilens.figures.sheet import BLUE, LEAST, figure_html, new_figure, save_figures, styled
from bilens.images.bonds import BondReading
from bilens.pages import heat_figure, save_figure
from bilens.sections import Picture
from tests.nightly import nightly


def texts_of(figure):
    """Return the texts on the axes of a figure, in the order in which they were written."""
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Return the pictures on the pages of a small demo, which are not drawn yet, by their names."""
    pictures = {}

    def collect(path, readings, *, title):
        for reading in readings:
            parts = [part for section in reading.sections() for part in section.parts]
            if not isinstance(reading, BondReading):  # a few figures, some of them on no page
                drawn = reading.figures().items()
                parts = [Picture(name, lambda figure=figure: figure) for name, figure in drawn]
            some = [part for part in parts if isinstance(part, Picture)]
            pictures.update({f"{path.parent.name}-{part.name}": part for part in some})
        return {}

    sizes = {"DEEP": {"d_model": 6}, "SMALL": {"d_model": 16, "d_hidden": 20}}
    epochs = {"IMAGES": {"epochs": 1}, "WORDS": {"epochs": 0.1}}
    with pytest.MonkeyPatch.context() as patch:
        for name, change in (sizes | epochs).items():
            patch.setattr(running, name, replace(getattr(running, name), **change))
        patch.setattr(bilens.pages, "write_report", collect)
        main(["demo", "--output", str(tmp_path_factory.mktemp("demo"))])
    return pictures


STARTS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def check_files(figures, folder, kind):
    save_figures(figures, folder, kind)
    files = {path.stem: path.read_bytes() for path in folder.iterdir()}
    assert files.keys() == figures.keys()
    assert all(content.startswith(STARTS[kind]) for content in files.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", STARTS)
def test_every_figure_of_the_demo_is_drawn(demo, tmp_path, kind):
    assert len(demo) >= 20
    check_files({name: picture.figure for name, picture in demo.items()}, tmp_path, kind)


@pytest.fixture(scope="module")
def one_of_each(demo):
    """Return the figures without a number, and those with the number 0."""
    assert {"deep-network-3", "grammar-graph"} < demo.keys()
    names = [name for name in demo if name[-1] == "0" or not name[-1].isdigit()]
    return {name: demo[name].figure for name in names}


@pytest.mark.long
@pytest.mark.parametrize("kind", nightly(STARTS, ["svg", "png"]))
def test_one_of_each_kind_is_drawn(one_of_each, tmp_path, kind):
    """All as SVG, and some in the other formats."""
    figures = [*one_of_each.items()]
    check_files(dict(figures if kind == "svg" else figures[::4]), tmp_path, kind)


def test_nothing_is_cut_off_and_no_letter_is_small(one_of_each):
    for name, figure in one_of_each.items():
        figure.draw_without_rendering()
        box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert 0 <= box.x0 <= box.x1 <= width, name
        assert 0 <= box.y0 <= box.y1 <= height, name
        sizes = [text.get_fontsize() for text in figure.findobj(Text) if text.get_text()]
        least = int(re.search(r"min-width: (\d+)px", figure_html(figure, "a"))[1])
        # On a page its smallest letters have ten pixels at the least width.
        assert min(sizes) / 0.75 * least / (96 * width) == pytest.approx(LEAST, rel=0.01), name
        assert len(figure.alt) > 5, name


def matrix():
    values = torch.tensor([[1.0, -1.0], [0.5, torch.nan]])
    return heat_figure(values, ["head one", "<b>"], ["x", "$y$"], title="A matrix")


def pdf_texts(raw):
    """Return the texts of a PDF whose fonts are numbered by their letters."""
    streams = re.findall(rb"stream\r?\n(.*?)endstream", raw, re.DOTALL)
    pages = [zlib.decompress(stream) for stream in streams if stream[:1] == b"x"]
    shown = re.findall(rb"\[([^\]]*)\]\s*TJ", b"".join(pages))
    letters = [b"".join(re.findall(rb"\((.*?)\)", text, re.DOTALL)) for text in shown]
    return {text.decode("utf-16-be") for text in letters}


def test_text_is_text_in_svg_pdf_pages_and_notebooks(tmp_path):
    expected = {"A matrix", "head one", "$y$"}
    save_figure(matrix(), tmp_path / "matrix.svg")
    notebook = re.search('base64,([^"]*)"', matrix()._repr_html_())[1]
    page = figure_html(matrix(), "a")
    svg = (tmp_path / "matrix.svg").read_text()
    for content in (svg, page, base64.b64decode(notebook).decode()):
        assert expected | {"&lt;b&gt;"} <= {*re.findall(r"<text[^>]*>([^<]*)</text>", content)}
    save_figure(matrix(), tmp_path / "matrix.pdf")
    assert expected | {"<b>"} <= pdf_texts((tmp_path / "matrix.pdf").read_bytes())


@pytest.mark.parametrize("kind", nightly(STARTS, ["svg"]))
def test_equal_figures_are_equal_files(tmp_path, kind):
    save_figure(matrix(), tmp_path / f"one.{kind}")
    # Settings of the user's own change nothing, and are left as they were.
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path"}):
        save_figure(matrix(), tmp_path / f"two.{kind}")
        assert matplotlib.rcParams["font.size"] == 30
    one, two = ((tmp_path / f"{name}.{kind}").read_bytes() for name in ("one", "two"))
    assert one == two
    assert not re.search(rb"20[0-9][0-9]-[01][0-9]-|CreationDate", one)


def test_a_png_has_the_pixels_that_are_asked_for(tmp_path):
    save_figure(new_figure(width=400, height=300)[0], tmp_path / "a.png", scale=1.5)
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size == (600, 450)


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(BilensError, match=r"ends in '.bmp'; expected .png, .svg or .pdf"):
        save_figure(Figure(), tmp_path / "curve.bmp")
    assert list(tmp_path.iterdir()) == []


@styled
def curve(color):
    figure, axes = new_figure(title="fill: #2166ac")
    axes.plot([1, 2], [1, 2], color=color)
    axes.set_xlabel("x")
    return figure


def test_a_page_has_its_own_colours_and_a_figure_its_own_names():
    one, other = figure_html(curve(BLUE), "a"), figure_html(curve("#123456"), "b")
    assert "stroke: var(--blue)" in one
    assert "stroke: #123456" in other
    for page in (one, other):
        assert "fill: var(--ink)" in page
        assert ">fill: #2166ac<" in page  # a text stays as it is
    ids = [set(re.findall(r'id="([^"]*)"', page)) for page in (one, other)]
    assert ids[0]
    assert not ids[0] & ids[1]
    used = set(re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', one))
    assert {name for pair in used for name in pair if name} <= ids[0]


def test_figures_of_a_users_own_are_shown_too():
    figure = Figure()
    figure.subplots().set_title("<mine>")
    page = figure_html(figure, "a", "of a section")
    assert 'aria-label="&lt;mine&gt;"' in page
    assert 'aria-label="of a section"' in figure_html(Figure(), "a", "of a section")


def test_pictures_and_lines_are_where_they_are_put():
    canvas = Canvas(4, 3, unit=50, title="")
    canvas.eigenvector(torch.eye(8).flatten(), (8, 8), x=1, y=0.5)
    canvas.line((1, 1), (3, 2), color=BLUE, width=4)
    canvas.label("one\ntwo", x=2, y=1)
    figure = canvas.figure()
    (axes,) = figure.axes
    # Squares stay square.
    box = axes.get_window_extent()
    assert box.width / 4 == pytest.approx(box.height / 3.3)
    assert [1, 2, 1.5, 0.5] in [list(picture.get_extent()) for picture in axes.images]
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[1, 1], [3, 2]]
    assert line.get_linewidth() == 3  # points
    one, two = axes.texts[-2:]
    assert one.get_position()[1] < two.get_position()[1]
    # As they are in the page: every pixel once.
    sources = re.findall(r"data:image/png;base64,([^\"]*)", figure_html(figure, "a"))
    shown = Image.open(io.BytesIO(base64.b64decode(sources[-1]))).convert("RGB")
    assert shown.size == (8, 8)
    blue = np.asarray(shown)[range(8), range(8)]
    assert (blue == [5, 48, 97]).all()

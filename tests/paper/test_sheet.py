"""Figures as files: all of the demo, with text as text, the same each time, nothing cut off."""

import re
import zlib
from dataclasses import replace
from functools import partial

import matplotlib
import plotly.express as px
import plotly.graph_objects as go
import plotly.io
import pytest
import torch
from PIL import Image

import bilens.pages
from bilens.cli import main, running
from bilens.errors import BilensError
from bilens.figures.canvas import BLUE, RED, Canvas, dress
from bilens.figures.plots import heat_figure
from bilens.images import BondReading
from bilens.paper import sheet
from bilens.paper.marks import plain
from bilens.paper.sheet import paper_figure, save_figure, save_figures
from bilens.sections import Picture
from tests.nightly import nightly


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
    names = [name for name in demo if name[-1] == "0" or not name[-1].isdigit()]
    return {name: demo[name].figure for name in names}


@pytest.mark.parametrize("kind", nightly(STARTS, ["svg", "png"]))
def test_one_of_each_kind_is_drawn(demo, one_of_each, tmp_path, kind):
    """All as SVG, and some in the other formats, which matplotlib makes of the same sheet."""
    assert {"deep-network-3", "grammar-graph"} < demo.keys()
    figures = [*one_of_each.items()]
    check_files(dict(figures if kind == "svg" else figures[::4]), tmp_path, kind)


def test_nothing_is_cut_off(one_of_each):
    for name, figure in one_of_each.items():
        sheet = paper_figure(figure)
        box, (width, height) = sheet.get_tightbbox(), sheet.get_size_inches()
        assert 0 <= box.x0 <= box.x1 <= width, name
        assert 0 <= box.y0 <= box.y1 <= height, name


def test_a_legend_in_a_row_is_below_the_axes():
    figure = dress(px.scatter(x=[0, 1], y=[0, 1], color=["one", "two"]), height=300)
    sheet = paper_figure(figure.update_layout(legend={"orientation": "h"}))
    (axes,) = sheet.axes
    legend, inner = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert legend.y1 <= inner.y0
    assert inner.x0 <= legend.x0 < legend.x1 <= inner.x1


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


def test_text_is_text_in_svg_and_pdf(tmp_path):
    expected = {"A matrix", "head one", "<b>", "$y$"}
    save_figure(matrix(), tmp_path / "matrix.svg")
    svg = (tmp_path / "matrix.svg").read_text()
    assert expected <= {plain(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)}
    save_figure(matrix(), tmp_path / "matrix.pdf")
    assert expected <= pdf_texts((tmp_path / "matrix.pdf").read_bytes())


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
    save_figure(dress(go.Figure(), height=300), tmp_path / "a.png", width=400, scale=1.5)
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size == (600, 450)


def axes_of(figure):
    return paper_figure(figure).axes[0]


def bars_of(figure):
    return [bar.get_bbox().bounds for bar in axes_of(figure).patches]


def test_bars_are_beside_each_other_or_stacked():
    beside = dress(go.Figure(), height=260).update_layout(barmode="group")
    beside.update_xaxes(type="category")
    for name, color, values in (("a", BLUE, [1.0, 2.0]), ("b", RED, [3.0, -4.0])):
        beside.add_bar(x=["7", "9"], y=values, name=name, marker={"color": color})
    expected = (-0.4, 0, 0.4, 1), (0.6, 0, 0.4, 2), (0, 0, 0.4, 3), (1, 0, 0.4, -4)
    assert bars_of(beside) == [*map(pytest.approx, expected)]
    stacked = bars_of(px.bar(x=["u"] * 3, y=[1.0, 2.0, -3.0], color=["p", "q", "r"]))
    assert stacked == [pytest.approx((-0.4, y, 0.8, h)) for y, h in ((0, 1), (1, 2), (0, -3))]
    across = bars_of(px.bar(x=[5.0], y=["name"], orientation="h"))
    assert across == [pytest.approx((0, -0.4, 5, 0.8))]


def test_shapes_and_labels_are_where_they_are_in_the_page():
    figure = dress(go.Figure(go.Scatter(x=[1, 100], y=[0, 4])), height=300)
    figure.update_xaxes(type="log", range=[0, 2]).update_yaxes(range=[4, 0])
    figure.add_hline(y=3, line={"color": RED, "dash": "dot"}, annotation_text="three")
    figure.add_shape(type="path", path="M 1,1 C 1,2 10,2 10,1e0 L 100,4 Z", opacity=0.5)
    figure.add_shape(type="rect", x0=10, x1=100, y0=1, y1=2, fillcolor="rgba(255,0,0,0.5)")
    # Annotations have logarithms on such an axis.
    figure.add_annotation(x=1, y=2, text="<b>ten</b>", ax=20, ay=10)
    axes = axes_of(figure)
    line, path, rectangle = axes.patches
    to_pixels = axes.transData.transform
    drawn = line.get_transform().transform_path(line.get_path()).vertices
    assert drawn[:, 1] == pytest.approx(to_pixels((1, 3))[1])
    assert drawn[:, 0] == pytest.approx(axes.bbox.intervalx)
    assert path.get_path().codes.tolist() == [1, 4, 4, 4, 2, 79]
    assert rectangle.get_facecolor() == (1, 0, 0, 0.5)
    ends = to_pixels([(1, 2), (1, 1)])[:, 1]
    assert rectangle.get_extents().intervaly == pytest.approx(ends)
    (ten,) = (note for note in axes.texts if note.get_text() == "ten")
    assert ten.xy == (10, 2)
    assert ten.get_fontweight() == "bold"


def test_pictures_and_lines_are_where_the_page_has_them():
    canvas = Canvas(4, 3, unit=50, title="")
    canvas.eigenvector(torch.eye(8).flatten(), (8, 8), x=1, y=0.5)
    canvas.line((1, 1), (3, 2), color=BLUE, width=4)
    axes = axes_of(canvas.figure())
    assert axes.get_aspect() == 1
    assert [1, 2, 1.5, 0.5] in [list(picture.get_extent()) for picture in axes.images]
    (line,) = (line for line in axes.lines if len(line.get_xdata()) == 2)
    assert line.get_xydata().tolist() == [[1, 1], [3, 2]]
    assert line.get_linewidth() == 3  # points


def test_words_in_cells_and_figures_from_json():
    figure = matrix().update_traces(texttemplate="%{z:.1f} %{text}", text=[["a", "b"], ["c", "d"]])
    texts = [text.get_text() for text in axes_of(plotly.io.from_json(figure.to_json())).texts]
    assert texts == ["1.0 a", "-1.0 b", "0.5 c", "nan d"]
    packed = plotly.io.from_json(px.line(x=[1.0, 2.0], y=[3.0, 5.0]).to_json())
    assert axes_of(packed).lines[0].get_xydata().tolist() == [[1, 3], [2, 5]]


def scatter(**how):
    return go.Figure(go.Scatter(x=[1], y=[1], **how))


marks = partial(scatter, mode="markers")
CURVE = {"type": "path", "path": "M 0,0 Q 1,1 2,2"}
FAR = {"source": "https://a.example/b.png", "x": 0, "y": 0}
NOT_DRAWN = {
    "of type 'pie'; expected scatter, bar or heatmap": go.Figure(go.Pie(values=[1])),
    "the axes x2; expected one pair": scatter(xaxis="x2"),
    "fill='tozeroy' of a scatter": scatter(fill="tozeroy"),
    "marker.symbol='hexagon', expected one of circle, square": marks(marker_symbol="hexagon"),
    "line.dash='5px', expected one of": scatter(line_dash="5px"),
    "a colour is 3; expected a name": marks(marker_color=[3]),
    "a heatmap has no colorscale; set one": dress(go.Figure(go.Heatmap(z=[[1.0]])), height=300),
    "is of type 'circle'; expected path": go.Figure(layout={"shapes": [{"type": "circle"}]}),
    "the command 'Q'; expected one of M, L, C and Z": go.Figure(layout={"shapes": [CURVE]}),
    "a picture comes from https://a.example/b.png; expected a data address": go.Figure(
        layout={"images": [FAR]}
    ),
}


@pytest.mark.parametrize(("message", "figure"), NOT_DRAWN.items(), ids=NOT_DRAWN)
def test_what_cannot_be_drawn_is_refused_by_name(tmp_path, figure, message):
    with pytest.raises(BilensError, match=re.escape(message)):
        save_figure(figure, tmp_path / "a.svg")
    assert list(tmp_path.iterdir()) == []


def test_saving_says_what_is_missing(tmp_path, monkeypatch):
    with pytest.raises(BilensError, match=r"ends in '.bmp'; expected .png, .svg or .pdf"):
        save_figure(go.Figure(), tmp_path / "curve.bmp")
    monkeypatch.setattr(sheet, "find_spec", lambda name: None)
    with pytest.raises(BilensError, match="saved by matplotlib: pip install matplotlib"):
        save_figure(go.Figure(), tmp_path / "curve.png")
    assert list(tmp_path.iterdir()) == []

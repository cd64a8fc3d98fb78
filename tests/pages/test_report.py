import base64
import io
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from bilens.errors import BilensError
from bilens.figures.canvas import as_image, data_address, diverging, grey
from bilens.figures.sheet import svg_of
from bilens.images import TruncationCurve, explain, read_classifier
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.pages import (
    eigenvector_figure,
    explanation_figure,
    new_figure,
    spectrum_figure,
    truncation_figure,
)
from bilens.pages.page import render_page, report, write_report
from bilens.sections import ContextLine, ContextList, Section, Table
from tests.explore.browser import visiting
from tests.models import digits
from tests.pages.test_figures import texts_of


@pytest.fixture(scope="module")
def reading():
    """Return a reading of three classes, whose figures are quickly drawn."""
    torch.manual_seed(0)
    model = ImageClassifier(ClassifierConfig(64, 3, 12, image_shape=(8, 8)))
    data = digits()
    train, test = data.train_labels < 3, data.test_labels < 3
    images = {"train_images": data.train_images[train], "test_images": data.test_images[test]}
    labels = {"train_labels": data.train_labels[train], "test_labels": data.test_labels[test]}
    return read_classifier(model, replace(data, class_names=("0", "1", "2"), **images, **labels))


@pytest.fixture(scope="module")
def written(reading, tmp_path_factory):
    """Return the report as it is written, and its figures."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    figures = write_report(path, [reading], title="digits")
    return path.read_text(), figures


def test_colours_mean_signs():
    picture = diverging(np.array([[-1.0, 0.0], [0.5, 1.0]])).astype(int)
    (negative, zero), (weak, positive) = picture
    assert zero.tolist() == [247, 247, 247]
    assert negative[0] > negative[2] + 50
    assert positive[2] > positive[0] + 50
    assert weak[2] > weak[0]
    assert (diverging(np.zeros((2, 2))) == 247).all()


def test_inputs_are_ink_on_paper():
    picture = grey(np.array([[0.0, 1.0], [0.5, 0.0]]))
    assert picture.tolist() == [[255, 0], [128, 255]]
    raw = base64.b64decode(data_address(picture).removeprefix("data:image/png;base64,"))
    enlarged = np.asarray(Image.open(io.BytesIO(raw)))
    assert (enlarged[:56, 56:] == 0).all()
    assert enlarged.shape == (112, 112)


def test_the_constant_coordinate_is_no_pixel():
    vector = torch.arange(7.0)
    assert as_image(vector, (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(BilensError, match=r"7 elements is not an image of shape \(2, 2\)"):
        as_image(vector, (2, 2))


def test_a_spectrum_shows_the_outer_eigenvalues_of_either_sign(reading):
    figure = spectrum_figure(reading.spectrum[2], title="three")
    _, positive, negative = (line.get_ydata() for line in figure.axes[0].lines)
    values = reading.spectrum[2].values.double().numpy()
    assert np.allclose(positive, np.sort(values[values > 0])[::-1])
    assert np.allclose(negative, np.sort(values[values < 0]))


def test_eigenvectors_and_their_top_inputs(reading):
    x = digits().test_images
    figure = eigenvector_figure(reading.spectrum[2], x, (8, 8), title="<three>", k=4)
    # The first picture is the colour bar.
    assert len(figure.axes[0].images) == 2 * 4 * (1 + 3) + 1
    negative, positive, *labels = texts_of(figure)
    assert (negative, positive) == ("negative", "positive")
    assert [text[:2] for text in labels] == ["P1", "P2", "P3", "P4", "N1", "N2", "N3", "N4"]
    assert labels[0] == f"P1  λ = {reading.spectrum[2].values.max():+.3g}"
    assert figure.alt == "<three>"
    with pytest.raises(BilensError, match="single form"):
        eigenvector_figure(reading.spectrum, x, (8, 8), title="")


def test_the_truncation_table_ends_with_all():
    curve = TruncationCurve((0.5, 0.75, 0.8, 0.9), 0.9)
    frame = pd.DataFrame(curve.columns())
    assert frame["eigenvectors per class"].tolist() == [1, 2, 3, 4]
    assert frame["accuracy"].tolist() == [0.5, 0.75, 0.8, 0.9]
    assert frame["drop (points)"].tolist() == pytest.approx([40, 15, 10, 0])
    assert list(truncation_figure(curve).axes[0].lines[0].get_ydata()) == [50, 75, 80, 90]


def test_an_explanation_has_three_rows(reading):
    part = explain(reading.spectrum, digits().test_images[0])
    figure = explanation_figure(part, (8, 8), ["<b>"] * 3, title="why")
    assert len(figure.axes[0].images) == 1 + 3 * 5 + 1
    assert {"<b>", f"logit {part.parts[0].logit:+.2f}"} < set(texts_of(figure))


def test_the_page_escapes_what_it_is_given():
    attack = "<script>alert(1)</script>"
    figure, _ = new_figure(title=attack)
    contexts = ContextList(attack, [ContextLine(1.0, [(attack, 1.0), ("b", -0.5)], 0)])
    table = Table(pd.DataFrame({attack: [attack]}), attack)
    section = Section(attack, attack, [[table, figure, contexts]])
    page = render_page(attack, attack, [(attack, attack)], [section])
    assert "alert(1)</script>" not in page
    assert page.count("&lt;script&gt;alert(1)") == 16


def test_the_page_needs_nothing_else(reading, written):
    page = written[0]
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']?(?!data:)[^\"'> ]+", page)
    assert f"{reading.accuracy:.2%}" in page
    assert page.count("<figure") == 1 + 3 + 1 + 2 * 3


def test_ordering_by_activation_changes_the_pictures(reading, written):
    by_value = written[1]
    by_activation = replace(reading, order="activation").figures()
    assert by_value.keys() == by_activation.keys()
    files = ({name: svg_of(f) for name, f in drawn.items()} for drawn in (by_value, by_activation))
    one, other = files
    changed = [name for name in one if one[name] != other[name]]
    assert any(name.startswith("eigen") for name in changed)


SETTINGS = {"data": "digits", "data_dir": "data", "add": ["nonsense"], "token": "a", "layer": 0}
REFUSED = {name: f"{name}={value!r} has no effect on readings" for name, value in SETTINGS.items()}
REFUSED["colour"] = "colour is no setting of a report"


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_a_report_of_readings_refuses_all_but_the_path(reading, tmp_path, name, message):
    for source in (reading, [reading]):
        with pytest.raises(BilensError, match=re.escape(message)):
            report(source, tmp_path / "page.html", **{name: SETTINGS.get(name, "red")})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_works_in_a_browser(written, browser, tmp_path, width):
    """No script fails, every figure is drawn, and nothing is wider than the window."""
    (tmp_path / "report.html").write_text(written[0])
    with visiting(browser, width) as visit:
        page = visit.open((tmp_path / "report.html").as_uri())
        visit.wait(f"document.querySelectorAll('figure svg').length >= {len(written[1])}")
        visit.wait("document.querySelectorAll('figure image').length >= 60")
        visit.fits()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

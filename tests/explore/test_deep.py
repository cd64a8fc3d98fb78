"""The explorer's screens of a classifier of several layers, without a browser and in one."""

import re
from dataclasses import replace

import numpy as np
import pytest

from bilens.explore.deep import DeepState, DeepView
from bilens.explore.screen import StateError
from bilens.read import path_accuracies
from bilens.report import Branch, branches_html
from tests.explore.browser import needs_chrome, visiting
from tests.models import digit_model, digits


@pytest.fixture(scope="module")
def view() -> DeepView:
    return DeepView(digit_model(2), digits())


def test_the_first_branches_are_the_strongest_paths(view):
    """The tree shows the same numbers of a leaf as the search."""
    paths = view.reading.search.paths.of(3)
    for row in range(3):
        if (paths.indices[row] >= 5).any():
            continue
        node = str(int(paths.indices[row, 0]))
        page = view.tree_html(DeepState(output=3, opened=(node,)))
        assert f"effective {float(paths.effective[row]):+.3g}" in page


def test_opened_nodes_show_what_they_branch_into(view):
    page = view.tree_html(replace(view.start, opened=("0", "2")))
    assert page.count('aria-expanded="true"') == 2
    assert page.count("<figure") == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output": 10}, "output: 10 is not a whole number from 0 to 9"),
        ({"n_paths": 301}, "n_paths: 301 is not a whole number from 1 to 300"),
        ({"opened": ("0.0",)}, "opened: '0.0' is not a node: up to 1 numbers below 24 with dots"),
        ({"opened": ("24",)}, "opened: '24' is not a node"),
        ({"opened": ("<b>",)}, "opened: '<b>' is not a node"),
        ({"opened": ("1",) * 41}, "41 nodes are open; close some, up to 40 can be"),
        ({"input": "test-999"}, "neither a test image from 0 to 359"),
    ],
)
def test_a_state_that_the_model_has_not(view, changes, message):
    with pytest.raises(StateError, match=message):
        view.checked(replace(view.start, **changes))


def test_logits_of_the_paths_kept(view):
    figure = view.input_figure(DeepState(n_paths=300, input="test-5"))
    remaining, full = (np.array(trace.y) for trace in figure.data)
    x = digits().test_images[5]
    assert np.allclose(full, digit_model(2)(x).detach().numpy(), atol=1e-5)
    assert np.allclose(remaining, view.reading.search.paths.truncate(300)(x), atol=1e-5)


def test_the_curve_is_the_readings(view):
    (count, accuracy), *_ = view.reading.by_paths
    assert view.paths_picture().data[0].y[0] == 100 * accuracy
    assert path_accuracies(view.reading.search.paths, digits(), [count]) == ((count, accuracy),)


def test_the_list_escapes_what_it_is_given():
    leaf = Branch('0.0"><script>', -1.0, text="<script>", picture='data:"><script>')
    node = Branch('"><script>', 1.0, opened=True, branches=[leaf])
    page = branches_html(Branch("", 1.0, opened=True, branches=[node]), "<script>")
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") >= 5
    assert page.count('<p class="scale">negative <img') == 1


def test_pictures_stand_at_leaves_alone(view):
    page = view.tree_html(replace(view.start, opened=()))
    assert "<img" not in page
    assert re.findall(r'data-node="(\w+)"', page) == ["0", "1", "2", "3", "4"]


@needs_chrome
def test_the_tree_is_opened_by_clicks(deep_site, browser):
    with visiting(browser) as visit:
        page = visit.open(deep_site, "#paths .main-svg")
        count = "document.querySelectorAll('#opened figure img').length"
        visit.wait(f"{count} === 5")
        page.locator("#opened [data-node='3']").click()
        visit.wait(f"{count} === 10")
        visit.wait("location.search === '?opened=0&opened=3'")
        page.reload()
        visit.wait(f"{count} === 10")
        page.locator("#opened [data-node='0']").click()
        visit.wait(f"{count} === 5")
        page.set_viewport_size({"width": 390, "height": 900})
        page.wait_for_timeout(300)
        visit.fits()

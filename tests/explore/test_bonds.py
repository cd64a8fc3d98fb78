"""The few directions of a deep classifier: the walk through them and its screens."""

import re
from html import unescape

import numpy as np
import pytest

from bilens.explore.deep import BondView
from bilens.explore.screen import StateError
from bilens.read import read_bonds
from bilens.reading import shown
from bilens.report import write_page
from bilens.tensor import product_weight
from tests.explore.browser import needs_chrome, visiting
from tests.models import digit_model, digits


@pytest.fixture(scope="module")
def view() -> BondView:
    return BondView(digit_model(2), digits(), (8, 8))


def test_it_starts_with_the_directions_that_a_report_shows(view):
    report = read_bonds(digit_model(2), digits())
    reading = view.reading(0)
    assert reading.cut.ranks == report.cut.ranks
    for bond, rank in enumerate(report.cut.ranks):
        for number in range(rank):
            single, other = (r.direction(bond, number) for r in (reading, report.cut_reading))
            assert single.share == pytest.approx(other.share)
            assert single.ends[0].images == other.ends[0].images
    assert f"With {' + '.join(map(str, report.cut.ranks))} directions, the fewest, the model " in (
        text := view.text(0)
    )
    assert f"gets {report.cut_accuracy:.2%} of the test images" in text
    assert f"change by {report.held_out.error:.2g} of their size" in text
    assert list(view.curve(0).data[-1].x) == [max(report.cut.ranks)]
    assert view.nodes(0, ("2.1", f"1.{report.cut.ranks[1]}")) == [
        (2, 0),
        (1, report.cut.ranks[1] - 1),
    ]
    assert view.nodes(0, ("2.1", f"1.{report.cut.ranks[1] + 1}")) == [(2, 0)]


def test_the_page_of_a_report_and_the_screen_have_the_same_numbers(view, tmp_path):
    reading = read_bonds(digit_model(2), digits())
    write_page(tmp_path / "page.html", "Bonds", "", reading.facts(), reading.sections())
    page = unescape((tmp_path / "page.html").read_text())
    ranks = " + ".join(map(str, reading.cut.ranks))
    for place in (page, view.text(0)):
        assert ranks in place
        assert f"{reading.cut_accuracy:.2%}" in place
    error = next(value for name, value in reading.facts() if name == "error of the logits")
    assert shown(error) in page
    assert f"{error:.2g}" in view.text(0)
    assert view.report.metric == reading.metric == "images"
    assert (view.report.kind, view.report.ranks) == (reading.kind, reading.ranks)


def test_however_many_are_kept_few_products_are_large(view):
    assert product_weight(view.reading(7).cut) < 0.95 * product_weight(view.bonds.cut(7))


def test_accuracy_and_error_are_beside_the_slider(view):
    bond_cut = view.bonds.cut(7)
    right = bond_cut(digits().test_images).argmax(-1) == digits().test_labels
    text = view.text(7)
    assert f"gets {float(right.double().mean()):.2%} of the test" in text
    logits = view.bonds.cut(100)(digits().test_images)
    error = float((bond_cut(digits().test_images) - logits).norm() / logits.norm())
    assert f"change by {error:.2g} of their size" in text
    assert list(view.curve(7).data[-1].x) == [7]


def test_a_page_has_the_strongest_products_and_they_can_be_walked_to(view):
    core = view.reading(6).cut.cores[1]
    Q = core.dense()[3].triu() + core.dense()[3].triu(1)
    first, second = divmod(int(Q.abs().argmax()), 6)
    page = view.page(6, ("2.4",))
    made = re.search(r"<h4>Made of</h4><ul><li>(.*?)</li>", page)
    assert made is not None
    assert set(re.findall(r'data-node="([\d.]+)"', made[1])) == {
        f"1.{first + 1}",
        f"1.{second + 1}",
    }
    assert page.count("<svg") == 1
    # Wherever one walks, the drawing has it, chosen, and the way there.
    page = view.page(6, ("2.4", "1.6"))
    assert (
        '<g role="button" tabindex="0" data-node="1.6" aria-label="1.6" aria-pressed="true">'
        in page
    )
    assert "Goes into" in page
    # The pictures of the card have colours, which are said once.
    assert page.count('<p class="scale">negative <img') == 1
    assert re.findall(r"1\.6, between layers 1 and 2, [\d.]+% of the squared norm", page)


def test_matrices_are_those_of_the_cut(view):
    cores = view.reading(6).cut.cores
    walk = ("2.1", "1.3")
    made, used = view.made(6, walk), view.used(6, walk)
    assert made is not None
    assert used is not None
    assert np.allclose(np.array(made.data[0].z), cores[0].dense()[2])
    assert np.allclose(np.array(used.data[0].z), cores[1].dense()[:, 2])
    ends = view.ends(6, walk)
    assert ends is not None
    assert list(ends.data[0].y) == pytest.approx(view.reading(6).direction(1, 2).ends[0].effects)
    assert view.made(6, ("2.1", "0.3")) is None
    assert view.used(6, ("2.1",)) is None
    assert view.ends(6, ("2.1",)) is None


def test_what_the_cut_leaves_out_is_stepped_over(view):
    assert view.nodes(4, ("2.2", "1.9", "0.3")) == [(2, 1), (0, 2)]
    assert view.nodes(4, ()) == [(2, 0)]
    assert 'data-node="1.9"' not in view.page(4, ("2.2", "1.9"))


@pytest.mark.parametrize("name", ["3.1", "1.25", "1.0", "2.11", "x", "1.1.1", "<b>"])
def test_a_direction_that_the_model_has_not(view, name):
    with pytest.raises(StateError, match="walk: .* is not a direction: a bond from 0 to 2, a dot"):
        view.check((name,))


def test_a_walk_ends_somewhere(view):
    with pytest.raises(StateError, match="walk: 31 steps are too many, up to 30 can be"):
        view.check(("1.1",) * 31)


@needs_chrome
def test_the_bonds_are_walked_by_clicks_and_keys(deep_site, browser):
    with visiting(browser) as visit:
        page = visit.open(deep_site, "#walk svg")
        head = "document.querySelector('#walk h3').textContent"
        page.locator("#walk .steps [data-node='2.4']").click()
        visit.wait(f"{head} === 'The logit of 3'")
        page.locator("#walk svg g[data-node^='1.']").first.click()
        visit.wait(f"{head}.includes('between layers 1 and 2')")
        visit.wait("document.querySelector('#ends .main-svg') !== null")
        # The colours of a scale do not hang on the address, which has changed meanwhile.
        colours = "document.querySelector('#used .cbfill').style.fill"
        visit.wait("document.querySelector('#used .cbfill') !== null")
        visit.wait(f"{colours}.startsWith('url(\"#')")
        # On from there with the keyboard: the focus stays on what was pressed.
        visit.wait("document.activeElement.dataset.node?.startsWith('1.')")
        pixel = page.locator("#walk svg g[data-node^='0.']").first
        name = pixel.get_attribute("data-node")
        pixel.focus()
        page.keyboard.press("Enter")
        visit.wait(f"{head}.startsWith('{name}, of the pixels')")
        visit.wait(f"document.activeElement.dataset.node === '{name}'")
        visit.wait("location.search.startsWith('?walk=2.4&walk=1.')")
        # What is pressed in the list of products has the focus where it stands then.
        target = page.locator("#walk .products li:last-child [data-node]").last
        name = target.get_attribute("data-node")
        target.click()
        visit.wait(f"{head}.startsWith('{name}, between')")
        visit.wait(f"document.activeElement.dataset.node === '{name}'")
        # A step back forgets what came after it, and another logit all.
        back = page.locator("#walk .steps [data-node^='1.']").first
        name = back.get_attribute("data-node")
        back.click()
        visit.wait(f"location.search === '?walk=2.4&walk={name}'")
        page.locator("#walk .steps [data-node='2.5']").click()
        visit.wait("location.search === '?walk=2.5'")
        page.locator("#directions input[type=number]").fill("3")
        visit.wait("document.querySelector('#directions-text').textContent.includes('With 3 ')")
        page.go_back()
        visit.wait("!document.querySelector('#directions-text').textContent.includes('With 3 ')")
        page.set_viewport_size({"width": 390, "height": 900})
        page.wait_for_timeout(300)
        visit.fits()

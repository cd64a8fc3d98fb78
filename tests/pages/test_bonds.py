from dataclasses import replace

import torch

from bilens.images.bonds import BondReading
from bilens.images.cuts import LEAST_DRAWN, chosen_edges
from bilens.pages import network_figure
from bilens.pages.bonds import bond_figure, kept_directions_figure
from bilens.pages.cuts import directions_figure, matrices_figure
from tests.models import digit_bonds
from tests.pages.test_figures import texts_of


def test_spectra_mark_where_the_cut_ends():
    drawn = bond_figure(digit_bonds()).axes[0].lines
    lines, marks = drawn[::2], drawn[1::2]
    assert [mark.get_xdata()[0] for mark in marks] == list(digit_bonds().cut.ranks)
    assert [line.get_label() for line in lines] == ["pixels to layer 1", "layer 1 to 2"]
    assert lines[0].get_ydata()[0] == float(digit_bonds().bonds.bonds[0].shares[0])


def test_accuracies_by_directions_are_drawn():
    figure = kept_directions_figure(digit_bonds().by_rank, digit_bonds().accuracy)
    curve = figure.axes[0].lines[0]
    assert list(curve.get_xdata()) == [k for k, _, _ in digit_bonds().by_rank]
    assert curve.get_ydata()[-1] == 100 * digit_bonds().by_rank[-1][1]


def test_a_network_has_the_largest_products():
    products = digit_bonds().cut.products()
    edges = chosen_edges(products, 2, 6)
    top = [edge for edge in edges if edge.target == (2, 6)]
    assert 1 <= len(top) <= 4
    assert all(edge.part >= LEAST_DRAWN for edge in top)
    plain = (products.layer == 1) & (products.output == 6)
    strongest = torch.nonzero(plain).flatten()[0]
    assert top[0].coefficient == float(products.coefficient[strongest])
    pair = products.first[strongest], products.second[strongest]
    assert top[0].sources == tuple((1, int(number)) for number in pair)
    assert 0 < sum(edge.part for edge in top) <= 1
    # Every node that is read is also explained, down to the pixels.
    read = {source for edge in edges for source in edge.sources if source[0] > 0}
    assert read == {edge.target for edge in edges if edge.target[0] == 1}
    figure = network_figure(digit_bonds().cut_reading, 6, (8, 8))
    share = f"{sum(edge.part for edge in top):.0%} of its squared norm"
    assert figure.alt.endswith(share)
    shown = set(texts_of(figure))
    assert {f"{bond}.{number + 1}" for bond, number in read} <= shown
    drawn = sum(len(set(edge.sources)) + 1 for edge in edges)
    assert len(figure.axes[0].lines) == drawn


def test_each_direction_has_a_row_and_each_layer_its_matrices():
    ranks = digit_bonds().cut.ranks
    for bond, pictures in enumerate((1 + 8, 2 + 8)):
        figure = directions_figure(digit_bonds().cut_reading, bond, (8, 8))
        assert len(figure.axes[0].images) == ranks[bond] * pictures + 1  # the colours
        arrows = [text for text in texts_of(figure) if "▲" in text]
        assert len(arrows) >= ranks[bond]
    assert len(matrices_figure(digit_bonds().cut_reading, 0).axes[0].images) == ranks[1] + 1
    assert len(matrices_figure(digit_bonds().cut_reading, 1).axes[0].images) == 10 + 1


def text_of(reading: BondReading) -> str:
    return " ".join(section.text for section in reading.sections())


def test_a_page_says_which_numbers_directions_have():
    assert "measured over the training images, the largest first" in text_of(digit_bonds())
    other = replace(digit_bonds(), metric="weights")
    assert "measured over standard normal inputs, the largest first" in text_of(other)


def test_the_answer_says_what_few_directions_keep():
    result = digit_bonds()
    assert result.few == 4
    few = next(accuracy for k, accuracy, _ in result.by_rank if k == 4)
    answer = result.sections()[0].text
    assert f"{result.few} keep {few:.1%} of test images right" in answer
    assert f"{' + '.join(map(str, result.cut.ranks))}, chosen on training images" in answer
    # One set of numbers: those of the kind of bonds that is used.
    assert "tree" not in text_of(result)
    at_chance = replace(result, accuracy=0.1)
    assert "always naming" in at_chance.sections()[0].text

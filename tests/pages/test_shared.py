import torch

from bilens.images.explanation import ClassUse, SharedFeature, SharedFeatures
from bilens.pages import shared_figure
from bilens.pages.explanation import shared_section
from tests.pages.test_figures import texts_of


def feature(*uses: tuple[int, bool, float]) -> SharedFeature:
    places = tuple(ClassUse(label, (0,), raises, weight) for label, raises, weight in uses)
    return SharedFeature(torch.ones(4), places, agreement=0.9)


def test_each_feature_names_the_classes_it_moves(monkeypatch):
    single = feature((1, True, 0.25), (0, False, 0.125), (2, True, 0.06), (1, True, 0.02))
    other = feature((0, False, 0.01), (2, False, 0.01))
    shared = SharedFeatures((single, other), compared=9, groups=5)
    figure = shared_figure(shared, (2, 2), ["<a>", "b", "c"])
    assert texts_of(figure)[2:] == ["45.5%", "▲ b, c", "▼ <a>", "2.0%", "▼ <a>, c"]
    # The first picture is the colour bar.
    assert len(figure.axes[0].images) == 1 + 2
    monkeypatch.setattr("bilens.pages.explanation.SHOWN", 1)
    assert len(shared_figure(shared, (2, 2), ["a", "b", "c"]).axes[0].images) == 1 + 1


def test_long_lists_of_names_are_cut():
    names = [f"class number {i}" for i in range(5)]
    every = feature(*((i, True, 0.1) for i in range(5)))
    figure = shared_figure(SharedFeatures((every,), 5, 1), (2, 2), names)
    assert texts_of(figure)[3:5] == ["▲ class number 0", "▲ class number 1 +3"]
    digits = shared_figure(SharedFeatures((every,), 5, 1), (2, 2), list("01234"))
    assert texts_of(digits)[3] == "▲ 0, 1, 2, 3, 4"


def test_the_section_says_how_much_is_shared():
    shared = SharedFeatures((feature((0, True, 0.25), (1, True, 0.25)),), compared=1200, groups=7)
    section = shared_section(shared, (2, 2), ["a", "b"], "ends of paths")
    assert "1,200 strongest ends of paths" in section.text
    assert "make 7 features. 1 of them" in section.text
    assert "50% of the weight. These are shown" in section.text
    many = SharedFeatures(13 * shared.features, compared=1200, groups=40)
    assert "The first 12 are shown" in shared_section(many, (2, 2), ["a", "b"], "ends").text
    none = shared_section(SharedFeatures((), 20, 20), (2, 2), ["a", "b"], "eigenvectors")
    assert none.text == "None: no two of the 20 eigenvectors compared are alike."
    assert not none.rows

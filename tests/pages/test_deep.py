import pytest
import torch

from bilens.images import read_bonds, read_deep
from bilens.pages import tree_figure, write_report
from bilens.tensor import decompile
from tests.models import digit_model, digits, small_model
from tests.pages.test_figures import texts_of


@pytest.fixture(scope="module")
def paths():
    return decompile(digit_model(n_layers=2).tensors(), torch.eye(10)[6], 7)


def test_a_tree_has_an_edge_for_every_eigenvector(paths):
    figure = tree_figure(paths, (8, 8), title='<six> " x"', root='<6> "')
    upper = {tuple(names[:1]) for names in paths.indices.tolist()}
    (axes,) = figure.axes
    assert len(axes.lines) == len(upper) + len(paths)
    assert len(axes.images) == len(paths) + 1
    texts = set(texts_of(figure))
    assert {f"{float(value):+.3g}" for value in paths.effective} <= texts
    assert '<6> "' in texts
    assert figure.alt == '<six> " x"'
    colors = {text.get_color() for text in axes.texts if text.get_text()[0] == "-"}
    assert "#2166ac" not in colors
    assert all(0.75 <= line.get_linewidth() <= 5.25 for line in axes.lines)  # points


@pytest.mark.long
def test_the_report_of_a_deep_model(tmp_path):
    reading = read_deep(small_model(n_layers=2), digits(), k=40)
    bonds = read_bonds(reading.model, reading.data, drop=0.02)
    figures = write_report(tmp_path / "report.html", [bonds, reading], title="deep")
    page = (tmp_path / "report.html").read_text()
    assert " + ".join(map(str, bonds.cut.ranks)) in page
    assert page.count("<figure") == len(figures)
    assert reading.figures().keys() < figures.keys()
    folded = len(bonds.sections()) + len(reading.sections()) - 2
    assert page.count("<details><summary><h2>") == folded
    assert "tree-0" in figures

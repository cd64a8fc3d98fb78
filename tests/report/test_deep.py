import pytest
import torch

from bilens.errors import BilensError
from bilens.read import read_bonds, read_deep
from bilens.report import deep_figures, tree_figure, write_deep_report
from bilens.tensor import top_paths
from tests.models import digit_model, digits


@pytest.fixture(scope="module")
def paths():
    return top_paths(digit_model(n_layers=2).tensors(), torch.eye(10)[6], 7).paths


def test_a_tree_has_an_edge_for_every_eigenvector(paths):
    figure = tree_figure(paths, (8, 8), title="<six>")
    upper = {tuple(names[:1]) for names in paths.indices.tolist()}
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    assert len(lines) == len(upper) + len(paths)
    assert len(figure.layout.images) == len(paths)
    texts = {note.text for note in figure.layout.annotations}
    assert {f"{float(value):+.3g}" for value in paths.effective} <= texts
    assert "&lt;six&gt;" in figure.layout.title.text
    colors = {note.font.color for note in figure.layout.annotations if note.text[0] == "-"}
    assert "#2166ac" not in colors
    assert all(1 <= trace.line.width <= 7 for trace in lines)


def test_the_report_of_a_deep_model(tmp_path):
    reading = read_deep(digit_model(n_layers=2), digits(), k=100)
    bonds = read_bonds(reading.model, reading.data, drop=0.02)
    figures = write_deep_report(tmp_path / "report.html", reading, bonds, title="deep")
    page = (tmp_path / "report.html").read_text()
    assert f"{reading.search.expanded:,} of {reading.search.total:,}" in page
    assert " + ".join(map(str, bonds.cut.ranks)) in page
    assert page.count('class="figure"') == len(figures) == len(deep_figures(reading, bonds))


def test_misuse_is_explained(paths):
    many = top_paths(digit_model(n_layers=2).tensors(), torch.eye(10), 30).paths
    with pytest.raises(BilensError, match="up to 24 paths of one direction; these are 30"):
        tree_figure(many, (8, 8), title="")

import pytest
import torch

from bilens.errors import BilensError
from bilens.read import class_paths, explain_deep, read_bonds, read_deep
from bilens.report import explanation_figure, tree_figure, write_report
from bilens.tensor import LazyTree, top_paths
from tests.models import digit_model, digits


@pytest.fixture(scope="module")
def paths():
    return top_paths(digit_model(n_layers=2).tensors(), torch.eye(10)[6], 7).paths


def test_a_tree_has_an_edge_for_every_eigenvector(paths):
    figure = tree_figure(paths, (8, 8), title='<six> " x"')
    upper = {tuple(names[:1]) for names in paths.indices.tolist()}
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    assert len(lines) == len(upper) + len(paths)
    assert len(figure.layout.images) == len(paths) + 1
    texts = {note.text for note in figure.layout.annotations}
    assert {f"{float(value):+.3g}" for value in paths.effective} <= texts
    assert figure.layout.title.text == '&lt;six&gt; " x"'
    colors = {note.font.color for note in figure.layout.annotations if note.text[0] == "-"}
    assert "#2166ac" not in colors
    assert all(1 <= trace.line.width <= 7 for trace in lines)


def test_a_tree_has_a_root_and_images_beside_its_nodes(paths):
    x = digits().test_images
    several = class_paths(LazyTree(digit_model(2).tensors(), torch.eye(10)[6]), paths, x, k=2)
    figure = tree_figure(several.paths, (8, 8), title="", root='<6> "', inputs=several.inputs)
    assert '<b>&lt;6&gt; "</b>' in {note.text for note in figure.layout.annotations}
    nodes = {tuple(names[:n]) for names in paths.indices.tolist() for n in (1, 2)}
    assert len(figure.layout.images) == len(paths) + 2 * len(nodes) + 1


def test_an_explained_input_has_its_parts():
    tree = LazyTree(digit_model(2).tensors(), torch.eye(10))
    explanation = explain_deep(tree, digits().test_images[3])
    figure = explanation_figure(explanation, (8, 8), ["<b>"] * 10, title="why")
    assert len(figure.layout.images) == 1 + 3 * 3 * 2 + 1
    texts = [note.text for note in figure.layout.annotations]
    part = explanation.parts[0]
    assert f"logit {part.logit:+.2f}" in texts
    assert f"rest {part.remainder:+.2f}" in texts
    assert f"<b>{part.branches[0].activation:+.2f}</b>" in texts
    assert "<b>&lt;b&gt;</b>" in texts


def test_the_report_of_a_deep_model(tmp_path):
    reading = read_deep(digit_model(n_layers=2), digits(), k=100)
    bonds = read_bonds(reading.model, reading.data, drop=0.02)
    figures = write_report(tmp_path / "report.html", [bonds, reading], title="deep")
    page = (tmp_path / "report.html").read_text()
    assert f"{reading.search.expanded:,} of {reading.search.total:,}" in page
    assert " + ".join(map(str, bonds.cut.ranks)) in page
    assert page.count('class="figure"') == len(figures)
    assert reading.figures().keys() < figures.keys()
    assert {"explanation-clear", "explanation-close", "tree-0"} <= figures.keys()


def test_misuse_is_explained(paths):
    many = top_paths(digit_model(n_layers=2).tensors(), torch.eye(10), 30).paths
    with pytest.raises(BilensError, match="up to 24 paths of one direction; these are 30"):
        tree_figure(many, (8, 8), title="")

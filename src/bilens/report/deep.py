"""The report on a classifier of several layers."""

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from bilens.errors import BilensError
from bilens.read import BondReading, DeepReading
from bilens.report.bonds import bond_figures, bond_sections
from bilens.report.page import Section, Table, write_page
from bilens.report.shared import shared_figure, shared_section
from bilens.report.style import BLUE, GREY, dress
from bilens.report.tree import tree_figure

__all__ = ["deep_figures", "path_figure", "write_deep_report"]

DRAWN = 8


def path_figure(by_paths: Sequence[tuple[int, float]], full: float) -> go.Figure:
    """Test accuracy of the tree pruned to its best k paths, against k."""
    figure = go.Figure()
    figure.add_scatter(
        x=[k for k, _ in by_paths],
        y=[100 * accuracy for _, accuracy in by_paths],
        mode="lines+markers",
        line={"color": BLUE, "width": 2},
        hovertemplate="%{x} paths: %{y:.2f} %<extra></extra>",
    )
    figure.add_hline(
        y=100 * full,
        line={"dash": "dot", "color": GREY, "width": 1.5},
        opacity=1,
        annotation_text=f"the model: {full:.2%}",
        annotation_position="top left",
    )
    figure.update_xaxes(title="paths kept over all classes", type="log", dtick=1, fixedrange=True)
    figure.update_yaxes(title="test accuracy (%)", fixedrange=True)
    return dress(figure, height=340).update_layout(showlegend=False)


def deep_figures(reading: DeepReading, bonds: BondReading) -> dict[str, go.Figure]:
    """Every figure of the report, by the name of the file it would be saved as.

    Args:
        reading: the model's paths.
        bonds: its directions.

    Raises:
        BilensError: the model's inputs have no image shape.
    """
    shape = reading.model.config.image_shape
    if shape is None:
        raise BilensError("The model has no image_shape, so its eigenvectors are no pictures")
    figures = bond_figures(bonds, shape)
    figures["paths"] = path_figure(reading.by_paths, reading.accuracy)
    for class_, name in enumerate(reading.data.class_names):
        paths = reading.search.paths.of(class_)
        if len(paths):
            title = f"Strongest paths of {name}"
            figures[f"tree-{class_}"] = tree_figure(
                paths.truncate(min(DRAWN, len(paths))), shape, title=title
            )
    if reading.shared.features:
        figures["shared"] = shared_figure(reading.shared, shape, reading.data.class_names)
    return figures


def write_deep_report(
    path: Path, reading: DeepReading, bonds: BondReading, *, title: str
) -> dict[str, go.Figure]:
    """Write the report page and give back its figures.

    Args:
        path: the page.
        reading: the model's paths.
        bonds: its directions.
        title: of the page.

    Raises:
        BilensError: the model's inputs have no image shape.
    """
    figures = deep_figures(reading, bonds)
    search, config = reading.search, reading.model.config
    facts = [
        ("data", reading.data.name),
        ("test accuracy", f"{reading.accuracy:.2%}"),
        ("layers", str(config.n_layers)),
        ("width", str(config.d_model)),
        ("nodes decomposed", f"{search.expanded:,} of {search.total:,}"),
    ]
    table = [
        (f"{k:,}", f"{accuracy:.2%}", f"{100 * (reading.accuracy - accuracy):+.2f}")
        for k, accuracy in reading.by_paths
    ]
    trees = [figure for name, figure in figures.items() if name.startswith("tree")]
    sections = [
        *bond_sections(bonds, figures),
        Section(
            "How few paths are enough",
            "Each logit is a tree: an eigenvector of the last layer is a direction in the one "
            "before, with eigenvectors of its own, down to the pixels. The paths are ranked over "
            "all classes by effective eigenvalue, and the tree is cut to the best k.",
            rows=[[Table(("paths", "accuracy", "drop (points)"), table), figures["paths"]]],
        ),
        Section(
            "The strongest paths of each class",
            "From the logit on the left to the pixels on the right. Edges carry eigenvalues, blue "
            "where positive and red where negative; under a leaf stands its effective eigenvalue. "
            "Everything after a red edge of the last layer lowers the logit. Further down a sign "
            "says less: with the eigenvector above turned around, all below it change theirs.",
            rows=[[tree] for tree in trees],
        ),
        shared_section(reading.shared, figures.get("shared"), "ends of paths"),
    ]
    summary = (
        "Each layer of this classifier is exactly a tensor, so the whole of it is a tree of "
        "tensors. These are the few directions that it uses between its layers, and its strongest "
        "paths of eigenvectors, found without making the tree."
    )
    write_page(path, title, summary, facts, sections)
    return figures

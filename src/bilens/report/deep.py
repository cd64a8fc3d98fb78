"""The report on a classifier of several layers."""

from functools import partial
from pathlib import Path

import plotly.graph_objects as go

from bilens.checks import checked
from bilens.read import BondReading, DeepReading, class_paths, explain_deep
from bilens.read.chain import size_facts
from bilens.reading import shown, signed
from bilens.report.accuracy import path_figure
from bilens.report.bonds import bond_figures, bond_sections
from bilens.report.explanation import explanation_figures
from bilens.report.page import Section, Table, write_page
from bilens.report.shared import shared_figure, shared_section
from bilens.report.tree import tree_figure

__all__ = ["deep_figures", "write_deep_report"]

DRAWN, SEEN = 6, 2000
"""Paths of a class that are drawn, and test images that those beside them are chosen from."""


@checked
def deep_figures(reading: DeepReading, bonds: BondReading) -> dict[str, go.Figure]:
    """Every figure of the report, by the name of the file it would be saved as.

    Raises:
        BilensError: the model's inputs have no image shape.
    """
    shape = reading.data.shape
    names, x = reading.data.class_names, reading.data.test_images
    figures = bond_figures(bonds, shape)
    figures["paths"] = path_figure(reading.by_paths, reading.accuracy)
    figures |= explanation_figures(reading, partial(explain_deep, reading.tree), shape)
    for label, name in enumerate(names):
        paths = reading.search.paths.of(label)
        if len(paths):
            some = class_paths(reading.tree, paths.truncate(min(DRAWN, len(paths))), x[:SEEN])
            title = f"Strongest paths of {name}"
            figures[f"tree-{label}"] = tree_figure(
                some.paths, shape, title=title, root=name, inputs=some.inputs
            )
    if reading.shared.features:
        figures["shared"] = shared_figure(reading.shared, shape, names)
    return figures


@checked
def write_deep_report(
    path: Path, reading: DeepReading, bonds: BondReading, *, title: str
) -> dict[str, go.Figure]:
    """Write the page on a model's paths and directions, and give back its figures.

    Raises:
        BilensError: the model's inputs have no image shape.
    """
    figures = deep_figures(reading, bonds)
    search = reading.search
    facts = [
        ("data", reading.data.name),
        ("test accuracy", f"{reading.accuracy:.2%}"),
        *((name, shown(value)) for name, value in size_facts(reading.model)),
        ("nodes decomposed", f"{search.expanded:,} of {search.total:,}"),
    ]
    table = [
        (f"{k:,}", f"{accuracy:.2%}", signed(100 * (reading.accuracy - accuracy), ".2f"))
        for k, accuracy in reading.by_paths
    ]
    trees = [figure for name, figure in figures.items() if name.startswith("tree")]
    sections = [
        *bond_sections(bonds, figures),
        Section(
            "Why these logits",
            "One row for each of the three highest logits of an image. Each logit is a sum of "
            "activations λ (v·h)², one for each eigenvector v of the last layer, where h is what "
            "the layer below gives for the image and λ the eigenvalue. The bold number is the "
            "activation: blue raises the logit, red lowers it; rest is what all other eigenvectors "
            "add. What such an eigenvector looks for is itself a sum over eigenvectors of the "
            "layer below, down to the pixels. The pictures are those that weigh most for this "
            "image, each with its share; blue pixels are positive, red ones negative.",
            rows=[[figure] for name, figure in figures.items() if name.startswith("explanation")],
        ),
        Section(
            "How few paths are enough",
            "Each logit is a tree: an eigenvector of the last layer is a direction in the one "
            "before, with eigenvectors of its own, down to the pixels. The paths are ranked over "
            "all classes by effective eigenvalue, and the tree is cut to the best k.",
            rows=[[Table(("paths", "accuracy", "drop (points)"), table), figures["paths"]]],
        ),
        Section(
            "The strongest paths of each class",
            "From the logit on the left to the pixels on the right. An edge is an eigenvector, and "
            "carries its eigenvalue, blue where positive and red where negative. Beside each stand "
            "the test images that it reacts to most. A picture on the right is an eigenvector of "
            "the first layer, blue where it is positive and red where it is negative; below it "
            "stands the effective eigenvalue of the whole path, which says how much it can weigh. "
            "Whatever follows a red edge of the last layer lowers the logit. Further down a sign "
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

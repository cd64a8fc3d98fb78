"""The page of a deep classifier: its strongest paths, and the accuracy that they reach."""

from functools import partial

from bilens.figures.canvas import tree_figure
from bilens.figures.plots import path_figure
from bilens.images import chain
from bilens.images.deep import DeepReading
from bilens.pages.classifier import accuracy_table
from bilens.pages.explanation import shared_section
from bilens.pages.layout import sections_of
from bilens.sections import Picture, Section


@sections_of.register
def deep_sections(reading: DeepReading) -> list[Section]:
    """Return the accuracy by paths, and the strongest paths of each class."""
    shape, names = reading.data.shape, reading.data.class_names
    trees = []
    for label, name in enumerate(names):
        paths = reading.paths.of(label)
        if len(paths):
            few, title = paths.truncate(min(6, len(paths))), f"Strongest paths of {name}"
            draw = partial(tree_figure, few, shape, title=title, root=name)
            trees.append([Picture(f"tree-{label}", draw)])
    curve = Picture("paths", partial(path_figure, reading.by_paths, reading.accuracy))
    table = chain.accuracy_columns("paths", reading.by_paths, reading.accuracy)
    return [
        Section(reading.title, reading.answer(), [[curve]]),
        Section(
            "How well it holds",
            "Each logit is a tree: an eigenvector of the last layer is a direction in the one "
            "before, with eigenvectors of its own, down to the pixels. The paths are ranked "
            "over all classes by effective eigenvalue, and the tree is cut to the best k.",
            [[accuracy_table(table)]],
        ),
        Section(
            "The strongest paths of each class",
            "From the logit on the left to the pixels on the right. An edge is an "
            "eigenvector, and carries its eigenvalue, blue where positive and red where "
            "negative. A picture on the right is an eigenvector of the first layer, blue where "
            "it is positive and red where it is negative; below it is the effective eigenvalue "
            "that ranks its path. A path through a red edge of the last layer lowers the "
            "logit. Further down a sign says less: with the eigenvector above turned around, "
            "all below it change theirs.",
            trees,
        ),
        shared_section(reading.shared, shape, names, "ends of paths"),
    ]

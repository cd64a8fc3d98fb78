"""The page of bonds: how few directions a deep classifier needs, and what each of them does."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.figures.plots import accuracy_curve, count_axis, log_axis
from bilens.figures.sheet import GREY, Figure, add_legend, new_figure, styled
from bilens.images.bonds import BondReading, as_sum
from bilens.pages.classifier import accuracy_table
from bilens.pages.cuts import directions_figure, matrices_figure, network_figure
from bilens.pages.layout import sections_of
from bilens.sections import Picture, Section


@sections_of.register
def bond_sections(reading: BondReading) -> list[Section]:
    """Return the accuracy by directions, the network of each class, and every direction."""
    cut, shape, test = reading.cut_reading, reading.data.shape, reading.held_out
    low, high = test.interval
    networks, directions, matrices = [], [], []
    for label in range(reading.data.n_classes):
        draw = partial(network_figure, cut, label, shape)
        networks.append([Picture(f"network-{label}", draw)])
    for bond in range(len(cut.cut.cores)):
        draw = partial(directions_figure, cut, bond, shape)
        directions.append([Picture(f"directions-{bond}", draw)])
        draw = partial(matrices_figure, cut, bond)
        matrices.append([Picture(f"matrices-{bond}", draw)])
    curve = partial(kept_directions_figure, reading.by_rank, reading.accuracy, mark=reading.few)
    accuracies = reading.accuracies()
    table = accuracy_table(accuracies)
    row_names = {reading.few, as_sum(reading.cut.ranks), reading.by_rank[-1][0]}
    rows = [i for i, k in enumerate(accuracies["directions at each bond"]) if k in row_names]
    table_rows = {name: [cells[i] for i in rows] for name, cells in accuracies.items()}
    products = f"{len(cut.products):,} products of two coordinates"
    enough = [k for k, share in reading.by_products if share >= reading.accuracy - reading.drop]
    if enough:
        products += f"; the {enough[0]:,} largest keep the accuracy within {reading.drop:.1%}"
    # Names of the inputs that a metric uses.
    inputs = {
        "images": "the training images",
        "gaussian": "a Gaussian of the images' mean and covariance",
        "weights": "standard normal inputs",
    }
    return [
        Section(reading.title, reading.answer(), [[Picture("kept-directions", curve)]]),
        Section(
            "How well it holds",
            f"On {test.n_images:,} test images the model on {as_sum(reading.cut.ranks)} directions "
            f"is right for {test.accuracy:.2%} (95 % interval {low:.2%} to {high:.2%}), and "
            f"changes {test.changed:.1%} of the predictions of the whole model.",
            [[accuracy_table(table_rows)]],
        ),
        Section("Accuracy by the number of directions", "", [[table]]),
        Section(
            "How fast the directions lose weight",
            "Each layer's output reaches the next layer through a bond. The share of each of "
            f"its directions is measured over {inputs[reading.metric]}, the largest first. A "
            "diamond is the last direction that is kept.",
            [[Picture("bonds", partial(bond_figure, reading))]],
        ),
        Section(
            "The network of each class",
            "For each class, from its logit on the right to the pixels: the products of two "
            "coordinates that make up most of it, those that make up most of these, and so "
            "on. A percentage belongs to a product, blue where it adds and red where it "
            "subtracts: its share of the squared norm of what it is part of. One line into "
            "it is a square. The same number is the same coordinate in every drawing. "
            "Coordinates after the first layer show the test images where they are largest "
            "and smallest.",
            networks,
        ),
        Section(
            "Every direction",
            "The pixels of a coordinate of the input (blue where they go with it, red against "
            "it); for any other, the strongest positive and negative eigenvector of its "
            "interaction matrix, followed down to the pixels along the strongest ones below. "
            "Then the test images at both ends of it and the logits that it raises and lowers "
            "there: their change when the coordinate is set to zero.",
            directions,
        ),
        Section(
            "The layers, whole",
            f"All {products}. One matrix for each coordinate that a layer makes, over the "
            "coordinates that it reads; a colour goes by the square root of an entry.",
            matrices,
        ),
    ]


@checked
@styled
def bond_figure(reading: BondReading) -> Figure:
    """Draw the squared singular values of each bond, with a mark at the end of the cut."""
    figure, axes = new_figure(height=340, alt="Share of each direction of each bond, largest first")
    # Shares below are rounding, or soon will be.
    floor = 1e-8
    for i, (bond, rank) in enumerate(zip(reading.bonds.bonds, reading.cut.ranks, strict=True)):
        name = f"layer {i} to {i + 1}" if i else "pixels to layer 1"
        # A logarithmic axis has no place for zero.
        shares = [share for share in bond.shares.tolist() if share > floor]
        (line,) = axes.plot(range(1, len(shares) + 1), shares, label=name)
        end = max(float(bond.shares[rank - 1]), floor)
        axes.plot([rank], [end], marker="D", color=line.get_color())
    axes.set_yscale("log")
    log_axis(axes.yaxis)
    count_axis(axes, [len(bond.shares) for bond in reading.bonds.bonds], "direction")
    axes.set_ylabel("share")
    add_legend(axes)
    return figure


@checked
@styled
def kept_directions_figure(
    by_rank: Sequence[tuple[int, float, float]], full: float, mark: int | None = None
) -> Figure:
    """Plot the test accuracy of uniform cuts against the number of directions of each bond.

    `by_rank` comes from `rank_accuracies`; `mark` is a number of directions that is marked.
    """
    if not by_rank:
        raise BilensError("by_rank is empty, expected at least one point")
    rank, accuracies, _ = zip(*by_rank, strict=True)
    figure = accuracy_curve(rank, accuracies, full, unit="directions", kept_by="at each bond")
    if mark is not None:
        accuracy = accuracies[rank.index(mark)]
        arrow: dict[str, Any] = {"arrowstyle": "-", "color": GREY}
        place: dict[str, Any] = {
            "xytext": (28, -26),
            "textcoords": "offset points",
            "arrowprops": arrow,
        }
        figure.axes[0].annotate(f"{mark}: {accuracy:.1%}", (mark, 100 * accuracy), **place)
    return figure

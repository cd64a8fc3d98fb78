"""The part of a report that shows a deep model on few directions."""

from collections.abc import Sequence

import plotly.graph_objects as go

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.read import BondReading
from bilens.read.figures.curves import accuracy_curve
from bilens.read.figures.network import directions_figure, matrices_figure, network_figure
from bilens.read.figures.style import BLUE, RED, dress
from bilens.reading import Picture, Section, Table

COLORS = (BLUE, RED, "#1b7837", "#762a83", "#b35806")
INPUTS = {
    "images": "the training images",
    "gaussian": "a Gaussian of the images' mean and covariance",
    "weights": "standard normal inputs",
}
"""Names of the inputs that a metric uses."""
FLOOR = 1e-8
"""Shares below are rounding, or soon will be."""


@checked
def bond_figure(reading: BondReading) -> go.Figure:
    """Draw the squared singular values of each bond, with a mark at the end of the cut."""
    figure = go.Figure()
    for number, (bond, rank) in enumerate(zip(reading.bonds.bonds, reading.cut.ranks, strict=True)):
        color, name = COLORS[number % len(COLORS)], bond_name(number)
        shares = [share for share in bond.shares.tolist() if share > FLOOR]
        figure.add_scatter(
            x=list(range(1, len(shares) + 1)),
            y=shares,
            mode="lines",
            name=name,
            line={"color": color, "width": 2},
            hovertemplate=f"{name}, direction %{{x}}: %{{y:.2%}}<extra></extra>",
        )
        figure.add_scatter(
            x=[rank],
            y=[max(float(bond.shares[rank - 1]), FLOOR)],
            mode="markers",
            marker={"color": color, "size": 11, "symbol": "diamond"},
            hovertemplate=f"{name}: {rank} kept<extra></extra>",
            showlegend=False,
        )
    figure.update_xaxes(title="direction", type="log", dtick=1, fixedrange=True)
    figure.update_yaxes(title="share", type="log", tickformat=".0e", fixedrange=True)
    alt = "Share of each direction of each bond, the largest first"
    return dress(figure, height=340, alt=alt).update_layout(
        legend={"x": 0.02, "y": 0.02, "xanchor": "left", "yanchor": "bottom"}
    )


@checked
def kept_directions_figure(by_rank: Sequence[tuple[int, float, float]], full: float) -> go.Figure:
    """Plot the test accuracy of uniform cuts against the number of directions of each bond.

    Args:
        by_rank: result of `rank_accuracies`.
        full: accuracy of the model.
    """
    if not by_rank:
        raise BilensError("by_rank is empty, expected at least one point")
    rank, accuracies, errors = zip(*by_rank, strict=True)
    figure = accuracy_curve(rank, accuracies, full, label="the model", beside="bottom right")
    figure.update_traces(
        customdata=errors,
        hovertemplate="%{x} directions: %{y:.2f} %, error %{customdata:.2g}<extra></extra>",
    )
    figure.update_xaxes(title="directions kept at each bond", type="log", dtick=1, fixedrange=True)
    return dress(figure, height=340, alt="Test accuracy against the directions kept at each bond")


def bond_name(number: int) -> str:
    """Return the name of a bond."""
    return "pixels to layer 1" if number == 0 else f"layer {number} to {number + 1}"


def bond_figures(reading: BondReading) -> dict[str, go.Figure]:
    """Draw every figure of these sections, by the name of the file that it is saved as."""
    shape = reading.data.shape
    figures = {
        "bonds": bond_figure(reading),
        "kept-directions": kept_directions_figure(reading.by_rank, reading.accuracy),
    }
    for label in range(reading.data.n_classes):
        figures[f"network-{label}"] = network_figure(reading.cut_reading, label, shape)
    for number in range(len(reading.cut.cores)):
        figures[f"directions-{number}"] = directions_figure(reading, number, shape)
    for number in range(len(reading.cut.cores)):
        figures[f"matrices-{number}"] = matrices_figure(reading, number)
    return figures


def bond_sections(reading: BondReading) -> list[Section]:
    """Return the sections on a model with few directions between its layers."""
    figures, n = reading.figures(), len(reading.cut.cores)
    ranks = " + ".join(map(str, reading.cut.ranks))
    enough = (k for k, a in reading.by_products if a >= reading.accuracy - reading.drop)
    few = next(enough, None)
    products = f"{len(reading.cut_reading.products):,} products of two coordinates" + (
        f"; the {few:,} of largest share keep the test accuracy within {reading.drop:.1%}"
        if few
        else ""
    )
    over = INPUTS[reading.metric]
    low, high = reading.held_out.interval
    ranks_of = {kind: " + ".join(map(str, sizes)) for kind, sizes in reading.ranks.items()}
    order = f"; numbers go by share over {over}"
    order += "" if reading.metric == "images" else ", in the explorer over the training images"
    (frame,) = reading.tables().values()
    shown = [k % 4 == 0 for k, _, _ in reading.by_rank[:-1]] + [True, True]
    return [
        Section(
            "How few directions are enough",
            "Each layer's output reaches the next layer through a bond, and the model uses "
            f"few directions of it. Their shares (over {over}) fall fast. Two kinds of bonds were "
            f"computed: the tree's need {ranks_of['tree']} directions, the function's "
            f"{ranks_of['function']}; the page shows the {reading.kind}'s. The cut to {ranks} "
            "(diamonds) was chosen on training images. Its test accuracy is "
            f"{reading.cut_accuracy:.2%} (95 % interval {low:.2%} to {high:.2%}). On these images "
            f"it changes the logits by {reading.held_out.error:.2g} of their size (RMS, each minus "
            f"the mean over classes; upper bound {reading.held_out.error_bound:.2g}).",
            [
                [Picture(name, figures[name]) for name in ("bonds", "kept-directions")],
                [Table(frame[shown], "", reading.formats, 0)],
            ],
        ),
        Section(
            "The network that is left",
            "For each class, from its logit on the right to the pixels: the products of two "
            "coordinates that make up most of it, those that make up most of these, and so on. A "
            "percentage belongs to a product, blue where it adds and red where it subtracts: its "
            "share of the sum that it is part of. One line into it is a square. The same number is "
            f"the same coordinate in every drawing{order}. Coordinates after the first layer show "
            "the test images where they are largest and smallest.",
            [
                [Picture(f"network-{k}", figures[f"network-{k}"])]
                for k in range(reading.data.n_classes)
            ],
        ),
        Section(
            "Every direction",
            "The pixels of a coordinate of the input (blue where they go with it, red against "
            "it); for any other, the strongest positive and negative eigenvector of its "
            "interaction matrix, followed down to the pixels along the strongest ones below. Then "
            "the test images at both ends of it and the logits that it raises and lowers there: "
            "their change when the coordinate is set to zero.",
            [[Picture(f"directions-{k}", figures[f"directions-{k}"])] for k in range(n)],
        ),
        Section(
            "The layers, whole",
            f"All {products}. One matrix for each coordinate that a layer makes, over the "
            "coordinates that it reads; a colour goes by the square root of an entry.",
            [[Picture(f"matrices-{k}", figures[f"matrices-{k}"])] for k in range(n)],
        ),
    ]

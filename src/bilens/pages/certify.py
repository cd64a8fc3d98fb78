"""The page of certified radii: pictures, their smallest changes, and the accuracy by radius."""

from functools import partial

import torch

from bilens.errors import BilensError
from bilens.figures.canvas import Canvas
from bilens.figures.sheet import Figure
from bilens.images.radii import CertifiedRadii
from bilens.pages.layout import sections_of
from bilens.sections import Picture, Section, Table

SHOWN = 10
"""Pictures on the page, in two columns, which a phone has one below the other."""


@sections_of.register
def certified_sections(reading: CertifiedRadii) -> list[Section]:
    """Return the nearest pictures of another answer, and the accuracy by radius."""
    picture_ids = [] if reading.change is None or reading.shape is None else shown_pictures(reading)
    halves = [half for half in (picture_ids[: SHOWN // 2], picture_ids[SHOWN // 2 :]) if half]
    pictures = [
        Picture(f"nearest-{i}", partial(nearest_figure, reading, half))
        for i, half in enumerate(halves)
    ]
    legend = (
        " Left is the picture, in the middle its smallest change, blue where ink is added and red "
        "where it is taken away, and right the sum. A thousandth further on, the model takes it "
        "for the other class."
    )
    answer = reading.answer() + legend * bool(picture_ids)
    return [
        Section(reading.title, answer, [pictures] if pictures else [], reading.facts()),
        Section(
            "How many answers hold",
            "The share of all pictures that are right within each radius, whatever the change. "
            "The interval is that of the share over pictures (Clopper-Pearson, 95 %).",
            [[Table(reading.frame(), "", reading.formats)]],
        ),
        Section(
            "What is not certified",
            "Lengths are Euclidean. A change is added to the pixels, and the sum may leave their "
            "range, so that with pixels between black and white the radius is a lower bound. "
            "Shifts, rotations and other pictures of the same thing are not certified, and neither "
            "is the data: a picture far from all others may have a large radius.",
        ),
    ]


def shown_pictures(reading: CertifiedRadii) -> list[int]:
    """Return a right picture of each class, at the median of its class's radii, ten at most."""
    ids = []
    for label in range(min(len(reading.class_names), SHOWN)):
        numbers = reading.right[reading.labels[reading.right] == label]
        numbers = numbers[reading.radius[numbers].isfinite()]
        if len(numbers):
            order = reading.radius[numbers].argsort()
            ids.append(int(numbers[order[len(order) // 2]]))
    return ids


def nearest_figure(reading: CertifiedRadii, shown: list[int]) -> Figure:
    """Draw pictures, their smallest changes, and the sums, one below the other."""
    if reading.change is None or reading.shape is None:
        raise BilensError("reading has no pictures: certify pictures with a model of one layer")
    shape, names = reading.shape, reading.class_names
    aspect = shape[0] / shape[1]
    height = aspect + 0.42
    canvas = Canvas(3.1, len(shown) * height, unit=90, title="")
    for row, i in enumerate(shown):
        top = row * height
        x, change = reading.x[i], reading.change[i]
        canvas.image(x, shape, x=0, y=top)
        canvas.eigenvector(change, shape, x=1.05, y=top)
        canvas.image(torch.clamp(x + change, 0, 1), shape, x=2.1, y=top)
        label, other = names[int(reading.labels[i])], names[int(reading.other[i])]
        text = f"{label} → {other}, {float(reading.radius[i]):.2f}"
        canvas.label(text, x=1.55, y=top + aspect + 0.04)
    return canvas.figure()

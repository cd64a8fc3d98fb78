"""Features that classes share, each as a picture with the classes that it raises and lowers."""

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from bilens.checks import checked
from bilens.read import SharedFeature, SharedFeatures
from bilens.report.canvas import Canvas
from bilens.report.page import Section
from bilens.report.style import BLUE, GREY, RED

__all__ = ["shared_figure", "shared_section"]

COLUMNS, STEP, LINE = 4, 1.42, 0.18
SHOWN = 12
LETTERS, LINES = 15, 2
"""What fits under a picture: letters of a line, and lines of each sign."""


@checked
def shared_figure(
    shared: SharedFeatures, shape: tuple[int, int], class_names: Sequence[str]
) -> go.Figure:
    """The first few shared features; the arrows under each name the classes that it moves."""
    features = shared.features[:SHOWN]
    aspect = shape[0] / shape[1]
    below = [_below(feature, class_names) for feature in features]
    rise = aspect + LINE * (max(map(len, below)) + 0.5)
    n_rows = -(-len(features) // COLUMNS)
    alt = f"{len(features)} pictures of features, each with the classes that it moves"
    canvas = Canvas(STEP * COLUMNS, rise * n_rows, unit=120, title="", alt=alt)
    for place, (feature, lines) in enumerate(zip(features, below, strict=True)):
        row, column = divmod(place, COLUMNS)
        left, top = STEP * column, rise * row
        canvas.eigenvector(feature.vector, shape, x=left + (STEP - 1) / 2, y=top)
        for number, (text, color, whole) in enumerate(lines):
            y = top + aspect + 0.01 + LINE * number
            canvas.label(text, x=left + STEP / 2, y=y, color=color, hover=whole)
    return canvas.figure()


def shared_section(shared: SharedFeatures, figure: go.Figure | None, what: str) -> Section:
    """The part of a report with `shared_figure`, or None; `what` are the vectors compared."""
    if figure is None:
        text = f"None: no two of the {shared.compared:,} {what} compared are alike."
        return Section("Features shared between classes", text)
    shown = min(SHOWN, len(shared.features))
    text = (
        f"The {shared.compared:,} strongest {what} of all classes, grouped where they are alike up "
        f"to sign, make {shared.groups:,} features. {len(shared.features):,} of them serve more "
        f"than one class and hold {shared.weight:.0%} of the weight. "
        f"{'These are' if shown == len(shared.features) else f'The first {shown} are'} shown, each "
        "with its share of the weight and the classes it takes part in raising (▲) or lowering (▼)."
    )
    return Section("Features shared between classes", text, rows=[[figure]])


def _below(feature: SharedFeature, class_names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Lines under a picture: their text, safe for HTML, their colour, and all of it."""
    lines = [(f"{feature.weight:.1%}", GREY, "share of the weight")]
    for raises, sign, color in ((True, "▲", BLUE), (False, "▼", RED)):
        # Each class once, by its heaviest use.
        classes = dict.fromkeys(use.label for use in feature.uses if use.raises == raises)
        names = [escape(class_names[label]) for label in classes]
        whole = f"{'raises' if raises else 'lowers'} {', '.join(names)}"
        lines += [(f"{sign} {line}", color, whole) for line in _wrapped(names)]
    return lines


def _wrapped(names: Sequence[str]) -> list[str]:
    """Names in as many lines as there is room for; the last one says how many there are besides."""
    lines = [""]
    for number, name in enumerate(names):
        longer = f"{lines[-1]}, {name}" if lines[-1] else name
        if len(longer) <= LETTERS or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < LINES:
            lines.append(name)
        else:
            lines[-1] += f" +{len(names) - number}"
            break
    return lines if names else []

"""Features that classes share, each as a picture with the classes that it raises and lowers."""

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from bilens.read import SharedFeature, SharedFeatures
from bilens.report.canvas import Canvas
from bilens.report.page import Section
from bilens.report.picture import as_image, diverging
from bilens.report.style import BLUE, GREY, RED

__all__ = ["shared_figure", "shared_section"]

COLUMNS, STEP, LABEL, LINE = 4, 1.42, 0.62, 0.17
LETTERS = 24
"""That fit under a picture."""


def shared_figure(
    shared: SharedFeatures,
    shape: tuple[int, int],
    class_names: Sequence[str],
    *,
    show: int = 12,
) -> go.Figure:
    """The first few shared features; the arrows under each name the classes that it moves.

    Args:
        shared: at least one.
        shape: height and width of an input as an image.
        class_names: what the classes are called.
        show: how many features.
    """
    features = shared.features[:show]
    aspect = shape[0] / shape[1]
    rise = aspect + LABEL
    n_rows = -(-len(features) // COLUMNS)
    canvas = Canvas(STEP * COLUMNS, rise * n_rows, unit=120, title="")
    for place, feature in enumerate(features):
        row, column = divmod(place, COLUMNS)
        left, top = STEP * column, rise * row
        picture = diverging(as_image(feature.vector, shape))
        canvas.picture(picture, x=left + (STEP - 1) / 2, y=top, width=1, height=aspect)
        below = [(f"{feature.weight:.1%}", GREY)]
        for raises, sign, color in ((True, "▲", BLUE), (False, "▼", RED)):
            names = _moved(feature, raises, class_names)
            if names:
                below.append((f"{sign} {_fitted(names)}", color))
        for line, (text, color) in enumerate(below):
            y = top + aspect + 0.01 + LINE * line
            canvas.label(text, x=left + STEP / 2, y=y, color=color)
    return canvas.figure()


def shared_section(shared: SharedFeatures, figure: go.Figure | None, what: str) -> Section:
    """The part of a report that shows them; without a figure it says that there are none.

    Args:
        shared: what is shown.
        figure: of `shared_figure`.
        what: the vectors that were compared, as the reader knows them.
    """
    if figure is None:
        text = f"None: no two of the {shared.compared:,} {what} compared are alike."
        return Section("Features shared between classes", text)
    shown = len(figure.layout.images)
    text = (
        f"The {shared.compared:,} strongest {what} of all classes, grouped where they are alike up "
        f"to sign, make {shared.groups:,} features. {len(shared.features):,} of them serve more "
        f"than one class and hold {shared.weight:.0%} of the weight. "
        f"{'These are' if shown == len(shared.features) else f'The first {shown} are'} shown, each "
        "with its share of the weight and the classes it takes part in raising (▲) or lowering (▼)."
    )
    return Section("Features shared between classes", text, rows=[[figure]])


def _moved(feature: SharedFeature, raises: bool, class_names: Sequence[str]) -> list[str]:
    """The classes that a feature raises, or lowers, each once, by their heaviest use."""
    classes = dict.fromkeys(use.class_ for use in feature.uses if use.raises == raises)
    return [class_names[class_] for class_ in classes]


def _fitted(names: Sequence[str]) -> str:
    """As many names as fit, and how many more there are; safe for HTML."""
    kept = [names[0]]
    for name in names[1:]:
        if len(", ".join([*kept, name])) > LETTERS:
            break
        kept.append(name)
    more = f" +{len(names) - len(kept)}" if len(kept) < len(names) else ""
    return escape(", ".join(kept)) + more

"""Trees of eigenvectors: as a figure, and as a list in HTML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from jaxtyping import Float
from torch import Tensor

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.lazy_imports import go
from bilens.read.figures.canvas import THUMB, Canvas, colour_bar_html
from bilens.read.figures.style import BLUE, GREY, RED
from bilens.reading import signed
from bilens.tensor import Paths

STEP, GAP, THICKEST = 2.4, 0.42, 7.0
ROOT, MOST = 0.5, 24
Name = tuple[int, ...]


@checked
def tree_figure(
    paths: Paths,
    shape: tuple[int, int],
    *,
    title: str,
    root: str = "",
    inputs: Mapping[Name, Float[Tensor, "k n_in"]] | None = None,
) -> "go.Figure":
    """Draw paths from the direction on the left to first-layer eigenvectors on the right.

    An edge is as thick as its |eigenvalue| is large among those of its layer. Positive ones are
    blue, negative ones red. Below a leaf is its effective eigenvalue.

    `root` is the name of the direction, `inputs` up to three images to show beside each
    eigenvector, as `class_paths` finds them.

    Raises:
        BilensError: the paths are of several directions, or more than can be drawn.

    Source:
        Pearce et al. 2024, figures 1C and 6.
    """
    if len(set(paths.roots.tolist())) != 1 or len(paths) > MOST:
        raise BilensError(
            f"tree_figure() draws up to {MOST} paths of one direction; these are {len(paths)} of "
            f"{len(set(paths.roots.tolist()))}. Choose some with paths.truncate() or paths.of()."
        )
    inputs = inputs or {}
    aspect, depth = shape[0] / shape[1], paths.depth
    thumb = THUMB if inputs else 0.0
    rows = sorted(range(len(paths)), key=lambda row: paths.indices[row].tolist())
    rise, leaf = aspect + GAP, ROOT + STEP * depth
    canvas = Canvas(leaf + 1.05 + thumb, rise * len(rows), unit=88, title=title)
    heights: dict[Name, list[float]] = {}
    eigenvalue: dict[Name, float] = {}
    for place, row in enumerate(rows):
        name = tuple(paths.indices[row].tolist())
        for length in range(depth + 1):
            heights.setdefault(name[:length], []).append(rise * place + aspect / 2)
            if length:
                eigenvalue[name[:length]] = float(paths.eigenvalues[row, length - 1])
        canvas.eigenvector(paths.vectors[row], shape, x=leaf, y=rise * place)
        text = signed(paths.effective[row].item())
        canvas.label(text, x=leaf + 0.5, y=rise * place + aspect, color=GREY)
    middle = {name: sum(ys) / len(ys) for name, ys in heights.items()}
    for name, value in eigenvalue.items():
        color, x = BLUE if value > 0 else RED, ROOT + STEP * (len(name) - 1)
        # Images are between the edge that comes in and those that go out.
        begin = x + (thumb if len(name) > 1 else 0)
        start, end = (begin, middle[name[:-1]]), (x + STEP, middle[name])
        canvas.line(start, end, color=color, width=_thickness(name, eigenvalue))
        at = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        canvas.label(signed(value, ".2g"), x=at[0], y=at[1], color=color, on_line=True)
    for name, images in inputs.items():
        left = ROOT + STEP * len(name) + (1.03 if len(name) == depth else 0)
        canvas.thumbnails(images, shape, x=left, y=middle[name] - aspect / 2)
    if root:
        canvas.label(f"<b>{escape(root)}</b>", x=ROOT / 2, y=middle[()], size=14, on_line=True)
    return canvas.figure()


def _thickness(name: Name, eigenvalue: dict[Name, float]) -> float:
    largest = max(abs(v) for other, v in eigenvalue.items() if len(other) == len(name))
    return 1 + (THICKEST - 1) * abs(eigenvalue[name]) / largest if largest else 1.0


@dataclass(frozen=True)
class Branch:
    """An eigenvector in the list.

    Attributes:
        name: sent when it is clicked.
        value: its eigenvalue.
        text: words beside the eigenvalue.
        picture: data address of a leaf's picture; None for a node that can be opened.
        opened: True if its branches are shown.
        branches: its branches, as far as shown.
        more: how many weaker branches are not shown.
    """

    name: str
    value: float
    text: str = ""
    picture: str | None = None
    opened: bool = False
    branches: Sequence["Branch"] = field(default=())
    more: int = 0


@checked
def branches_html(root: Branch, title: str) -> str:
    """Return the list below a direction, safe for HTML.

    A node that can be opened is a button with its name in `data-node`.
    """
    shown = _list(root)
    bar = colour_bar_html() if "<img" in shown else ""
    return f'<div class="branches"><p><b>{escape(title)}</b></p>{shown}{bar}</div>'


def _list(node: Branch) -> str:
    items = "".join(f"<li>{_item(branch)}</li>" for branch in node.branches)
    others = f'<li class="more">and {node.more} weaker ones</li>' if node.more else ""
    kind = ' class="leaves"' if any(branch.picture for branch in node.branches) else ""
    return f"<ul{kind}>{items}{others}</ul>"


def _item(branch: Branch) -> str:
    sign = "up" if branch.value > 0 else "down"
    label = f'<span class="{sign}">λ = {signed(branch.value)}</span>'
    label += f"<br>{escape(branch.text)}" if branch.text else ""
    if branch.picture is not None:
        name, picture = escape(branch.name), escape(branch.picture)
        return (
            f'<figure><a href="{picture}" download="eigenvector-{name}.png">'
            f'<img src="{picture}" alt="eigenvector {name}"></a>'
            f"<figcaption>{label}</figcaption></figure>"
        )
    opened = str(branch.opened).lower()
    mark = "▾" if branch.opened else "▸"
    button = (
        f'<button type="button" data-node="{escape(branch.name)}" aria-expanded="{opened}">'
        f"{mark} {label}</button>"
    )
    return button + (_list(branch) if branch.opened else "")

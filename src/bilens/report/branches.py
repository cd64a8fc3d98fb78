"""A tree of eigenvectors as a list in HTML, each of whose nodes can be opened."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from bilens.checks import checked
from bilens.reading import signed
from bilens.report.picture import colour_bar_html

__all__ = ["Branch", "branches_html"]


@dataclass(frozen=True)
class Branch:
    """An eigenvector in the list.

    Attributes:
        name: what is handed over when it is clicked.
        value: its eigenvalue.
        text: what stands beside the eigenvalue.
        picture: data address of a leaf's picture; None for a node that can be opened.
        opened: whether what it branches into is shown.
        branches: what it branches into, as far as shown.
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
    """The list under a direction, safe for HTML.

    A node that can be opened is a button with its name in `data-node`.
    """
    shown = _list(root)
    bar = colour_bar_html() if "<img" in shown else ""
    return f'<div class="branches"><p><b>{escape(title)}</b></p>{shown}{bar}</div>'


def _list(node: Branch) -> str:
    items = "".join(f"<li>{_item(branch)}</li>" for branch in node.branches)
    rest = f'<li class="more">and {node.more} weaker ones</li>' if node.more else ""
    kind = ' class="leaves"' if any(branch.picture for branch in node.branches) else ""
    return f"<ul{kind}>{items}{rest}</ul>"


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

"""Figures that notebooks show: interactive, and as they stand on the pages that nbconvert makes."""

from contextlib import suppress
from typing import Any

import plotly.graph_objects as go

from bilens.errors import BilensError
from bilens.paper.sheet import has_matplotlib, still_picture


class NotebookFigure(go.Figure):  # type: ignore[misc]
    """A figure of plotly with a still picture beside it, which needs no script.

    Without matplotlib, and if `bilens.paper.sheet` cannot draw it, it is plotly's alone.
    """

    # Plotly's would be called in place of the bundle: the one shows nothing that nbconvert can
    # write, the other loads a script from another host.
    _ipython_display_ = _repr_html_ = None

    def _repr_mimebundle_(self, *args: Any, **options: Any) -> dict[str, Any]:
        alt = str((self.layout.meta or {}).get("alt") or self.layout.title.text or "A figure")
        shown = {"text/plain": alt, **super()._repr_mimebundle_(*args, **options)}
        # A renderer that the user chose may write HTML of its own.
        if "text/html" not in shown and has_matplotlib():
            with suppress(BilensError):
                shown["text/html"] = still_picture(self, alt)
        return shown

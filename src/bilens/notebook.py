"""How results show themselves: one line in a console, a table in a notebook, a figure by `plot`."""

from html import escape
from typing import ClassVar

from bilens.lazy_imports import go, pd, px

__all__ = ["Shown", "signed"]

ROWS = 10
BARS = {"align": "zero", "color": ["#b2182b55", "#2166ac55"], "width": 90}


def signed(value: float, digits: str = ".3g") -> str:
    """A number with its sign, as `format` gives it, but none where zero is all that is shown."""
    text = format(value, "+" + digits)
    return text if text.strip("+-0.%") else text[1:]


class Shown:
    """A result that shows itself; a subclass says in `facts` what it is, and in `frame` its rows.

    Attributes:
        axes: columns of the frame that `plot` draws: y over x, and color for several.
    """

    axes: ClassVar[dict[str, str]]

    def facts(self) -> str:
        """What it is, in one line."""
        raise NotImplementedError

    def frame(self) -> "pd.DataFrame":
        """Its numbers as a table, the strongest first."""
        raise NotImplementedError

    def plot(self) -> "go.Figure":
        """The table as a figure, in plotly's default template."""
        frame = self.frame()
        if frame[self.axes["x"]].dtype.kind in "if":
            return px.line(frame, markers=True, **self.axes)
        return px.bar(frame, **self.axes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.facts()})"

    def _repr_html_(self) -> str:
        return f"<p><code>{escape(repr(self))}</code></p>{self._shown_table()}"

    def _shown_table(self) -> str:
        """The first rows, with bars behind the numbers that are plotted; escaped."""
        frame = self.frame()
        style = frame.head(ROWS).style.hide(axis="index").bar(subset=[self.axes["y"]], **BARS)
        numbers = dict.fromkeys(frame.select_dtypes("float"), "{:z.4g}".format)
        table: str = style.format(numbers, escape="html").to_html()
        return table + (f"<p>{ROWS} of {len(frame):,} rows</p>" if len(frame) > ROWS else "")

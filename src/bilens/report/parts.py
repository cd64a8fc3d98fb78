"""Parts of a page on their own, as HTML, for pages that others make."""

import base64
from html import escape

import pandas as pd

from bilens.report.page import ContextList, Table, page_templates

__all__ = ["contexts_html", "table_html"]


def table_html(table: Table, frame: pd.DataFrame, name: str) -> str:
    """A table with a link that saves all its numbers as CSV.

    Args:
        table: what is shown; escaped here.
        frame: what is saved.
        name: of the file, without its ending.
    """
    shown = page_templates().get_template("parts.html").module
    packed = base64.b64encode(frame.to_csv(index=False).encode()).decode()
    link = f'download="{escape(name)}.csv" href="data:text/csv;base64,{packed}"'
    return f'<div class="table">{shown.table(table)}<a class="save" {link}>CSV</a></div>'  # type: ignore[attr-defined]


def contexts_html(contexts: ContextList) -> str:
    """Texts whose tokens are coloured by what they contribute; escaped here."""
    shown = page_templates().get_template("parts.html").module
    return str(shown.contexts(contexts))  # type: ignore[attr-defined]

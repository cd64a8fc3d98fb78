"""What every screen is made of: guarded handlers, figures, and the address of its state."""

import functools
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, TypeVar

from bilens.errors import BilensError
from bilens.explore.address import read_address
from bilens.explore.framework import gradio as gr

__all__ = ["QUIET", "address_bar", "facts_html", "guarded", "picture", "restored"]

State = TypeVar("State")
Result = TypeVar("Result")

QUIET: dict[str, Any] = {
    "show_progress": "hidden",
    "trigger_mode": "always_last",
    "api_visibility": "private",
}
"""Of events that are answered at once: no veil over the figures, and only the last move counts."""

KEEP_ADDRESS = """(query) => {
  // What hosts add, such as signatures, starts with two underscores and stays.
  const given = [...new URLSearchParams(location.search)];
  const others = new URLSearchParams(given.filter(([name]) => name.startsWith("__")));
  const all = [others.toString(), query].filter(Boolean).join("&");
  history.replaceState(null, "", location.pathname + (all ? "?" + all : ""));
}"""
COPY_ADDRESS = "() => { navigator.clipboard.writeText(location.href); }"


def guarded(handler: Callable[..., Result]) -> Callable[..., Result]:
    """A handler whose errors of the user's making are shown on the page."""

    @functools.wraps(handler)
    def call(*args: Any) -> Result:
        try:
            return handler(*args)
        except BilensError as error:
            raise gr.Error(escape(str(error)), print_exception=False) from error

    return call


def restored(start: State, checked: Callable[[State], State], request: Any) -> State:
    """The state that a page's address asks for, or the first one with a warning."""
    try:
        return checked(read_address(start, request.query_params.multi_items()))
    except BilensError as error:
        gr.Warning(escape(f"The address cannot be shown: {error}"))
        return start


def picture(name: str) -> gr.Plot:
    """A place for a figure, on white in either theme."""
    return gr.Plot(
        show_label=False, container=False, label=name, elem_id=name, elem_classes="bilens-plot"
    )


def address_bar() -> gr.Textbox:
    """A button that copies the address; give the query of each new state to the result."""
    query = gr.Textbox(visible="hidden", elem_id="query", label="query")
    query.change(None, query, None, js=KEEP_ADDRESS, api_visibility="private")
    button = gr.Button("Copy the address of this view", size="sm", min_width=120)
    button.click(None, None, None, js=COPY_ADDRESS, api_visibility="private")
    return query


def facts_html(facts: Sequence[tuple[str, str]]) -> str:
    """Names and values for the head of a screen."""
    rows = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="bilens-facts">{"".join(rows)}</dl>'

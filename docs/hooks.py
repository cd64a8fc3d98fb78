"""What the site needs besides Markdown: equations as MathML, and the promise to load nothing."""

import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

__all__ = ["mathml", "on_post_page"]

REMOTE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


def mathml(source: str, *_: Any, **__: Any) -> str:
    """An equation in a fence called math, for superfences; browsers draw it by themselves."""
    lines = [convert(line, display="block") for line in source.splitlines() if line.strip()]
    return f'<div class="math">{"".join(lines)}</div>'


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Fail the build if a page would fetch a script, style or picture from another machine.

    Raises:
        PluginError: it would.
    """
    if found := REMOTE.search(output):
        raise PluginError(f"{page.file.src_uri} loads from elsewhere: {found.group()}")
    return output

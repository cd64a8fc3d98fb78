"""Run the tutorials and store them as notebooks: `python -m docs.draw_tutorials [NAME ...]`.

NAME.ipynb has the texts that cells print, and figures as SVG, which are also the pictures of the
page, with the names of their variables. docs/hooks.py adds the texts to the page.
"""

import base64
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jupytext
from nbclient import NotebookClient
from nbformat.v4 import new_output

TUTORIALS = Path(__file__).parent / "tutorials"
FOLDER = Path(__file__).parent / "pictures" / "tutorials"
PICTURES = re.compile(r"^!\[.*\]\(\.\./pictures/tutorials/.*\)\n*", re.MULTILINE)
"""Pictures of a page, which are outputs of cells in its notebook."""
INSTALL = "# In a clone, once: pip install -e '.[all]'"
FIGURE = re.compile('<img[^>]*src="data:image/svg\\+xml;base64,([^"]+)"')


def draw(names: Sequence[str]) -> None:
    """Draw the named tutorials, or all."""
    for name in names or sorted(page.stem for page in TUTORIALS.glob("*.md")):
        notebook = jupytext.read(TUTORIALS / f"{name}.md")
        with tempfile.TemporaryDirectory() as folder:
            place = {"metadata": {"path": folder}}
            NotebookClient(notebook, kernel_name="python3", resources=place).execute()
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = _stored(cell, name)
            cell.source = PICTURES.sub("", cell.source)
        first = jupytext.reads(f"```python\n{INSTALL}\n```", "md").cells
        notebook.cells[1:1] = first
        jupytext.write(notebook, TUTORIALS / f"{name}.ipynb")


def _stored(cell: Any, name: str) -> list[Any]:
    """Return the text and the figures of a cell, which are written as pictures too."""
    outputs: list[Any] = []
    if text := "".join(map(_text, cell.outputs)).strip("\n"):
        outputs.append(new_output("stream", text=text))  # type: ignore[no-untyped-call]
    for shown in filter(None, map(_figure, cell.outputs)):
        figure = base64.b64decode(shown)
        (FOLDER / f"{name}-{cell.source.splitlines()[-1]}.svg").write_bytes(figure)
        data = {"image/svg+xml": figure.decode()}
        outputs.append(new_output("display_data", data))  # type: ignore[no-untyped-call]
    return outputs


def _figure(output: Any) -> str:
    """Return the figure that a cell shows, an SVG in base64, or nothing."""
    found = FIGURE.search(output.get("data", {}).get("text/html", ""))
    return found[1] if found else ""


def _text(output: Any) -> str:
    """Return the text that a cell prints or returns, without warnings and figures."""
    if output.output_type == "stream":
        return str(output.text) if output.name == "stdout" else ""
    if output.output_type == "execute_result" and not _figure(output):
        return str(output.data["text/plain"]) + "\n"
    return ""


if __name__ == "__main__":
    draw(sys.argv[1:])

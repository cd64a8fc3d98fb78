"""Run the tutorials and store their outputs: `python -m docs.draw_tutorials [NAME ...]`.

A figure becomes a picture with the name of its variable. Printed text goes to NAME.json, and
docs/hooks.py adds it to the page. The notebooks of the site hold both as outputs.
"""

import base64
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jupytext
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parent / "tutorials"
FOLDER = Path(__file__).parent / "pictures" / "tutorials"
FIGURE = re.compile('<img[^>]*src="data:image/svg\\+xml;base64,([^"]+)"')


def draw(names: Sequence[str]) -> None:
    """Draw the named tutorials, or all."""
    for name in names or sorted(page.stem for page in TUTORIALS.glob("*.md")):
        notebook = jupytext.read(TUTORIALS / f"{name}.md")
        with tempfile.TemporaryDirectory() as folder:
            place = {"metadata": {"path": folder}}
            NotebookClient(notebook, kernel_name="python3", resources=place).execute()
        printed = []
        for cell in notebook.cells:
            if cell.cell_type == "code":
                text = "".join(map(_text, cell.outputs))
                printed.append(text.strip("\n"))
                for shown in filter(None, map(_figure, cell.outputs)):
                    path = FOLDER / f"{name}-{cell.source.splitlines()[-1]}.svg"
                    path.write_bytes(base64.b64decode(shown))
        text = json.dumps(printed, indent=1, ensure_ascii=False)
        (TUTORIALS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


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

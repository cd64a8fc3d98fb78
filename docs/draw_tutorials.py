"""Run the tutorials and store their outputs: `python -m docs.draw_tutorials [NAME ...]`.

A figure becomes a picture with the name of its variable. Printed text goes to NAME.json, and
docs/hooks.py adds it to the page. The notebooks of the site hold both as outputs.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jupytext
import plotly.graph_objects as go
from nbclient import NotebookClient
from PIL import Image

from bilens.pages import save_figure

TUTORIALS = Path(__file__).parent / "tutorials"
FOLDER = Path(__file__).parent / "pictures" / "tutorials"
FIGURE = "application/vnd.plotly.v1+json"


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
                for shown in (o.data[FIGURE] for o in cell.outputs if FIGURE in o.get("data", {})):
                    path = FOLDER / f"{name}-{cell.source.splitlines()[-1]}.png"
                    save_figure(go.Figure(shown), path, scale=1)
                    # A notebook holds all of its pictures, and should stay small.
                    with Image.open(path) as picture:
                        few = picture.convert("RGB").quantize(256)
                    few.save(path, optimize=True)
        text = json.dumps(printed, indent=1, ensure_ascii=False)
        (TUTORIALS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _text(output: Any) -> str:
    """Return the text that a cell prints or returns, without warnings and figures."""
    if output.output_type == "stream":
        return str(output.text) if output.name == "stdout" else ""
    if output.output_type == "execute_result" and FIGURE not in output.data:
        return str(output.data["text/plain"]) + "\n"
    return ""


if __name__ == "__main__":
    draw(sys.argv[1:])

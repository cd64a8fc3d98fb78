"""Draw the pictures of the tutorials by running them: `python -m docs.draw_tutorials`."""

import os
import tempfile
from pathlib import Path
from typing import Any

import jupytext

from bilens.report import save_figure

TUTORIALS = Path(__file__).parent / "tutorials"
FOLDER = Path(__file__).parent / "pictures" / "tutorials"
PICTURES = {
    "images": ("eigenvalues", "eigenvectors", "kept", "why"),
}
"""The variables of each tutorial that are figures."""


def draw() -> None:
    """Draw them all."""
    for page, figures in PICTURES.items():
        state = run(TUTORIALS / f"{page}.md")
        for figure in figures:
            save_figure(state[figure], FOLDER / f"{page}-{figure}.png", scale=1)


def run(page: Path) -> dict[str, Any]:
    """What a tutorial's cells leave behind, run in an empty folder."""
    state: dict[str, Any] = {}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for cell in jupytext.read(page).cells:
            if cell.cell_type == "code":
                exec(cell.source, state)
        os.chdir(before)
    return state


if __name__ == "__main__":
    draw()

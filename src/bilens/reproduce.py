"""Run a recipe of the experiments folder and keep what it found."""

import importlib
import platform
import sys
import time
from pathlib import Path
from types import ModuleType

import torch

from bilens.errors import BilensError
from bilens.files import write_json
from bilens.report import write_page
from bilens.report.page import ContextList, Section, Table

__all__ = ["RECIPES", "reproduce"]

RECIPES = (
    "fig2",
    "fig3",
    "fig4",
    "fig5",
    "fig6",
    "fig9",
    "masks",
    "search",
    "bonds",
    "anneal",
    "case_digits",
    "case_svd",
    "case_sae",
    "case_pairs",
    "grammar",
    "stories",
)
FOLDER = Path(__file__).parents[2] / "experiments"


def reproduce(
    name: str, *, scale: str, output: Path, models: Path, data_dir: Path | None
) -> dict[str, object]:
    """Run one recipe; write its numbers to output/NAME.json and its figures to output/NAME.html.

    Raises:
        BilensError: the recipes are not there, since bilens was installed without its repository.
    """
    recipe = _recipe(name)
    workshop = importlib.import_module("experiments.workshop").Workshop(scale, models, data_dir)
    start = time.perf_counter()
    outcome = recipe.run(workshop)
    about = {
        "recipe": name,
        "scale": scale,
        "seconds": round(time.perf_counter() - start, 1),
        "hardware": f"{platform.machine()}, {torch.get_num_threads()} threads, "
        + ("GPU" if torch.cuda.is_available() else "no GPU"),
        "torch": torch.__version__,
    }
    record = {**about, **outcome.numbers}
    write_json(output / f"{name}.json", record)
    doc = (recipe.__doc__ or name).strip()
    title, _, text = doc.partition("\n")
    rows = [[figure] for figure in outcome.figures.values()]
    facts = [(key, str(value)) for key, value in about.items()]
    sections = [Section("Figures", rows=rows)] if rows else []
    tables = [part for part in outcome.parts if isinstance(part, Table)]
    texts = [[part] for part in outcome.parts if isinstance(part, ContextList)]
    sections += [Section("Tables", rows=[tables])] if tables else []
    sections += [Section("Contexts", rows=texts)] if texts else []
    write_page(output / f"{name}.html", title, text.strip(), facts, sections)
    return record


def _recipe(name: str) -> ModuleType:
    if not FOLDER.is_dir():
        raise BilensError(
            f"The recipes are part of the repository and not of the installed package; {FOLDER} is "
            "not there. Clone the repository and install it with `pip install -e .`."
        )
    if str(FOLDER.parent) not in sys.path:
        sys.path.insert(0, str(FOLDER.parent))
    return importlib.import_module(f"experiments.{name}")

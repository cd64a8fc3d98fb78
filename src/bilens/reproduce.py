"""Recipes of the experiments folder: run one and save its numbers and figures."""

import ast
import importlib
import platform
import sys
import time
from pathlib import Path

import torch

from bilens.errors import BilensError
from bilens.files import write_json
from bilens.reading import ContextList, Section, Table
from bilens.report import write_page

FOLDER = Path(__file__).parents[2] / "experiments"


def recipes() -> dict[str, str]:
    """Return the name and title of each recipe, a file with a function `run`.

    Raises:
        BilensError: bilens was installed without its repository.
    """
    if not FOLDER.is_dir():
        raise BilensError(
            f"{FOLDER} does not exist: recipes are part of the repository, not of the package. "
            "Clone the repository and install it with `pip install -e .`."
        )
    titles = {}
    for path in sorted(FOLDER.glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(part, ast.FunctionDef) and part.name == "run" for part in module.body):
            titles[path.stem] = (ast.get_docstring(module) or path.stem).splitlines()[0]
    return titles


def reproduce(
    name: str, *, scale: str, output: Path, models: Path, data_dir: Path | None
) -> dict[str, object]:
    """Run one recipe; write its numbers to output/NAME.json and its figures to output/NAME.html.

    Raises:
        BilensError: the recipe does not exist.
    """
    if name not in recipes():
        raise BilensError(f"recipe={name!r}, expected one of {', '.join(recipes())}")
    if str(FOLDER.parent) not in sys.path:
        sys.path.insert(0, str(FOLDER.parent))
    recipe = importlib.import_module(f"experiments.{name}")
    context = importlib.import_module("experiments.context").RecipeContext(scale, models, data_dir)
    start = time.perf_counter()
    outcome = recipe.run(context)
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

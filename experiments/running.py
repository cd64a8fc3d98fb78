"""Runs of recipes: numbers as JSON, figures as a page, and rows as a file of results."""

import platform
import time
from importlib import import_module
from pathlib import Path

import torch

from bilens import BilensError
from bilens.analysis import ContextList, Section, Table
from bilens.pages import write_page
from experiments import results
from experiments.claims import table_of
from experiments.context import RecipeContext

__all__ = ["RecipeContext", "run_recipe"]


def run_recipe(
    name: str, context: RecipeContext, output: Path, *, write: bool = False
) -> dict[str, object]:
    """Run one recipe; write its numbers to output/NAME.json and its figures to output/NAME.html.

    With `write` its rows are in results/NAME.json too.
    """
    recipe = import_module(f"experiments.{name}")
    scale, seeds, seed = context.scale, context.seeds, context.seed
    of_scales = getattr(recipe, "SEEDS", None)
    if of_scales is None and (seeds is not None or seed):
        raise BilensError(f"{name} trains nothing from a seed: leave out --seeds and --seed.")
    least = getattr(recipe, "LEAST_SEEDS", 1)
    if seeds is not None and seeds < least:
        raise BilensError(
            f"seeds={seeds}, expected at least {least}: {name} compares each model with others"
        )
    recording = results.Recording() if write else None
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
    measured = table_of(name, outcome.rows)
    record = {**about, **outcome.numbers, "rows": measured.to_dict("records")}
    output.mkdir(parents=True, exist_ok=True)
    results.write_json(output / f"{name}.json", record)
    title, _, text = (recipe.__doc__ or name).strip().partition("\n")
    rows = [[figure] for figure in outcome.figures.values()]
    facts = [(key, str(value)) for key, value in about.items()]
    sections = [Section("Figures", rows=rows)] if rows else []
    tables = [Table(measured, "Rows")] if len(measured) else []
    tables += [part for part in outcome.parts if isinstance(part, Table)]
    texts = [[part] for part in outcome.parts if isinstance(part, ContextList)]
    sections += [Section("Tables", rows=[tables])] if tables else []
    sections += [Section("Contexts", rows=texts)] if texts else []
    write_page(output / f"{name}.html", title, text.strip(), facts, sections)
    if recording is not None:
        words = ["--scale paper"] if scale == "paper" else []
        words += [f"--seeds {seeds}"] if seeds else []
        words += [f"--seed {seed}"] if seed else []
        recording.write(
            name,
            title=title.rstrip("."),
            command=" ".join(["bilens reproduce", name, *words, "--write"]),
            rows=outcome.rows,
            settings={"scale": scale, **outcome.settings},
            seeds=[] if of_scales is None else context.seed_range(of_scales),
            details=outcome.details,
        )
    return record

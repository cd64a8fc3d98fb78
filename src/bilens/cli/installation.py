"""`bilens demo`, `doctor`, `cite` and `reproduce`: commands about an installation."""

import ast
import importlib
import os
import platform
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bilens import __version__
from bilens.analysis import declared_analysis
from bilens.cli.analyses import command_of
from bilens.cli.console import DataDir, out, show_table
from bilens.cli.decompose import Decompose, Report
from bilens.cli.train import Architecture, TrainImages, TrainLanguage
from bilens.errors import BilensError
from bilens.lazy_imports import datasets
from bilens.nn.settings import LanguageSettings
from bilens.sections import ContextList, Section, Table
from bilens.train.settings import ClassifierTraining, LanguageTraining

FOLDER = Path(__file__).parents[3] / "experiments"


def recipes() -> dict[str, str]:
    """Return the name and title of each recipe, a file with a function `run`."""
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
    name: str,
    *,
    scale: str,
    output: Path,
    models: Path,
    data_dir: Path | None,
    seeds: int | None = None,
    seed: int = 0,
    write: bool = False,
) -> dict[str, object]:
    """Run one recipe; write its numbers to output/NAME.json and its figures to output/NAME.html.

    With `write` its rows are in results/NAME.json too.
    """
    import torch

    from bilens.files import write_json
    from bilens.report import write_page

    if name not in recipes():
        raise BilensError(f"recipe={name!r}, expected one of {', '.join(recipes())}")
    if str(FOLDER.parent) not in sys.path:
        sys.path.insert(0, str(FOLDER.parent))
    recipe = importlib.import_module(f"experiments.{name}")
    if seeds is not None and seeds < 1:
        raise BilensError(f"seeds={seeds}, expected at least 1")
    of_scales = getattr(recipe, "SEEDS", None)
    if of_scales is None and (seeds is not None or seed):
        raise BilensError(f"{name} trains nothing from a seed: leave out --seeds and --seed.")
    recording = importlib.import_module("experiments.results").Recording() if write else None
    contexts = importlib.import_module("experiments.context")
    context = contexts.RecipeContext(scale, models, data_dir, seeds, seed)
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
    if recording is not None:
        used = [] if of_scales is None else context.seed_range(of_scales)
        words = ["--scale paper"] if scale == "paper" else []
        words += [f"--seeds {seeds}"] if seeds else []
        words += [f"--seed {seed}"] if seed else []
        recording.write(
            name,
            title=title.rstrip("."),
            command=" ".join(["bilens reproduce", name, *words, "--write"]),
            rows=outcome.rows,
            settings={"scale": scale, **outcome.settings},
            seeds=used,
        )
    return record


BIBTEX = f"""\
@software{{bilens,
  title   = {{bilens: read neural networks from their weights}},
  author  = {{{{the bilens developers}}}},
  year    = {{2026}},
  version = {{{__version__}}}
}}"""
"""The entry as it is in README; a test compares both with CITATION.cff."""
OPTIONAL = {
    "datasets": ("train", "data sets by name, texts of your own, training"),
    "accelerate": ("train", "training, and scans of texts by several processes"),
    "pyarrow": ("train", "texts of your own, whose tokens it keeps on disk"),
    "scikit-learn": ("train", "the digits of the demo"),
    "gradio": ("explore", "bilens explore"),
    "gguf": ("gguf", "models in .gguf files"),
    "matplotlib": ("figures", "figures as SVG, PDF and PNG, and pictures in a notebook's HTML"),
    "triton": ("gpu", "attention without softmax on a GPU; computed in chunks without it"),
    "tensorboard": ("", "--report-to tensorboard"),
    "wandb": ("", "--report-to wandb"),
    "trackio": ("", "--report-to trackio"),
}
"""By name: the extra that installs it, if one does, and what it adds."""


@dataclass(frozen=True)
class Doctor:
    """Print versions, devices, places of data and caches, and optional packages that are missing.

    bilens doctor --json
    """

    def run(self) -> dict[str, Any]:
        import torch
        from huggingface_hub import constants

        from bilens.kernels import triton_problem

        optional = {name: _version(name) for name in OPTIONAL}
        # Installed is not enough: it has to fit the GPU and its driver.
        if optional["triton"] is not None and (problem := triton_problem()) is not None:
            optional["triton"] = f"{problem}; the chunked kernel is used"
        data = os.environ.get("BILENS_DATA")
        needed = ("torch", "transformers", "datasets", "tokenizers", "accelerate", "plotly", "tyro")
        cards = {}
        for number in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(number)
            cards[f"cuda:{number}"] = f"{card.name}, {card.total_memory / 2**30:.0f} GiB"
        checks: dict[str, Any] = {
            "versions": {
                "bilens": __version__,
                "python": platform.python_version(),
                "system": platform.platform(),
                **{name: _version(name) for name in needed},
            },
            "devices": {
                "cpu": f"{torch.get_num_threads()} threads of torch, {os.cpu_count()} cores",
                **cards,
                **({"mps": "Apple"} if torch.backends.mps.is_available() else {}),
            },
            "places": {
                "BILENS_DATA": data if data is None or Path(data).is_dir() else f"{data} (missing)",
                "models and data of the hub": constants.HF_HUB_CACHE,
                "texts and tokens": str(datasets.config.HF_DATASETS_CACHE),
                "hub": "offline (HF_HUB_OFFLINE)"
                if constants.HF_HUB_OFFLINE
                else constants.ENDPOINT,
            },
            "optional": optional,
        }
        for title, rows in checks.items():
            cells = {name: str(value or "missing") for name, value in rows.items()}
            if title == "optional":
                adds = [(name, cell, OPTIONAL[name][1]) for name, cell in cells.items()]
                show_table(("", "", "adds"), adds, title, words=3)
            else:
                show_table(("", ""), cells.items(), title, words=2)
        missing = [name for name, value in optional.items() if value is None]
        extras = dict.fromkeys(OPTIONAL[name][0] for name in missing)
        others = [name for name in missing if not OPTIONAL[name][0]]
        lines = [f"pip install -e '.[{','.join(filter(None, extras))}]'"] * any(extras)
        lines += [f"pip install {' '.join(others)}"] * bool(others)
        if lines:
            out.print(f"What is missing comes with {', '.join(lines)}", markup=False)
        return checks


@dataclass(frozen=True)
class Cite:
    """Print the BibTeX entry of this version.

    The sources of the methods are in the docs, on the page "What is exact".

    bilens cite
    """

    def run(self) -> dict[str, Any]:
        out.print(BIBTEX)
        return {"bibtex": BIBTEX}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


DEEP = Architecture(d_model=64, n_layers=3, norm="scalar")
IMAGES = ClassifierTraining(epochs=40, batch_size=50, decay=0.95)
SMALL = LanguageSettings(d_model=64, n_heads=2, d_hidden=128, n_ctx=16)
WORDS = LanguageTraining(epochs=1, batch_size=64, learning_rate=5e-3)


@dataclass(frozen=True)
class Demo:
    """See it work: a deep model on few directions, and a logit of a language model accounted for.

    Trains three layers on the bundled digits and a language model on a small grammar, which takes
    a minute or two. Prints how few directions the first needs and the sources of a logit of the
    second, and writes a page on each.

        bilens demo

    Attributes:
        output: folder of the two runs, deep and grammar; by default runs/demo.
    """

    output: Path | None = None
    place = Path("runs/demo")

    def run(self) -> dict[str, Any]:
        from bilens.train.run_directory import is_begun

        output = self.output or self.place
        deep, grammar = output / "deep", output / "grammar"
        out.print("A deep model on few directions", style="bold")
        TrainImages(output=deep, resume=is_begun(deep), architecture=DEEP, training=IMAGES).run()
        records = {"decompose": Decompose(deep, bonds=True).run()}
        Report(str(deep)).run()
        # A name and a verb have an object: what ben ate was rice, what lily ate soup.
        prompt, token, minus = "then ben was happy and ate", "rice", "soup,jam"
        unlikely = minus.replace(",", " or ")
        out.print(f"\n“{prompt}”: why {token}, and not {unlikely}?", style="bold")
        TrainLanguage(output=grammar, resume=is_begun(grammar), model=SMALL, training=WORDS).run()
        # The command, and not the function, so that the demo shows what users will type.
        flow: Any = command_of(declared_analysis("flow"))
        page = grammar / "flow.html"
        records["flow"] = flow(
            model=str(grammar), prompt=prompt, token=token, minus=minus, output=page
        ).run()
        Report(str(grammar), token=token, minus=minus).run()
        return records


@dataclass(frozen=True)
class Reproduce:
    """Reproduce a figure or table of the papers: its numbers as JSON, its figures as a page.

    Trained models are kept below the output folder, so that a second recipe, or a second try, finds
    them; ctrl-C loses nothing.

        bilens reproduce
        bilens reproduce bonds --scale small

    Attributes:
        recipe: which; without one, all are listed.
        scale: small takes minutes on two cores; paper is as large as the source.
        seeds: how many models of each kind to train; by default as many as the scale has.
        seed: the first seed.
        write: also write results/NAME.json, of which the docs are made; needs a clean clone.
        data_dir: folder of the IDX files; see `bilens train images --help`.
        output: folder for NAME.json, NAME.html and the models; by default runs/reproduced.
    """

    recipe: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")] = None
    scale: Literal["small", "paper"] = "small"
    seeds: int | None = None
    seed: int = 0
    write: bool = False
    data_dir: DataDir = None
    output: Path | None = None
    place = Path("runs/reproduced")

    def run(self) -> dict[str, Any]:
        """Run the recipe and print its numbers, or list them all."""
        if self.recipe is None:
            show_table(("recipe", "what"), recipes().items(), words=2)
            return {"recipes": recipes()}
        output = self.output or self.place
        record = reproduce(
            self.recipe,
            scale=self.scale,
            output=output,
            models=output / "models",
            data_dir=self.data_dir,
            seeds=self.seeds,
            seed=self.seed,
            write=self.write,
        )
        out.print_json(data=record)
        out.print(f"page: {output / self.recipe}.html")
        return record

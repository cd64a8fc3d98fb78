"""Commands that serve or run: pages of models, the demo, the installation and the recipes."""

import ast
import importlib
import inspect
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bilens import __version__
from bilens.analyses import check_once, find_analyses, find_analysis
from bilens.analyses.refusals import of_report
from bilens.cli.commands import flag_of
from bilens.cli.console import (
    Device,
    ModelName,
    check_own,
    choose_device,
    out,
    own_place,
    show_table,
)
from bilens.cli.readings import run_analysis, show_reading, write_reading
from bilens.cli.training import Architecture, train_images, train_language
from bilens.errors import BilensError
from bilens.lazy_imports import datasets
from bilens.nn.settings import LanguageSettings
from bilens.options import Basis, Metric, Order
from bilens.settings import Count, Index, Share
from bilens.shipped import STORY
from bilens.train.settings import ClassifierTraining, LanguageTraining

HERE = "127.0.0.1"
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
    "accelerate": ("train", "training"),
    "pyarrow": ("train", "texts of your own, whose tokens it keeps on disk"),
    "scikit-learn": ("train", "the digits of the demo"),
    "gguf": ("gguf", "models in .gguf files"),
    "triton": ("gpu", "attention without softmax on a GPU; computed in chunks without it"),
    "tensorboard": ("", "--report-to tensorboard"),
    "wandb": ("", "--report-to wandb"),
    "trackio": ("", "--report-to trackio"),
}
"""By name: the extra that installs it, if one does, and what it adds."""


def report(
    model: ModelName,
    *,
    data: str | None = None,
    data_dir: Path | None = None,
    output: Path | None = None,
    figures: Literal["png", "svg", "pdf"] | None = None,
    add: tuple[str, ...] = (),
    basis: Basis | None = None,
    drop: Share | None = None,
    metric: Metric | None = None,
    order: Order | None = None,
    token: str | None = None,
    minus: str | None = None,
    layer: Index | None = None,
    among: Count | None = None,
    prompt: str | None = None,
    against: str | None = None,
    device: Device = "auto",
) -> dict[str, Any]:
    """Write the report of a trained model: one HTML file that works offline.

        bilens report runs/mnist --figures png
        bilens report runs/grammar --token soup --minus rice,jam
        bilens report runs/grammar --token soup --prompt "then ben ate" --add flow copying.py

    Args:
        data: name of the data; by default that of the training. A language model needs none for
            the flow that its page begins with.
        data_dir: folder of the data; see `bilens train images --help` and `train language --help`.
        output: the page; by default report.html in the run directory, or runs/report-NAME.html.
        figures: also save every figure in this format into the folder figures beside the page.
        add: names of further readings, such as flow, and files with readings of your own.
        basis: (images) eigenvectors orthonormal after the embedding, as in the paper, or in
            pixels; for models of one layer.
        drop: (images) accuracy that the cut to few directions may lose, as a share of the images;
            for models of several layers. By default that of the cut that `bonds --arrays` wrote
            into the run, or else 0.01.
        metric: (images) inputs of the directions, as in `bonds`; by default those of that cut, or
            else the training images.
        order: (images) eigenvectors by eigenvalue, or by mean activation over the test set.
        token: (language) the output to explain; by default that of the sentence, or the token that
            the model predicts with the largest margin at the beginning of a held-out text.
        minus: (language) tokens whose mean is subtracted from it, separated by commas.
        layer: (language) number of the layer whose heads and MLP are read, from 0; by default 0 if
            its MLP is a tensor, or else none.
        among: (language) read heads of this many tokens, the first of the vocabulary.
        prompt: (language) the text whose flow the page begins with; by default a sentence that the
            model answers, or the held-out text of the largest margin.
        against: (language) a second text of as many tokens; the page asks why the token is likelier
            after the first. By default a held-out text.
    """
    settings: dict[str, Any] = {"data": data, "data_dir": data_dir, "basis": basis, "drop": drop}
    settings |= {"metric": metric, "order": order, "token": token, "minus": minus, "layer": layer}
    settings |= {"among": among, "prompt": prompt, "against": against}
    folder = Path(model)
    inside, outside = folder / "report.html", Path("runs") / f"report-{folder.stem}.html"
    page = own_place(output, inside if folder.is_dir() else outside)
    check_own(page)
    if figures:
        check_own(page.parent / "figures", page)
    check_once([entry for name in add for entry in find_analyses(name)])
    of_report(settings)

    from bilens.figures.sheet import save_figures
    from bilens.inputs import check_data
    from bilens.models import load
    from bilens.pages import write_report
    from bilens.pages.model import report_readings

    check_data(model, data, data_dir)
    network = load(model, device=choose_device(device))
    readings = report_readings(network, settings, source=model, add=add)
    figures_by_name = write_report(page, readings, title=f"{folder.name}, read from its weights")
    out.print(f"report: {page}")
    if figures:
        save_figures(figures_by_name, page.parent / "figures", figures)
        out.print(f"figures: {page.parent / 'figures'}")
    return {"report": page, "figures": list(figures_by_name)}


def explore(
    model: ModelName,
    *,
    data: str | None = None,
    data_dir: Path | None = None,
    host: str = HERE,
    port: int | None = None,
    open_browser: bool = False,
    add: tuple[str, ...] = (),
    space: Path | None = None,
    device: Device = "auto",
) -> dict[str, Any]:
    """Ask a trained model in the browser: the pages of its readings, of your own inputs.

    Serves pages to this machine only, and sends nothing elsewhere. Each has an address of its own.

        bilens explore runs/mnist --open-browser
        bilens explore runs/grammar --space grammar-space

    Args:
        data: name of the data; by default that of the training. A language model needs none for
            flows and circuits.
        data_dir: folder of the data; see `bilens train images --help` and `train language --help`.
        host: address to listen at; 0.0.0.0 lets other machines in.
        port: by default the first free one from 7860.
        open_browser: open the page in the default browser.
        add: names of further readings, such as heads, and files with readings of your own.
        space: write a folder instead that Hugging Face runs as a Space, the model in it.
    """
    from bilens.explore import app as explorers

    # A Space starts its own explorer, so nothing is read here.
    if space is not None:
        server_options: dict[str, Any] = {"data_dir": data_dir, "host": host, "port": port}
        server_options |= {"open_browser": open_browser, "add": add, "device": device}
        for name, value in server_options.items():
            if value != inspect.signature(explore).parameters[name].default:
                raise BilensError(
                    f"{flag_of(name)}={value} has no effect with --space, which starts "
                    "its own explorer; leave it out"
                )
        explorers.write_space(space, model, data=data)
        out.print(f"Space: {space}; `python app.py` in it serves it here")
        return {"space": space}
    app = explorers.explorer(
        model, data=data, data_dir=data_dir, device=str(choose_device(device)), add=add
    )
    address = app.launch(host=host, port=port, open_browser=open_browser)
    return {"address": address}


def graph(
    file: tyro.conf.Positional[Path],
    *,
    pin: tuple[str, ...] = (),
    output: Path | None = None,
    figure: Path | None = None,
    save_graph: Path | None = None,
) -> dict[str, Any]:
    """Show the graph of a flow that `bilens flow --save-graph` wrote, and pin nodes of it.

        bilens graph graph.json --pin head.26.0@4 mlp.28@4 --save-graph pinned.json

    Args:
        file: the graph.
        pin: addresses of nodes; the picture and the table are of those that are pinned.
        output: also write a page, numbers or a table; see `bilens flow --help`.
        figure: file to also draw the picture to: a name that ends in .png, .svg or .pdf.
        save_graph: file to write the graph with its pins to.
    """
    if output is not None and output.suffix == ".html":
        check_own(output)
        check_own(output.with_suffix(".json"), output)

    from bilens.figures.sheet import save_figure
    from bilens.flows import load_graph

    reading = load_graph(file).pin(*pin)
    show_reading(reading)
    if output is not None:
        write_reading(reading, output, f"bilens graph {file}")
    if figure is not None:
        save_figure(reading.plot(), figure)
    if save_graph is not None:
        reading.save(save_graph)
    for path in filter(None, (output, figure, save_graph)):
        out.print(f"written: {path}")
    return reading.record()


def doctor() -> dict[str, Any]:
    """Print versions, devices, places of data and caches, and optional packages that are missing.

    Of what is missing it says what it adds, and the command that installs it.

        bilens doctor --json
    """
    import torch
    from huggingface_hub import constants

    from bilens.kernels.attention import triton_problem

    optional = {name: _version(name) for name in OPTIONAL}
    # Installed is not enough: it has to fit the GPU and its driver.
    if optional["triton"] is not None and (problem := triton_problem()) is not None:
        optional["triton"] = f"{problem}; the chunked kernel is used"
    data = os.environ.get("BILENS_DATA")
    names = ("torch", "transformers", "datasets", "tokenizers", "accelerate", "matplotlib", "tyro")
    devices = {"cpu": f"{torch.get_num_threads()} threads of torch, {os.cpu_count()} cores"}
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        devices[f"cuda:{i}"] = f"{card.name}, {card.total_memory / 2**30:.0f} GiB"
    if torch.backends.mps.is_available():
        devices["mps"] = "Apple"
    checks: dict[str, Any] = {
        "versions": {
            "bilens": __version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            **{name: _version(name) for name in names},
        },
        "devices": devices,
        "places": {
            "BILENS_DATA": data if data is None or Path(data).is_dir() else f"{data} (missing)",
            "models and data of the hub": constants.HF_HUB_CACHE,
            "texts and tokens": str(datasets.config.HF_DATASETS_CACHE),
            "hub": "offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else constants.ENDPOINT,
        },
        "optional": optional,
    }
    for title, rows in checks.items():
        _show_check(title, {name: str(value or "missing") for name, value in rows.items()})
    return checks


def _show_check(title: str, cells: dict[str, str]) -> None:
    """Print what was found, and below optional packages the commands that install the missing."""
    if title != "optional":
        show_table(("", ""), cells.items(), title, words=2)
        return
    adds = [(name, cell, OPTIONAL[name][1]) for name, cell in cells.items()]
    show_table(("", "", "adds"), adds, title, words=3)
    missing = [name for name, cell in cells.items() if cell == "missing"]
    extras = dict.fromkeys(OPTIONAL[name][0] for name in missing)
    others = [name for name in missing if not OPTIONAL[name][0]]
    lines = [f"pip install -e '.[{','.join(filter(None, extras))}]'"] * any(extras)
    lines += [f"pip install {' '.join(others)}"] * bool(others)
    if lines:
        out.print(f"What is missing comes with {', '.join(lines)}", markup=False)


def cite() -> dict[str, Any]:
    """Print the BibTeX entry of this version.

    The sources of the methods are in the docs, on the page "What is exact".

        bilens cite
    """
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


def demo(*, output: Path | None = None) -> dict[str, Any]:
    """See it work: the parts that answer a sentence, a deep model on few directions, a known rule.

    Reads the model of English stories that comes with bilens, then trains three layers on the
    bundled digits and a language model on a small grammar, in a minute or two. Writes a page on
    each.

        bilens demo

    Args:
        output: folder of pages and runs, story, deep and grammar; by default runs/demo.
    """
    output = own_place(output, "runs/demo")

    from bilens.train.run_directory import is_begun

    # As the commands do it, so that the demo shows what users will type.
    def read(name: str, model: str, page: Path, **options: Any) -> dict[str, Any] | None:
        return run_analysis(find_analysis(name), model, output=page, **options)

    deep, grammar = output / "deep", output / "grammar"
    girl, boy = "The girl was sad because", "The boy was sad because"
    out.print(f"“{girl}”: why she, and he after “{boy}”?", style="bold")
    options: dict[str, Any] = {"prompt": girl, "token": "she", "minus": "he", "against": boy}
    records = {"story": read("flow", STORY.name, output / "story" / "flow.html", **options)}
    out.print("\nThe few stages that carry such answers", style="bold")
    page = output / "story" / "circuit.html"
    records["circuit"] = read("circuit", STORY.name, page, questions="pronouns")
    out.print("\nA deep model on few directions", style="bold")
    train_images(output=deep, resume=is_begun(deep), architecture=DEEP, training=IMAGES)
    records["bonds"] = run_analysis(find_analysis("bonds"), str(deep), arrays=(deep,))
    report(str(deep), output=deep / "report.html")
    # A name and a verb have an object: what ben ate was rice, what lily ate soup.
    prompt, token, minus = "then ben was happy and ate", "rice", "soup,jam"
    unlikely = minus.replace(",", " or ")
    out.print(f"\n“{prompt}”: why {token}, and not {unlikely}?", style="bold")
    train_language(output=grammar, resume=is_begun(grammar), model=SMALL, training=WORDS)
    options = {"prompt": prompt, "token": token, "minus": minus}
    records["flow"] = read("flow", str(grammar), grammar / "flow.html", **options)
    report(str(grammar), output=grammar / "report.html", token=token, minus=minus)
    return records


def reproduce(
    recipe: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")] = None,
    *,
    scale: Literal["small", "paper"] = "small",
    seeds: Count | None = None,
    seed: int = 0,
    write: bool = False,
    data_dir: Path | None = None,
    output: Path | None = None,
) -> dict[str, Any]:
    """Reproduce a figure or table of the papers: its numbers as JSON, its figures as a page.

    Trained models are kept below the output folder, so that a second recipe, or a second try, finds
    them; ctrl-C loses nothing.

        bilens reproduce
        bilens reproduce bonds --scale small

    Args:
        recipe: which; without one, all are listed.
        scale: small takes minutes on two cores; paper is as large as the source.
        seeds: how many models of each kind to train; by default as many as the scale has.
        seed: the first seed.
        write: also write results/NAME.json, of which the docs are made; needs a clean clone.
        data_dir: folder of the IDX files; see `bilens train images --help`.
        output: folder for NAME.json, NAME.html and the models; by default runs/reproduced.
    """
    output = own_place(output, "runs/reproduced")
    if recipe is None:
        show_table(("recipe", "what"), recipes().items(), words=2)
        return {"recipes": recipes()}
    if recipe not in recipes():
        raise BilensError(f"recipe={recipe!r}, expected one of {', '.join(recipes())}")
    check_own(output / f"{recipe}.html")
    if str(FOLDER.parent) not in sys.path:
        sys.path.insert(0, str(FOLDER.parent))
    runner = importlib.import_module("experiments.running")
    context = runner.RecipeContext(scale, output / "models", data_dir, seeds, seed)
    record: dict[str, Any] = runner.run_recipe(recipe, context, output, write=write)
    if rows := record["rows"]:
        show_table(list(rows[0]), [list(row.values()) for row in rows])
    out.print(f"page: {output / recipe}.html, numbers: {output / recipe}.json")
    return record

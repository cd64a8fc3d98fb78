"""Draw the pictures of the docs that need runs: `python -m docs.draw [NAME ...]`, all by default.

The runs are those of these commands. Chrome or Chromium photographs the page of a flow of the story
model, and stages are those of SmolLM2, after `make test-models`:

    bilens train images --data mnist --output runs/mnist
    bilens train images --data mnist --n-layers 2 --epochs 8 --decay 0.7 --output runs/two
    bilens train images --data mnist --n-layers 3 --d-model 100 --epochs 8 --decay 0.7 \
        --weight-decay 0.1 --input-noise 0.5 --output runs/mnist-deep
    bilens train language --attention bilinear --qk-norm True --output runs/grammar
"""

import shutil
import subprocess
import sys
from pathlib import Path

import torch
from benchmarks.unseen_templates import LEVEL, OURS, PARTS
from experiments.curves import BLUE, RED
from experiments.pretrained import smollm2
from experiments.results import load_results
from matplotlib.figure import Figure
from playwright.sync_api import sync_playwright

import bilens
from bilens.data import load_images
from bilens.images import read_bonds, read_classifier
from bilens.language import attention_scores
from bilens.nn import ImageClassifier
from bilens.pages import (
    Canvas,
    add_legend,
    eigenvector_figure,
    heat_figure,
    network_figure,
    new_figure,
    save_figure,
    spectrum_figure,
    styled,
    tree_figure,
    truncation_figure,
)
from bilens.tensor import decompile
from bilens.transformer import ResidualModel

FOLDER = Path(__file__).parent / "pictures"


def spectrum() -> Figure:
    """Draw the eigenvalues of a logit."""
    reading = read_classifier(_classifier("runs/mnist"), load_images("mnist"))
    return spectrum_figure(reading.spectrum[3], title="Spectrum of 3")


def truncation() -> Figure:
    """Accuracy against eigenvectors kept."""
    reading = read_classifier(_classifier("runs/mnist"), load_images("mnist"))
    return truncation_figure(reading.curve)


def component() -> Figure:
    """Draw the strongest component of the SVD of a layer."""
    x = load_images("mnist").test_images
    svd = _classifier("runs/mnist").tensor().svd()
    first = svd.components[0].eigh(k=40).oriented(x)
    title = f"Component 1 of the whole tensor, σ = {svd.values[0]:.3g}"
    return eigenvector_figure(first, x, (28, 28), title=title)


def nearest() -> Figure:
    """Draw two pictures, their smallest changes, and the sums, which have other answers."""
    data = load_images("mnist")
    x, labels = data.test_images[:300], data.test_labels[:300]
    reading = bilens.certify(_classifier("runs/mnist"), x, labels)
    assert reading.change is not None
    canvas = Canvas(3.1, 2.84, unit=90, title="")
    for row, digit in enumerate((4, 3)):
        numbers = reading.right[labels[reading.right] == digit]
        number = int(numbers[reading.radius[numbers].argsort()[len(numbers) // 2]])
        change, y = reading.change[number], 1.42 * row
        canvas.image(x[number], data.shape, x=0, y=y)
        canvas.eigenvector(change, data.shape, x=1.05, y=y)
        canvas.image(torch.clamp(x[number] + change, 0, 1), data.shape, x=2.1, y=y)
        text = f"{digit} → {int(reading.other[number])}, {float(reading.radius[number]):.2f}"
        canvas.label(text, x=1.55, y=y + 1.04)
    return canvas.figure()


def tree() -> Figure:
    """Draw the strongest paths of eigenvectors through two layers."""
    deep = _classifier("runs/two")
    paths = decompile(deep.tensors(), torch.eye(10)[3], 6)
    return tree_figure(paths, (28, 28), title="Strongest paths of 3")


def network() -> Figure:
    """Draw a model of three layers on few directions."""
    data = load_images("mnist")
    return network_figure(
        read_bonds(_classifier("runs/mnist-deep"), data).cut_reading, 3, data.shape
    )


def pattern() -> Figure:
    """Where the heads of a bilinear attention look, two tokens back."""
    model = bilens.load("runs/grammar")
    assert isinstance(model, ResidualModel)
    queries = ("sang", "ate", "lost", "found", "ice", "once", "and", "happy")
    keys = ("lily", "tom", "ben", "mia", "sam", "anna", "once", "ice", "cream", "and", "red")
    rows, columns = (torch.tensor([*map(model.token, words)]) for words in (queries, keys))
    first, second = attention_scores(model, layer=0, distance=2)
    return heat_figure(
        (first * second)[0].rows(rows)[:, columns],
        queries,
        keys,
        title="Pattern of head 0, two tokens back",
        across="token that is looked at",
        down="token that looks",
    )


@styled
def templates() -> Figure:
    """Draw f on the template that was left out, of the stages and the circuits of each task."""
    folds = load_results()["unseen_templates"]["details"]
    figure, axes = new_figure(
        width=640, height=420, title="Share restored on a template that nobody saw"
    )
    axes.axvspan(*LEVEL, color=BLUE, alpha=0.08, linewidth=0)
    for (model, of_model), color in zip(folds.items(), (BLUE, RED), strict=False):
        name = model.partition("-")[0]
        for method, symbol in ((OURS, "o"), (PARTS, "x")):
            rows = [x for x in of_model["folds"] if x["method"] == method and "size" in x]
            shares = [row["restored"]["value"] for row in rows]
            label = f"{name}, {method}"
            axes.plot(shares, [row["task"] for row in rows], symbol, color=color, label=label)
    axes.set_xlabel("f of what the other two templates find")
    add_legend(axes)
    return figure


FIGURES = {
    "templates.svg": templates,
    "spectrum.svg": spectrum,
    "truncation.svg": truncation,
    "component.png": component,
    "tree.png": tree,
    "network.png": network,
    "pattern.svg": pattern,
    "nearest.svg": nearest,
}


def flow() -> None:
    """Photograph the graph on the page of a flow between two texts."""
    texts = ["--prompt", "The girl was sad because", "--against", "The boy was sad because"]
    tokens = ["--token", "she", "--minus", "he"]
    command = ["flow", "story", *texts, *tokens, "--output", "runs/flow.html"]
    subprocess.run([sys.executable, "-m", "bilens", *command], check=True)
    with sync_playwright() as driver:
        chrome = shutil.which("chromium") or shutil.which("google-chrome")
        page = driver.chromium.launch(executable_path=chrome, args=["--no-sandbox"]).new_page(
            device_scale_factor=1.5
        )
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto((Path("runs") / "flow.html").absolute().as_uri())
        page.locator(".graph circle").first.wait_for()
        page.locator(".flow .graph").screenshot(path=FOLDER / "flow.png")


def stages() -> None:
    """Draw the stages of a task in SmolLM2."""
    model, picture = smollm2(), FOLDER / "stages.svg"
    assert model is not None
    command = ["circuit", str(model), "--questions", "gender", "--width", "280"]
    command += ["--figure", str(picture), "--output", "runs/stages.html"]
    subprocess.run([sys.executable, "-m", "bilens", *command], check=True)


BY_COMMAND = {"flow.png": flow, "stages.svg": stages}


def _classifier(run: str) -> ImageClassifier:
    model = bilens.load(run)
    assert isinstance(model, ImageClassifier)
    return model


if __name__ == "__main__":
    for name in sys.argv[1:] or [*FIGURES, *BY_COMMAND]:
        if name in BY_COMMAND:
            BY_COMMAND[name]()
        else:
            save_figure(FIGURES[name](), FOLDER / name, scale=1)

"""Draw the pictures of the docs: `python -m docs.draw runs/mnist runs/two runs/grammar`.

The runs are those of `bilens train images --data mnist --output runs/mnist`,
`bilens train images --data mnist --n-layers 2 --epochs 8 --decay 0.7 --output runs/two` and
`bilens train language --attention bilinear --qk-norm True --output runs/grammar`; Chrome or
Chromium draws.
"""

import sys
from pathlib import Path

import torch

import bilens
from bilens.data import load_images
from bilens.nn import ImageClassifier
from bilens.read import read_classifier
from bilens.read.language import attention_scores
from bilens.report import (
    eigenvector_figure,
    heat_figure,
    save_figure,
    spectrum_figure,
    tree_figure,
    truncation_figure,
)
from bilens.residual import ResidualModel
from bilens.tensor import top_paths

FOLDER = Path(__file__).parent / "pictures"
SHAPE = (28, 28)
QUERIES = ("sang", "ate", "lost", "found", "ice", "once", "and", "happy")
KEYS = ("lily", "tom", "ben", "mia", "sam", "anna", "once", "ice", "cream", "and", "red", "home")


def draw(mnist: Path, two: Path, grammar: Path) -> None:
    """Draw them all."""
    data = load_images("mnist")
    model = _classifier(mnist)
    reading = read_classifier(model, data)
    save_figure(
        spectrum_figure(reading.spectrum[3], title="Spectrum of 3"),
        FOLDER / "spectrum.svg",
        width=640,
    )
    save_figure(truncation_figure(reading.curve), FOLDER / "truncation.svg", width=640)

    svd = model.tensor().svd()
    x = data.test_images
    first = svd.components[0].eigh(k=40).oriented(x)
    title = f"Component 1 of the whole tensor, σ = {svd.values[0]:.3g}"
    save_figure(eigenvector_figure(first, x, SHAPE, title=title), FOLDER / "component.png", scale=1)

    deep = _classifier(two)
    paths = top_paths(deep.tensors(), torch.eye(10)[3], 6)
    save_figure(
        tree_figure(paths.paths, SHAPE, title="Strongest paths of 3"),
        FOLDER / "tree.png",
        scale=1,
    )
    draw_pattern(grammar)


def draw_pattern(run: Path) -> None:
    """Draw where the heads of a bilinear attention look, two tokens back."""
    model = bilens.load(run)
    if not isinstance(model, ResidualModel):
        raise SystemExit(f"{run} holds no language model")
    rows, columns = (torch.tensor([*map(model.token, words)]) for words in (QUERIES, KEYS))
    first, second = attention_scores(model, distance=2)
    figure = heat_figure(
        (first * second)[0].rows(rows)[:, columns],
        QUERIES,
        KEYS,
        title="Pattern of head 0, two tokens back",
        across="token that is looked at",
        down="token that looks",
    )
    save_figure(figure, FOLDER / "pattern.svg", width=640)


def _classifier(run: Path) -> ImageClassifier:
    model = bilens.load(run)
    if not isinstance(model, ImageClassifier):
        raise SystemExit(f"{run} holds no image classifier")
    return model


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))

"""How long the explorer takes to answer a click: `python -m benchmarks.explore RUN...`.

What is timed is all that happens between a click and the answer that is sent, JSON included. The
runs are those of `bilens demo` and of `bilens train`.
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import bilens
from benchmarks.clock import machine, seconds
from bilens.data import load_images
from bilens.explore.deep import DeepView
from bilens.explore.images import ImageState, ImageView
from bilens.explore.plots import plot_of
from bilens.nn import ImageClassifier
from bilens.train import read_training

LIMIT = 0.5


def main() -> None:
    """Print each click's time beside the limit."""
    print(machine())
    for run in map(Path, sys.argv[1:]):
        print(f"{run.name}, limit {LIMIT} s")
        for name, click in clicks(run).items():
            taken = seconds(click)
            print(f"  {name:44} {taken:8.3f} s  {'' if taken < LIMIT else 'TOO SLOW'}")


def clicks(run: Path) -> dict[str, Callable[[], object]]:
    """Every kind of click on a run's screen."""
    model, data = bilens.load(run), read_training(run)["data"]
    if not isinstance(model, ImageClassifier):
        raise SystemExit(f"{run} holds no classifier")
    if len(model.layers) > 1:
        return deep_clicks(DeepView(model, load_images(data)))
    return image_clicks(ImageView(model, load_images(data)))


def image_clicks(view: ImageView) -> dict[str, Callable[[], object]]:
    """Clicks on the screen of a classifier of one layer."""
    start = view.start

    def direction(state: ImageState) -> object:
        return [plot_of(figure, "") for figure in view.direction_figures(state)]

    def apart(state: ImageState) -> object:
        return [plot_of(figure, "") for figure in view.input_figures(state)]

    def slider(state: ImageState) -> object:
        return [plot_of(view.curve_figure(state), ""), apart(state)]

    return {
        "a class": lambda: direction(start),
        "a difference": lambda: direction(replace(start, by="difference")),
        "a component": lambda: direction(replace(start, by="component")),
        "eigenvectors kept": lambda: slider(start),
        "an image": lambda: apart(replace(start, input="test-3")),
    }


def deep_clicks(view: DeepView) -> dict[str, Callable[[], object]]:
    """Clicks on the screen of a classifier of several layers."""
    start, far = view.start, itertools.count(view.tree.branches((0,)).k - 1, -1)

    def node() -> object:
        # Each time another one: what was opened once is kept.
        return view.tree_html(view.toggled(start, str(next(far))))

    return {
        "another class": lambda: [
            view.tree_html(replace(start, output=1)),
            [plot_of(figure, "") for figure in [view.tree_picture(start)] if figure],
        ],
        "a node": node,
        "paths kept": lambda: plot_of(view.input_figure(start), ""),
        "an image": lambda: plot_of(view.input_figure(replace(start, input="test-3")), ""),
    }


if __name__ == "__main__":
    main()

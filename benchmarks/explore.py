"""How long the explorer takes to answer a click: `python -m benchmarks.explore RUN...`.

What is timed is all that happens between a click and the answer that is sent, JSON included. The
runs are those of `bilens demo` and of `bilens train`.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import bilens
from benchmarks.clock import machine, seconds
from bilens.data import load_images
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


if __name__ == "__main__":
    main()

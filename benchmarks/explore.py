"""Time of the explorer's answer to a click: `python -m benchmarks.explore RUN...`.

The time is from a click to the answer that is sent, JSON included. The
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
from bilens.explore.language import LanguageView
from bilens.explore.screen import plot_of
from bilens.nn import ImageClassifier
from bilens.read.language import corpus_for
from bilens.residual import ResidualModel
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
    if isinstance(model, ResidualModel):
        return language_clicks(LanguageView(model, corpus_for(model, data)))
    if not isinstance(model, ImageClassifier):
        raise SystemExit(f"{run} holds a sparse autoencoder")
    if len(model.layers) > 1:
        return deep_clicks(DeepView(model, load_images(data)))
    return image_clicks(ImageView(model, load_images(data)))


def image_clicks(view: ImageView) -> dict[str, Callable[[], object]]:
    """Clicks on the screen of a classifier of one layer."""
    start = view.start

    def direction(state: ImageState) -> object:
        figures = [
            draw(state)
            for draw in (view.spectrum_figure, view.eigenvectors_figure, view.weights_figure)
        ]
        return [plot_of(figure, "") for figure in figures if figure]

    def apart(state: ImageState) -> object:
        return [plot_of(draw(state), "") for draw in (view.logits_figure, view.explanation_figure)]

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
        return view.tree_html(replace(start, opened=("0", str(next(far)))))

    steps = itertools.count(1)

    def walk() -> object:
        k, steps_taken = start.directions, (f"{view.bonds.depth}.1", f"1.{next(steps)}")
        drawn = [view.bonds.ends, view.bonds.made, view.bonds.used]
        figures = [figure for show in drawn if (figure := show(k, steps_taken))]
        return [view.bonds.page(k, steps_taken), [plot_of(figure, "") for figure in figures]]

    return {
        "a direction between layers": walk,
        "another class": lambda: [
            view.tree_html(replace(start, output=1)),
            [plot_of(figure, "") for figure in [view.tree_picture(start)] if figure],
        ],
        "a node": node,
        "paths kept": lambda: plot_of(view.input_figure(start), ""),
        "an image": lambda: plot_of(view.input_figure(replace(start, input="test-3")), ""),
    }


def language_clicks(view: LanguageView) -> dict[str, Callable[[], object]]:
    """Clicks on the screen of a language model."""
    start, tokens = view.start, iter(view.frequent)

    def direction() -> object:
        # Each time another one: what was decomposed lately is kept.
        state = replace(start, token=view.names[next(tokens)])
        figure = plot_of(view.spectrum_picture(state), "")
        return [figure, view.contexts_page(state), view.panels[0].reading(state)]

    def prompt() -> object:
        table, _, figure = view.prediction(start)
        return [table, figure and plot_of(figure, "")]

    return {
        "a direction": direction,
        "an eigenvector": lambda: view.contexts_page(replace(start, number=1)),
        "a letter of the prompt": prompt,
    }


if __name__ == "__main__":
    main()

"""Modular addition: the waves of its known solution, read out of the weights.

No figure of the papers: a ground truth for reading a complete model. Classifiers of one and of two
bilinear layers learn a + b mod 59 from 80 % of the pairs. Networks that add modulo a prime use
waves of a few frequencies k, cos(2 pi k (a + b - c) / p) (Nanda et al. 2023, who found them by
experiments on a transformer). Here they are read from the p^3 logits, which are the complete model
(`experiments.fourier.read_fourier`). Measured are, over initialisations,

- the accuracy on the pairs that were held out;
- the share of these waves in the part of the logits that depends on a, b and c together, and the
  number of frequencies of at least 1 %;
- the accuracy over all pairs of logits with only the waves of these frequencies, and without them;
- the share of a single frequency in a hidden unit's weights of the first layer for a number.

Small: 5 initialisations, two minutes on one core. Paper: p = 113 and 10 initialisations.
"""

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from bilens.data import modular_addition
from bilens.sections import Table
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext, interval
from experiments.fourier import FourierReading, read_fourier

__all__ = ["TRAINING", "run"]

TRAINING = ClassifierTraining(
    epochs=400, batch_size=256, learning_rate=3e-3, decay=1.0, weight_decay=1.0, input_noise=0.0
)
WIDTHS = {1: 128, 2: 64}


def run(context: RecipeContext) -> Outcome:
    """Train models of one and of two layers, and read their waves."""
    data = modular_addition(context.choose(59, 113))
    numbers: dict[str, Any] = {}
    figures: dict[str, go.Figure] = {}
    rows: list[tuple[str, ...]] = []
    for layers, d_model in WIDTHS.items():
        models = context.classifiers(
            data, TRAINING, context.choose(5, 10), d_model=d_model, layers=layers
        )
        readings = [read_fourier(model) for model in models]
        held_out = [model.accuracy(data.test_images, data.test_labels) for model in models]
        name = f"{layers} layer{'s' if layers > 1 else ''}"
        numbers[name] = {
            "accuracy_held_out": interval(held_out),
            "share_of_addition": interval([float(r.power.sum()) for r in readings]),
            "frequencies": [list(r.frequencies) for r in readings],
            "accuracy_kept": interval([r.accuracy_kept for r in readings]),
            "accuracy_removed": interval([r.accuracy_removed for r in readings]),
            "unit_share": interval([r.unit_share for r in readings]),
        }
        rows += [
            (name, str(seed), f"{accuracy:.2%}", *_row(reading))
            for seed, (accuracy, reading) in enumerate(zip(held_out, readings, strict=True))
        ]
        figures[f"power-{layers}"] = _power_figure(readings, name)
    headings = ("model", "seed", "held out", "addition", "frequencies", "kept", "removed", "units")
    return Outcome(
        numbers,
        figures,
        [Table(pd.DataFrame(rows, columns=headings), "Waves of modular addition", words=1)],
    )


def _row(reading: FourierReading) -> tuple[str, ...]:
    return (
        f"{float(reading.power.sum()):.1%}",
        ", ".join(map(str, reading.frequencies)),
        f"{reading.accuracy_kept:.2%}",
        f"{reading.accuracy_removed:.2%}",
        f"{reading.unit_share:.1%}",
    )


def _power_figure(readings: list[FourierReading], name: str) -> go.Figure:
    figure = go.Figure(
        [
            go.Bar(x=list(range(1, len(r.power) + 1)), y=r.power.tolist(), name=f"seed {seed}")
            for seed, r in enumerate(readings)
        ]
    )
    return figure.update_layout(
        title=f"Share of each frequency, {name}", xaxis_title="frequency", yaxis_title="share"
    )

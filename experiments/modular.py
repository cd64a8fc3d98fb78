"""Modular addition: the waves of its known solution, read out of the weights.

No figure of the papers: a ground truth for reading a complete model. Classifiers of one and of two
bilinear layers learn a + b mod 59 from 80 % of the pairs. Networks that add modulo a prime use
waves of a few frequencies k, cos(2 pi k (a + b - c) / p) (Nanda et al. 2023, who found them by
experiments on a transformer). Here they are read from the p^3 logits, which are the complete model
(`experiments.fourier.read_fourier`). Accuracies are those on held-out pairs, and over all pairs
with only the waves of these frequencies and without them.

Small: 5 initialisations, two minutes on one core. Paper: p = 113 and 10 initialisations.
"""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from bilens.analysis import Table
from bilens.data import modular_addition
from bilens.pages import add_legend, new_figure, styled
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext
from experiments.fourier import FourierReading, read_fourier
from experiments.results import Row, intervals

SEEDS = (5, 10)
"""Initialisations at either scale."""
TRAINING = ClassifierTraining(
    epochs=400, batch_size=256, learning_rate=3e-3, decay=1.0, weight_decay=1.0, input_noise=0.0
)
WIDTHS = {1: 128, 2: 64}


def run(context: RecipeContext) -> Outcome:
    """Train models of one and of two layers, and read their waves."""
    data = modular_addition(context.choose(59, 113))
    numbers: dict[str, Any] = {}
    figures: dict[str, Figure] = {}
    tables: list[Table] = []
    rows: list[Row] = []
    for layers, d_model in WIDTHS.items():
        models = context.classifiers(
            data, TRAINING, context.seed_range(SEEDS), d_model=d_model, layers=layers
        )
        readings = [read_fourier(model) for model in models]
        name = f"{layers} layer{'s' if layers > 1 else ''}"
        measured = [
            {
                "accuracy_held_out": model.accuracy(data.test_images, data.test_labels),
                "share_of_addition": float(reading.power.sum()),
                "accuracy_kept": reading.accuracy_kept,
                "accuracy_removed": reading.accuracy_removed,
                "unit_share": reading.unit_share,
            }
            for model, reading in zip(models, readings, strict=True)
        ]
        frequencies = [list(reading.frequencies) for reading in readings]
        numbers[name] = {**intervals(measured), "frequencies": frequencies}
        table = pd.DataFrame(measured)
        table.insert(0, "frequencies", [", ".join(map(str, several)) for several in frequencies])
        of_key = {key: [row[key] for row in measured] for key in measured[0]}
        claim = f"{name}: accuracy over all pairs with the waves that are read alone"
        without = 100 * sum(of_key["accuracy_removed"]) / len(models)
        alone = {"without them": without, "chance": 100 / data.n_classes}
        rows += [
            Row.of_shares(
                f"{name}: accuracy, held out", of_key["accuracy_held_out"], scale=100, unit="%"
            ),
            Row.of_shares(claim, of_key["accuracy_kept"], scale=100, unit="%", baselines=alone),
        ]
        tables.append(Table(table, f"Waves of modular addition, {name}", words=1))
        figures[f"power-{layers}"] = _power_figure(readings, name)
    settings = {"layers": list(WIDTHS), "modulus": data.n_classes}
    return Outcome(numbers, figures, tables, rows=rows, settings=settings)


@styled
def _power_figure(readings: list[FourierReading], name: str) -> Figure:
    figure, axes = new_figure(title=f"Share of each frequency, {name}")
    width = 0.8 / len(readings)
    for seed, reading in enumerate(readings):
        places = [number + 1 + width * seed - 0.4 for number in range(len(reading.power))]
        axes.bar(places, reading.power.tolist(), width, align="edge", label=f"seed {seed}")
    axes.set_xlabel("frequency")
    axes.set_ylabel("share")
    add_legend(axes)
    return figure

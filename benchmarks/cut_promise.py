"""Cuts of image models that lose more than is promised, by exact chances and by simulation.

`python -m benchmarks.cut_promise` prints how often a check passes a cut whose real loss of accuracy
is the limit or above it, summed over all outcomes of so many images; beside it the normal bound of
earlier versions, of 3.09 standard errors. Then it draws training images from the digits, which are
the whole population here, searches cuts of a trained model, and counts those that lose more than
was asked for. `--write` also writes the numbers to results/cut_promise.json. Two minutes on a core.
"""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from experiments.results import Recording, Row
from scipy import stats
from torch import Tensor

from bilens.data import ImageData, load_images
from bilens.images import accurate_ranks, classifier_function_bonds, loss_bound
from bilens.nn import ClassifierConfig
from bilens.tensor import Bonds
from bilens.train import ClassifierTraining, train_classifier

SIZES = (30, 100, 300)
LIMITS = (0.01, 0.05, 0.2)
ABOVE = (1.0, 1.5, 3.0)
"""Real losses, in limits."""
DRAWS = 200
ASKED = {30: 0.35, 100: 0.12, 300: 0.05}
"""Limits that so many images can promise for some cut."""


def chance(n: int, limit: float, loss: float) -> tuple[float, float]:
    """Return the chance that a cut of this loss passes, by the exact and by the normal bound."""
    exact = normal = 0.0
    for lost in range(n + 1):
        probability = float(stats.binom(n, loss).pmf(lost))
        exact += probability * (loss_bound(lost, 0, n) <= limit)
        share = lost / n
        deviation = (share * (1 - share) * n / (n - 1) * 3 / n) ** 0.5
        normal += probability * (share + 3.09 * deviation <= limit)
    return exact, normal


def loss_of(bonds: Bonds, ranks: tuple[int, ...], x: Tensor, labels: Tensor) -> float:
    """Return the accuracy that a cut loses on images."""
    full = tuple(bond.k for bond in bonds.bonds)
    before, after = ((bonds.cut(r)(x).argmax(-1) == labels).double() for r in (full, ranks))
    return float((before - after).mean())


def trained(data: ImageData) -> Bonds:
    """Return the bonds of a classifier of two layers."""
    config = ClassifierConfig(data.n_inputs, data.n_classes, d_model=24, n_layers=2, norm="scalar")
    with TemporaryDirectory() as folder:
        training = ClassifierTraining(epochs=8, batch_size=50)
        model, _ = train_classifier(config, data, training, Path(folder))
    return classifier_function_bonds(model, data)


def main() -> None:
    """Simulate, print, and write if asked to."""
    recording = Recording() if "--write" in sys.argv else None
    rows = []
    for n in SIZES:
        for limit in LIMITS:
            for times in ABOVE:
                exact, normal = chance(n, limit, times * limit)
                claim = f"{n} images, real loss of {times:g} times the limit, {limit:.0%}: passes"
                rows.append(Row(claim, exact, n=n, baselines={"normal bound": normal}))
                print(rows[-1], flush=True)
    logging.getLogger("bilens").setLevel(logging.ERROR)
    data = load_images("digits")
    bonds = trained(data)
    x = torch.cat([data.train_images, data.test_images])
    labels = torch.cat([data.train_labels, data.test_labels])
    generator = torch.Generator().manual_seed(0)
    full = tuple(bond.k for bond in bonds.bonds)
    for n, limit in ASKED.items():
        wrong, smaller = [], []
        for _ in range(DRAWS):
            drawn = torch.randint(len(x), (n,), generator=generator)
            few = replace(data, train_images=x[drawn], train_labels=labels[drawn])
            ranks = accurate_ranks(bonds, few, limit)
            wrong.append(loss_of(bonds, ranks, x, labels) > limit)
            smaller.append(ranks != full)
        claim = f"{n} training images, limit {limit:.0%}: cuts that lose more"
        found = {"cuts below all directions": sum(smaller) / DRAWS}
        rows.append(Row(claim, sum(wrong) / DRAWS, n=DRAWS, baselines=found))
        print(rows[-1], flush=True)
    if recording is not None:
        recording.write(
            "cut_promise",
            title="Cuts that lose more accuracy than is promised",
            command="python -m benchmarks.cut_promise --write",
            rows=rows,
            settings={
                "promise": "a chance of at most 0.001, of both kinds of bonds together",
                "images": SIZES,
                "limits, %": [*(round(100 * x) for x in (*LIMITS, *ASKED.values()))],
                "real losses, in limits": ABOVE,
            },
        )


if __name__ == "__main__":
    main()

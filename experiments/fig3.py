"""Figure 3: accuracy with the first few eigenvectors of each digit.

Reproduces figure 3 of Pearce et al. 2024: single-layer MNIST models, with the settings of their
Table 2 (20 epochs, weight decay 0.5, input noise 1.0). They are cut to the k eigenvectors of
largest |eigenvalue| of each class. Measured are the drop of the test accuracy, and the smallest k
that keeps it under 1 point and under 0.1 point, as do all larger ones. Numbers are shares, so a
point is 0.01; the spread is over initialisations.

The source loses under 1 point with 10 eigenvectors at d = 300, and says that the drop falls
exponentially with k. An independent reproduction needed 11, 16, 20 and 28 eigenvectors for 0.1
point at d = 30, 100, 300 and 1000.

Small: 5 initialisations of three sizes, a quarter of an hour on one core.
Paper: 20, some 4 hours. The source plots one model and one size only.
"""

from collections.abc import Sequence
from typing import Any

from bilens.images import TruncationCurve, class_spectra, truncation_curve
from bilens.train import ClassifierTraining
from experiments.context import Outcome, RecipeContext
from experiments.curves import line_figure, spread_line
from experiments.results import Row, interval

SEEDS = (5, 20)
"""Initialisations at either scale."""
SHOWN = 60
FEW = 10
NEEDED_BY_OTHERS = {30: 11, 100: 16, 300: 20, 1000: 28}


def run(context: RecipeContext) -> Outcome:
    """Truncate models of several sizes."""
    data = context.mnist
    seeds = context.seed_range(SEEDS)
    sizes: dict[str, Any] = {}
    rows: list[Row] = []
    lines = []
    for d_model in context.choose((30, 100, 300), (30, 100, 300, 1000)):
        models = context.classifiers(data, ClassifierTraining(), seeds, d_model=d_model)
        curves = [
            truncation_curve(class_spectra(m), data.test_images, data.test_labels) for m in models
        ]
        sizes[str(d_model)] = {
            **_numbers(curves, len(data.test_labels)),
            "needed_under_0.1_point_elsewhere": NEEDED_BY_OTHERS[d_model],
        }
        rows += _rows(d_model, curves, len(data.test_labels))
        ks = range(1, min(SHOWN, len(curves[0].accuracy)) + 1)
        drops = [[100 * curve.drop(k) for k in ks] for curve in curves]
        lines.append(spread_line(f"d = {d_model}", ks, drops))
    figure = line_figure(
        lines,
        title="Accuracy lost by keeping k eigenvectors a digit",
        x_title="k (on the axis: less than one image lost)",
        y_title="accuracy drop (points)",
        floor=100 / len(data.test_labels),
    )
    source = {"d_model": 300, "k": FEW, "drop_under": 0.01}
    settings = {"d_model": list(map(int, sizes)), "k": FEW, "points": [1, 0.1]}
    numbers = {"sizes": sizes, "source": source}
    return Outcome(numbers, {"truncation": figure}, rows=rows, settings=settings)


def needed_under(curve: TruncationCurve, drop: float, n_samples: int) -> int:
    """Return the smallest k that loses less than `drop`, as do all larger ones.

    Accuracies are whole numbers of samples, so half of one decides without a rounding error.
    """
    return curve.needed(drop - 0.5 / n_samples)


def _rows(d_model: int, curves: Sequence[TruncationCurve], n_samples: int) -> list[Row]:
    name, few = f"d = {d_model}", min(FEW, len(curves[0].accuracy))
    needed = {drop: [needed_under(c, drop / 100, n_samples) for c in curves] for drop in (1, 0.1)}
    lost = [100 * curve.drop(few) for curve in curves]
    of_source, all_of_them = d_model == 300, {"all": len(curves[0].accuracy)}
    return [
        Row.of_shares(f"{name}: accuracy", [c.full for c in curves], scale=100, unit="%"),
        Row.of(
            f"{name}: points lost with {few} eigenvectors of each class",
            lost,
            source=1 if of_source else None,
            held=sum(lost) / len(lost) < 1 if of_source else None,
        ),
        Row.of(
            f"{name}: eigenvectors of each class for a loss under 1 point",
            needed[1],
            baselines=all_of_them,
        ),
        Row.of(
            f"{name}: eigenvectors of each class for a loss under 0.1 points",
            needed[0.1],
            baselines=all_of_them,
            source=NEEDED_BY_OTHERS[d_model],
            held=sum(needed[0.1]) / len(curves) <= NEEDED_BY_OTHERS[d_model],
        ),
    ]


def _numbers(curves: Sequence[TruncationCurve], n_samples: int) -> dict[str, Any]:
    few = min(FEW, len(curves[0].accuracy))
    return {
        "accuracy": interval([curve.full for curve in curves]),
        f"drop_at_{few}": interval([curve.drop(few) for curve in curves]),
        "needed_under_1_point": interval([needed_under(c, 0.01, n_samples) for c in curves]),
        "needed_under_0.1_point": interval([needed_under(c, 0.001, n_samples) for c in curves]),
    }

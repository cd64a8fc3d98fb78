"""Directions: the flow through few directions of an MLP, and the effect of removing each of them.

The MLPs of a flow are split into two directions a position. For each of 20 pairs of texts
the 60 directions with the largest |flow| are removed one by one from the running model. Between two
texts their change is exchanged, in both directions. On the first text only, their part of the MLP's
output is set to zero. The effect is compared with

- the flow through the direction;
- its estimate by gradients: on two texts integrated gradients.

Reported are R2, with the number as a prediction of the effect and no fitted line, and Pearson
correlations over all nodes. Intervals are bootstraps over pairs. The median R2 is that of single
pairs. Eigenvectors in place of Gauss directions are measured on one text and a few of the pairs.

Results of each pair are kept in the folder of models, and a stopped run resumes.

Small: 4 pairs. Paper: 20 pairs, 5 minutes on a core for SmolLM2.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bilens.read.flow import flow
from bilens.read.flow.account import estimates, measure
from bilens.read.language import TokenDirection
from bilens.residual import ResidualModel
from bilens.sections import Table
from experiments.context import Outcome, RecipeContext
from experiments.pairs import Pair, pairs_of
from experiments.patching import SAMPLES
from experiments.pretrained import SavedRows, open_models

STRONGEST = 60
EIGENVECTOR_PAIRS = 4
KINDS: dict[str, dict[str, Any]] = {
    "two texts, m = 2": {"m": 2, "against": True},
    "one text, m = 2": {"m": 2, "against": False},
    "one text, eigenvectors": {"m": None, "against": False},
}


def run(context: RecipeContext) -> Outcome:
    """Measure all models that are installed."""
    numbers: dict[str, Any] = {}
    parts = []
    for name, model in open_models(context.models):
        pairs = pairs_of(model, 3)[: context.choose(4, 20)]
        rows = removals(model, pairs, context.models / f"directions-{name}.jsonl")
        frame = summary(rows)
        numbers[name] = frame.to_dict("records")
        parts.append(Table(frame, name))
    return Outcome(numbers, parts=parts)


def removals(model: ResidualModel, pairs: list[Pair], path: Path) -> list[dict[str, Any]]:
    """Return flows, estimates and effects of the strongest directions, a row a pair and kind."""
    saved, wanted = SavedRows(path, "text", "against", "kind"), set()
    for kind, options in KINDS.items():
        for pair in pairs[:EIGENVECTOR_PAIRS] if options["m"] is None else pairs:
            key = (pair.text, pair.against, kind)
            wanted.add(key)
            if key not in saved:
                saved.add({**pair._asdict(), "kind": kind, **_removed(model, pair, **options)})
    return saved.of(wanted)


def _removed(
    model: ResidualModel, pair: Pair, m: int | None, against: bool
) -> dict[str, list[float]]:
    direction = TokenDirection(pair.token, pair.minus)
    graph = flow(model, pair.text, direction, against=pair.against if against else None, m=m)
    directions = [i for i, node in enumerate(graph.nodes) if node.kind == "direction"]
    strongest = sorted(directions, key=lambda i: -abs(graph.nodes[i].flow))[:STRONGEST]
    slopes = estimates(model, graph)[strongest].tolist()
    return {
        "flow": [graph.nodes[i].flow for i in strongest],
        "estimate": slopes,
        "effect": [-ablation.actual for ablation in measure(model, graph, strongest)],
    }


def fit(effect: np.ndarray, predicted: np.ndarray) -> tuple[float, float]:
    """Return R2 of the prediction, and the Pearson correlation."""
    left = ((effect - predicted) ** 2).sum() / ((effect - effect.mean()) ** 2).sum()
    return float(1 - left), float(np.corrcoef(effect, predicted)[0, 1])


def summary(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return R2 and Pearson of each kind of node and prediction."""
    entries = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind]
        for name in ("flow", "estimate"):
            pairs = [(np.array(row["effect"]), np.array(row[name])) for row in of_kind]
            generator = np.random.default_rng(0)
            drawn = generator.integers(len(pairs), size=(SAMPLES, len(pairs)))
            fits = [
                fit(*(np.concatenate(part) for part in zip(*(pairs[i] for i in row), strict=True)))
                for row in [range(len(pairs)), *drawn]
            ]
            low, high = np.quantile([r2 for r2, _ in fits[1:]], [0.025, 0.975])
            single = [fit(*pair)[0] for pair in pairs]
            nodes = sum(len(effect) for effect, _ in pairs)
            entry = (kind, name, len(pairs), nodes, *fits[0], f"{low:.2f} to {high:.2f}")
            entries.append((*entry, float(np.median(single))))
    columns = ("nodes", "number", "pairs", "count", "R2", "Pearson", "interval of R2", "median R2")
    return pd.DataFrame(entries, columns=columns)

"""Directions of a task: the share of the flow that few directions of each MLP hold, and exchanges.

For each task of `experiments/pairs.py` directions are found on some questions. On others of the
task, and on those of all other tasks, the share of the flow through MLPs is measured that they
hold, without credit for cancellation between positions (`bilens.circuits.recurring.share_held`).

Baselines are orthonormal directions of each MLP: the principal components of changes of the output
(PCA of Dy) and of adjoints (PCA of w), both about zero, the left singular vectors of W_down, and
random ones. The last two need no questions. R2 is that of exchanging the 20 strongest directions
between the two texts, by their flow, on the other questions of the task. Beside it are correlation
and slope of the mean effects of these directions by their mean flows.

Small: SmolLM2, two questions of each task to find and two to measure, five minutes of processor
time. Paper: all models that are installed, eight and eight.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
import torch

from bilens.analysis import Table
from bilens.circuits import MLPDirections, Snapshots, find_directions, share_held, task_directions
from bilens.flows import Question
from bilens.transformer import ResidualModel
from experiments.context import Outcome, RecipeContext
from experiments.pairs import questions_by_task
from experiments.pretrained import open_models
from experiments.results import Row

KS, STRONGEST = (8, 16, 64), 20


def run(context: RecipeContext) -> Outcome:
    """Measure the directions of each task, and the baselines."""
    finding, tasks = context.choose(2, 8), context.choose(3, 7)
    numbers: dict[str, Any] = {}
    parts = []
    for name, model in open_models(context.models):
        if numbers and context.scale == "small":
            break
        numbers[name] = measured(model, finding, tasks)
        rows = [
            (k, method, *held)
            for k, methods in numbers[name]["shares"].items()
            for method, held in methods.items()
        ]
        frame = pd.DataFrame(rows, columns=["k", "directions", "same task", "other tasks"])
        parts.append(Table(frame, f"{name}: share of the flow on other questions"))
        exchanges = pd.DataFrame(numbers[name]["exchanges"]).T.rename_axis("task").reset_index()
        parts.append(Table(exchanges, f"{name}: exchanges of the strongest directions"))
    settings = {"k": KS, "questions to find": finding, "low and high": "range of tasks"}
    stated = [row for name, of_model in numbers.items() for row in _rows(name, of_model)]
    return Outcome(numbers, parts=parts, rows=stated, settings={**settings, "exchanged": STRONGEST})


def _rows(name: str, measured: dict[str, Any]) -> list[Row]:
    """Return the shares of the flow, and how well flows tell what exchanges do."""
    rows = []
    for k, methods in measured["shares"].items():
        for place, where in enumerate(("on other questions of the task", "on other tasks")):
            value, *others = (shares[place] for shares in methods.values())
            beside = dict(zip(list(methods)[1:], others, strict=True))
            claim = f"{name}: share of the flow that {k} directions hold {where}"
            rows.append(Row(claim, value, baselines=beside))
    r2 = [row["r2"] for row in measured["exchanges"].values() if row["r2"] is not None]
    claim = f"{name}: R² of exchanging the {STRONGEST} strongest directions"
    return [*rows, Row.of_range(claim, r2)] if r2 else rows


def measured(model: ResidualModel, finding: int, tasks: int) -> dict[str, Any]:
    """Return mean shares over tasks, by number of directions and method, and R2 of exchanges."""
    questions = dict(list(questions_by_task(model, 2 * finding).items())[:tasks])
    with torch.no_grad():
        snapshots = {
            task: [Snapshots.of(model, q) for q in asked] for task, asked in questions.items()
        }
    shares: dict[str, dict[str, list[float]]] = {}
    for k in KS:
        fixed = _without_questions(model, k)
        of_methods: dict[str, list[list[float]]] = {}
        for task, of_task in snapshots.items():
            others = [
                m for name, group in snapshots.items() if name != task for m in group[finding:]
            ]
            found = of_task[:finding]
            by_method = {
                "of the task": find_directions(found, k)[0],
                "PCA of Dy": principal_directions(found, 0, k),
                "PCA of w": principal_directions(found, 1, k),
            }
            for method, directions in (by_method | fixed).items():
                held = [share_held(m, directions)[0] for m in (of_task[finding:], others)]
                of_methods.setdefault(method, []).append(held)
        shares[str(k)] = {
            method: [statistics.fmean(column) for column in zip(*rows, strict=True)]
            for method, rows in of_methods.items()
        }
    exchanges = {task: exchanged(model, asked) for task, asked in questions.items()}
    return {"finding": finding, "shares": shares, "exchanges": exchanges}


def exchanged(model: ResidualModel, questions: Sequence[Question]) -> dict[str, float | None]:
    """Return how well flows tell what exchanges of a task's strongest directions do."""
    found = task_directions(model, questions, strongest=STRONGEST)
    flows, effects = ([getattr(x, name) for x in found.strongest] for name in ("flow", "effect"))
    slope = statistics.linear_regression(flows, effects, proportional=True).slope
    return {"r2": found.r2, "correlation": statistics.correlation(flows, effects), "slope": slope}


def _without_questions(model: ResidualModel, k: int) -> dict[str, list[MLPDirections]]:
    """Return directions of each layer from the weights, and random ones."""
    of_weights = []
    for layer in range(model.n_layers):
        weight = model.layer(layer).mlp.down.weight().double().cpu()
        of_weights.append(_orthonormal(torch.linalg.svd(weight, full_matrices=False)[0].T[:k]))
    chance = random_directions([model.d_model] * model.n_layers, k)
    return {"SVD of W_down": of_weights, "random": chance}


def principal_directions(snapshots: Sequence[Snapshots], side: int, k: int) -> list[MLPDirections]:
    """Return the first principal directions of changes (side 0) or adjoints (1) of each part."""
    parts = zip(*(of_question[side] for of_question in snapshots), strict=True)
    rows = (torch.cat(of_part) for of_part in parts)
    return [_orthonormal(torch.linalg.svd(x, full_matrices=False)[2][:k]) for x in rows]


def random_directions(widths: Iterable[int], k: int) -> list[MLPDirections]:
    """Return k random orthonormal directions of parts of these widths."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(width, k, generator=generator, dtype=torch.float64) for width in widths)
    return [_orthonormal(torch.linalg.qr(x)[0].T) for x in drawn]


def _orthonormal(rows: torch.Tensor) -> MLPDirections:
    return MLPDirections(rows, rows)

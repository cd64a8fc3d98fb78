"""Directions of a task in the values of heads: the share of the flow that few of them hold.

`bilens.circuits.recurring` balances changes and adjoints of the outputs of MLPs. This is the same
for heads: of the mixed values of each head (d_head numbers), and of those of all heads of a layer,
side by side. Beside it are principal components of the changes and random directions.
Shares are of the flow on other questions of the same tasks, without credit for cancellation between
positions.

Small: three tasks, two questions of each to find and two to measure, three minutes of a processor.
Paper: seven tasks, eight and eight.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from bilens.analysis import Table
from bilens.circuits import MLPDirections, Snapshots, find_directions, share_held
from bilens.flows import Question, adjoints_of
from bilens.transformer import ResidualModel
from experiments.context import Outcome, RecipeContext
from experiments.pairs import questions_by_task
from experiments.pretrained import open_models
from experiments.results import Row
from experiments.task_directions import principal_directions, random_directions

KS = (1, 8)


def run(context: RecipeContext) -> Outcome:
    """Measure the directions of each task, and the baselines."""
    finding, n_tasks = context.choose(2, 8), context.choose(3, 7)
    name, model = next(iter(open_models(context.models)))
    by_task = dict(list(questions_by_task(model, 2 * finding).items())[:n_tasks])
    shares: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for of_task in by_task.values():
        with torch.no_grad():
            both = [head_snapshots(model, question) for question in of_task]
        of_values, of_layers = zip(*both, strict=True)
        for part, snapshots in (
            ("values of each head", of_values),
            ("values of a layer", of_layers),
        ):
            for k in KS:
                for method, directions in methods(snapshots[:finding], k).items():
                    shares[part, k, method].append(share_held(snapshots[finding:], directions)[0])
    rows = [(*key, statistics.fmean(of_tasks)) for key, of_tasks in shares.items()]
    frame = pd.DataFrame(rows, columns=["part", "k", "directions", "share"])
    numbers: dict[str, Any] = {"tasks": list(by_task), "finding": finding}
    means = {key: statistics.fmean(of_tasks) for key, of_tasks in shares.items()}
    stated = [
        Row(
            f"{name}, {part}: share of the flow that {k} directions hold",
            value,
            n=n_tasks,
            baselines={other: means[part, k, other] for other in ("PCA of changes", "random")},
        )
        for (part, k, method), value in means.items()
        if method == "of the task"
    ]
    return Outcome(
        {**numbers, "shares": frame.to_dict("records")},
        parts=[Table(frame, "Share of the flow")],
        rows=stated,
        settings={"k": KS, "questions to find": finding},
    )


def head_snapshots(model: ResidualModel, question: Question) -> tuple[Snapshots, Snapshots]:
    """Return changes and adjoints of the mixed values of every head, and of all heads of a layer.

    They are scaled to a change of the logit of 1, as those of `Snapshots.of`.
    """
    adjoints = adjoints_of(model, [question])
    changes, of_layers = [], []
    for _, layer in reversed(list(adjoints.layers())):
        assert layer.heads is not None
        assert layer.of_heads is not None
        changes.append(adjoints.change(layer.heads.leaf)[0])
        of_layers.append(layer.of_heads[0])
    first, second = adjoints.numbers.tolist()
    scale = abs(first - second) ** -0.5
    layers = Snapshots(*(scale * torch.stack(rows).double().cpu() for rows in (changes, of_layers)))
    by_head = (rows.unflatten(-1, (model.n_heads, -1)).transpose(1, 2) for rows in layers)
    return Snapshots(*(rows.flatten(0, 1) for rows in by_head)), layers


def methods(snapshots: Sequence[Snapshots], k: int) -> dict[str, list[MLPDirections]]:
    """Return k directions of each part, by method."""
    widths = [changes.shape[1] for changes in snapshots[0].changes]
    return {
        "of the task": find_directions(snapshots, k)[0],
        "PCA of changes": principal_directions(snapshots, 0, k),
        "random": random_directions(widths, k),
    }

"""Circuits: how much of a model's behaviour few of its nodes or edges keep, by each attribution.

The circuit track of MIB. For each task the nodes (heads and MLPs) or edges are ordered by an
attribution, its mean over some pairs of texts. On other pairs the first 0.1, 0.2, 0.5, 1, 2, 5, 10,
20, 50 and 100 % are kept, and everything else has its value of the second text. The faithfulness f
is the difference of logits of that run, on a scale where the second text has 0 and the first 1.

- CPR is the area under f as a function of the share, for nodes or edges of the largest score;
- CMD is the area under |1 - f|, for those of the largest absolute score.

The attributions are those of `patching`, and for nodes the effect by activation patching itself.
An edge is the product of a part's change with the direction that a later part reads: the adjoint in
flows, the gradient otherwise. Queries, keys and values of a head are three readers, and keys and
values that heads share are one each. The embedding is always in a circuit of nodes, and is not
counted.

Intervals are bootstraps over the pairs of the evaluation, 95 %, also of differences from EAP-IG.
Results of each pair are kept in the folder of models, and a stopped run resumes.

Small: 2 pairs of each task for the order and 2 for the evaluation. Paper: 10 for the
order of nodes, 3 for that of edges, and 25 for the evaluation, an hour of processor time.

Source: Mueller et al. 2025, "MIB: a mechanistic interpretability benchmark" (arXiv 2504.13151);
definitions as in github.com/hannamw/MIB-circuit-track.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bilens.read.flow.contrast import Other
from bilens.read.flow.patching import runs_of
from bilens.read.flow.split import split
from bilens.read.language import TokenDirection
from bilens.residual import ResidualModel
from bilens.residual.interventions import Number, logit_of
from bilens.sections import Table
from experiments.context import Outcome, RecipeContext
from experiments.edges import EdgeGraph, PartialRuns
from experiments.pairs import Pair, pairs_of, templates
from experiments.patching import GRADIENTS, SAMPLES, measure
from experiments.pretrained import SavedRows, open_models

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
TASKS = ("ioi", "agreement", "induction")
BASELINE = "EAP-IG inputs"
ROWS = 18
"""Runs in a batch."""
PATCHING_PAIRS = 15
"""Pairs of `patching` at its scale of the paper; those of the evaluation come after them."""


def run(context: RecipeContext) -> Outcome:
    """Measure nodes and edges of all models that are installed."""
    numbers: dict[str, Any] = {}
    parts = []
    for name, model in open_models(context.models):
        for level, paper in (("nodes", (10, 25)), ("edges", (3, 25))):
            counts = context.choose((2, 2), paper)
            rows = evaluate(model, name, level, counts, context.models)
            numbers.setdefault(name, {})[level] = summary(rows)
            title = f"{name}, {level}, {counts[0]} + {counts[1]} pairs a task"
            parts.append(Table(table(rows), title))
    return Outcome(numbers, parts=parts)


def evaluate(
    model: ResidualModel, name: str, level: str, counts: tuple[int, int], folder: Path
) -> list[dict[str, Any]]:
    """Return the difference of logits of each circuit on each pair, and keep them in a file."""
    # Circuits depend on the number of pairs that order them.
    path = folder / f"circuits-{name}-{level}-{counts[0]}.jsonl"
    saved = SavedRows(path, "text", "against")
    graph, wanted = EdgeGraph(model), set()
    for task in TASKS:
        pairs = pairs_of(model, PATCHING_PAIRS + counts[1], {task: templates()[task]})
        ordering, others = pairs[: counts[0]], pairs[PATCHING_PAIRS:]
        wanted |= {(pair.text, pair.against) for pair in others}
        todo = [pair for pair in others if (pair.text, pair.against) not in saved]
        if not todo:
            continue
        if level == "nodes":
            scores = node_scores(measure(model, ordering, folder / f"patching-{name}.jsonl"))
        else:
            scores = edge_scores(
                graph, ordering, folder / f"edges-{name}-{task}-{counts[0]}.safetensors"
            )
        for pair in todo:
            saved.add({**pair._asdict(), **circuits(graph, pair, scores, level)})
    return saved.of(wanted)


def node_scores(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the mean attribution of each head and MLP, (1, parts), in the order of the parts."""
    scores = {}
    for name in rows[0]["heads"]:
        heads, mlps = (
            torch.tensor([row[kind][name] for row in rows], dtype=torch.float64).mean(0)
            for kind in ("heads", "mlps")
        )
        scores[name] = torch.cat([heads.reshape(len(mlps), -1), mlps[:, None]], 1).reshape(1, -1)
    return {**scores, "random": _random(scores["patching"])}


def edge_scores(graph: EdgeGraph, pairs: list[Pair], path: Path) -> dict[str, Tensor]:
    """Return the mean attribution of each edge, (readers, parts)."""
    if path.exists():
        return load_file(path)
    total: dict[str, Tensor] = {}
    for pair in pairs:
        for name, values in edge_attributions(graph, pair).items():
            total[name] = total.get(name, 0) + values / len(pairs)
    scores = {**total, "random": _random(graph.exists.double()) * graph.exists}
    save_file(scores, path)
    return scores


def _random(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def edge_attributions(graph: EdgeGraph, pair: Pair) -> dict[str, Tensor]:
    """Return the attribution of each edge for a pair, (readers, parts), by each method."""
    direction = TokenDirection(pair.token, pair.minus)
    number = logit_of(graph.model, direction.vector(graph.model))
    return attributed_edges(graph, (pair.text, pair.against), direction, number)


def attributed_edges(
    graph: EdgeGraph,
    texts: tuple[str, str] | tuple[Tensor, Tensor],
    direction: TokenDirection | Tensor,
    number: Number,
) -> dict[str, Tensor]:
    """Return the same for two texts and a direction, with its number of the last stream."""
    model, (text, against) = graph.model, texts
    ids = model.ids(text)
    with torch.no_grad():
        runs = runs_of(model, ids, Other(model, ids, against))
        change = graph.outputs(runs[0]) - graph.outputs(runs[1])
        flows = {
            "contrastive flow": split(model, text, direction, against=against),
            "frozen flow (LRP)": split(model, text, direction),
        }
        reads = {name: graph.flow_reads(through) for name, through in flows.items()}
        direct = torch.zeros_like(reads["frozen flow (LRP)"])
        direct[-1:] = graph.logit_reads(flows["frozen flow (LRP)"])
    reads |= {name: graph.gradient_reads(runs, number, at) for name, at in GRADIENTS.items()}
    reads["direct logit attribution"] = direct
    return {name: graph.scores(change, rows).double() for name, rows in reads.items()}


def circuits(graph: EdgeGraph, pair: Pair, scores: dict[str, Tensor], level: str) -> dict[str, Any]:
    """Return the difference of logits of the circuits of each attribution on a pair."""
    model = graph.model
    ids = model.ids(pair.text)
    number = logit_of(model, TokenDirection(pair.token, pair.minus).vector(model))
    with torch.no_grad():
        runs = runs_of(model, ids, Other(model, ids, pair.against))
        ends = [float(number(run.stream[None])[0]) for run in runs]
    partial = PartialRuns(graph, runs, number)
    exists = graph.exists if level == "edges" else torch.ones_like(next(iter(scores.values()))) > 0
    selected = [
        masks(score if ranking == "signed" else score.abs(), exists)
        for score in scores.values()
        for ranking in ("signed", "absolute")
    ]
    # Attributions agree on many circuits, above all on the smallest.
    rows, places = torch.cat(selected).unique(dim=0, return_inverse=True)
    values = []
    for batch in rows.split(ROWS):
        if level == "edges":
            values.append(partial.with_edges(batch))
        else:
            with_embedding = torch.cat([torch.ones_like(batch[:, 0, :1]), batch[:, 0]], 1)
            values.append(partial.with_nodes(with_embedding))
    logits = torch.cat(values)[places].double().reshape(len(scores), 2, -1)
    return {
        "ends": ends,
        "logits": {
            name: {"signed": of_method[0].tolist(), "absolute": of_method[1].tolist()}
            for name, of_method in zip(scores, logits, strict=True)
        },
    }


def masks(scores: Tensor, exists: Tensor) -> Tensor:
    """Return the circuits of all shares but the last, (shares, *scores), largest scores first."""
    order = scores.masked_fill(~exists, -torch.inf).flatten().argsort(descending=True, stable=True)
    rows = torch.zeros(len(SHARES) - 1, scores.numel(), dtype=torch.bool)
    for row, share in zip(rows, SHARES, strict=False):
        row[order[: int(share * int(exists.sum()))]] = True
    return rows.reshape(-1, *scores.shape)


def areas(faithfulness: np.ndarray) -> dict[str, np.ndarray]:
    """Return the areas under f and under |1 - f|, over the last axis, by the trapezoid rule."""
    return {
        "CPR": np.trapezoid(faithfulness, SHARES, axis=-1),
        "CMD": np.trapezoid(np.abs(1 - faithfulness), SHARES, axis=-1),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return CPR and CMD of each task and attribution, with bootstrap intervals."""
    numbers: dict[str, Any] = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        ends = np.array([row["ends"] for row in of_task])
        generator = np.random.default_rng(0)
        drawn = generator.integers(len(of_task), size=(SAMPLES, len(of_task)))
        # The first row is the estimate, the others are the bootstrap's samples of pairs.
        drawn = np.concatenate([np.arange(len(of_task))[None], drawn])
        span = (ends[:, 0] - ends[:, 1])[drawn].mean(1)
        numbers[task] = {"pairs": len(of_task)}
        values: dict[tuple[str, str], np.ndarray] = {}
        for name in of_task[0]["logits"]:
            entry = {}
            for ranking, metric in (("signed", "CPR"), ("absolute", "CMD")):
                logits = np.array([row["logits"][name][ranking] for row in of_task])
                gained = (logits - ends[:, 1:])[drawn].mean(1) / span[:, None]
                faithfulness = np.concatenate([gained, np.ones((len(gained), 1))], 1)
                values[name, metric] = areas(faithfulness)[metric]
                entry[metric] = _interval(values[name, metric])
                entry[f"faithfulness, {ranking}"] = faithfulness[0].tolist()
            numbers[task][name] = entry
        for (name, metric), samples in values.items():
            # The same pairs are drawn for all attributions, so that differences are of pairs.
            if (BASELINE, metric) in values:
                difference = _interval(samples - values[BASELINE, metric])
                numbers[task][name][f"{metric} minus that of {BASELINE}"] = difference
    return numbers


def _interval(samples: np.ndarray) -> dict[str, float]:
    """Return the estimate, which comes first, and the interval of 95 % of the samples after it."""
    low, high = np.quantile(samples[1:], [0.025, 0.975])
    return {"value": float(samples[0]), "low": float(low), "high": float(high)}


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return CPR and CMD of each task, a row for each attribution."""
    numbers = summary(rows)
    names = list(rows[0]["logits"])
    columns: dict[str, list[str]] = {"attribution": names}
    for task, of_task in numbers.items():
        for metric in ("CPR", "CMD"):
            columns[f"{task} {metric}"] = [
                "{value:.2f} ({low:.2f} to {high:.2f})".format(**of_task[name][metric])
                for name in names
            ]
    return pd.DataFrame(columns)

"""Circuits: the parts that answer a task, and attributions that find them.

For each of the tasks that come with bilens a circuit is found on all its templates, by the search
of `bilens circuit`. It is measured on other questions of the task, and on questions of every other
task.

The circuit track of MIB: parts are ordered by an attribution, its mean over the questions of the
first template that order. On the others the first 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50 and 100 % are
kept, and everything else has its value of the second text.

- CPR is the area under f as a function of the share, for parts of the largest score;
- CMD is the area under |1 - f|, for parts of the largest absolute score.

The attributions are the gradient at the first text (AtP), EAP-IG inputs with 8 points, GIM's
gradient (`experiments/gim.py`), contrastive flow, masks that are learned by 500 steps of Adam on
the questions that order, and elimination: integrated gradients by the mask, taken again and again.
Intervals of areas are bootstraps over questions, 95 %, also of differences from EAP-IG. Rows are
kept in the folder of models, and a stopped run resumes. The circuit of one task is also written
there as MIB's track reads it.

Small: two tasks. Paper: all of English, areas of every second one.

Source: Mueller et al. 2025, "MIB: a mechanistic interpretability benchmark" (arXiv 2504.13151);
definitions as in github.com/hannamw/MIB-circuit-track.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import bilens
from bilens.analysis import Table
from bilens.circuits import Cases, Split, find_circuit, gradient_effects, parts_in
from bilens.flows import Question, read_pairs
from bilens.transformer import ResidualModel
from experiments.context import Outcome, RecipeContext
from experiments.gim import gim_rules
from experiments.patching import GRADIENTS, along, flows, resampled
from experiments.pretrained import open_models, saved_rows
from experiments.results import Row, write_json

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
FILES = Path(bilens.__file__).parent.glob("tasks/*.tsv")
TASKS = sorted(path.stem for path in FILES if path.stem != "pronouns")
"""Tasks of models of English; the pronouns are those of the story model."""
TEMPLATES = 3
"""Templates of each task."""
CHOSEN_ON = TASKS[::2]
"""The rule for the size of a circuit was chosen on these, in SmolLM2."""
SMALL = ("agreement", "ioi")
BASELINE = "EAP-IG inputs"
KEEP, LEFT = 0.95, 0.1
UNRELATED = 0.1
"""Size of f up to which a circuit is said to do nothing."""
BATCH = 16


def run(context: RecipeContext) -> Outcome:
    """Find and measure the circuits of all models that are installed."""
    numbers, parts, rows = dict[str, Any](), list[Table](), list[Row]()
    for name, model in open_models(context.models):
        circuits, of_parts = measurements(context, name, model)
        numbers[name] = circuits
        tables = {
            "circuits": circuit_table(circuits),
            "restored of other tasks, by circuits": transfer_table(circuits),
            "areas, first templates": area_table(of_parts),
        }
        parts += [Table(frame, f"{name}: {title}") for title, frame in tables.items()]
        rows += circuit_rows(name, circuits) + area_rows(name, of_parts)
    return Outcome(numbers, parts=parts, rows=rows, settings={"unrelated": UNRELATED})


def measurements(
    context: RecipeContext, name: str, model: ResidualModel
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a row of the circuit of each task, and of the areas of some."""
    tasks: list[str] = context.choose(list(SMALL), TASKS)

    def saved(kind: str, tasks: Sequence[str], measure: Callable[[str], Any]) -> Any:
        path = context.models / f"{kind}-{name}.jsonl"
        return saved_rows(path, ("task",), [(task,) for task in tasks], measure)

    def first(task: str) -> Split:
        return next(iter(splits_of(model, read_pairs(model, task)).values()))

    every = saved("circuits", tasks, lambda task: of_task(model, task))
    circuits = [row for row in every if "mask" in row]
    asked = [row["task"] for row in circuits]
    # A task at a time, since the activations of all of its texts are held.
    for row in saved("transfer", asked, lambda task: of_others(model, task, circuits)):
        for circuit in circuits:
            circuit.setdefault("on others", {})[row["task"]] = row["restored"][circuit["task"]]
    steps = context.choose(20, 500)
    some = [task for task in context.choose(SMALL[:1], TASKS[::2]) if task in asked]
    of_parts = saved("areas", some, lambda task: compared(model, first(task), steps))
    path = context.models / f"mib-{name}.json"
    if not path.exists():
        ranks = eliminated(first(asked[-1]).ordering)
        write_json(path, mib_graph(model, circuits[-1]["parts"], ranks))
    return circuits, of_parts


def splits_of(
    model: ResidualModel,
    questions: Sequence[Question],
    *,
    least: int = 3,
    most: int | None = None,
    any_length: bool = False,
) -> dict[str, Split]:
    """Return the questions that a model answers, by template, as a search splits them.

    Templates of which it answers fewer than `least`, by default what a circuit needs, are left out.
    Of the others the first `most` questions are taken, by default all.
    """
    cases = Cases.of(model, questions, any_length=any_length)
    splits = {}
    for template, numbers in cases.templates.items():
        answered = [number for number in numbers if cases.answers[number]][:most]
        if len(answered) >= least:
            splits[template] = Split.of(cases, answered, template)
    return splits


def others_of(splits: Sequence[Split]) -> Cases:
    """Return the questions that measure, of several templates."""
    return Cases.joined([split.measuring for split in splits])


def of_task(model: ResidualModel, task: str) -> dict[str, Any]:
    """Return the circuit of a task; nothing if it is unknown."""
    splits = [*splits_of(model, read_pairs(model, task)).values()]
    if len(splits) < TEMPLATES:
        return {}
    circuit = find_circuit(splits, KEEP, LEFT)
    return {
        "parts": [str(part) for part in parts_in(circuit.mask)],
        "mask": circuit.mask.tolist(),
        "holds": circuit.holds,
        "restored": vars(circuit.measured.restored),
        "left": vars(circuit.measured.left),
    }


def of_others(
    model: ResidualModel, task: str, circuits: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return f of the circuit of each task on a task's questions that measure."""
    cases = others_of([*splits_of(model, read_pairs(model, task)).values()])
    shares = cases.faithfulness(torch.tensor([row["mask"] for row in circuits]).double())
    return {"restored": dict(zip([row["task"] for row in circuits], shares.tolist(), strict=True))}


def mib_graph(model: ResidualModel, circuit: Collection[str], ranks: Tensor) -> dict[str, Any]:
    """Return a circuit of parts as the circuit track of MIB reads it: its nodes, with scores."""
    nodes: dict[str, Any] = {"input": {"in_graph": True, "score": float(len(ranks.flatten()) + 1)}}
    for part in parts_in(torch.ones_like(ranks, dtype=torch.bool)):
        layer = part.layer or 0
        name = f"m{layer}" if part.number is None else f"a{layer}.h{part.number}"
        column = -1 if part.number is None else part.number
        nodes[name] = {"in_graph": str(part) in circuit, "score": float(ranks[layer, column])}
    nodes["logits"] = {"in_graph": True}
    cfg = {"n_layers": model.n_layers, "n_heads": model.n_heads, "d_model": model.d_model}
    return {"cfg": {**cfg, "parallel_attn_mlp": False}, "nodes": nodes, "edges": {}}


def compared(model: ResidualModel, split: Split, steps: int) -> dict[str, Any]:
    """Return f of the circuits of each attribution on the questions that do not order."""
    first, others = split.ordering, Cases.joined([split.deciding, split.measuring])
    scores = {
        "gradient (AtP)": by_gradients(first, GRADIENTS["gradient (AtP)"]),
        BASELINE: by_gradients(first, GRADIENTS[BASELINE]),
        "GIM": by_gim(first),
        "contrastive flow": flows(model, [case.question for case in first.cases]),
        "learned masks": learned(first, steps),
    }
    return measured_rankings(first, others, scores)


def measured_rankings(first: Cases, others: Cases, scores: dict[str, Tensor]) -> dict[str, Any]:
    """Return f of the circuits of some scores, and of elimination, on questions that measure."""
    rankings = {name: (score, score.abs()) for name, score in scores.items()}
    rankings["elimination"] = eliminated(first), eliminated(first, absolute=True)
    counts = [int(share * int(first.everything.sum())) for share in SHARES[:-1]]
    masks = []
    for of_attribution in rankings.values():
        for ranking in of_attribution:
            masks += [largest(ranking, count) for count in counts]
    # Attributions agree on many circuits, above all on the smallest.
    rows, places = torch.stack(masks).flatten(1).unique(dim=0, return_inverse=True)
    batches = rows.reshape(-1, *first.shape).split(BATCH)
    values = torch.cat([others.values(batch.double()) for batch in batches])[places]
    values = values.reshape(len(rankings), 2, len(counts), -1)
    return {
        "changes": others.changes.tolist(),
        "rises": dict(zip(rankings, values.tolist(), strict=True)),
    }


def by_gradients(cases: Cases, points: tuple[float, ...]) -> Tensor:
    """Return the change of each part times the mean gradient at some points, over all questions."""
    rows = [gradient_effects(case.alone, case.score, points) for case in cases.cases]
    return torch.stack(rows).mean(0)


def by_gim(cases: Cases) -> Tensor:
    """Return the change of each part times the gradient by GIM's rules, over all questions."""
    rows = []
    for case in cases.cases:
        model, stream = cases.model, case.alone[0].stream[0]
        # The last norm's scale is fixed too.
        tokens, minus = case.fitted.tokens, case.fitted.minus
        u = model.direction(tokens, minus) * model.modules.scale(stream[-1])
        with gim_rules(model):
            rows.append(gradient_effects(case.alone, along(u), [1.0]))
    return torch.stack(rows).mean(0)


def eliminated(cases: Cases, *, absolute: bool = False) -> Tensor:
    """Return the ranking of parts by which a quarter of a circuit is dropped again and again.

    Integrated gradients are taken anew in the circuit that is left. With `absolute` those of the
    smallest size go.
    """
    order = cases.everything.flatten().nonzero().flatten()
    size = len(order)
    # Below the smallest share that is measured, the last order stays.
    while size > max(1, SHARES[0] * len(order)):
        left = order[:size].clone()
        mask = torch.zeros(cases.shape, dtype=torch.bool)
        mask.view(-1)[left] = True
        gradients = cases.scores(mask).flatten()[left]
        order[:size] = left[(gradients.abs() if absolute else gradients).argsort(descending=True)]
        size = 3 * size // 4
    ranks = torch.zeros(cases.shape, dtype=torch.float64)
    ranks.view(-1)[order] = torch.arange(len(order), 0, -1).double()
    return ranks


def largest(scores: Tensor, count: int) -> Tensor:
    """Return the mask of the parts with the largest scores."""
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    mask[scores.flatten().argsort(descending=True, stable=True)[:count]] = True
    return mask.reshape(scores.shape)


def learned(cases: Cases, steps: int) -> Tensor:
    """Return the logits of masks that keep f at 1 with few parts, learned by Adam.

    The loss is |1 - f| of a question, plus the mean of the mask times a weight that takes all
    values from 10 to 0.1 on the way, so that parts are ordered by the weight at which they go.
    """
    logits = torch.full(cases.shape, 2.0, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([logits], lr=0.05)
    total = torch.zeros(cases.shape, dtype=torch.float64)
    each = [cases.some([number]) for number in range(len(cases))]
    for step in range(steps):
        case = each[step % len(cases)]
        mask = logits.sigmoid()
        with torch.enable_grad():
            given = mask[None].to(case.cases[0].passes[0].stream)
            f = case.rises(0, given)[0, 0] / float(case.changes[0])
            loss = (1 - f).abs() + 10 * 0.01 ** (1 - step / steps) * logits.sigmoid().mean()
            adam.zero_grad()
            loss.backward()
        adam.step()
        total += mask.detach()
    return total


def areas(faithfulness: np.ndarray) -> dict[str, np.ndarray]:
    """Return the areas under f and under |1 - f|, over the last axis, by the trapezoid rule."""
    return {
        "CPR": np.trapezoid(faithfulness, SHARES, axis=-1),
        "CMD": np.trapezoid(np.abs(1 - faithfulness), SHARES, axis=-1),
    }


def summary(row: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Return CPR and CMD of each attribution on a task, and their differences from EAP-IG's."""
    changes = np.array(row["changes"])
    # The first row is the estimate, the others are the bootstrap's samples of questions.
    drawn = np.concatenate([np.arange(len(changes))[None], resampled(len(changes))])
    samples: dict[str, dict[str, np.ndarray]] = {}
    for name, rises in row["rises"].items():
        samples[name] = {}
        for metric, of_ranking in zip(("CPR", "CMD"), np.array(rises), strict=True):
            f = of_ranking.T[drawn].mean(1) / changes[drawn].mean(1)[:, None]
            f = np.concatenate([f, np.ones((len(f), 1))], 1)
            samples[name][metric] = areas(f)[metric]
    return {
        name: {
            **{metric: _interval(x) for metric, x in of_name.items()},
            **{
                f"{metric} minus that of {BASELINE}": _interval(x - samples[BASELINE][metric])
                for metric, x in of_name.items()
            },
        }
        for name, of_name in samples.items()
    }


def _interval(samples: np.ndarray) -> dict[str, float]:
    """Return the estimate, which comes first, and the interval of 95 % of the samples after it."""
    low, high = np.quantile(samples[1:], [0.025, 0.975])
    return {"value": float(samples[0]), "low": float(low), "high": float(high)}


def _shown(interval: dict[str, Any]) -> str:
    if interval["low"] is None:  # of fewer than five questions
        return f"{interval['value']:.2f}"
    return "{value:.2f} [{low:.2f}, {high:.2f}]".format(**interval)


def circuit_rows(name: str, circuits: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows of results about the circuits of a model."""
    found = [row for row in circuits if row["holds"]]
    sizes = []
    for row in found:
        sizes += [abs(f) for task, f in row["on others"].items() if task != row["task"]]
    ranges = {
        "parts": [len(row["parts"]) for row in found],
        "f on other questions": [row["restored"]["value"] for row in found],
        "left on other questions": [row["left"]["value"] for row in found],
        "size of f on another task": sizes,
    }
    rows = [Row.of_share(f"{name}: a circuit is found", [row["holds"] for row in circuits])]
    rows += [Row.of_range(f"{name}: {claim}", values) for claim, values in ranges.items() if values]
    claim = f"{name}: size of f on another task at most {UNRELATED}"
    return [*rows, Row.of_share(claim, [size <= UNRELATED for size in sizes])] if sizes else rows


def area_rows(name: str, of_tasks: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows of results about areas: of elimination, beside all other attributions."""
    rows, tables = [], [summary(row) for row in of_tasks]
    for metric in ("CPR", "CMD") if tables else ():
        of_each = {key: [table[key][metric]["value"] for table in tables] for key in tables[0]}
        ours = of_each.pop("elimination")
        means = {key: float(np.mean(values)) for key, values in of_each.items()}
        rows.append(Row.of(f"{name}: {metric} of elimination", ours, baselines=means))
        ahead = {}
        for key in tables[0]:
            differences = [table[key][f"{metric} minus that of {BASELINE}"] for table in tables]
            # More is better for CPR, less for CMD.
            ahead[key] = [x["low"] > 0 if metric == "CPR" else x["high"] < 0 for x in differences]
        of_ours = ahead.pop("elimination")
        others = {key: float(np.mean(x)) for key, x in ahead.items() if key != BASELINE}
        claim = f"{name}: {metric} of elimination ahead of {BASELINE}"
        rows.append(Row.of_share(claim, of_ours, baselines=others))
    return rows


def circuit_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return a row for each circuit: its size, what it restores, and what is left."""
    return pd.DataFrame(
        {
            "task": row["task"],
            "parts": len(row["parts"]),
            "found": "yes" if row["holds"] else "no",
            "restored": _shown(row["restored"]),
            "left": _shown(row["left"]),
        }
        for row in rows
    )


def transfer_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return what the circuit of each task (row) restores on each task."""
    return pd.DataFrame(
        {"circuit": row["task"], **{key: f"{f:.2f}" for key, f in row["on others"].items()}}
        for row in rows
    )


def area_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return CPR and CMD of each attribution (row) on each task."""
    columns: dict[str, list[str]] = {"attribution": [*rows[0]["rises"]] if rows else []}
    for row in rows:
        numbers = summary(row)
        for metric in ("CPR", "CMD"):
            columns[f"{row['task']} {metric}"] = [_shown(of[metric]) for of in numbers.values()]
    return pd.DataFrame(columns)

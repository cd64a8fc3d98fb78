"""Circuits: the few parts that answer a task, where they transfer, and attributions that find them.

For each of eleven tasks (`experiments/tasks.py`) a circuit is found on eleven questions of the
first template, by `bilens.circuit`. It is measured on other questions of that template, and on
the second template of every task: what it restores of the change, and what is left without it.

The circuit track of MIB: parts are ordered by an attribution, its mean over the questions that
order. On the others the first 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50 and 100 % are kept, and everything
else has its value of the second text.

- CPR is the area under f as a function of the share, for parts of the largest score;
- CMD is the area under |1 - f|, for parts of the largest absolute score.

The attributions are the gradient at the first text (AtP), EAP-IG inputs with 8 points, GIM's
gradient (`experiments/gim.py`), contrastive flow, masks that are learned by 500 steps of Adam on
the questions that order, and elimination: integrated gradients by the mask, taken again and again.
The edges between the parts of each circuit are searched in the same way, and keep 0.9 of what the
parts keep. Intervals of areas are bootstraps over questions, 95 %, also of differences from EAP-IG.
Results are kept in the folder of models, and a stopped run resumes. The circuit of one task is also
written there as MIB's track reads it.

Small: three tasks with three questions. Paper: all tasks, 8 questions to find, 12 to measure by
either template and 25 for areas; an hour of processor time for each model.

Source: Mueller et al. 2025, "MIB: a mechanistic interpretability benchmark" (arXiv 2504.13151);
definitions as in github.com/hannamw/MIB-circuit-track.
"""

import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bilens.files import write_json
from bilens.read.flow.circuit_measures import Split, found_circuit
from bilens.read.flow.circuit_search import KEEP, Cases
from bilens.read.flow.edges import EdgeCases, found_edges
from bilens.read.flow.gradients import gradient_effects
from bilens.read.flow.interval import Interval
from bilens.read.flow.patching import parts_in
from bilens.read.flow.question import Question
from bilens.residual import ResidualModel
from bilens.residual.changes import Part
from bilens.sections import Table
from experiments.context import Outcome, RecipeContext
from experiments.contrasts import flows
from experiments.edges import AttributedEdges, attributed_edges
from experiments.gim import gim_rules
from experiments.patching import GRADIENTS, along, resampled
from experiments.pretrained import open_models, saved_rows
from experiments.tasks import questions_of

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
EDGES = ("agreement", "ioi")
KNOWN = ("agreement", "gender", "ioi", "facts")
BASELINE = "EAP-IG inputs"
LEFT = 0.1
BATCH = 16


def run(context: RecipeContext) -> Outcome:
    """Find and measure the circuits of all models that are installed."""
    outcomes = {
        name: _of_model(context, name, model) for name, model in open_models(context.models)
    }
    numbers = {name: rows for name, (rows, _) in outcomes.items()}
    return Outcome(numbers, parts=[part for _, parts in outcomes.values() for part in parts])


def _of_model(
    context: RecipeContext, name: str, model: ResidualModel
) -> tuple[list[dict[str, Any]], list[Table]]:
    """Return the row of each circuit, and all tables."""
    finding, measuring = context.choose(3, 8), context.choose(4, 12)
    first = questions_of(model, finding + measuring)
    of_second = questions_of(model, finding + measuring, 1)
    second = {task: questions[:measuring] for task, questions in of_second.items()}
    longer = questions_of(model, finding + context.choose(4, 25))
    more = questions_of(model, 2 * finding + measuring)
    tasks = list(first)[: context.choose(3, len(first))]
    known = list(KNOWN[: context.choose(1, len(KNOWN))])

    def saved(kind: str, tasks: list[str], measure: Callable[[str], Any]) -> list[dict[str, Any]]:
        path = context.models / f"{kind}-{name}-{finding}.jsonl"
        return saved_rows(path, ("task",), [(task,) for task in tasks], measure)

    circuits = saved("circuits", tasks, lambda task: of_task(model, first[task], second))
    parts_of = {row["task"]: row for row in circuits}
    twice = saved(
        "circuits-of-twice", known, lambda task: of_task(model, more[task], {task: second[task]})
    )
    # Where a circuit does not carry over, does the second template have one of its own?
    poor = [task for task, row in parts_of.items() if row["transfer"][task][0]["value"] < 0.5]
    own = saved(
        "circuits-of-second",
        poor,
        lambda task: of_task(model, of_second[task], {task: first[task][:measuring]}),
    )
    edges = saved(
        "edges",
        tasks[: context.choose(1, len(tasks))],
        lambda task: edges_of_task(model, parts_of[task], first[task]),
    )
    steps = context.choose(20, 500)
    of_parts = saved("areas", tasks, lambda task: compared(model, longer[task], finding, steps))
    few = finding // 2
    of_edges = saved(
        "edge-areas",
        [task for task in EDGES if task in known],
        lambda task: compared_edges(model, longer[task][: few + 10], few),
    )
    task = "ioi" if "ioi" in tasks else tasks[0]
    path = context.models / f"mib-{name}-{task}.json"
    if not path.exists():
        ranks = eliminated(Cases.of(model, first[task][:finding]))
        write_json(path, mib_graph(model, parts_of[task]["parts"], ranks))
    tables = {
        "circuits": circuit_table(circuits),
        "circuits by tasks, second templates": transfer_table(circuits),
        "circuits found on twice the questions": circuit_table(twice),
        "circuits of the second template": circuit_table(own),
        "edges between the parts": pd.DataFrame(edges),
        "areas, first templates": area_table(of_parts),
        "areas of edges": area_table(of_edges),
    }
    return circuits, [Table(frame, f"{name}: {title}") for title, frame in tables.items()]


def of_task(
    model: ResidualModel, questions: list[Question], others: dict[str, list[Question]]
) -> dict[str, Any]:
    """Return the circuit of a task, and what it does on the second template of every task."""
    circuit = found_circuit([split_of(model, questions)], KEEP, LEFT)
    masks = torch.stack([circuit.mask, circuit.others]).double()
    transfer = {}
    for other, of_other in others.items():
        cases = Cases.of(model, of_other)
        values = cases.values(masks)
        transfer[other] = [vars(Interval.of(rises, cases.changes)) for rises in values]
    return {
        "parts": [str(part) for part in parts_in(circuit.mask)],
        "needed": [str(part) for part in parts_in(circuit.needed)],
        "holds": circuit.holds,
        "restored": vars(circuit.measured.restored),
        "left": vars(circuit.measured.left),
        "transfer": transfer,
    }


def edges_of_task(
    model: ResidualModel, row: dict[str, Any], questions: list[Question]
) -> dict[str, Any]:
    """Return the numbers of edges between the parts of a circuit, and what the few restore."""
    split = split_of(model, questions)
    mask = torch.zeros(split.ordering.shape, dtype=torch.bool)
    for address in row["parts"]:
        part = Part.parse(address, model)
        mask[part.layer or 0, -1 if part.number is None else part.number] = True
    start = time.process_time()
    found = found_edges([split.ordering], split.deciding, split.measuring, mask)
    return {
        "edges": len(found.edges),
        "of": found.candidates,
        "restored": vars(found.restored),
        "by its parts": row["restored"]["value"],
        "seconds": time.process_time() - start,
    }


def split_of(model: ResidualModel, questions: list[Question]) -> Split:
    """Return the questions that order, that decide the size of a circuit, and that measure."""
    return Split.of(Cases.of(model, questions), range(len(questions)), "")


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


def compared(
    model: ResidualModel, questions: list[Question], finding: int, steps: int
) -> dict[str, Any]:
    """Return f of the circuits of each attribution on the questions that do not order."""
    first, others = Cases.of(model, questions[:finding]), Cases.of(model, questions[finding:])
    scores = {
        "gradient (AtP)": by_gradients(first, GRADIENTS["gradient (AtP)"]),
        BASELINE: by_gradients(first, GRADIENTS[BASELINE]),
        "GIM": by_gim(first),
        "contrastive flow": flows(model, questions[:finding]),
        "learned masks": learned(first, steps),
    }
    return measured_rankings(first, others, scores)


def compared_edges(model: ResidualModel, questions: list[Question], finding: int) -> dict[str, Any]:
    """Return the same for edges, without GIM and learned masks."""
    first = EdgeCases(Cases.of(model, questions[:finding]))
    others = EdgeCases(Cases.of(model, questions[finding:]))
    graph, scores = AttributedEdges(model), dict[str, Tensor]()
    for case in first.cases:
        of_case = attributed_edges(graph, case.question)
        for name in ("gradient (AtP)", BASELINE, "contrastive flow"):
            scores[name] = scores.get(name, 0) + of_case[name].cpu()
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
    rows = [gradient_effects(case.alone, case.score.of_streams, points) for case in cases.cases]
    return torch.stack(rows).mean(0)


def by_gim(cases: Cases) -> Tensor:
    """Return the change of each part times the gradient by GIM's rules, over all questions."""
    rows = []
    for case in cases.cases:
        model, stream = cases.model, case.alone[0].stream[0]
        # The last norm's scale is fixed too.
        u = case.question.output_direction(model) * model.parts.scale(stream[-1])
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


def circuit_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return a row for each circuit: its size, what it restores and what is left without it."""
    return pd.DataFrame(
        {
            "task": row["task"],
            "parts": len(row["parts"]),
            "restored": _shown(row["restored"]),
            "left": _shown(row["left"]),
            "restored, other template": _shown(row["transfer"][row["task"]][0]),
            "left, other template": _shown(row["transfer"][row["task"]][1]),
            "needed": " ".join(row["needed"]),
        }
        for row in rows
    )


def transfer_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return what the circuit of each task (row) restores on each task, and what is left."""
    return pd.DataFrame(
        {
            "circuit": row["task"],
            **{
                other: f"{restored['value']:.2f}, {left['value']:.2f}"
                for other, (restored, left) in row["transfer"].items()
            },
        }
        for row in rows
    )


def area_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return CPR and CMD of each attribution (row) on each task."""
    columns: dict[str, list[str]] = {"attribution": list(rows[0]["rises"])}
    for row in rows:
        numbers = summary(row)
        for metric in ("CPR", "CMD"):
            columns[f"{row['task']} {metric}"] = [_shown(of[metric]) for of in numbers.values()]
    return pd.DataFrame(columns)

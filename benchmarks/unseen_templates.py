"""Do stages hold on a template that nobody saw? Twelve tasks, three templates each.

    python -m benchmarks.unseen_templates runs/unseen [MODEL ...]

Tasks are those that come with bilens. For each task and each of its templates, the stages of the
other two are found as `bilens circuit` finds them, and measured on all questions of the template
that is left out; so are the circuits of parts, by our order and by that of EAP-IG with 8 points.
Beside the stages stand ranges of equal length at other layers, the median of five draws, and as
many random directions at both cuts as the balanced ones. Stages of the template alone tell how far
the ends of ranges move. The control of a task is what the same search finds for an answer that is
nonsense.

The rule for parts was chosen on six of the tasks in SmolLM2, that for stages on eight other tasks
and on eight of these.

Each fold is a line of a file in the folder, so that a stopped run resumes with the next. At the end
`results/unseen_templates.json` is written. Times are of the processor, with one thread.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments.patching import GRADIENTS
from experiments.pretrained import open_models, saved_rows
from experiments.results import Recording, Row
from torch import Tensor

import bilens
from bilens.circuits import (
    ROLES,
    Cases,
    Cuts,
    MLPDirections,
    Split,
    Stages,
    find_circuit,
    find_cuts,
    find_stages,
    gradient_effects,
    mask_of,
    nonsense,
    passed,
    verdict,
)
from bilens.flows import read_pairs
from bilens.transformer import ResidualModel

FILES = Path(bilens.__file__).parent.glob("tasks/*.tsv")
TASKS = sorted(path.stem for path in FILES if path.stem != "pronouns")
"""Tasks of models of English; the pronouns are those of the story model."""
TEMPLATES, LEAST = 3, 3
"""Templates of each task, and questions of each that the model answers, at least."""
OURS, PARTS, EAP_IG = "stages", "parts", "parts, EAP-IG"
METHODS = (OURS, PARTS, EAP_IG)
LEVEL, LEFT = (0.9, 1.15), 0.1
"""Where f on a template that nobody saw counts as holding, and what may be left."""
MOVED = 3
"""Layers by which an end of a range may move between templates."""
DRAWS = 5


def all_of(split: Split) -> Cases:
    """Return all questions of a template."""
    return Cases.joined([split.ordering, split.deciding, split.measuring])


class Task:
    """The questions of a task that a model answers, by template."""

    def __init__(self, model: ResidualModel, name: str) -> None:
        self.model = model
        cases = Cases.of(model, read_pairs(model, name))
        self.splits = dict[str, Split]()
        for template, numbers in cases.templates.items():
            answered = [number for number in numbers if cases.answers[number]]
            if len(answered) >= LEAST:
                self.splits[template] = Split.of(cases, answered, template)
        self.is_asked = len(self.splits) == TEMPLATES


def fold(task: Task, template: str, method: str) -> dict[str, Any]:
    """Return what is found on all templates but one, there and on the one left out."""
    others = [split for split in task.splits.values() if split.template != template]
    unseen = all_of(task.splits[template])
    start = time.process_time()
    if method == OURS:
        found = find_stages(others, measuring=unseen)
        seconds = time.process_time() - start
        alone = find_stages([task.splits[template]])
        row = {**of_stages(found, others, unseen), "moved": moved(found, alone)}
        measured = found.measured
    else:
        scores = Cases.scores if method == PARTS else eap_ig_scores
        circuit = find_circuit(others, measuring=unseen, scores=scores)
        seconds = time.process_time() - start
        row = {"size": circuit.size, "holds": circuit.holds}
        row["share inside"] = circuit.size / circuit.mask.numel()
        measured = circuit.measured
    return {**row, **asdict(measured), "seconds": seconds}


def of_stages(found: Stages, others: Sequence[Split], unseen: Cases) -> dict[str, Any]:
    """Return the numbers of stages, of ranges elsewhere, and of cuts and directions."""
    inside, every = found.inside
    unseen = unseen.by("role")
    cuts = find_cuts(others, unseen)
    drawn = {place: random_directions(others, cuts, place) for place in cuts.directions}
    passing = {(cuts.layers[place], place): x for place, x in drawn.items()}
    return {
        "size": len(found.stages),
        "holds": True,
        "share inside": inside / every,
        "stages": [asdict(stage) for stage in found.stages],
        "elsewhere": elsewhere(found, unseen),
        "apart": cuts.apart,
        "word until": cuts.until,
        "end from": cuts.since,
        "width": cuts.width,
        "through directions": cuts.through[max(cuts.through)],
        "through random ones": passed(unseen, passing),
    }


def random_directions(others: Sequence[Split], cuts: Cuts, place: Any) -> MLPDirections:
    """Return an orthonormal basis of random sums of the changes before a cut.

    There are as many as balanced directions, of the questions that find.
    """
    finding = Cases.joined([x for split in others for x in split[1:3]]).by("role")
    layer = cuts.layers[place]
    changes = []
    for group, numbers in enumerate(finding.groups):
        first, second = finding.passes(group)
        at = [place in ROLES[role] for role in finding.roles[numbers[0]]]
        moved = first.streams[layer] - second.streams[layer]
        changes.append(moved[:, at].flatten(0, 1).double())
    rows = torch.cat(changes)
    generator = torch.Generator().manual_seed(0)
    count = len(cuts.directions[place].read)
    sums = torch.randn(count, len(rows), generator=generator).double() @ rows
    basis = torch.linalg.qr(sums.T)[0].T
    return MLPDirections(basis, basis)


def elsewhere(found: Stages, unseen: Cases) -> float:
    """Return the median f of ranges of equal length at random layers."""
    generator, n_layers = torch.Generator().manual_seed(0), len(found.mask)
    masks = []
    for _ in range(DRAWS):
        ranges = {}
        for stage in found.stages:
            size = stage.last - stage.first
            first = int(torch.randint(n_layers - size, (1,), generator=generator))
            ranges[stage.kind, stage.role] = (first, first + size)
        masks.append(mask_of(unseen.model, ranges))
    return float(unseen.faithfulness(torch.stack(masks).double()).median())


def moved(found: Stages, alone: Stages) -> float:
    """Return the share of the ends of ranges, of rows in both, that differ by more than three."""
    rows = [{(x.kind, x.role): (x.first, x.last) for x in one.stages} for one in (found, alone)]
    ends = []
    for row in rows[0].keys() & rows[1].keys():
        ends += [abs(a - b) > MOVED for a, b in zip(rows[0][row], rows[1][row], strict=True)]
    return float(np.mean(ends)) if ends else 1.0


def eap_ig_scores(cases: Cases, _: Tensor) -> Tensor:
    """Return the attribution of each part to the change of some questions, by EAP-IG."""
    points = GRADIENTS["EAP-IG inputs"]
    rows = [gradient_effects(case.alone, case.score, points) for case in cases.cases]
    return torch.stack(rows).mean(0) / cases.changes.mean()


def control(task: Task) -> dict[str, Any]:
    """Return what is found for an answer that is nonsense, and whether it is told apart."""
    found = find_stages([*task.splits.values()])
    splits = []
    for split in task.splits.values():
        splits.append(Split(split.template, *map(nonsense, split[1:])))
    of_nonsense = find_stages(splits)
    question = splits[0].measuring.cases[0].question
    said = verdict(found.measured, of_nonsense.measured, question)
    return {"told apart": "cannot be told" not in said, **asdict(of_nonsense.measured)}


def measure(folder: Path, name: str, model: ResidualModel, tasks: Sequence[str]) -> dict[str, Any]:
    """Return the rows of all folds and controls of a model, from their files if they exist."""
    # One at a time: a task holds the activations of all its texts.
    opened = lru_cache(maxsize=1)(lambda task: Task(model, task))

    def asked(call: Callable[..., dict[str, Any]], task: str, *key: str) -> dict[str, Any]:
        print(f"{name}: {task} {' '.join(key)}", flush=True)
        return call(opened(task), *key) if opened(task).is_asked else {}

    rows: dict[str, list[dict[str, Any]]] = {"folds": [], "controls": []}
    for task in tasks:
        templates = dict.fromkeys(question.template for question in read_pairs(model, task))
        keys = [(task, *key) for key in product(templates, METHODS)]
        names = ("task", "template", "method")
        path = folder / f"stages-{name}.jsonl"
        rows["folds"] += saved_rows(path, names, keys, lambda *key: asked(fold, *key))
        path = folder / f"nonsense-{name}.jsonl"
        rows["controls"] += saved_rows(path, ("task",), [(task,)], lambda x: asked(control, x))
    return rows


def rows_of(name: str, folds: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows of a model: all folds together, and each task."""
    found = [row for row in folds if "size" in row]
    by_method = {method: [row for row in found if row["method"] == method] for method in METHODS}

    def row(claim: str, number: Callable[[Any], Any], unit: str = "", **beside: Any) -> Row:
        """Return the share of folds, or the median over them, beside those of parts."""
        values = [number(x) for x in by_method[OURS]]
        middle = np.mean if isinstance(values[0], bool) else np.median
        baselines = {k: float(middle([number(x) for x in by_method[k]])) for k in METHODS[1:]}
        for key, other in beside.items():
            baselines[key.replace("_", " ")] = float(middle([other(x) for x in by_method[OURS]]))
        claim = f"{name}: {claim}"
        if isinstance(values[0], bool):
            return Row.of_share(claim, values, baselines=baselines)
        return Row.of_range(claim, values, unit=unit, baselines=baselines)

    def holds(f: float) -> bool:
        return LEVEL[0] <= f <= LEVEL[1]

    rows = [
        row(
            "f from 0.9 to 1.15 on the template left out, found or not",
            lambda x: bool(x["holds"] and holds(x["restored"]["value"])),
            ranges_elsewhere=lambda x: holds(x.get("elsewhere", 0)),
            balanced_directions=lambda x: holds(x["through directions"]),
            random_directions=lambda x: holds(x["through random ones"]),
        ),
        row(
            "f there, median and range",
            lambda x: x["restored"]["value"],
            ranges_elsewhere=lambda x: x["elsewhere"],
            balanced_directions=lambda x: x["through directions"],
            random_directions=lambda x: x["through random ones"],
        ),
        row("things in the answer, median and range", lambda x: x["size"]),
        row("share of parts and places inside, median and range", lambda x: x["share inside"]),
        row("at most 0.1 left there", lambda x: bool(x["left"]["value"] <= LEFT)),
        row("right there, median and range", lambda x: x["right"] / x["questions"]),
        row("closeness there, median and range", lambda x: x["closeness"]),
        row("search and measurement, median and range", lambda x: x["seconds"], "s"),
    ]
    moves = [x["moved"] for x in by_method[OURS]]
    claim = f"{name}: ends of ranges that move by more than {MOVED} layers on one template alone"
    rows.append(Row.of(claim, moves))
    for task in dict.fromkeys(x["task"] for x in folds):
        rows += of_task(name, task, [x for x in found if x["task"] == task])
    return rows


def of_task(name: str, task: str, folds: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return f on the template that was left out, of the three folds of a task, and its width."""
    claim = f"{name}, {task}: f on the template left out, median and range"
    if not folds:
        return [Row(f"{claim}; too few questions that the model answers", None)]
    of_method = {k: [x for x in folds if x["method"] == k] for k in METHODS}
    ours = of_method[OURS]
    baselines: dict[str, float | None] = {}
    for method in METHODS[1:]:
        baselines[method] = float(np.median([x["restored"]["value"] for x in of_method[method]]))
    baselines["stages"] = float(np.median([x["size"] for x in ours]))
    baselines["inside"] = float(np.median([x["share inside"] for x in ours]))
    baselines["word until"] = float(np.median([x["word until"] for x in ours]))
    since = [x["end from"] for x in ours if x["end from"] is not None]
    baselines["end from"] = float(np.median(since)) if since else None
    widths = [x["width"] for x in ours if x["width"] is not None]
    baselines["width"] = float(np.median(widths)) if len(widths) == len(ours) else None
    return [Row.of_range(claim, [x["restored"]["value"] for x in ours], baselines=baselines)]


def main() -> None:
    """Measure all models that are installed, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where rows are kept, so that a run resumes")
    parser.add_argument("models", nargs="*", help="names of models; by default all")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=TASKS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    recording = Recording()
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for name, model in open_models(given.folder):
        if not given.models or name in given.models:
            details[name] = measure(given.folder, name, model, given.tasks)
            rows += rows_of(name, details[name]["folds"])
            apart = [x["told apart"] for x in details[name]["controls"] if "told apart" in x]
            rows.append(Row.of_share(f"{name}: nonsense told apart by the sentence", apart))
    if given.tasks != TASKS:
        print("some tasks only: results/unseen_templates.json stays as it is")
        return
    recording.write(
        "unseen_templates",
        title="Stages on templates that nobody saw",
        command="python -m benchmarks.unseen_templates runs/unseen",
        rows=rows,
        settings={"level": LEVEL, "left": LEFT, "moved": MOVED, "draws": DRAWS},
        details=details,
    )


if __name__ == "__main__":
    main()

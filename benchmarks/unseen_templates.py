"""Do circuits hold on a template that nobody saw? Twelve tasks, three templates each.

    python -m benchmarks.unseen_templates runs/unseen [MODEL ...]

Tasks are those that come with bilens; they were written down before any circuit was measured on
them. For each task and each of its templates, the circuit of the other two is found by
the search of `bilens circuit` on some of their questions; it is measured on the rest of them, and
on all questions of the template that is left out. Beside it stand circuits that other scores order:
EAP-IG with 8 points, the gradient at the first text, contrastive flow, and random scores. The rule
for the size, and parts for necessity, are the same for all.

The rule for the size, and that opposing parts are in circuits that restore too much without them,
were chosen on six tasks in SmolLM2; the other six, and all of Gemma 3, have rows of their own.
Controls of all templates of a task are what the same search finds where there is nothing to find.

Each fold is a line of a file in the folder, so that a stopped run resumes with the next. At the end
`results/unseen_templates.json` is written. Times are of the processor, with one thread.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments.circuits import CHOSEN_ON, KEEP, LEFT, TASKS, TEMPLATES, splits_of
from experiments.patching import GRADIENTS, flows
from experiments.pretrained import open_models, saved_rows
from experiments.results import Recording, Row
from torch import Tensor

from bilens.circuits import Cases, Split, circuit, find_circuit, gradient_effects
from bilens.flows import read_pairs
from bilens.transformer import ResidualModel

OURS = "integrated gradients of the mask"
KINDS = ("the answer", "random parts", "nonsense", "shuffled weights")
BASELINES = ("EAP-IG", "gradient", "contrastive flow", "random order")
HIGHEST = 1.15
"""Largest f of a circuit."""
LEVEL = (0.9, 1.15)
"""Where f on a template that nobody saw counts as holding."""


def all_of(split: Split) -> Cases:
    """Return all questions of a template."""
    return Cases.joined([split.ordering, split.deciding, split.measuring])


class Task:
    """The questions of a task that a model answers, and the scores of its parts on them."""

    def __init__(self, model: ResidualModel, name: str) -> None:
        self.model, self.questions = model, read_pairs(model, name)
        self.splits = splits_of(model, self.questions)
        self.is_asked = len(self.splits) == TEMPLATES
        self.scores = cache(self._scores)

    def _scores(self, method: str, template: str) -> Tensor:
        """Return the scores of all parts on the questions of a template that order."""
        ordering = self.splits[template].ordering
        if method == OURS:
            return ordering.scores(ordering.everything)
        if method == "random order":
            generator = torch.Generator().manual_seed(sum(map(ord, template)))
            return torch.rand(ordering.shape, generator=generator, dtype=torch.float64)
        if method == "contrastive flow":
            total = flows(self.model, [case.question for case in ordering.cases])
        else:
            points = GRADIENTS["EAP-IG inputs" if method == "EAP-IG" else "gradient (AtP)"]
            rows = []
            for case in ordering.cases:
                rows.append(gradient_effects(case.alone, case.score, points))
            total = torch.stack(rows).mean(0)
        return total / ordering.changes.mean()


def fold(task: Task, template: str, method: str) -> dict[str, Any]:
    """Return what the circuit of all templates but one does, there and on the one left out."""
    splits = [split for split in task.splits.values() if split.template != template]
    names = {split.ordering: split.template for split in splits}
    there = task.splits[template]
    start = time.process_time()
    found = find_circuit(
        splits, KEEP, LEFT, scores=lambda cases, _: task.scores(method, names[cases])
    )
    seconds = time.process_time() - start
    unseen = asdict(found.on(all_of(there)))
    others = Cases.joined([there.ordering, there.deciding])
    return {
        "parts": found.size,
        "mask": found.mask.flatten().nonzero().flatten().tolist(),
        "holds": found.holds,
        "own": asdict(found.measured.restored),
        "unseen": unseen.pop("restored"),
        **unseen,
        "on those that measure": found.on(there.measuring).restored.value,
        "on the others": found.on(others).restored.value,
        "seconds": seconds,
    }


def controls_of(task: Task) -> dict[str, Any]:
    """Return the circuit of a task, and what the same search finds where there is nothing."""
    reading = circuit(task.model, task.questions, keep=KEEP, left=LEFT, controls=True)
    rows = {}
    for name, control in reading.circuits[0].controls.items():
        kind = name if name in KINDS else "nonsense"
        rows[kind] = {"parts": control.size, "holds": control.holds, **asdict(control.measured)}
    return {"controls": rows}


def measure(
    folder: Path,
    name: str,
    model: ResidualModel,
    baselines: Sequence[str],
    tasks: Sequence[str],
    controlled: Sequence[str],
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of all folds and controls of a model, from their files if they exist."""
    # One at a time: a task holds the activations of all its texts.
    opened = lru_cache(maxsize=1)(lambda task: Task(model, task))

    def of_fold(task: str, template: str, method: str) -> dict[str, Any]:
        print(f"{name}: {task} without {template}, {method}", flush=True)
        return fold(opened(task), template, method) if opened(task).is_asked else {}

    def of_task(task: str) -> dict[str, Any]:
        print(f"{name}: controls of {task}", flush=True)
        return controls_of(opened(task)) if opened(task).is_asked else {}

    rows: dict[str, list[dict[str, Any]]] = {"folds": [], "controls": []}
    for task in tasks:
        templates = dict.fromkeys(asked.template for asked in read_pairs(model, task))
        keys = [(task, *key) for key in product(templates, (OURS, *baselines))]
        path = folder / f"folds-{name}.jsonl"
        rows["folds"] += saved_rows(path, ("task", "template", "method"), keys, of_fold)
    for task in controlled:
        path = folder / f"controls-{name}.jsonl"
        rows["controls"] += saved_rows(path, ("task",), [(task,)], of_task)
    return rows


def jaccard(masks: Sequence[set[int]]) -> float:
    """Return the mean Jaccard index of every two sets."""
    return float(np.mean([len(a & b) / len(a | b) for a, b in combinations(masks, 2)]))


@dataclass(frozen=True)
class Summary:
    """The folds of a model, by method, and rows about those whose circuit was found."""

    name: str
    folds: Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]]

    @property
    def baselines(self) -> list[str]:
        """Names of the other methods."""
        return [method for method in next(iter(self.folds.values())) if method != OURS]

    def values(self, method: str, number: Callable[[Any], float], *, found: bool) -> list[float]:
        """Return a number of each fold of a method, or of each whose circuit was found."""
        rows = [row[method] for row in self.folds.values()]
        return [float(number(row)) for row in rows if row["holds"] or not found]

    def row(
        self, claim: str, number: Callable[[Any], Any], *, found: bool = True, unit: str = ""
    ) -> Row:
        """Return the row of a share, if the number is true or false, or of a median."""
        is_share = isinstance(number(next(iter(self.folds.values()))[OURS]), bool)
        middles: dict[str, float | None] = {}
        for method in (OURS, *self.baselines):
            values = self.values(method, number, found=found)
            middles[method] = (
                float((np.mean if is_share else np.median)(values)) if values else None
            )
        values, claim = self.values(OURS, number, found=found), f"{self.name}: {claim}"
        middle = middles.pop(OURS)
        if not values:
            return Row(claim, None, unit=unit, baselines=middles)
        if is_share:
            return Row.of_share(claim, [bool(value) for value in values], baselines=middles)
        drawn = np.random.default_rng(0).choice(values, (2000, len(values)))
        low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975]).tolist()
        return Row(claim, middle, low, high, len(values), unit, middles)

    def nearer(self, word: str) -> Row:
        """Return the share of folds where ours is ahead of EAP-IG, level with it, or behind.

        They are level where the interval of f holds the other's, else the one nearer to 1 is ahead.
        """
        found = []
        for row in self.folds.values():
            ours, other = row[OURS], row[BASELINES[0]]
            if not (ours["holds"] and other["holds"]):
                continue
            f, g = ours["unseen"], other["unseen"]
            if f["low"] is None or f["low"] <= g["value"] <= f["high"]:
                found.append("level")
            else:
                is_nearer = abs(1 - f["value"]) < abs(1 - g["value"])
                found.append("ahead" if is_nearer else "behind")
        claim = f"{self.name}: {word}, beside {BASELINES[0]}"
        return Row.of_share(claim, [x == word for x in found])

    def said(self) -> Row:
        """Return of templates that are said to have other parts, for how many it is true.

        f of the others' circuit is below half on those of their questions that measure, and, if
        it is true, on all others.
        """
        values = [row[OURS]["on the others"] for row in self.folds.values() if _is_said(row[OURS])]
        claim = f"{self.name}: f is below half on the rest of templates said to have other parts"
        if not values:
            return Row(claim, None)
        return Row.of_share(claim, [x < 0.5 for x in values])

    def shared(self) -> Row:
        """Return the Jaccard index of every two of a task's circuits, the median over tasks."""
        means: dict[str, list[float]] = {}
        for method in (OURS, *self.baselines):
            of_tasks: dict[str, list[set[int]]] = {}
            for (task, _), row in self.folds.items():
                of_tasks.setdefault(task, []).append(set(row[method]["mask"]))
            means[method] = [jaccard(masks) for masks in of_tasks.values()]
        baselines = {name: float(np.median(means[name])) for name in self.baselines}
        claim = f"{self.name}: parts that two circuits of a task share"
        return Row.of_range(claim, means[OURS], baselines=baselines)

    def of_task(self, task: str) -> Row:
        """Return f on the template that was left out, of the three circuits of a task."""
        rows = [row for (of, _), row in self.folds.items() if of == task]
        claim = f"{self.name}, {task}: f on the template left out, median and range"
        if not rows:
            return Row(f"{claim}; too few questions that the model answers", None)
        baselines: dict[str, float | None] = {}
        for method in self.baselines:
            baselines[method] = float(np.median([row[method]["unseen"]["value"] for row in rows]))
        found = all(row[OURS]["holds"] for row in rows)
        values = [row[OURS]["unseen"]["value"] for row in rows]
        return replace(Row.of_range(claim, values, baselines=baselines), held=found)


def _is_said(row: Mapping[str, Any]) -> bool:
    return bool(row["on those that measure"] < 0.5)


def control_rows(name: str, of_tasks: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return in which share of tasks the table of a page tells each control from the answer.

    None holds, it restores less than half, the model answers less than three quarters of its
    questions, or their number changes less than half as much.
    """
    rows = []
    for kind in KINDS[1:]:
        apart = []
        for row in of_tasks:
            if "controls" in row:
                answer, x = row["controls"][KINDS[0]], row["controls"][kind]
                unlike = x["restored"]["value"] < 0.5 or x["change"] < answer["change"] / 2
                known = x["answers"] is None or x["answers"] >= 0.75 * x["questions"]
                apart.append(unlike or not known or not (x["holds"] or kind == KINDS[1]))
        if apart:
            rows.append(Row.of_share(f"{name}: {kind} told apart", apart))
    return rows


def rows_of(name: str, measured_folds: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows of a model: all folds together, and each task."""
    folds: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in measured_folds:
        if "parts" in row:
            folds.setdefault((row["task"], row["template"]), {})[row["method"]] = row
    of, (least, most) = Summary(name, folds), LEVEL
    rows = [
        of.row("a circuit is found", lambda x: x["holds"], found=False),
        of.row("f there, median", lambda x: x["unseen"]["value"]),
        of.row(f"f from {least} to {most} there", lambda x: least <= x["unseen"]["value"] <= most),
        of.row(f"f at least {least} there", lambda x: x["unseen"]["value"] >= least),
        of.row("f below half there", lambda x: x["unseen"]["value"] < 0.5),
        of.row(
            f"found or not, f from {least} to {most} there",
            lambda x: least <= x["unseen"]["value"] <= most,
            found=False,
        ),
        of.row("f on other words, median", lambda x: x["own"]["value"]),
        of.row("parts, median", lambda x: x["parts"]),
        of.row(f"at most {LEFT} left there", lambda x: x["left"]["value"] <= LEFT),
        of.row("right there, median", lambda x: x["right"] / x["questions"]),
        of.row("closeness there, median", lambda x: x["closeness"]),
        of.row("search and measurement, median", lambda x: x["seconds"], unit="s"),
    ]
    for label, is_chosen in (("tasks of the choice", True), ("other tasks", False)):
        some = {key: row for key, row in folds.items() if (key[0] in CHOSEN_ON) == is_chosen}
        if some:
            part = Summary(name, some)
            rows += [
                part.row(f"{label}, a circuit is found", lambda x: x["holds"], found=False),
                part.row(
                    f"{label}, f from {least} to {most} there",
                    lambda x: least <= x["unseen"]["value"] <= most,
                ),
            ]
    rows.append(of.row("said to have other parts", _is_said, found=False))
    rows.append(of.said())
    rows += [of.nearer(word) for word in ("ahead", "level", "behind")]
    rows.append(of.shared())
    return rows + [
        of.of_task(task) for task in dict.fromkeys(row["task"] for row in measured_folds)
    ]


def main() -> None:
    """Measure all models that are installed, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where rows are kept, so that a run resumes")
    parser.add_argument("models", nargs="*", help="names of models; by default all")
    parser.add_argument(
        "--baselines", nargs="*", choices=BASELINES, default=BASELINES, help="EAP-IG at least"
    )
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=TASKS)
    parser.add_argument(
        "--controls", nargs="*", choices=TASKS, default=TASKS, help="of these tasks"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    recording = Recording()
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for name, model in open_models(given.folder):
        if not given.models or name in given.models:
            chosen = (given.baselines, given.tasks, given.controls)
            details[name] = measure(given.folder, name, model, *chosen)
            rows += rows_of(name, details[name]["folds"])
            rows += control_rows(name, details[name]["controls"])
    recording.write(
        "unseen_templates",
        title="Circuits on templates that nobody saw",
        command="python -m benchmarks.unseen_templates runs/unseen",
        rows=rows,
        settings={
            **{"keep": KEEP, "highest": HIGHEST, "left": LEFT, "level": LEVEL},
            "chosen on": CHOSEN_ON,
        },
        details=details,
    )


if __name__ == "__main__":
    main()

"""Do circuits hold on a template that nobody saw? Twelve tasks, three templates each.

    python -m benchmarks.unseen_templates runs/unseen [MODEL ...]

Tasks are those that come with bilens; they were written down before any circuit was measured on
them. For each task and each of its templates, the circuit of the other two is found by
the search of `bilens circuit` on some of their questions; it is measured on the rest of them, and
on all questions of the template that is left out. Beside it stand circuits that other scores order:
EAP-IG with 8 points, the gradient at the first text, contrastive flow, and random scores. The rule
for the size, and parts for necessity, are the same for all.

Each fold is a line of a file in the folder, so that a stopped run resumes with the next. At the end
`results/unseen_templates.json` is written. Times are of the processor, with one thread.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments.contrasts import flows
from experiments.patching import GRADIENTS
from experiments.pretrained import open_models, saved_rows
from experiments.results import Recording, Row
from scipy import stats
from torch import Tensor

from bilens.question_files import read_lines, task_names
from bilens.read.flow.circuit_measures import Measured, Split, found_parts
from bilens.read.flow.circuit_search import HIGHEST, Cases
from bilens.read.flow.gradients import gradient_effects
from bilens.read.flow.question import Question, read_pairs
from bilens.residual import ResidualModel

OURS = "integrated gradients of the mask"
BASELINES = ("EAP-IG", "gradient", "contrastive flow", "random order")
KEEP, LEFT = 1.0, 0.1
LEVEL = (0.9, 1.15)
"""Where f on a template that nobody saw counts as holding."""


def splits_of(model: ResidualModel, questions: Sequence[Question]) -> dict[str, Split]:
    """Return the questions that a model answers, by their templates, as a search splits them."""
    cases = Cases.of(model, questions)
    templates: dict[str, list[int]] = {}
    for number, (case, is_right) in enumerate(zip(cases.cases, cases.answers, strict=True)):
        of_template = templates.setdefault(case.question.template, [])
        if is_right:
            of_template.append(number)
    return {name: Split.of(cases, numbers, name) for name, numbers in templates.items() if numbers}


def all_of(split: Split) -> Cases:
    """Return all questions of a template."""
    return Cases.joined([split.ordering, split.deciding, split.measuring])


class Task:
    """The questions of a task that a model answers, and the scores of its parts on them."""

    def __init__(self, model: ResidualModel, name: str) -> None:
        questions = read_pairs(model, name)
        self.model, self.splits = model, splits_of(model, questions)
        self.templates = {question.template for question in questions}
        self.scores = cache(self._scores)

    @property
    def is_asked(self) -> bool:
        """Whether the model answers three questions of each template, the least for a circuit."""
        least = min(len(all_of(split)) for split in self.splits.values())
        return self.splits.keys() == self.templates and least >= 3

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
                rows.append(gradient_effects(case.alone, case.score.of_streams, points))
            total = torch.stack(rows).mean(0)
        return total / ordering.changes.mean()


def measured_on(cases: Cases, circuit: Tensor, others: Tensor) -> dict[str, Any]:
    """Return what a circuit does on some questions, and everything else."""
    rises, answered = cases.measured(torch.stack([circuit, others]).double())
    return asdict(Measured.of(rises, cases.changes, answered))


def fold(task: Task, template: str, method: str) -> dict[str, Any]:
    """Return what the circuit of all templates but one does, there and on the one left out."""
    splits = [split for split in task.splits.values() if split.template != template]
    names = {split.ordering: split.template for split in splits}
    start = time.process_time()
    found, mask, needed = found_parts(
        splits, KEEP, LEFT, lambda cases, _: task.scores(method, names[cases])
    )
    seconds = time.process_time() - start
    on = partial(measured_on, circuit=mask, others=~mask | needed)
    own = on(Cases.joined([split.measuring for split in splits]))
    unseen = on(all_of(task.splits[template]))
    return {
        "parts": int(mask.sum()),
        "mask": mask.flatten().nonzero().flatten().tolist(),
        "holds": found.holds,
        "own": own["restored"],
        "unseen": unseen.pop("restored"),
        **unseen,
        "seconds": seconds,
    }


def measure(
    folder: Path,
    name: str,
    model: ResidualModel,
    baselines: Sequence[str],
    tasks: Sequence[str],
    commit: str,
) -> list[dict[str, Any]]:
    """Return the rows of all folds of a model, from their file if they exist."""
    # One at a time: a task holds the activations of all its texts.
    opened = lru_cache(maxsize=1)(lambda task: Task(model, task))

    def of_fold(task: str, template: str, method: str) -> dict[str, Any]:
        print(f"{name}: {task} without {template}, {method}", flush=True)
        row = fold(opened(task), template, method) if opened(task).is_asked else {}
        return row | {"commit": commit}

    folds: list[dict[str, Any]] = []
    for task in tasks:
        templates = dict.fromkeys(line.template for line in read_lines(task))
        keys = [(task, *key) for key in product(templates, (OURS, *baselines))]
        path = folder / f"folds-{name}.jsonl"
        folds += saved_rows(path, ("task", "template", "method"), keys, of_fold)
    return folds


def share(values: Sequence[bool]) -> tuple[float, float, float]:
    """Return a share with its interval of 95 %, Wilson's."""
    of_all = stats.binomtest(sum(values), len(values))
    low, high = of_all.proportion_ci(method="wilson")
    return of_all.statistic, low, high


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
            _, low, high = share([bool(value) for value in values])
        else:
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
        value, low, high = share([x == word for x in found])
        return Row(f"{self.name}: {word}, beside {BASELINES[0]}", value, low, high, len(found))

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
    parser.add_argument("--tasks", nargs="*", choices=task_names(), default=task_names())
    given = parser.parse_args()
    torch.set_num_threads(1)
    recording = Recording()
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for name, model in open_models(given.folder):
        if not given.models or name in given.models:
            details[name] = measure(
                given.folder, name, model, given.baselines, given.tasks, recording.commit
            )
            rows += rows_of(name, details[name])
    recording.write(
        "unseen_templates",
        title="Circuits on templates that nobody saw",
        command="python -m benchmarks.unseen_templates runs/unseen",
        rows=rows,
        settings={
            **{"keep": KEEP, "highest": HIGHEST, "left": LEFT, "level": LEVEL},
            # A run that was stopped keeps rows of an earlier commit.
            "commits of rows": sorted({row["commit"] for rows in details.values() for row in rows}),
        },
        details=details,
    )


if __name__ == "__main__":
    main()

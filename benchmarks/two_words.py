"""Stages of questions in which two words differ: a role for each of them, or one for both.

`python -m benchmarks.two_words --write` takes ten minutes of a core, after `make test-models`, and
writes `results/two_words.json`. In one task the names of a sentence are exchanged, in the other the
numbers of two nouns. Both searches run on the same questions of SmolLM2, and are measured on each
template that was left out. The last row is the command that draws the figure of 24 questions in a
file, with its start and the model's: seconds of the processor, of a process of its own.
"""

import argparse
import os
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
from experiments.results import Recording, Row
from tests.real.packages import SMOLLM2, gguf_file

import bilens
from bilens.circuits import ROLES, Cases, Stages, circuit
from bilens.flows import Question

NAMES = ["Mary", "John", "Tom", "Anna", "Paul", "Lisa", "Mark", "Sara"]
NOUNS = ["dog", "cat", "boy", "girl", "tree", "car", "toy", "bird"]
STEPS = (1, 3)
"""Each word stands beside those that are this far behind it in the list."""
TASKS = {
    "names exchanged": (
        "Then {a} and {b} went to the store, and {a} gave a drink to",
        "When {a} and {b} had a long talk, {a} gave the book to",
        "After {a} and {b} worked all day, {a} sent the money to",
    ),
    "numbers exchanged": (
        "The {a} near the {b}",
        "The {a} that the {b} liked",
        "I think that the {a} behind the {b}",
    ),
}
PLACES = {"word 2": "second word", "between": "places between"}
FIGURE = 24
"""Questions of the figure."""
GOOD = (0.9, 1.15)
TWO_ROLES = Cases.__dict__["roles"]
FIRST = {ROLES.index(x): ROLES.index(x.replace(" 2", "")) for x in ROLES if "word 2" in x}
"""The role of the first word by that of the second, each as its number."""


def questions(task: str) -> list[Question]:
    """Return the questions of a task: after names the other one, after nouns the first's verb."""
    found = []
    for template in TASKS[task]:
        words = NAMES if task == "names exchanged" else NOUNS
        for i, first in enumerate(words):
            for step in STEPS:
                second = words[(i + step) % len(words)]
                if words is NAMES:
                    texts = [
                        template.format(a=a, b=b) for a, b in ((first, second), (second, first))
                    ]
                    token, minus = f" {second}", f" {first}"
                else:
                    ends = (("s", ""), ("", "s"))
                    texts = [template.format(a=first + a, b=second + b) for a, b in ends]
                    token, minus = " are", " is"
                found.append(Question(texts[0], token, (minus,), texts[1], task, template))
    return found


def one_role(cases: Cases) -> list[tuple[int, ...]]:
    """Return the roles of questions with the second word among the first ones."""
    return [tuple(FIRST.get(i, i) for i in roles) for roles in TWO_ROLES.func(cases)]


def of_task(model: Any, task: str) -> list[Row]:
    """Return what both searches find, and how it holds."""
    rows = []
    for name, roles in {"one role": one_role, "two roles": TWO_ROLES.func}.items():
        computed = cached_property(roles)
        computed.__set_name__(Cases, "roles")
        with patch.object(Cases, "roles", computed):
            start = time.process_time()
            [answer] = circuit(model, questions(task)).circuits
            assert isinstance(answer, Stages)
            seconds = time.process_time() - start
        held = [stages.measured for stages in answer.left_out.values()]
        shares, left = [x.restored.value for x in held], [x.left.value for x in held]
        claim = f"{task}, {name}: "
        good = sum(GOOD[0] <= f <= GOOD[1] for f in shares)
        inside, every = answer.inside
        beside = {"inside": inside / every, "templates": len(held), "good": good}
        rows += [
            Row.of_range(f"{claim}f on the template left out", shares, baselines=beside),
            Row.of_range(f"{claim}left there", left),
            Row(f"{claim}seconds of the whole call", seconds, unit="s"),
        ]
        for stage in answer.stages:
            where = f"{stage.kind} at the {PLACES.get(stage.role, stage.role)}"
            layers = {"first layer": stage.first, "last layer": stage.last}
            rows.append(Row(f"{claim}f without {where}", stage.without, baselines=layers))
        print(*rows, sep="\n", flush=True)
    return rows


def figure(asked: list[Question], folder: Path) -> float:
    """Return the seconds from questions in a file to a figure."""
    columns = ("text", "token", "minus", "against")
    table = [[x.text, x.token, x.minus[0], x.against] for x in asked]
    pd.DataFrame(table, columns=columns).to_csv(folder / "own.tsv", sep="\t", index=False)
    command = [sys.executable, "-m", "bilens", "circuit", str(gguf_file(SMOLLM2))]
    command += ["--questions", str(folder / "own.tsv"), "--figure", str(folder / "own.svg")]
    before = os.times()
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    after = os.times()
    assert (folder / "own.svg").stat().st_size
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def main() -> None:
    """Measure both tasks and the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    recording, rows = Recording() if parser.parse_args().write else None, list[Row]()
    torch.set_num_threads(1)
    model = bilens.load(gguf_file(SMOLLM2), dtype=torch.float32)
    for task in TASKS:
        rows += of_task(model, task)
    with TemporaryDirectory() as folder:
        seconds = figure(questions("names exchanged")[:FIGURE], Path(folder))
    rows.append(Row(f"{FIGURE} questions in a file to a figure", seconds, unit="s"))
    print(rows[-1], flush=True)
    if recording is not None:
        recording.write(
            "two_words",
            title="Stages of questions in which two words differ",
            command="python -m benchmarks.two_words --write",
            rows=rows,
            settings={
                "templates": {task: list(texts) for task, texts in TASKS.items()},
                "questions of a template": len(NAMES) * len(STEPS),
                "questions of the figure": FIGURE,
                "good": list(GOOD),
            },
        )


if __name__ == "__main__":
    main()

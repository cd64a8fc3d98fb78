"""From one question to a circuit: are the questions that a model proposes good, and do they do?

    python -m benchmarks.proposals runs/proposals

For five behaviours SmolLM2 proposes questions like the first of a task that comes with bilens. A
circuit is found on them and measured on the hand-written questions of the task, and the other way
round. Of the proposals of each behaviour twenty, evenly over the file, were read by the author of
the method, whose judgements are in `benchmarks/proposals_judged.tsv`: accepted are two English
sentences with right answers. A proposal without a judgement is printed, and the run
stops before anything is written.
"""

import argparse
import csv
import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from experiments.circuits import KEEP, LEFT, splits_of
from experiments.pretrained import SMOLLM2, saved_rows, smollm2
from experiments.results import Recording, Row

from benchmarks.unseen_templates import all_of
from bilens import load
from bilens.circuits import Cases, find_circuit, propose_questions
from bilens.flows import Question, read_pairs
from bilens.transformer import ResidualModel

BEHAVIOURS = ("language", "comparative", "ioi", "plural", "capitals")
COUNT = 48
READ = 20
JUDGED = Path(__file__).with_name("proposals_judged.tsv")


@cache
def proposed(model: ResidualModel, task: str) -> list[Question]:
    """Return the proposals of a behaviour, from the first question of its task."""
    first = read_pairs(model, task)[0]
    question = Question(first.text, first.token, first.minus, first.against, task)
    return [proposal.question for proposal in propose_questions(model, question, COUNT)]


def transfer(model: ResidualModel, task: str) -> dict[str, Any]:
    """Return f of the circuit of proposals on hand-written questions, and the other way round."""
    print(task, flush=True)
    row: dict[str, Any] = {}
    kinds = {"proposals": [*splits_of(model, proposed(model, task)).values()]}
    kinds["by hand"] = [*splits_of(model, read_pairs(model, task)).values()]
    for name, other in (("proposals", "by hand"), ("by hand", "proposals")):
        start = time.process_time()
        found = find_circuit(kinds[name], KEEP, LEFT)
        there = Cases.joined([all_of(split) for split in kinds[other]])
        row[name] = {
            "seconds to search": time.process_time() - start,
            "parts": found.size,
            "holds": found.holds,
            "own": asdict(found.measured),
            "there": asdict(found.on(there)),
        }
    return row


def judgements() -> dict[tuple[str, str], bool]:
    """Return whether the author of the method accepted a proposal, by its two texts."""
    with JUDGED.open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file, delimiter="\t")]
    return {(row["text"], row["against"]): row["accepted"] == "yes" for row in rows}


def to_read(model: ResidualModel, task: str) -> dict[str, Any]:
    """Return the proposals of a behaviour that are read, and the time to propose all."""
    start = time.process_time()
    questions, rows = proposed(model, task), []
    seconds = time.process_time() - start
    count = min(READ, len(questions))
    for i in range(count):
        question = questions[i * len(questions) // count]
        answers = {"token": question.token, "minus": question.minus[0]}
        rows.append({"text": str(question.text), "against": str(question.against), **answers})
    return {"seconds to propose": seconds, "read": rows}


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where rows are kept, so that a run resumes")
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    recording = Recording()
    model = load(str(smollm2()))
    assert isinstance(model, ResidualModel)
    known, read = judgements(), []
    keys = [(task,) for task in BEHAVIOURS]
    of_tasks = saved_rows(folder / "read.jsonl", ("task",), keys, lambda task: to_read(model, task))
    for of_task in of_tasks:
        for row in of_task["read"]:
            accepted = known.get((row["text"], row["against"]))
            read.append({"task": of_task["task"], **row, "accepted": accepted})
    missing = [row for row in read if row["accepted"] is None]
    for row in missing:
        print("\t".join(str(row[name]) for name in ("task", "text", "against", "token", "minus")))
    if missing:
        raise SystemExit(f"{len(missing)} proposals have no judgement in {JUDGED.name}")
    transferred = folder / "transfer.jsonl"
    found = saved_rows(transferred, ("task",), keys, lambda task: transfer(model, task))
    judged = [row["accepted"] for row in read]
    rows = [Row.of_share("proposals that the author of the method accepts", judged)]
    for task in BEHAVIOURS:
        judged = [row["accepted"] for row in read if row["task"] == task]
        rows.append(Row.of_share(f"{task}: proposals accepted", judged))
    for row in found:
        for name, claim in (
            ("proposals", "circuit of proposals, f on hand-written questions"),
            ("by hand", "circuit of hand-written questions, f on proposals"),
        ):
            there, own = row[name]["there"], row[name]["own"]
            rows.append(
                Row(
                    f"{row['task']}: {claim}",
                    there["restored"]["value"],
                    there["restored"]["low"],
                    there["restored"]["high"],
                    there["questions"],
                    baselines={"on other questions of its own kind": own["restored"]["value"]},
                    held=row[name]["holds"],
                )
            )
    seconds = []
    for of_task, row in zip(of_tasks, found, strict=True):
        seconds.append(of_task["seconds to propose"] + row["proposals"]["seconds to search"])
    rows.append(Row.of_range("from one question to a circuit, of the processor", seconds, unit="s"))
    recording.write(
        "proposals",
        title="Questions that a model proposes",
        command="python -m benchmarks.proposals runs/proposals",
        rows=rows,
        settings={"model": SMOLLM2, "proposals": COUNT, "read of each": READ, "keep": KEEP},
        details={"read": read, "circuits": found},
    )


if __name__ == "__main__":
    main()

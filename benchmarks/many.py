"""Flows of many questions: memory, speed, runs that are killed, and how far two hours go.

`python -m benchmarks.many --write` takes 20 minutes of one core, after `make test-models`, and
writes `results/many.json`. Questions of agreement are made from lists of words, the same each time.
Memory is what a run adds to a process of its own. Two processes are killed together, ten times, at
random moments, and then left to end. What two hours hold is extrapolated from the speed of minutes.

`python -m benchmarks.many --hours 2 --folder runs/agreement --write` runs as many questions of
SmolLM2 as so much time of a core holds, and writes what they show to `results/agreement.json`. The
folder keeps the rows and the time that they took, so a run that was stopped goes on.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from experiments.results import Recording, Row
from tests.real.packages import SMOLLM2, gguf_file

import bilens
from benchmarks import agreement
from benchmarks.agreement import questions
from benchmarks.clock import spent
from benchmarks.subprocess_memory import peak_above
from bilens.flows import Question, flow_table

FEW, MANY = 1_000, 50_000
KILLED, SHARD, KILLS = 1_500, 32, 10
SHARD_OF_HOURS = 512
BATCH, TURNS, MINUTES, HOURS = 8, 5, 2, 2


def memory(number: int) -> None:
    """Print the MB that flows of some questions add to this process."""
    torch.set_num_threads(1)
    model = bilens.load("story")
    with TemporaryDirectory() as folder:
        flow_table(model, questions(10), f"{folder}/first")  # fills caches of torch
        run = partial(flow_table, model, questions(number), f"{folder}/rows")
        print(peak_above(run)[0])


def passes(model: Any, asked: list[Question]) -> None:
    """Run both texts of questions forwards, and the changes of their numbers back."""
    rows = [[model.ids(text) for text in (x.text, x.against)] for x in asked]
    tokens = torch.tensor([[model.token(x.token), model.token(x.minus[0])] for x in asked])
    ids = torch.stack([row[side] for side in (0, 1) for row in rows])
    with torch.enable_grad():
        x = model.modules.embed.rows(ids).requires_grad_()
        logits = model.model(inputs_embeds=x, use_cache=False, logits_to_keep=1).logits[:, -1]
        pairs = logits.gather(1, tokens.repeat(2, 1))
        first, second = (pairs[:, 0] - pairs[:, 1]).chunk(2)
        torch.autograd.grad((first - second).sum(), x)


def speed(model: Any, folder: Path) -> list[float]:
    """Return the time of rows over that of both passes of the same batch, in each turn."""
    length = len(model.ids("The dogs near the cat"))
    fits = (x for x in questions() if {*map(len, map(model.ids, (x.text, x.against)))} == {length})
    asked, ratios = list(islice(fits, BATCH)), []
    for turn in range(TURNS + 1):
        rows = spent(partial(flow_table, model, asked, folder / f"{turn}"))
        ratios.append(rows / spent(partial(passes, model, asked)))
    return ratios[1:]  # the first fills caches


def within(model: Any, folder: Path, seconds: float, shard: int) -> tuple[Any, float]:
    """Return the table of the questions whose rows a core writes in some time, and the time.

    Both are of all runs with this folder; shards are whole, and the last one ends after the time.
    """
    kept, rows, start = folder / "seconds", folder / "rows", time.process_time()
    rows.mkdir(parents=True, exist_ok=True)
    before = float(kept.read_text()) if kept.exists() else 0.0

    def until() -> Iterator[Question]:
        for number, question in enumerate(questions()):
            if number % shard == 0 and not any(rows.glob(f"{number // shard:06}-*")):
                kept.write_text(f"{before + time.process_time() - start}")
                if float(kept.read_text()) > seconds:
                    return
            yield question

    return flow_table(model, until(), rows, shard=shard), float(kept.read_text())


def in_two(model: Any, asked: list[Question], folder: Path, seconds: float | None) -> bool:
    """Run a table in two processes, forks of this one; kill both after some time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    running = []
    for rank in ("0", "1"):
        child = os.fork()
        if child == 0:
            os.environ.update(group, MASTER_PORT=f"{port}", RANK=rank, LOCAL_RANK=rank)
            found = flow_table(model, asked, folder, shard=SHARD)
            os._exit(found.questions != len(asked))
        running.append(child)
    if seconds is not None:
        time.sleep(seconds)
        for child in running:
            os.kill(child, signal.SIGKILL)
    ends = [os.waitpid(child, 0)[1] for child in running]
    return not any(ends)


def killed(folder: Path) -> list[Row]:
    """Return what ten kills lose, and whether the rows are those of a run that was not killed."""
    model: Any = bilens.load("story")
    asked = list(questions(KILLED))
    start = time.perf_counter()
    flow_table(model, asked, folder / "whole", shard=SHARD)
    whole, draw = time.perf_counter() - start, Random(0)
    kills = 0
    for _ in range(KILLS):
        # Each run has a tenth of the time on average, so that no kill finds all done.
        kills += not in_two(model, asked, folder / "killed", draw.uniform(0.02, 0.18) * whole)
    if not in_two(model, asked, folder / "killed", None):
        raise SystemExit("the last run of two processes has failed")
    columns = ["number", "text", "token", "minus", "against", "task", "template", "target"]
    columns += ["clean", "corrupt"]
    rows, expected = (
        pd.read_parquet(folder / name).sort_values("number", ignore_index=True)
        for name in ("killed", "whole")
    )
    lost = len({*expected["number"]} - {*rows["number"]})
    same = lost == 0 and rows[columns].equals(expected[columns])
    parts = [name for name in expected if name not in (*columns, "reason")]
    gap = (rows[parts] - expected[parts]).abs().max(axis=None) if same else float("nan")
    return [
        Row("kills of two processes", kills),
        Row("rows that are lost after the kills", lost, n=KILLED),
        Row("rows that are there twice", int(rows["number"].duplicated().sum()), n=KILLED),
        Row("largest difference of a flow from a run that was not killed", float(gap)),
    ]


def of_smollm2(folder: Path) -> list[Row]:
    """Return speed and size on SmolLM2, and what follows for two hours and a million questions."""
    model: Any = bilens.load(gguf_file(SMOLLM2), dtype=torch.float32)
    ratios = speed(model, folder / "speed")
    table, seconds = within(model, folder, MINUTES * 60, SHARD)
    asked = table.questions
    size = sum(path.stat().st_size for path in table.folder.iterdir()) / asked
    claim = "rows of questions over a forward and a backward pass of the same batch, SmolLM2"
    hours = f"questions of SmolLM2 in {HOURS} hours of one core, extrapolated"
    return [
        Row.of_range(claim, ratios),
        Row(f"questions of SmolLM2 in {MINUTES} minutes of one core", asked),
        Row(hours, asked / seconds * HOURS * 3600),
        Row("a row of SmolLM2", size, unit="bytes"),
        Row(
            "hours of one core for a million questions, extrapolated", 1e6 / asked * seconds / 3600
        ),
        Row("rows of a million questions, extrapolated", size / 1000, unit="GB"),
        Row("questions that SmolLM2 cannot read", table.unread, n=asked),
        Row("clusters of questions", len(table.clusters["cluster"])),
    ]


def of_hours(hours: float, folder: Path) -> list[Row]:
    """Return what the questions of SmolLM2 show that some hours of a core hold."""
    model: Any = bilens.load(gguf_file(SMOLLM2), dtype=torch.float32)
    table, seconds = within(model, folder, hours * 3600, SHARD_OF_HOURS)
    return [Row("time of a core", seconds / 3600, unit="hours"), *agreement.rows_of(table)]


def main() -> None:
    """Measure each, and write all of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--memory", type=int, help="number of questions to measure in this process")
    parser.add_argument("--hours", type=float, help="of a core, for questions of SmolLM2")
    parser.add_argument("--folder", type=Path, help="for the rows of --hours")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.memory:
        memory(given.memory)
        return
    if (given.hours is None) != (given.folder is None):
        parser.error("--hours and --folder belong together")
    torch.set_num_threads(1)
    recording, rows = Recording() if given.write else None, list[Row]()
    if given.hours:
        rows = of_hours(given.hours, given.folder)
        print(*rows, sep="\n")
        if recording is not None:
            recording.write(
                "agreement",
                title="Flows of many questions of agreement, SmolLM2",
                command=f"python -m benchmarks.many --hours {given.hours:g} --folder F --write",
                rows=rows,
                settings={
                    "hours": given.hours,
                    "questions of a sample": agreement.SIZES,
                    "samples": agreement.SAMPLES,
                    "strongest parts": agreement.TOP,
                    "worst words and parts": agreement.WORST,
                },
                seeds=[agreement.SEED],
            )
        return
    for number in (FEW, MANY):
        command = [sys.executable, "-m", "benchmarks.many", "--memory", f"{number}"]
        added = float(subprocess.check_output(command, text=True))
        rows.append(
            Row(f"memory that {number:,} questions of the story model add", added, unit="MB")
        )
        print(rows[-1], flush=True)
    with TemporaryDirectory() as name:
        for measure, place in ((killed, "kills"), (of_smollm2, "smollm2")):
            rows += measure(Path(name, place))
            print(*rows, sep="\n", flush=True)
    if recording is not None:
        recording.write(
            "many",
            title="Flows of many questions",
            command="python -m benchmarks.many --write",
            rows=rows,
            settings={
                "questions": {"made": agreement.ALL, "memory": [FEW, MANY], "killed": KILLED},
                "shard of the runs that are killed": SHARD,
                "kills": KILLS,
                "batch of the ratio": BATCH,
                "minutes": MINUTES,
                "hours": HOURS,
            },
        )


if __name__ == "__main__":
    main()

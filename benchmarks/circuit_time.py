"""Time of circuits: the search of stages alone, and whole calls, also with controls and of parts.

    python -m benchmarks.circuit_time [--turns 3]

Times are the processor's, of one thread, without imports and loading, with the range over turns.
Beside each stand the forward passes of both texts of its questions, which any method needs. Writes
`results/circuit_time.json`.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from experiments.pretrained import SMOLLM2, smollm2
from experiments.results import Recording, Row

from benchmarks.unseen_templates import Task
from bilens import load
from bilens.circuits import Cases, circuit, find_stages
from bilens.flows import read_pairs
from bilens.transformer import ResidualModel

TASKS = ("agreement", "ioi")
WHOLE: dict[str, dict[str, Any]] = {
    "": {},
    ", with controls": {"controls": True},
    ", of parts": {"level": "parts"},
}


def spent(call: Callable[[], Any]) -> float:
    """Return the processor's seconds of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def search(model: ResidualModel, task: str) -> tuple[float, float]:
    """Return the time of a search on the first two templates of a task, whose passes are known.

    Beside it is that of a pass of the questions that order, forward and backward.
    """
    splits = [*Task(model, task).splits.values()][:2]
    few = splits[0].deciding
    ordering = Cases.joined([split.ordering for split in splits])
    everything = ordering.everything[None].double()
    both = spent(lambda: ordering.gradient(everything, [1.0]))
    return spent(lambda: find_stages(splits, measuring=few)), both


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    turns = range(parser.parse_args().turns)
    torch.set_num_threads(1)
    recording = Recording()
    model = load(str(smollm2()))
    assert isinstance(model, ResidualModel)
    rows = []

    def add(claim: str, seconds: list[float], **baselines: float) -> None:
        print(f"{claim}: {seconds}", flush=True)
        rows.append(Row.of_range(claim, seconds, unit="s", baselines=baselines))

    for task in TASKS:
        asked = read_pairs(model, task)
        passes = spent(partial(Cases.of, model, asked[: 2 * len(asked) // 3]))
        searches = [search(model, task) for _ in turns]
        both = min(time for _, time in searches)
        add(
            f"{task}: search on 2 templates of 24 questions",
            [time for time, _ in searches],
            **{"passes of both texts": passes, "pass forward and backward": both},
        )
    for name, options in WHOLE.items():
        asked = read_pairs(model, TASKS[0])
        passes = spent(partial(Cases.of, model, asked))
        times = [spent(partial(circuit, model, asked, **options)) for _ in turns]
        add(
            f"{TASKS[0]}: circuit of 3 templates of 24 questions{name}",
            times,
            **{"passes of both texts": passes},
        )
    recording.write(
        "circuit_time",
        title="Time of circuits",
        command="python -m benchmarks.circuit_time",
        rows=rows,
        settings={
            **{"model": SMOLLM2, "threads": 1, "low and high": "range over turns"},
            **{"templates": [2, 3], "questions of a template": 24},
        },
    )


if __name__ == "__main__":
    main()

"""What readings of texts cost, in forward passes of the model on the texts that they are given.

`python -m benchmarks.cost --write` takes fifteen minutes of a core, after `make test-models`, and
writes `results/cost.json`. Passes are counted as operations of matrix products, by torch's own
counter, and do not depend on the machine; the reference is the forward pass of the same texts by
transformers, logits included. Seconds of that pass are of the processor, of one thread, for
SmolLM2 and a Llama of random weights.
"""

import argparse
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from experiments.results import Recording, Row
from tests.real.packages import SMOLLM2, gguf_file

import bilens
from benchmarks.clock import spent
from benchmarks.flow_time import opened
from bilens.circuits import Cases, circuit, patch, task_directions
from bilens.flows import Question, answer_flows, flow, read_lens, read_pairs
from bilens.transformer import ResidualModel, counting_operations

TASK, TOKENS, NODES, ANSWER = "agreement", 32, 20, 20
QUESTIONS = [24, 72]
"""Of a template, and of the task."""
TIMED = ("circuit, 24 questions", "circuit, 72 questions, three templates")
"""Readings whose seconds are taken, beside those of the forward passes."""
BILLION = [2048, 8192, 16]
"""Width, hidden units and layers of Llama 3.2 1B."""


def operations(call: Callable[[], object]) -> int:
    """Return the floating-point operations of a call, in attention too."""
    with counting_operations() as counter:
        call()
    return int(counter.get_total_flops())


def forward(model: ResidualModel, texts: list[Any]) -> None:
    """Run a model on each text alone."""
    with torch.no_grad():
        for text in texts:
            ids = text if isinstance(text, torch.Tensor) else model.ids(text)
            model.model(ids[None], use_cache=False)


def readings(model: ResidualModel, pairs: list[Question]) -> dict[str, tuple[Any, list[Question]]]:
    """Return a call of each reading of texts, and the questions that it is given."""
    first = pairs[:1]
    asked = first[0]
    given = (model, asked.text, asked.token)
    options: dict[str, Any] = {"minus": asked.minus, "against": asked.against}
    tuned = deepcopy(model)
    for weight in tuned.model.parameters():
        weight.data.mul_(1.01)
    template = [x for x in pairs if x.template == asked.template]
    count = f"{len(pairs)} questions, three templates"
    assert [len(template), len(pairs)] == QUESTIONS
    return {
        "flow": (partial(flow, *given, labels=0, **options), first),
        f"flow, {NODES} nodes labelled": (partial(flow, *given, **options), first),
        f"flow, {NODES} nodes removed": (partial(flow, *given, ablate=NODES, **options), first),
        f"flow, each of {ANSWER} tokens of an answer": (
            partial(answer_flows, *given[:2], against=asked.against, generate=ANSWER),
            first,
        ),
        "lens": (partial(read_lens, model, asked.text, asked.against), first),
        "diff": (partial(bilens.diff, model, tuned, *given[1:], minus=asked.minus), first),
        "patch of all heads and MLPs": (partial(patch, *given, **options), first),
        "circuit, one question": (partial(circuit, model, first), first),
        f"circuit, {len(template)} questions": (partial(circuit, model, template), template),
        f"circuit, {count}": (partial(circuit, model, pairs), pairs),
        f"circuit --level parts, {count}": (partial(circuit, model, pairs, level="parts"), pairs),
        f"task-directions, {len(template)} questions": (
            partial(task_directions, model, template),
            template,
        ),
    }


def main() -> None:
    """Print each number, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="readings whose name holds this")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    recording, rows = Recording() if given.write else None, []
    model = bilens.load(gguf_file(SMOLLM2), dtype=torch.float32)
    assert isinstance(model, ResidualModel)
    cases = Cases.of(model, read_pairs(model, TASK)).cases
    for name, (call, of_call) in readings(model, [case.question for case in cases]).items():
        if given.only in name:
            texts = [text for x in of_call for text in (x.text, x.against)]
            passes = operations(call) / operations(partial(forward, model, texts))
            rows.append(Row(name, passes, unit="passes of both texts"))
            print(rows[-1], flush=True)
            if name in TIMED:
                beside = {"forward passes of both texts": spent(partial(forward, model, texts))}
                claim = f"{name}, whole call for SmolLM2"
                rows.append(Row(claim, spent(call), unit="s", baselines=beside))
                print(rows[-1], flush=True)
    for name, sizes in {"SmolLM2, 0.135 billion": None, "Llama, 1.24 billion": BILLION}.items():
        model = opened(sizes)
        ids = [torch.arange(TOKENS) + 100]
        times = [spent(partial(forward, model, ids)) for _ in range(4)]
        claim = f"{name} weights in float32: forward pass of {TOKENS} tokens"
        rows.append(Row.of_range(claim, times[1:], unit="s"))  # the first fills caches
        print(rows[-1], flush=True)
    if recording is not None:
        recording.write(
            "cost",
            title="Cost of readings in forward passes",
            command="python -m benchmarks.cost --write",
            rows=rows,
            settings={
                "task": TASK,
                "tokens": TOKENS,
                "nodes": NODES,
                "questions of a template, and of the task": QUESTIONS,
                "weights, billions": [0.135, 1.24],
                "rows": "median and range of the turns",
            },
        )


if __name__ == "__main__":
    main()

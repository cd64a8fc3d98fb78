"""Operations of torch in each form of call: whether a flow reads the model as it is.

`python -m benchmarks.calls` puts each call of `tests/flows/test_calls.py` into a small model and
prints those that are not read; `--write` also writes the counts to results/calls.json. A minute on
one core.
"""

import sys
import warnings
from collections import Counter

import torch
from experiments.results import Recording, Row
from tests.flows.own_model import own_model
from tests.flows.test_calls import CALLS, outcome

KINDS = {
    "other": "silently other than the module",
    "raw": "raw errors",
    "refused without": "refused without a line",
    "refused": "refused by name and line",
    "as it is": "equal to the module",
}


def main() -> None:
    """Run, print, and write if asked to."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    recording = Recording() if "--write" in sys.argv else None
    counts, n = Counter[str](), 0
    for name, call in CALLS.items():
        found = outcome(own_model(op=call))
        if found == "not a call of torch":
            continue
        n += 1
        counts[next(kind for kind in KINDS if found.startswith(kind))] += 1
        if found != "as it is":
            print(f"{name}: {found}", flush=True)
    rows = [
        Row(f"operations times call forms: {claim}", counts[kind], n=n)
        for kind, claim in KINDS.items()
    ]
    print(*rows, sep="\n")
    if recording is not None:
        recording.write(
            "calls",
            title="Operations in each form of call",
            command="python -m benchmarks.calls --write",
            rows=rows,
            settings={"tolerance": "float64"},
        )


if __name__ == "__main__":
    main()

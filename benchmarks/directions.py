"""Whether directions of a task hold the flow of a template that did not find them.

`python -m benchmarks.directions --write` finds directions of every MLP of SmolLM2, after
`make test-models`, on two templates of each task that comes with bilens, and writes
`results/directions.json`: the share of the flow through MLPs that they hold on the third. Beside
the balanced directions of `bilens task-directions` stand as many principal components of the
changes, of the adjoints, and random sums of the changes.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import torch
from experiments.results import Recording, Row
from tests.real.packages import SMOLLM2, gguf_file
from torch import Tensor

import bilens
from bilens.circuits import MLPDirections, task_directions
from bilens.flows import Question, adjoints_of, read_pairs
from bilens.transformer import ResidualModel

FILES = Path(bilens.__file__).parent.glob("tasks/*.tsv")
TASKS = sorted(path.stem for path in FILES if path.stem != "pronouns")
"""Tasks of models of English; the pronouns are those of the story model."""
BALANCED = "balanced"
OTHERS = ("components of changes", "components of adjoints", "random sums of changes")


Changes = list[tuple[Tensor, Tensor]]
"""Changes of the outputs of all MLPs in a question, and their adjoints: (time, d_model) of each."""


def changes_of(model: ResidualModel, question: Question) -> Changes:
    """Return those of a question, scaled to a change of the logit of 1."""
    adjoints = adjoints_of(model, [question])
    pairs: Changes = []
    for _, layer in adjoints.layers():
        if layer.mlp is None or layer.of_mlp is None:
            raise ValueError(f"a layer has no MLP whose output counts after {question.text!r}")
        pairs.insert(0, (adjoints.change(layer.mlp.leaf)[0], layer.of_mlp[0]))
    first, second = adjoints.numbers.tolist()
    scale = abs(first - second) ** -0.5
    return [(scale * change.double(), scale * adjoint.double()) for change, adjoint in pairs]


def orthonormal(finding: list[Changes], method: str, k: int) -> list[MLPDirections]:
    """Return k directions of each MLP, which are written and read along alike."""
    directions = []
    generator = torch.Generator().manual_seed(0)
    for layer in range(len(finding[0])):
        changes, adjoints = (torch.cat([x[layer][side] for x in finding]) for side in (0, 1))
        rows = adjoints if method == "components of adjoints" else changes
        if method == "random sums of changes":
            rows = torch.randn(k, len(rows), dtype=rows.dtype, generator=generator) @ rows
        basis = torch.linalg.svd(rows, full_matrices=False).Vh[:k]
        directions.append(MLPDirections(basis, basis))
    return directions


def share(unseen: list[Changes], directions: list[MLPDirections]) -> float:
    """Return 1 - sum |remainder| / sum |flow| over questions, layers and positions."""
    left = whole = 0.0
    for of_question in unseen:
        for (changes, adjoints), of_layer in zip(of_question, directions, strict=True):
            flow = (changes * adjoints).sum(-1)
            left += float((flow - of_layer.flows(changes, adjoints).sum(-1)).abs().sum())
            whole += float(flow.abs().sum())
    return 1 - left / whole


def by_template(questions: list[Question]) -> dict[str, list[Question]]:
    """Return the questions of each template, without those whose two texts another has."""
    seen, templates = set[frozenset[str]](), defaultdict[str, list[Question]](list)
    for question in questions:
        texts = frozenset((str(question.text), str(question.against)))
        if texts not in seen:
            seen.add(texts)
            templates[question.template].append(question)
    return templates


def of_task(model: ResidualModel, task: str, k: int) -> list[dict[str, float]]:
    """Return the share that each method's directions hold on each template, found without it."""
    templates = by_template(read_pairs(model, task))
    changes = {x: changes_of(model, x) for some in templates.values() for x in some}
    folds = []
    for name, unseen in templates.items():
        others = [some for other, some in templates.items() if other != name]
        # The first half of the questions find directions.
        half = len(unseen) // len(others)
        finding = [question for some in others for question in some[:half]]
        measuring = unseen[: len(finding)]
        own = task_directions(model, [*finding, *measuring], k, strongest=1)
        fold = {BALANCED: own.share}
        for method in OTHERS:
            directions = orthonormal([changes[x] for x in finding], method, k)
            fold[method] = share([changes[x] for x in measuring], directions)
        print(task, name, *(f"{method} {x:.2f}" for method, x in fold.items()), flush=True)
        folds.append(fold)
    return folds


def rows_of(folds: list[dict[str, float]]) -> list[Row]:
    """Return the median share over folds, and of how many each method's is the largest."""
    shares = {name: torch.tensor([fold[name] for fold in folds]) for name in folds[0]}
    first = [max(fold, key=lambda name: fold[name]) for fold in folds]
    own, n = shares[BALANCED], len(folds)
    medians = {name: float(shares[name].median()) for name in OTHERS}
    counts = {name: float(first.count(name)) for name in OTHERS}
    low, high = float(own.min()), float(own.max())
    return [
        Row(
            "share of the flow through MLPs on a template left out, median and range",
            *(float(own.median()), low, high, n),
            baselines=medians,
        ),
        Row("templates of which they hold most", first.count(BALANCED), n=n, baselines=counts),
    ]


def main() -> None:
    """Measure all tasks, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    recording = Recording() if args.write else None
    model = bilens.load(gguf_file(SMOLLM2), dtype=torch.float32)
    assert isinstance(model, ResidualModel)
    folds = [fold for task in TASKS for fold in of_task(model, task, args.k)]
    rows = rows_of(folds)
    for row in rows:
        print(row)
    if recording is not None:
        recording.write(
            "directions",
            title="Directions of a task on templates that did not find them, SmolLM2",
            command="python -m benchmarks.directions --write",
            rows=rows,
            settings={"directions of each MLP": args.k, "low and high": "range over templates"},
        )


if __name__ == "__main__":
    main()

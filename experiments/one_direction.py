"""Edits of one direction of agreement: what is lost of it on BLiMP, and of everything else.

The directions are those of the task (`bilens.circuits.recurring`), found on pairs of a plural and
a singular subject: of the mixed values of the two heads with the largest contrastive flow, and of
the output of the MLP in the last eighth of the layers whose direction has the largest measured
effect. BLiMP selects nothing.

An edit along t reads r: of the task, or the r that changes everything else least, M^-1 t with the
second moment M of WikiText. Directions are removed or reversed. Beside them is the edit along the
heads' mean change of number (`experiments.agreement`), with the moment of its own prefixes.

Small: 15 pairs of each paradigm of agreement and 4 of each other one, four minutes of a processor.
Paper: 100 and 40, half an hour or more.
"""

import gzip
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilens.circuits import edit_head_along, edit_mlp_along, find_directions, task_directions
from bilens.flows import Question
from bilens.transformer import Pass, ResidualModel
from experiments.agreement import HEADS, accuracy
from experiments.blimp import TERM, Pair, Preferences, load_pairs
from experiments.context import Outcome, RecipeContext
from experiments.contrasts import Contrasts, Head, contrasts, questions, ridged
from experiments.head_directions import head_snapshots
from experiments.pretrained import open_models
from experiments.results import Row

Edit = Callable[[], ResidualModel]


def run(context: RecipeContext) -> Outcome:
    """Find the directions of each model that is installed, edit it along them, and measure."""
    numbers, rows = {}, []
    for name, model in open_models(context.models):
        numbers[name], of_model = _of_model(context, name, model)
        rows += of_model
    sizes = dict(zip(("pairs of others", "pairs of agreement"), _sizes(context), strict=True))
    return Outcome(numbers, rows=rows, settings={**sizes, "models": list(numbers)})


def _sizes(context: RecipeContext) -> tuple[int, int]:
    """Return how many pairs each paradigm has, of agreement and of the others."""
    sizes: tuple[int, int] = context.choose((4, 15), (40, 100))
    return sizes


def _of_model(
    context: RecipeContext, name: str, model: ResidualModel
) -> tuple[dict[str, Any], list[Row]]:
    """Return the accuracies after each edit, and their rows."""
    pairs = load_pairs(context.folder / "blimp", *_sizes(context))
    number = contrasts(model, 8)
    heads = number.strongest("contrastive flow", HEADS, model.n_layers // 4)
    asked = questions(model, context.choose(16, 32))
    of_values, of_outputs = moments(
        model, context.folder / "text" / "wikitext2_valid.txt.gz", heads
    )
    edits = _of_heads(model, asked, heads, number, of_values)
    edits |= _of_mlp(model, asked, of_outputs)
    numbers: dict[str, Any] = {"heads": heads}
    # Layers below all edits are run once.
    prefers = Preferences(model, pairs, min(layer for layer, _ in edits.values()))
    before = prefers(model)
    numbers["before"] = accuracy(pairs, before)
    rows = []
    for edit_name, (_, edit) in edits.items():
        measured = numbers[edit_name] = context.measured(
            f"one-direction-{name}-{edit_name}-{context.scale}",
            partial(_changed, pairs, prefers, edit, before),
        )
        mean, half = measured["agreement_change"]
        rows.append(
            Row(
                f"{name}, {edit_name}: BLiMP's agreement lost",
                -mean,
                -mean - half,
                -mean + half,
                sum(pair.term == TERM for pair in pairs),
                "points",
                {"mean absolute change of a paradigm of others": measured["others_mean_absolute"]},
            )
        )
    return numbers, rows


def _changed(
    pairs: Sequence[Pair], prefers: Preferences, edit: Edit, before: Sequence[bool]
) -> dict[str, Any]:
    return accuracy(pairs, prefers(edit()), before)


def moments(
    model: ResidualModel, path: Path, heads: Sequence[Head], n: int = 16, length: int = 128
) -> tuple[dict[Head, Tensor], list[Tensor]]:
    """Return second moments of the values of heads and of the outputs of MLPs on a text."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        words = "".join(islice(lines, 400))[: 8 * n * length]
    ids = model.ids(words)[: n * length].unflatten(0, (n, length))
    values: dict[Head, Tensor] = defaultdict(lambda: torch.zeros(()))
    outputs = [torch.zeros(()) for _ in range(model.n_layers)]
    for row in ids:
        of_text = Pass.of(model, row[None])
        for layer, head in heads:
            z = of_text.mixed[layer][0].unflatten(1, (model.n_heads, -1))[:, head].double()
            values[layer, head] = values[layer, head] + z.T @ z / ids.numel()
        for layer, (y,) in enumerate(of_text.outputs):
            outputs[layer] = outputs[layer] + y.double().T @ y.double() / ids.numel()
    return {head: ridged(M) for head, M in values.items()}, [ridged(M) for M in outputs]


def _of_heads(
    model: ResidualModel,
    asked: Sequence[Question],
    heads: Sequence[Head],
    number: Contrasts,
    of_values: dict[Head, Tensor],
) -> dict[str, tuple[int, Edit]]:
    """Return edits of one direction of each head, by name, with the first layer that changes."""
    first = min(layer for layer, _ in heads)
    with torch.no_grad():
        directions, _ = find_directions(
            [head_snapshots(model, question)[0] for question in asked], 1
        )

    def along(scale: float, *, of_task: bool) -> Edit:
        def edited() -> ResidualModel:
            new = model
            for layer, head in heads:
                t = directions[layer * model.n_heads + head].written
                vectors = t if of_task else number.changes[layer, head][None]
                new = edit_head_along(
                    new, vectors.float(), layer=layer, head=head, scale=scale,
                    moment=of_values[layer, head].float(),
                )  # fmt: skip
            return new

        return edited

    return {
        "heads, direction of the task reversed": (first, along(-1.0, of_task=True)),
        "heads, mean change reversed, moment of prefixes": (
            first,
            lambda: number.turned(model, heads),
        ),
        "heads, direction of the task removed": (first, along(0.0, of_task=True)),
        "heads, mean change reversed": (first, along(-1.0, of_task=False)),
    }


def _of_mlp(
    model: ResidualModel, asked: Sequence[Question], of_outputs: Sequence[Tensor]
) -> dict[str, tuple[int, Edit]]:
    """Return edits of the direction of an MLP with the largest effect in the last eighth.

    None if norms follow all of these MLPs, as in Gemma 3.
    """
    last = range(7 * model.n_layers // 8, model.n_layers)
    if all(model.layer(layer).mlp.out_norm is not None for layer in last):
        return {}
    task = task_directions(model, asked, strongest=40)
    late = [part for part in task.strongest if part.layer in last]
    part = max(late, key=lambda one: one.effect)
    t, r = (rows[part.number - 1][None] for rows in task.directions[part.layer])
    least = torch.linalg.solve(of_outputs[part.layer], t.T).T
    name = f"direction.{part.layer}.{part.number}"

    def removed(read: Tensor) -> tuple[int, Edit]:
        return part.layer, partial(edit_mlp_along, model, t, read, layer=part.layer)

    return {
        f"{name} removed": removed(r),
        f"{name} removed, least change of text": removed(least / (least @ t.T)),
    }

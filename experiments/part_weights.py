"""From parts to weights: how much of a part's measured effect three eigenvectors carry.

The strongest MLPs of a flow, each at a position, are opened to the eigenvectors of their
interaction matrix along the direction that later parts read (`bilens.flows.open_part`). All but
the three of the largest |flow| are removed from the running model. Beside them are the same number
of hidden units (neurons), and of principal components of the MLP's output over 64 texts, both the
three of the largest |flow| too.

A question is two held-out texts of one length, the token that the model expects after the first,
and that after the second. On one text it is the token that it expects, and its second choice.
A share is 1 - sum |effect that is left| / sum |effect|, over parts: too much counts as much as too
little. Its interval is a bootstrap over questions.

The models, all with bilinear MLPs: the grammar of `bilens.data.Grammar`, at positions that a
skip-trigram decides; two blocks trained on TinyStories; and the tensors of stories260K that
`experiments.tensorise` makes, without gates only and without softmax too.

Small: 60 questions of each model, ten minutes on one core, of which the trainings take eight.
Paper: 400, and three grammars.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional

from bilens.analysis import Table
from bilens.data import Grammar
from bilens.flows import Flow, Node, flow, open_part, without_output
from bilens.train import PRESETS
from bilens.transformer import Pass, ResidualModel
from experiments import tensorise as tensors
from experiments.context import Outcome, RecipeContext
from experiments.results import Row

K, PARTS, LENGTHS = 3, 2, (6, 20)
"""Directions of a part, parts of a question, and lengths of its texts."""


class Share(NamedTuple):
    """The effect of a part, and what is left of it without its strongest directions."""

    question: int
    effect: float
    left: dict[str, float]


SEEDS = (1, 3)
"""Initialisations at either scale."""


def run(context: RecipeContext) -> Outcome:
    """Open the parts of all models."""
    rows: list[dict[str, Any]] = []
    for name, model, ids, places in _models(context):
        for kind in ("two texts", "one text"):
            asked = context.choose(60, 400)
            measure = partial(_measured, model, ids, places, asked, kind == "two texts")
            numbers = context.measured(f"part-weights-{name}-{kind}-{context.scale}", measure)
            rows.append({"model": name, "kind": kind, **numbers})
    frame = pd.DataFrame(rows)
    stated = [
        Row(
            f"{row['model']}, {row['kind']}: share of the effect in {K} eigenvectors",
            row["eigenvectors"],
            row["eigenvectors, low"],
            row["eigenvectors, high"],
            row["questions"],
            baselines={name: row[name] for name in ("neurons", "principal components")},
        )
        for row in rows
    ]
    return Outcome(
        {"rows": rows},
        parts=[Table(frame, f"Share of {K} directions", words=2)],
        rows=stated,
        settings={"eigenvectors": K, "seed": list(context.seed_range(SEEDS))},
    )


def _models(context: RecipeContext) -> Iterator[tuple[str, ResidualModel, Tensor, Tensor | None]]:
    """Yield models with held-out texts, and the positions that are asked about if not all are."""
    preset, grammar = PRESETS["grammar"], Grammar()
    for seed in context.seed_range(SEEDS):
        model = context.language("grammar", replace(preset.training, seed=seed), preset.model)
        corpus = context.corpus("grammar", preset.model.n_ctx, preset.model.vocab_size)
        ids = corpus.validation[:1200]["input_ids"]
        yield f"grammar, seed {seed}", model, ids, grammar.is_kind(ids, "skip-trigram")
    for variant in ("gates", "both"):
        changes = {"learning_rate": tensors.RATES[variant]}
        tensor = tensors.tensor_of(context, tensors.STORY, variant, changes)
        # Flows of so many factors are large and cancel.
        tensor.model.double()
        _, _, _, held_out, _ = tensors.source(context, tensors.STORY)
        # Each text gives several short ones.
        ids = next(iter(held_out.values())).unfold(1, 24, 24).flatten(0, 1)
        yield f"stories260K, {variant}", tensor, ids, None
    own = replace(tensors.OWN, mlp="bilinear")
    model = context.language("tinystories", replace(tensors.OWN_FIRST, epochs=0.2), own)
    corpus = context.corpus("tinystories", own.n_ctx, own.vocab_size)
    yield "two blocks, TinyStories", model, corpus.validation[:900]["input_ids"], None


def _measured(
    model: ResidualModel, ids: Tensor, places: Tensor | None, asked: int, two: bool
) -> dict[str, Any]:
    basis = principal(model, ids[-64:])
    return summary(list(opened(model, ids[:-64], places, basis, asked, two)))


def principal(model: ResidualModel, ids: Tensor) -> list[Tensor]:
    """Return the principal components of the outputs of each MLP over texts."""
    outputs = [Pass.of(model, row[None, : LENGTHS[1]]).outputs for row in ids]
    bases = []
    for of_layer in zip(*outputs, strict=True):
        y = torch.cat(of_layer, 1)[0].double()
        bases.append(torch.linalg.svd(y - y.mean(0), full_matrices=False)[2])
    return bases


@torch.no_grad()
def opened(
    model: ResidualModel, ids: Tensor, places: Tensor | None, basis: list[Tensor], n: int, two: bool
) -> Iterator[Share]:
    """Yield the parts of n questions."""
    generator = torch.Generator().manual_seed(0)
    half, asked = len(ids) // 2, 0
    for i in range(half):
        first, second = ids[i], ids[half + i]
        possible = torch.arange(*LENGTHS)
        if places is not None:
            possible = possible[(places[i] & places[half + i])[possible]]
        if not len(possible) or asked == n:
            continue
        last = possible[torch.randint(len(possible), (), generator=generator)]
        first, second = first[: last + 1], second[: last + 1]
        logits = model.logits(torch.stack([first, second]))[:, -1]
        expected, other = logits.argmax(-1).tolist() if two else logits[0].topk(2).indices.tolist()
        if expected == other:
            continue
        u = model.W_U[:, expected] - model.W_U[:, other]
        through = flow(model, first, u, against=second if two else None, ablate=0)
        for node in [node for node in through.nodes if node.kind == "mlp"][:PARTS]:
            yield _part(model, through, node, basis, asked)
        asked += 1


def _part(
    model: ResidualModel, through: Flow, node: Node, basis: list[Tensor], question: int
) -> Share:
    assert node.layer is not None
    assert node.position is not None
    part, tensor = open_part(model, through, node.address, k=K), model.mlp(node.layer)
    (output,), w = through.written([node]), through.adjoint(node)
    # The texts of the flow, and the constant of a tensor with biases.
    against: Any = through.question.against
    texts = [through.ids, against] if through.two_texts else [through.ids]
    inputs = [model.mlp_inputs(node.layer, text[None])[0, node.position] for text in texts]
    inputs = [functional.pad(x, (0, tensor.n_in - len(x)), value=1.0) for x in inputs]
    hidden, *second = [(tensor.left @ z) * (tensor.right @ z) for z in inputs]
    for other in second:
        hidden = hidden - other
    units = ((w.to(tensor.out) @ tensor.out) * hidden).abs().topk(K).indices
    B = basis[node.layer].to(output)
    strongest = ((B @ w) * (B @ output)).abs().topk(K).indices
    written = {
        "neurons": tensor.out[:, units] @ hidden[units],
        "principal components": B[strongest].T @ (B[strongest] @ output),
    }
    left = {"eigenvectors": (1 - (part.share or 0)) * part.measured}
    rows = torch.stack([output - kept.to(output) for kept in written.values()])
    changes = without_output(model, through, node.where, rows)
    return Share(
        question, part.measured, left | dict(zip(written, [-x for x in changes], strict=True))
    )


def summary(shares: list[Share]) -> dict[str, Any]:
    """Return the share of each kind of directions, with a bootstrap interval over questions."""
    questions = 1 + max(share.question for share in shares)
    sums = torch.zeros(questions, 1 + len(shares[0].left), dtype=torch.float64)
    for share in shares:
        values = (share.effect, *share.left.values())
        sums[share.question] += torch.tensor(values, dtype=torch.float64).abs()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(questions, (1000, questions), generator=generator)
    totals = torch.cat([sums.sum(0)[None], sums[drawn].sum(1)])
    kept = 1 - totals[:, 1:] / totals[:, :1]
    numbers: dict[str, Any] = {"questions": questions, "parts": len(shares)}
    for name, column in zip(shares[0].left, kept.T, strict=True):
        low, high = column[1:].quantile(torch.tensor([0.025, 0.975]).to(column)).tolist()
        numbers |= {name: float(column[0]), f"{name}, low": low, f"{name}, high": high}
    return numbers

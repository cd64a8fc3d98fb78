"""Texts that differ in the number of the subject, and the heads that carry it to the verb."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bilens import TokenDirection
from bilens.circuits import edit_head_along
from bilens.flows import Question, flow
from bilens.transformer import Pass, ResidualModel

NOUNS = (
    *("key keys", "cat cats", "dog dogs", "boy boys", "girl girls", "teacher teachers"),
    *("student students", "doctor doctors", "car cars", "book books", "child children"),
    *("woman women", "man men", "author authors", "guest guests", "pilot pilots"),
)
VERBS = (
    *("is are", "was were", "has have", "does do", "likes like", "knows know"),
    *("wants want", "needs need", "looks look", "seems seem"),
)
BETWEEN = ("near the", "behind the", "with the", "of the")
RIDGE = 0.01
"""Share of the mean variance that is added to every direction of a second moment."""

Head = tuple[int, int]
"""Layer and number of a head."""


@dataclass(frozen=True, eq=False)
class Contrasts:
    """The heads' part in the change of verbs from singular to plural subjects.

    These are the mean change of each head's mixed values after the last token, (layers, heads,
    d_head), their second moments over all positions, and the mean change of the logit difference
    that each method assigns to each head.
    """

    changes: Tensor
    moments: Tensor
    scores: dict[str, Tensor]

    def strongest(self, method: str, n: int, first_layer: int = 0) -> list[Head]:
        """Return the n heads to which a method assigns most, from a layer on."""
        late = self.scores[method][first_layer:]
        order = late.flatten().argsort(descending=True)[:n].tolist()
        return [(first_layer + i // late.shape[1], i % late.shape[1]) for i in order]

    def turned(self, model: ResidualModel, heads: Sequence[Head]) -> ResidualModel:
        """Reverse the direction of number in heads, with the least change of everything else."""
        for layer, head in heads:
            change, moment = self.changes[layer, head][None], ridged(self.moments[layer, head])
            model = edit_head_along(model, change, layer=layer, head=head, moment=moment)
        return model


def ridged(moment: Tensor) -> Tensor:
    """Return a second moment with a small share of its mean variance in every direction."""
    return moment + RIDGE * moment.diagonal().mean() * torch.eye(len(moment)).to(moment)


def contrasts(model: ResidualModel, n: int) -> Contrasts:
    """Return scores of heads by contrastive flow, gradients and direct logit attribution."""
    asked = questions(model, n)
    by_flow = flows(model, asked)[:, :-1].float()
    plurals = [model.ids(question.text) for question in asked]
    singulars = [model.ids(str(question.against)) for question in asked]
    directions = [TokenDirection(question.tokens[0], question.minus) for question in asked]
    z, slopes, moments = [], [], []
    for texts in (plurals, singulars):
        runs = [_mixed(model, *run) for run in zip(texts, directions, strict=True)]
        z.append(torch.stack([last for last, _, _ in runs]))
        slopes.append(torch.stack([slope for _, slope, _ in runs]))
        moments.append(torch.stack([moment for _, _, moment in runs]).mean(0))
    changes = z[0] - z[1]
    out = torch.stack([layer.heads.weights().out for layer in _layers(model)])
    u = torch.stack([model.direction(pair.token, pair.minus) for pair in directions])
    streams = torch.stack([Pass.of(model, text).stream[0, -1] for text in plurals])
    scales = model.modules.scale(streams)
    written = torch.einsum("tlhd,lhdm,tm->tlh", changes, out, u)
    scores = {
        "contrastive flow": by_flow,
        "gradients": ((slopes[0] + slopes[1]) / 2 * changes).sum(-1).mean(0),
        "direct logit attribution": (written * scales[:, None, None]).mean(0),
    }
    return Contrasts(changes.mean(0), (moments[0] + moments[1]) / 2, scores)


def flows(model: ResidualModel, asked: Sequence[Question]) -> Tensor:
    """Return the contrastive flow of each head and MLP, (layers, heads + 1), the mean."""
    rows = []
    for one in asked:
        through = flow(model, one.text, one.token, minus=one.minus, against=one.against, ablate=0)
        rows.append(torch.cat([through.heads.sum(-1), through.mlps.sum(-1, keepdim=True)], 1))
    return torch.stack(rows).double().cpu().mean(0)


def questions(model: ResidualModel, n: int) -> list[Question]:
    """Return questions of plural texts and the same in the singular, which ask for the verb."""
    generator = torch.Generator().manual_seed(1)

    def draw(words: Sequence[str]) -> str:
        return words[int(torch.randint(len(words), (), generator=generator))]

    asked: list[Question] = []
    while len(asked) < n:
        subject, verb = draw(NOUNS).split(), draw(VERBS).split()
        # A third has no distractor. Half of the distractors are plural.
        end = f" {draw(BETWEEN)} {draw(NOUNS).split()[len(asked) % 2]}" if len(asked) % 3 else ""
        plural, singular = (f"The {subject[which]}{end}" for which in (1, 0))
        if len(model.ids(plural)) == len(model.ids(singular)):
            asked.append(Question(plural, f" {verb[1]}", (f" {verb[0]}",), singular))
    return asked


def _layers(model: ResidualModel) -> list[Any]:
    return [model.layer(number) for number in range(model.n_layers)]


def _mixed(
    model: ResidualModel, ids: Tensor, direction: TokenDirection
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the heads' mixed values at the end of a text, their gradients, and second moments.

    Gradients are of the direction's logit difference.
    """
    inputs: list[Tensor] = []

    def record(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
        inputs.append(x)
        return (x, *args[1:])

    outs = [layer.heads.out.module for layer in _layers(model)]
    right, *wrong = (model.token(name) for name in (direction.token, *direction.minus))
    with torch.enable_grad(), ExitStack() as hooks:
        for out in outs:
            hooks.enter_context(out.register_forward_pre_hook(record))
        logits = model.model(ids[None], use_cache=False).logits[0, -1]
        gradients = torch.autograd.grad(logits[right] - logits[wrong].mean(), inputs)
    z, slopes = (
        torch.cat(list(parts)).detach().unflatten(-1, (model.n_heads, -1))
        for parts in (inputs, gradients)
    )
    return z[:, -1], slopes[:, -1], torch.einsum("lthd,lthe->lhde", z, z) / z.shape[1]

"""Attributions by gradients: attribution patching and EAP-IG."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import checked
from bilens.circuits.case import make_cases
from bilens.circuits.patching import parts_in
from bilens.errors import BilensError
from bilens.flows.question import Question
from bilens.sections import Columns, Fact, by_column
from bilens.settings import Count
from bilens.transformer import ResidualModel
from bilens.transformer.exchange import exchange
from bilens.transformer.passes import Metric, Pass


def gradient_effects(
    runs: tuple[Pass, Pass], metric: Metric, points: Sequence[float]
) -> Float[Tensor, "layers parts"]:
    """Return the change of each head and MLP times the mean gradient at some points.

    A point is a share of the way of the embeddings from the second text (0) to the first (1). The
    point 1 is attribution patching; the points 1/8, 2/8, ... 1 are EAP-IG of 8 steps.

    Source:
        Nanda 2023, "Attribution patching"; Hanna et al. 2024 (arXiv 2403.17806).
    """
    first, second = runs
    shares = first.tokens.new_tensor(points)[:, None, None]
    tokens = second.tokens + shares * (first.tokens - second.tokens)
    at = Pass.of(first.model, first.ids.expand(len(tokens), -1), tokens, parts=True)
    # What a part takes differs by its change between the texts, so that the gradient by the share
    # that it keeps is the gradient by the part times the change.
    values = at.values.map(lambda x, a, b: x - (a - b), first.values, second.values)
    keep = torch.ones(first.model.places.exist.shape, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        value = metric(exchange(at, at.with_values(values), [keep])[0]).sum()
        (slope,) = torch.autograd.grad(value, keep)
    return slope / len(points)


@dataclass(frozen=True, eq=False, repr=False)
class Attributions(Reading):
    """What each head and MLP is worth to the change of a number, by gradients.

    The last part of a layer is its MLP.

    Attributes:
        of_questions: the attribution of each part to the change of each question.
    """

    of_questions: Float[Tensor, "questions layers parts"]

    title: ClassVar[str] = "Attributions"
    axes: ClassVar[dict[str, str]] = {"x": "part", "y": "attribution"}

    def facts(self) -> list[Fact]:
        return [("questions", len(self.of_questions)), ("parts", self.of_questions[0].numel())]

    def columns(self) -> Columns:
        """Return a row for each head and MLP, with the mean over questions, the largest first."""
        mean = self.of_questions.mean(0)
        parts = parts_in(torch.ones_like(mean, dtype=torch.bool))
        rows = [
            (str(part), part.layer, value)
            for part, value in zip(parts, mean.flatten().tolist(), strict=True)
        ]
        rows.sort(key=lambda row: -abs(row[-1]))
        return by_column(["part", "layer", "attribution"], rows)


@checked
def eap_ig(
    model: ResidualModel, questions: Sequence[Question], *, steps: Count = 8
) -> Attributions:
    """Return the attributions of all heads and MLPs to the answers to questions, by EAP-IG.

    A part's attribution is its change between both texts times the mean gradient of the number by
    it, at `steps` points between the embeddings of the texts: EAP-IG inputs. With one step it is
    attribution patching.

    Args:
        model: any.
        questions: each with a second text of as many tokens.
        steps: points between the texts.

    Raises:
        BilensError: there are no questions, one has no second text, or texts do not fit.

    Source: Hanna et al. 2024 (arXiv 2403.17806).
    """
    if not questions:
        raise BilensError("questions is empty, expected at least one")
    points = [(step + 1) / steps for step in range(steps)]
    rows = []
    for case in make_cases(model, questions):
        rows.append(gradient_effects(case.alone, case.score, points))
    return Attributions(torch.stack(rows))

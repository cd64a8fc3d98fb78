"""Agreement of a model with the original that it was made from, on held-out texts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from bilens.files import write_json, write_text
from bilens.hub import AGREEMENT_NAME, CARD_NAME, model_card
from bilens.lazy_imports import accelerate, pd
from bilens.reading import Fact, Reading

BATCH = 4
"""Texts that are compared at once: their logits are the largest tensors of a stage."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of a model with its original on one held-out text.

    Attributes:
        loss: Loss of the model, in nats a token.
        rise: Loss above the original's.
        kl: Mean KL divergence from the original's next-token distribution, in nats.
        top1: Share of positions at which both have the same most likely token.
    """

    loss: float
    rise: float
    kl: float
    top1: float


@dataclass(frozen=True)
class Tensorised(Reading):
    """Losses of a model on its way to a tensor.

    Attributes:
        stages: Agreement with the original on each held-out text, after each stage.
    """

    stages: dict[str, dict[str, Agreement]]

    title = "From a transformer to a tensor"
    explanation = (
        "Each row compares the model after a stage with the original, on text that no stage used."
    )

    def facts(self) -> list[Fact]:
        """Return the loss above the original's on each text, at the end."""
        final = next(reversed(self.stages.values()))
        return [(f"rise on {name}", agreement.rise) for name, agreement in final.items()]

    def frame(self) -> "pd.DataFrame":
        """Return a row for each stage and text."""
        rows = [
            {"stage": stage, "text": name, **asdict(agreement)}
            for stage, texts in self.stages.items()
            for name, agreement in texts.items()
        ]
        return pd.DataFrame(rows)


@dataclass(frozen=True)
class Measurements:
    """The measurements of a run, written to its record and its model card.

    Attributes:
        run: directory of the run.
        original: the original model.
        held_out: texts by name.
    """

    run: Path
    original: Any
    held_out: Mapping[str, Int[Tensor, "texts time"]]
    stages: dict[str, dict[str, Agreement]] = field(default_factory=dict)

    def add(self, stage: str, model: Any) -> None:
        """Measure the model after a stage."""
        device = next(model.parameters()).device
        self.stages[stage] = {
            name: agreement(model, self.original, ids.to(device))
            for name, ids in self.held_out.items()
        }
        if accelerate.PartialState().is_main_process:
            write_json(self.run / AGREEMENT_NAME, asdict(Tensorised(self.stages))["stages"])

    def finish(self, model: Any) -> Tensorised:
        """Write the card of the finished model, and return all measurements."""
        if accelerate.PartialState().is_main_process:
            card = model_card(model.config.to_diff_dict(), self.run)
            write_text(self.run / CARD_NAME, str(card))
        return Tensorised(self.stages)


@torch.no_grad()
def agreement(model: Any, original: Any, texts: Int[Tensor, "texts time"]) -> Agreement:
    """Return the loss of a model on texts, and its agreement with the original."""
    sums = torch.zeros(4, dtype=torch.float64)
    for ids in texts.split(BATCH):
        ours, theirs = (_log_probs(m(ids, use_cache=False).logits) for m in (model, original))
        labels = ids[:, 1:, None]
        sums += (
            torch.stack(
                [
                    -ours[:, :-1].gather(-1, labels).sum(),
                    -theirs[:, :-1].gather(-1, labels).sum(),
                    (theirs.exp() * (theirs - ours))[:, :-1].sum(),
                    (ours.argmax(-1) == theirs.argmax(-1))[:, :-1].sum(),
                ]
            )
            .double()
            .cpu()
        )
    loss, before, kl, same = (sums / (texts.numel() - len(texts))).tolist()
    return Agreement(loss=loss, rise=loss - before, kl=kl, top1=same)


def distillation_loss(
    logits: Float[Tensor, "batch time vocab"],
    target: Float[Tensor, "batch time vocab"],
    counted: Tensor,
    n_items: Tensor | int | None = None,
) -> Float[Tensor, ""]:
    """Return the mean KL divergence from the target's distribution over the counted positions."""
    ours, theirs = _log_probs(logits), _log_probs(target)
    total = ((theirs.exp() * (theirs - ours)).sum(-1) * counted).sum()
    return total / (counted.sum() if n_items is None else n_items)


def _log_probs(logits: Tensor) -> Tensor:
    return functional.log_softmax(logits.float(), -1)

"""Muon for the matrices inside the blocks, and AdamW for all else, as one optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bilens.nn.language import LanguageModel

__all__ = ["MuonWithAdamW"]


class MuonWithAdamW(torch.optim.Optimizer):
    """Steps of one size in all directions for matrices that map the residual stream.

        W <- (1 - lr decay) W - 0.2 sqrt(max(n_out, n_in)) lr U V',  momentum = U S V'

    U V' comes from torch's own Muon, which approximates it by five Newton-Schulz iterations in
    bfloat16. The factor makes the step as large as one of AdamW, which embeddings, unembedding,
    norms and biases are left to, so that both go by one learning rate and one schedule. Gains and
    biases do not decay.

    Args:
        model: whose weights are trained.
        lr: learning rate.
        weight_decay: of matrices, and of embeddings and the unembedding.

    Source: Jordan 2024, *Muon*; the factor: Liu et al. 2025, *Muon is Scalable for LLM Training*.
    """

    def __init__(self, model: LanguageModel, *, lr: float, weight_decay: float) -> None:
        matrices = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
        inside = set(matrices)
        rest = [weight for weight in model.parameters() if weight not in inside]
        self.muon = torch.optim.Muon(
            matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = torch.optim.AdamW(
            [
                _group([weight for weight in rest if weight.ndim > 1], weight_decay),
                _group([weight for weight in rest if weight.ndim == 1], 0.0),
            ],
            lr=lr,
        )
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step both."""
        loss = None if closure is None else closure()
        # Loading a state puts new groups and a new state here, and the parts have to use them.
        self.muon.param_groups, self.adamw.param_groups = (
            self.param_groups[:1],
            self.param_groups[1:],
        )
        self.muon.state = self.adamw.state = self.state
        self.muon.step()
        self.adamw.step()
        return loss


def _group(weights: list[nn.Parameter], weight_decay: float) -> dict[str, Any]:
    return {"params": weights, "weight_decay": weight_decay}

"""Weight processing of a whole model: what can be folded is folded, and the function stays."""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from bilens.checks import check_weights, checked
from bilens.convert.config_record import write_record
from bilens.convert.steps import STEPS, StepName, refusal
from bilens.errors import BilensError
from bilens.residual.families import evaluating, parts_of
from bilens.residual.layers import Parts
from bilens.residual.parts import LinearMap

__all__ = ["Processing", "process"]

TEXTS, LENGTH = 2, 16
ROUNDING = {torch.float64: 1e-4, torch.float32: 2e-3}
"""Changes of a log-probability that rounding explains; models round inside, whatever they store."""
COARSE = 1.0
"""The same for weights of 16 bits and less."""


@dataclass(frozen=True)
class Processing:
    """What was done to a model.

    Attributes:
        folded: what was folded where, for each step that was applied.
        refused: why a step was left out, for each that was.
        untied: whether embedding and unembedding were one matrix and are two now.
        added_biases: maps that had no bias and have one now. Plain transformers has no room for
            these when it loads the model again; `bilens.load` has.
        change: the largest change of a log-probability on random tokens, through rounding.
    """

    folded: dict[str, list[str]]
    refused: dict[str, str] = field(default_factory=dict)
    untied: bool = False
    added_biases: tuple[str, ...] = ()
    change: float = 0.0

    @property
    def loads_in_transformers(self) -> bool:
        """Whether plain transformers can load the model once it is saved."""
        return not self.added_biases

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "loads_in_transformers": self.loads_in_transformers}


@checked
@torch.no_grad()
def process(
    model: PreTrainedModel, steps: Sequence[StepName] | None = None, *, in_place: bool = False
) -> tuple[PreTrainedModel, Processing]:
    """Rewrite the weights of a model so that they are easier to read, and its function stays.

    The steps are fold_norms, fold_value_biases, center_writing_weights and center_unembed, in this
    order; `bilens.convert.steps` gives their mathematics. Each weight is computed in float32, or in
    float64 where it is stored so, and put back in the dtype of its storage. A second time changes
    nothing. The model's config says in `bilens_processing` what was applied.

    Args:
        model: of a family that `bilens.residual.families` knows, or one that was registered.
        steps: which to apply; by default all that leave the function of this model unchanged.
        in_place: change the model itself. Otherwise the result is another one, which shares with
            the model the memory of the weights that stay what they are.

    Raises:
        BilensError: the structure of the model is not known, layers share a module, an unknown
            step is asked for or one that would change this model, or a log-probability changed by
            more than rounding explains.
        CheckpointError: a weight is NaN or infinite.

    Source:
        The weight processing of TransformerLens; see `bilens.convert.steps`.
    """
    unknown = set(steps or ()) - STEPS.keys()
    if unknown:
        raise BilensError(f"steps={list(steps or ())}, expected some of {', '.join(STEPS)}")
    parts = parts_of(model)
    chosen = [step for step in STEPS if steps is None or step in steps]
    reasons = {step: reason for step in chosen if (reason := refusal(step, parts)) is not None}
    if steps is not None and reasons:
        step, reason = next(iter(reasons.items()))
        raise BilensError(f"{step} would change what this model computes: {reason}")
    check_weights(model)
    before = _log_probabilities(model)
    if not in_place:
        # Another model with parameters of its own, whose values are not copied.
        own = {id(p): nn.Parameter(p.data, p.requires_grad) for p in model.parameters()}
        model = copy.deepcopy(model, own)
        parts = parts_of(model)
    untied = any(step != "fold_value_biases" for step in chosen) and _untie(model, parts)
    bare = [part for part in _maps(parts) if part.module.bias is None]
    folded = {step: STEPS[step](parts) for step in chosen if step not in reasons}
    added = tuple(part.name for part in bare if part.module.bias is not None)
    write_record(model.config, list(folded), added)
    change = float((_log_probabilities(model) - before).abs().max())
    allowed = ROUNDING.get(parts.embed.module.weight.dtype, COARSE)
    if not change <= allowed:
        raise BilensError(
            f"Processing changed a log-probability by {change:.2g} nats, where rounding explains "
            f"{allowed:g}; the model does something that its modules do not show"
            + (", and has been changed: open it again." if in_place else ". It is as it was.")
        )
    return model, Processing(folded, reasons, untied, added, change)


def _maps(parts: Parts) -> list[LinearMap]:
    readers = (part for reader in parts.readers() for part in reader.maps)
    return list({part.name: part for part in (*readers, *parts.writes)}.values())


def _untie(model: PreTrainedModel, parts: Parts) -> bool:
    unembed = parts.unembed.module
    shared = next((t.module for t in parts.tables if t.module.weight is unembed.weight), None)
    if shared is None:
        return False
    unembed.weight = nn.Parameter(shared.weight.detach().clone(), shared.weight.requires_grad)
    model.config.tie_word_embeddings = False
    # transformers keeps a list of its own of what it leaves out of a checkpoint.
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=False)
    return True


def _log_probabilities(model: PreTrainedModel) -> Float[Tensor, "texts time vocab"]:
    generator = torch.Generator().manual_seed(0)
    length = min(LENGTH, int(getattr(model.config, "max_position_embeddings", LENGTH)))
    ids = torch.randint(model.config.vocab_size, (TEXTS, length), generator=generator)
    with evaluating(model):
        logits: Tensor = model(ids.to(model.device), use_cache=False).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.log_softmax(-1)

"""Weight processing of a whole model: what can be folded is folded, and the function stays."""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from bilens.checks import check_weights
from bilens.convert.anatomy import Anatomy
from bilens.convert.families import anatomy
from bilens.convert.record import write_record
from bilens.convert.steps import STEPS, refusal
from bilens.errors import BilensError

__all__ = [
    "Processing",
    "center_unembed",
    "center_writing_weights",
    "fold_norms",
    "fold_value_biases",
    "process",
]

TEXTS, LENGTH = 2, 16


@dataclass(frozen=True)
class Processing:
    """What was done to a model.

    Attributes:
        folded: what was folded where, for each step that was applied.
        refused: why a step was left out, for each that was.
        untied: whether embedding and unembedding were one matrix and are two now.
        added_biases: maps that had no bias and have one now. Plain transformers has no room for
            these when it loads the model again; `bilens.convert.open_model` has.
        change: the largest change of a log-probability on random tokens, through rounding.
    """

    folded: dict[str, list[str]]
    refused: dict[str, str] = field(default_factory=dict)
    untied: bool = False
    added_biases: tuple[str, ...] = ()
    change: float = 0.0

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def process(
    model: PreTrainedModel, *, in_place: bool = False
) -> tuple[PreTrainedModel, Processing]:
    """Apply every step of weight processing that leaves the function of this model unchanged.

    In the order of `fold_norms`, `fold_value_biases`, `center_writing_weights`, `center_unembed`.
    Each weight is computed in float32, or in float64 where it is stored so, and put back in the
    dtype of its storage. A second time changes nothing. The model's config says in
    `bilens_processing` what was applied.

    Args:
        model: a bilens transformer, or GPT-2, GPT-NeoX, Llama, Mistral, Qwen 2 or 3, Gemma 2 or 3,
            or Phi-3 of transformers.
        in_place: change the model itself. Otherwise the result is another one, which shares with
            the model the memory of the weights that stay what they are.

    Returns:
        The processed model, and what was done to it.

    Raises:
        BilensError: the structure of the model is not known.
        CheckpointError: a weight is NaN or infinite.

    Source:
        The weight processing of TransformerLens; see `bilens.convert.steps`.
    """
    return _apply(model, list(STEPS), in_place, strict=False)


def fold_norms(
    model: PreTrainedModel, *, in_place: bool = False
) -> tuple[PreTrainedModel, Processing]:
    """Fold gains and biases of norms into the maps that read them; see `process`.

    Raises:
        BilensError: as in `process`, or something is added between a norm and a map.
    """
    return _apply(model, ["fold_norms"], in_place, strict=True)


def center_writing_weights(
    model: PreTrainedModel, *, in_place: bool = False
) -> tuple[PreTrainedModel, Processing]:
    """Take the mean away from all that is written to the residual stream; see `process`.

    Raises:
        BilensError: as in `process`, or something reads the stream through no LayerNorm.
    """
    return _apply(model, ["center_writing_weights"], in_place, strict=True)


def center_unembed(
    model: PreTrainedModel, *, in_place: bool = False
) -> tuple[PreTrainedModel, Processing]:
    """Take the mean over all tokens away from the unembedding; see `process`.

    Raises:
        BilensError: as in `process`, or the logits go through a soft-cap.
    """
    return _apply(model, ["center_unembed"], in_place, strict=True)


def fold_value_biases(
    model: PreTrainedModel, *, in_place: bool = False
) -> tuple[PreTrainedModel, Processing]:
    """Fold the biases of attention's values into those of its output; see `process`.

    Raises:
        BilensError: as in `process`, or rows of a pattern do not sum to 1, or values are mixed with
            those of the first block.
    """
    return _apply(model, ["fold_value_biases"], in_place, strict=True)


@torch.no_grad()
def _apply(
    model: PreTrainedModel, steps: Sequence[str], in_place: bool, *, strict: bool
) -> tuple[PreTrainedModel, Processing]:
    found = anatomy(model)
    reasons = {step: reason for step in steps if (reason := refusal(step, found)) is not None}
    if strict and reasons:
        [(step, reason)] = reasons.items()
        raise BilensError(f"{step} would change what this model computes: {reason}")
    check_weights(model)
    before = _log_probabilities(model)
    if not in_place:
        model = _sharing_memory(model)
        found = anatomy(model)
    untied = any(step != "fold_value_biases" for step in steps) and _untie(model, found)
    bare = [part for part in _maps(found) if part.module.bias is None]
    folded = {step: STEPS[step](found) for step in steps if step not in reasons}
    added = tuple(part.name for part in bare if part.module.bias is not None)
    write_record(model.config, list(folded), added)
    change = float((_log_probabilities(model) - before).abs().max())
    return model, Processing(folded, reasons, untied, added, change)


def _maps(model: Anatomy) -> list[Any]:
    unique = {
        part.name: part
        for part in (*(m for r in model.readings for m in r.maps), *model.writes, model.unembed)
    }
    return list(unique.values())


def _sharing_memory(model: PreTrainedModel) -> PreTrainedModel:
    """Another model with parameters of its own, whose values are not copied."""
    shared = {id(part): nn.Parameter(part.data, part.requires_grad) for part in model.parameters()}
    return copy.deepcopy(model, shared)


def _untie(model: PreTrainedModel, found: Anatomy) -> bool:
    unembed = found.unembed.module
    shared = next((t.module for t in found.tables if t.module.weight is unembed.weight), None)
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
    training = {module: module.training for module in model.modules()}
    model.eval()
    logits: Tensor = model(ids.to(model.device), use_cache=False).logits
    for module, mode in training.items():
        module.training = mode
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.log_softmax(-1)

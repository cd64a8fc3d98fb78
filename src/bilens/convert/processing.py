"""Weight processing: four rewritings of a model's weights that leave its function unchanged.

A LayerNorm is x -> g * c / |c| sqrt(d) + b with c = x - mean(x). Every linear map W x + e that
reads it can take over its linear part:

fold_norms: W becomes W g and e becomes e + W b. The norm keeps centring and scaling. Its output
then has mean 0, so the mean of each row of W has no effect and is subtracted too. RMSNorm is the
same without mean and b.

fold_value_biases: a row of an attention pattern sums to 1, so a bias b_V passes unchanged through
the pattern. W_O b_V thus belongs to the bias of the output.

center_writing_weights: a stream that is read through LayerNorms only is read without its mean.
Nothing has to write a mean, and every column of the weights that write is centred.

center_unembed: softmax ignores a number that all logits share, so the rows of W_U, one for each
token, are centred together.

Source: the weight processing of TransformerLens (fold_ln and its companions), and Elhage et al.
2021, "Handling Layer Normalization".
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from einops import repeat
from torch import Tensor, nn
from transformers import PreTrainedModel

from bilens.checks import check_weights, checked
from bilens.convert.gates import add_to_processing
from bilens.errors import BilensError
from bilens.options import StepName
from bilens.residual.families import parts_of
from bilens.residual.layers import Parts
from bilens.residual.model import check_unhooked
from bilens.residual.parts import Embedding, LinearMap
from bilens.residual.sums import check_unchanged, log_probabilities

Step = Callable[[Parts], list[str]]
"""A rewriting of a model's weights; returns the folded parts and their new places, in words."""


@dataclass(frozen=True)
class Processing:
    """Report of `process`.

    Attributes:
        folded: for each step that was applied, the folded parts and their new places.
        refused: for each step that was left out, the reason.
        untied: True if embedding and unembedding were one matrix and are two now.
        added_biases: maps that had no bias and have one now. Plain transformers has no room for
            these when it opens the model again; `bilens.load` has.
        change: the largest change of a log-probability on random tokens, through rounding.
    """

    folded: dict[str, list[str]]
    refused: dict[str, str] = field(default_factory=dict)
    untied: bool = False
    added_biases: tuple[str, ...] = ()
    change: float = 0.0

    @property
    def loads_in_transformers(self) -> bool:
        """True if plain transformers can open the model once it is saved."""
        return not self.added_biases

    def record(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {**asdict(self), "loads_in_transformers": self.loads_in_transformers}


@checked
@torch.no_grad()
def process(
    model: PreTrainedModel, steps: Sequence[StepName] | None = None, *, in_place: bool = False
) -> tuple[PreTrainedModel, Processing]:
    """Rewrite the weights of a model so that they are easier to read; its function stays.

    The steps are fold_norms, fold_value_biases, center_writing_weights and center_unembed, in this
    order; `bilens.convert.processing` derives them. Each weight is computed in float32, or in
    float64 if it is stored so, and put back in the dtype of its storage. A second time changes
    nothing. The model's config lists the applied steps in `bilens_processing`.

    Args:
        model: of a family that `bilens.residual.families` knows, or one that was registered.
        steps: the steps to apply; by default every step that leaves the function unchanged.
        in_place: change the model itself. Otherwise the result is another model, which shares the
            memory of unchanged weights with it.

    Raises:
        BilensError: the structure of the model is not known, layers share a module, or a module is
            pruned or has another hook. Or a step is unknown or would change this model, or a
            log-probability changed by more than rounding explains.
        CheckpointError: a weight is NaN or infinite.

    Source: The weight processing of TransformerLens; see `bilens.convert.processing`.
    """
    unknown = set(steps or ()) - STEPS.keys()
    if unknown:
        raise BilensError(f"steps={list(steps or ())}, expected some of {', '.join(STEPS)}")
    # A hook, such as that of pruning, computes weights anew and would undo a folding.
    check_unhooked(model)
    parts = parts_of(model)
    selected = [step for step in STEPS if steps is None or step in steps]
    reasons = {step: reason for step in selected if (reason := refusal(step, parts)) is not None}
    if steps is not None and reasons:
        step, reason = next(iter(reasons.items()))
        raise BilensError(f"{step} would change the function of this model: {reason}")
    check_weights(model)
    before = log_probabilities(model)
    if not in_place:
        # Another model with parameters of its own, whose values are not copied.
        shared = {id(p): nn.Parameter(p.data, p.requires_grad) for p in model.parameters()}
        model = copy.deepcopy(model, shared)
        parts = parts_of(model)
    # Folding value biases leaves both tables alone, so they may stay one matrix.
    untied = any(step != "fold_value_biases" for step in selected) and _untie(model, parts)
    bare = [part for part in _maps(parts) if part.bias() is None]
    folded = {step: STEPS[step](parts) for step in selected if step not in reasons}
    added = tuple(part.name for part in bare if part.bias() is not None)
    add_to_processing(model.config, list(folded), added)
    remedy = "it has been changed: open it again" if in_place else "it is as it was"
    change = check_unchanged(model, before, "Processing", remedy)
    return model, Processing(folded, reasons, untied, added, change)


def _maps(parts: Parts) -> list[LinearMap]:
    maps = {part.name: part for part in parts.writes}
    for group in parts.fold_groups():
        maps |= {part.name: part for part in group.maps}
    return list(maps.values())


def _untie(model: PreTrainedModel, parts: Parts) -> bool:
    unembed = parts.unembed.module
    shared = next((t.module for t in parts.tables if t.module.weight is unembed.weight), None)
    if shared is None:
        return False
    # The embedding has no norm before it, so a gain can be folded into the unembedding only.
    unembed.weight = nn.Parameter(shared.weight.detach().clone(), shared.weight.requires_grad)
    model.config.tie_word_embeddings = False
    # transformers has its own list of weights that it leaves out of a checkpoint.
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=False)
    return True


def _fold_norms(model: Parts) -> list[str]:
    done = []
    for reader in model.fold_groups():
        norm = reader.norm
        if norm is None:
            continue
        # A norm that was folded before is plain; only centring may be left to do.
        plain = norm.is_plain()
        for part in reader.maps:
            weight, bias = part.weight(), part.bias()
            # Both from the weights before any change: the bias of a norm passes through W.
            moved, added = norm.folded(weight, bias)
            if added is not bias and added is not None:
                part.set_bias(added)
            # Rounding leaves something of a mean, which is kept: a second time changes nothing.
            if not plain or (norm.centres and _without_mean(weight, 1, part) is not weight):
                part.set_weight(moved)
                done.append(f"{part.name} centred" if plain else f"{norm.name} into {part.name}")
        if not plain:
            norm.make_plain()
    return done


def _fold_value_biases(model: Parts) -> list[str]:
    done = []
    for layer in model.layers:
        heads = layer.heads
        bias = heads.value.bias()
        if bias is None or not bias.any():
            continue
        # Rows of a pattern sum to 1, so that the bias of a value reaches the output unchanged,
        # whatever the head attends to. One copy for each head, if heads share values.
        per_head = repeat(bias, "(h d) -> (h n d)", d=heads.d_head, n=heads.sharing)
        folded = heads.out.weight() @ per_head
        out_bias = heads.out.bias()
        heads.out.set_bias(folded if out_bias is None else out_bias + folded)
        heads.value.set_bias(torch.zeros_like(bias))
        done.append(f"bias of values in {heads.value.name} into {heads.out.name}")
    return done


def _center_writing_weights(model: Parts) -> list[str]:
    done = []
    for table in model.tables:
        rows = table.weight()
        moved = _without_mean(rows, 1, table)
        if moved is not rows:
            table.set_weight(moved)
            done.append(f"{table.name} centred")
    for part in model.writes:
        done += _center_outputs(part)
    return done


def _center_outputs(part: LinearMap) -> list[str]:
    """Subtract the mean over a map's outputs from its weight and from its bias."""
    done = []
    weight, bias = part.weight(), part.bias()
    moved = _without_mean(weight, 0, part)
    if moved is not weight:
        part.set_weight(moved)
        done.append(f"{part.name} centred")
    if bias is not None:
        moved = _without_mean(bias, 0, part)
        if moved is not bias:
            part.set_bias(moved)
            done.append(f"bias of {part.name} centred")
    return done


def _without_mean(weight: Tensor, axis: int, part: LinearMap | Embedding) -> Tensor:
    """Return the weights without their mean over an axis; the same tensor if it is rounding only.

    Rounding to the storage dtype leaves something of a mean, which is kept: a second time changes
    nothing.
    """
    mean = weight.mean(axis, keepdim=True)
    stored = part.module.weight.dtype if isinstance(part, Embedding) else part.stored.dtype
    rounding = max(torch.finfo(stored).eps, 8 * torch.finfo(weight.dtype).eps)
    if _root_mean_square(mean) <= rounding * _root_mean_square(weight):
        return weight
    return weight - mean


def _root_mean_square(weight: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight) / weight.numel() ** 0.5


STEPS: dict[str, Step] = {
    "fold_norms": _fold_norms,
    "fold_value_biases": _fold_value_biases,
    "center_writing_weights": _center_writing_weights,
    "center_unembed": lambda model: _center_outputs(model.unembed),
}
"""Steps by name, in the order of their application: biases move before they are centred."""


def refusal(step: str, model: Parts) -> str | None:
    """Return the reason why a step would change the function of a model; None if it would not."""
    readers = model.fold_groups()
    match step:
        case "fold_norms":
            return next((r.obstacle for r in readers if r.norm is not None and r.obstacle), None)
        case "fold_value_biases":
            return model.partial_values
        case "center_writing_weights":
            seeing = [r for r in readers if r.norm is None or not r.norm.centres]
            if seeing:
                reader = seeing[0].maps[0].name
                through = "no norm" if seeing[0].norm is None else "an RMSNorm"
                return f"{reader} reads the stream through {through}, which lets its mean pass"
        case "center_unembed" if model.softcap is not None:
            return "the logits pass through a soft-cap, which changes with a shared number"
    return None

"""Weight processing: five rewritings of a model's weights that leave its function unchanged.

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

factor_heads: a score is a product x A B' y of queries A and keys B, and a head moves x C D' of
values C and outputs D. Only these products matter, whose ranks are those of a head. Each becomes
U sqrt(S) and V sqrt(S) of the product's singular value decomposition, so that coordinates of a head
are in the order of their importance.

Source: the weight processing of TransformerLens (fold_ln and its companions, among them
refactor_factored_attn_matrices), and Elhage et al. 2021, "Handling Layer Normalization".
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from bilens.checks import check_weights, detached
from bilens.convert.gates import add_to_processing
from bilens.errors import BilensError
from bilens.options import StepName
from bilens.transformer.families import find_modules
from bilens.transformer.layers import Heads, Modules
from bilens.transformer.maps import Embedding, LinearMap, working_dtype
from bilens.transformer.model import check_unhooked
from bilens.transformer.sums import check_unchanged, log_probabilities

Step = Callable[[Modules], list[str]]
"""A rewriting of a model's weights; returns the folded parts and their new places, in words."""


@dataclass(frozen=True)
class Processing:
    """Report of `process`.

    Attributes:
        folded: for each step that was applied, the folded parts and their new places.
        refused: for each step that was left out, in whole or in part, the reason.
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


@detached
def process(
    model: PreTrainedModel, steps: Sequence[StepName] | None = None, *, in_place: bool = False
) -> tuple[PreTrainedModel, Processing]:
    """Rewrite the weights of a model so that they are easier to read; its function stays.

    The steps are fold_norms, fold_value_biases, center_writing_weights, center_unembed and
    factor_heads, in this order; `bilens.convert.processing` derives them. Each weight is computed
    in float32, or in float64 if it is stored so, and put back in the dtype of its storage. A second
    time changes nothing. The model's config lists the applied steps in `bilens_processing`.

    Args:
        model: of a family that `bilens.transformer.families` knows, or one that was registered.
        steps: the steps to apply; by default every step but factor_heads that leaves the function
            unchanged.
        in_place: change the model itself. Otherwise the result is another model, which shares the
            memory of unchanged weights with it.

    Raises:
        BilensError: the structure of the model is not known, layers share a module, or a module is
            pruned or has another hook. Or a step is unknown or would change this model, or a
            log-probability changed by more than rounding explains.
        CheckpointError: a weight is NaN or infinite.

    Source: The weight processing of TransformerLens; see `bilens.convert.processing`.
    """
    # A hook, such as that of pruning, computes weights anew and would undo a folding.
    check_unhooked(model)
    modules = find_modules(model)
    names, reasons = _selected(modules, steps)
    check_weights(model)
    before = log_probabilities(model)
    if not in_place:
        model = _sharing_copy(model)
        modules = find_modules(model)
    # Steps inside of attention leave both tables alone, so they may stay one matrix.
    outer = {"fold_norms", "center_writing_weights", "center_unembed"}
    is_untied = not outer.isdisjoint(names) and _untie(model, modules)
    bare = [part for part in _maps(modules) if part.bias() is None]
    folds = {step: STEPS[step](modules) for step in names if step not in reasons}
    if "fold_norms" in folds:
        groups = [group for group in modules.fold_groups() if group.norm and group.obstacle]
        if groups:
            reasons["fold_norms"] = f"{len(groups)} norms stay: {groups[0].obstacle}"
    biases = tuple(part.name for part in bare if part.bias() is not None)
    add_to_processing(model.config, list(folds), biases)
    remedy = "it has been changed: open it again" if in_place else "it is as it was"
    change = check_unchanged(model, before, "Processing", remedy)
    return model, Processing(folds, reasons, is_untied, biases, change)


def _sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return another model with parameters of its own, whose values are not copied."""
    memo = {id(p): nn.Parameter(p.data, p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def _selected(
    modules: Modules, steps: Sequence[StepName] | None
) -> tuple[list[str], dict[str, str]]:
    """Return the steps in their order, and of those that would change the model the reasons."""
    if not {*(steps or ())} <= STEPS.keys():
        raise BilensError(f"steps={list(steps or ())}, expected some of {', '.join(STEPS)}")
    names = [step for step in STEPS if step in (BY_DEFAULT if steps is None else steps)]
    reasons = {step: reason for step in names if (reason := refusal(step, modules)) is not None}
    if steps is not None and reasons:
        step, reason = next(iter(reasons.items()))
        raise BilensError(f"{step} would change the function of this model: {reason}")
    return names, reasons


def _maps(modules: Modules) -> list[LinearMap]:
    maps = {part.name: part for part in modules.writes}
    for group in modules.fold_groups():
        maps |= {part.name: part for part in group.maps}
    return list(maps.values())


def _untie(model: PreTrainedModel, modules: Modules) -> bool:
    unembed = modules.unembed.module
    table = next((t.module for t in modules.tables if t.module.weight is unembed.weight), None)
    if table is None:
        return False
    # The embedding has no norm before it, so a gain can be folded into the unembedding only.
    unembed.weight = nn.Parameter(table.weight.detach().clone(), table.weight.requires_grad)
    model.config.tie_word_embeddings = False
    # transformers has its own list of weights that it leaves out of a checkpoint.
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=False)
    return True


def _fold_norms(model: Modules) -> list[str]:
    notes = []
    for reader in model.fold_groups():
        norm = reader.norm
        if norm is None or reader.obstacle is not None:
            continue
        # A norm that was folded before is plain; only centring may be left to do.
        plain = norm.is_plain()
        for part in reader.maps:
            weight, bias = part.weight(), part.bias()
            # Both from the weights before any change: the bias of a norm passes through W.
            new_weight, new_bias = norm.folded(weight, bias)
            if new_bias is not bias and new_bias is not None:
                part.set_bias(new_bias)
            # Rounding leaves something of a mean, which is kept: a second time changes nothing.
            if not plain or (norm.centres and _without_mean(weight, 1, part) is not weight):
                part.set_weight(new_weight)
                notes.append(f"{part.name} centred" if plain else f"{norm.name} into {part.name}")
        if not plain:
            norm.make_plain()
    return notes


def _fold_value_biases(model: Modules) -> list[str]:
    notes = []
    for layer in model.layers:
        heads = layer.heads
        bias = heads.value.bias()
        if bias is None or not bias.any():
            continue
        # Rows of a pattern sum to 1, so that the bias of a value reaches the output unchanged,
        # whatever the head attends to. One copy for each head, if heads share values.
        per_head = repeat(bias, "(h d) -> (h n d)", d=heads.d_head, n=heads.sharing)
        shift = heads.out.weight() @ per_head
        out_bias = heads.out.bias()
        heads.out.set_bias(shift if out_bias is None else out_bias + shift)
        heads.value.set_bias(torch.zeros_like(bias))
        notes.append(f"bias of values in {heads.value.name} into {heads.out.name}")
    return notes


def _center_writing_weights(model: Modules) -> list[str]:
    notes = []
    for table in model.tables:
        rows = table.weight()
        deviations = _without_mean(rows, 1, table)
        if deviations is not rows:
            table.set_weight(deviations)
            notes.append(f"{table.name} centred")
    for part in model.writes:
        notes += _center_outputs(part)
    return notes


def _center_outputs(part: LinearMap) -> list[str]:
    """Subtract the mean over a map's outputs from its weight and from its bias."""
    notes = []
    weight, bias = part.weight(), part.bias()
    deviations = _without_mean(weight, 0, part)
    if deviations is not weight:
        part.set_weight(deviations)
        notes.append(f"{part.name} centred")
    if bias is not None:
        deviations = _without_mean(bias, 0, part)
        if deviations is not bias:
            part.set_bias(deviations)
            notes.append(f"bias of {part.name} centred")
    return notes


def _without_mean(weight: Tensor, axis: int, part: LinearMap | Embedding) -> Tensor:
    """Return the weights without their mean over an axis; the same tensor if it is rounding only.

    Rounding to the storage dtype leaves something of a mean, which is kept: a second time changes
    nothing.
    """
    mean = weight.mean(axis, keepdim=True)
    dtype = part.module.weight.dtype if isinstance(part, Embedding) else part.stored.dtype
    rounding = max(torch.finfo(dtype).eps, 8 * torch.finfo(weight.dtype).eps)
    if _root_mean_square(mean) <= rounding * _root_mean_square(weight):
        return weight
    return weight - mean


def _root_mean_square(weight: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight) / weight.numel() ** 0.5


def _factor_heads(model: Modules) -> list[str]:
    notes = []
    for layer in model.layers:
        heads = layer.heads
        for query, key in heads.pairs:
            if _factor(heads, query, key):
                notes.append(f"{query.name} and {key.name}")
        # A head's output is its values times the columns of the output's weight.
        if _factor(heads, heads.value, heads.out):
            notes.append(f"{heads.value.name} and {heads.out.name}")
    return notes


def _factor(heads: Heads, first: LinearMap, second: LinearMap) -> bool:
    """Give each head's two maps the form of their product's SVD; False if they have it already."""
    sides = [_by_head(heads, part) for part in (first, second)]
    if all(_is_factored(a, b, first.stored.dtype) for a, b in zip(*sides, strict=True)):
        return False
    # QR first: products of width d_head have the same singular values as those of the stream's.
    (Q, K), (A, B) = zip(*(torch.linalg.qr(side.double()) for side in sides), strict=True)
    U, values, V = torch.linalg.svd(A @ B.mT)
    roots = values.sqrt()[:, None, :]
    _put_by_head(heads, first, Q @ U * roots)
    _put_by_head(heads, second, K @ V.mT * roots)
    return True


def _by_head(heads: Heads, part: LinearMap) -> Tensor:
    """Return (heads, d, d_head), the weight of each head, with a last row for biases of its own.

    The bias of the map out of the heads belongs to no head.
    """
    weight, bias = part.weight(), part.bias()
    if part is heads.out:
        return rearrange(weight, "d (h e) -> h d e", h=heads.n_heads)
    rows = rearrange(weight, "(h e) d -> h d e", h=heads.n_heads)
    if bias is None or not bias.any():
        return rows
    return torch.cat([rows, rearrange(bias, "(h e) -> h 1 e", h=heads.n_heads)], 1)


def _put_by_head(heads: Heads, part: LinearMap, rows: Tensor) -> None:
    rows = rows.to(working_dtype(part.stored.dtype))
    if part is heads.out:
        part.set_weight(rearrange(rows, "h d e -> d (h e)"))
        return
    part.set_weight(rearrange(rows[:, : part.n_in], "h d e -> (h e) d"))
    if rows.shape[1] > part.n_in:
        part.set_bias(rearrange(rows[:, -1], "h e -> (h e)"))


def _is_factored(
    first: Float[Tensor, "d d_head"], second: Float[Tensor, "n d_head"], stored: torch.dtype
) -> bool:
    """Return whether both sides have orthogonal columns of the same falling lengths."""
    one, other = (side.double().T @ side.double() for side in (first, second))
    squares = one.diagonal()
    rounding = 16 * torch.finfo(stored).eps * squares.max()
    off = max(float((side - torch.diag(squares)).abs().max()) for side in (one, other))
    is_sorted = squares.diff() <= rounding
    return off <= float(rounding) and bool(is_sorted.all())


STEPS: dict[str, Step] = {
    "fold_norms": _fold_norms,
    "fold_value_biases": _fold_value_biases,
    "center_writing_weights": _center_writing_weights,
    "center_unembed": lambda model: _center_outputs(model.unembed),
    "factor_heads": _factor_heads,
}
"""Steps by name, in the order of their application: biases move before they are centred."""
BY_DEFAULT = [step for step in STEPS if step != "factor_heads"]
"""Steps that are applied where none is named: those of TransformerLens's defaults."""


def refusal(step: str, model: Modules) -> str | None:
    """Return the reason why a step would change the function of a model; None if it would not."""
    readers = model.fold_groups()
    match step:
        case "fold_value_biases":
            return model.partial_values
        case "center_writing_weights":
            obstacles = [r for r in readers if r.norm is None or not r.norm.centres]
            if obstacles:
                reader = obstacles[0].maps[0].name
                through = "no norm" if obstacles[0].norm is None else "an RMSNorm"
                return f"{reader} reads the stream through {through}, which lets its mean pass"
        case "center_unembed" if model.softcap is not None:
            return "the logits pass through a soft-cap, which changes with a shared number"
        case "factor_heads":
            return _heads_refusal(model)
    return None


def _heads_refusal(model: Modules) -> str | None:
    heads = model.layers[0].heads
    if heads.inner:
        return f"{heads.inner[0].name} is between queries or keys and their scores"
    if heads.sharing > 1:
        return f"{heads.sharing} heads share keys and values, which can have one form only"
    if model.n_positions is None:
        return "positions without vectors turn queries and keys"
    return model.fixed_heads

"""The mathematics of weight processing: four rewritings of weights that change no function.

A LayerNorm is x -> g * c / |c| sqrt(d) + b with c = x - mean(x), and every linear map W x + e that
reads it can take over what is linear in it:

fold_norms: W g * (..) + (e + W b), and the norm keeps the centring and the scaling. What it hands
over then has mean 0, so the mean of each row of W is without effect and is taken away too. RMSNorm
is the same without mean and b.

fold_value_biases: a row of an attention pattern sums to 1, so a bias b_V arrives whole behind the
pattern, and W_O b_V belongs to the bias of the output.

center_writing_weights: a stream that is only read through LayerNorms is read without its mean, so
nothing has to write one, and every column of what writes is centred.

center_unembed: softmax does not see what all logits share, so the rows of W_U, one for each token,
are centred together.

Source: the weight processing of TransformerLens (`fold_ln` and its companions), and Elhage et al.
2021, "Handling Layer Normalization".
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from einops import repeat
from torch import Tensor

from bilens.residual.layers import Parts
from bilens.residual.parts import Embedding, LinearMap

__all__ = ["STEPS", "Step", "StepName", "refusal"]

StepName = Literal["fold_norms", "fold_value_biases", "center_writing_weights", "center_unembed"]
"""The steps by their names."""

Step = Callable[[Parts], list[str]]
"""Rewrites the weights of a model and says what was folded where."""


def _fold_norms(model: Parts) -> list[str]:
    done = []
    for reader in model.readers():
        norm = reader.norm
        if norm is None:
            continue
        plain = norm.is_plain()
        for part in reader.maps:
            weight, bias = part.weight(), part.bias()
            moved, added = norm.folded(weight, bias)
            if added is not bias and added is not None:
                part.set_bias(added)
            # What rounding leaves of a mean stays, so that a second time changes nothing.
            if not plain or (norm.centres and _take_mean(weight, 1, part) is not weight):
                part.set_weight(moved)
                done.append(
                    f"{norm.name} into {part.name}" if not plain else f"{part.name} centred"
                )
        if not plain:
            norm.make_plain()
    return done


def _fold_value_biases(model: Parts) -> list[str]:
    done = []
    for heads in (layer.heads for layer in model.layers):
        bias = heads.value.bias()
        if bias is None or not bias.any():
            continue
        # Of each head, where heads share values.
        each = repeat(bias, "(h d) -> (h n d)", d=heads.d_head, n=heads.sharing)
        arriving = heads.out.weight() @ each
        had = heads.out.bias()
        heads.out.set_bias(arriving if had is None else had + arriving)
        heads.value.set_bias(torch.zeros_like(bias))
        done.append(f"bias of values in {heads.value.name} into {heads.out.name}")
    return done


def _center_writing_weights(model: Parts) -> list[str]:
    done = []
    for table in model.tables:
        rows = table.weight()
        moved = _take_mean(rows, 1, table)
        if moved is not rows:
            table.set_weight(moved)
            done.append(f"{table.name} centred")
    for part in model.writes:
        done += _center_outputs(part)
    return done


def _center_outputs(part: LinearMap) -> list[str]:
    """Take from a map what all its outputs share, in its weight and in its bias."""
    done = []
    weight, bias = part.weight(), part.bias()
    moved = _take_mean(weight, 0, part)
    if moved is not weight:
        part.set_weight(moved)
        done.append(f"{part.name} centred")
    if bias is not None:
        moved = _take_mean(bias, 0, part)
        if moved is not bias:
            part.set_bias(moved)
            done.append(f"bias of {part.name} centred")
    return done


def _take_mean(weight: Tensor, axis: int, part: LinearMap | Embedding) -> Tensor:
    """The weights without their mean over an axis; the same tensor where it is only rounding.

    What rounding to the storage dtype leaves of a mean stays, so that a second time changes
    nothing.
    """
    mean = weight.mean(axis, keepdim=True)
    stored: Any = part.module.weight.dtype
    rounding = max(torch.finfo(stored).eps, 8 * torch.finfo(weight.dtype).eps)
    if _size(mean) <= rounding * _size(weight):
        return weight
    return weight - mean


def _size(weight: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight) / weight.numel() ** 0.5


STEPS: dict[str, Step] = {
    "fold_norms": _fold_norms,
    "fold_value_biases": _fold_value_biases,
    "center_writing_weights": _center_writing_weights,
    "center_unembed": lambda model: _center_outputs(model.unembed),
}
"""By name, in the order in which `process` applies them: biases move before they are centred."""


def refusal(step: str, model: Parts) -> str | None:
    """Why a step would change what a model computes; None where it would not."""
    readers = model.readers()
    match step:
        case "fold_norms":
            found = [r.obstacle for r in readers if r.norm is not None and r.obstacle is not None]
            return found[0] if found else None
        case "fold_value_biases":
            return model.partial_values
        case "center_writing_weights":
            seeing = [r for r in readers if r.norm is None or not r.norm.centres]
            if seeing:
                reader = seeing[0].maps[0].name
                through = "no norm" if seeing[0].norm is None else "an RMSNorm"
                return f"{reader} reads the stream through {through}, which lets its mean pass"
        case "center_unembed" if model.softcap is not None:
            return "the logits go through a soft-cap, which what they share does not leave alone"
    return None

"""Edits: parts removed or scaled in the weights of a model, for all texts."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bilens.checks import check_finite, check_index, detached
from bilens.errors import BilensError
from bilens.settings import NotNegative
from bilens.transformer import ResidualModel
from bilens.transformer.maps import LinearMap, Norm


@detached
def edit(
    model: ResidualModel, layer: int, vectors: Float[Tensor, "k n"], *, scale: NotNegative = 0.0
) -> ResidualModel:
    """Return the model with some directions of one MLP's input scaled, or removed.

    With P the projector on the directions and z the normalised stream, the constant included,
    L becomes L (1 - (1 - scale) P), and so does R of a gate. This holds at every position of every
    text. Only the weights of that MLP differ. The result is an ordinary model of its family, and
    `bilens.convert.save_model` writes it. Costs O(k rank n).

    The model stays as it is, and the edited one shares the memory of all other weights with it.
    Vectors are rows in the normalised stream, with the constant as last coordinate, as
    in `Flow.vector`, or without. They need not be orthogonal. Scale 0 removes them.

    Raises:
        BilensError: the MLP has experts or reads after a norm with a gain of 0, or the edit asks
            for a bias, and the model has none.
    """
    mlp = model.layer(layer).mlp
    if mlp.router is not None:
        raise BilensError(
            f"{mlp.name} has experts, and their router reads the same input; edit "
            "heads, or a model without experts"
        )
    basis = _orthonormal(vectors.to(model.device, model.modules.dtype), model.d_model)
    result = sharing_weights(model)
    new = result.layer(layer).mlp
    tensor, units = mlp.factors(), new.up.n_out
    for part, factor in ((new.up, tensor.left[:units]), (new.gate, tensor.right[:units])):
        if part is not None:
            along = (1 - scale) * factor @ basis[:, : factor.shape[1]].T
            _remove(part, new.norm, along, basis)
    return result


@detached
def edit_heads(
    model: ResidualModel, layer: int, heads: Sequence[int], *, scale: float = 0.0
) -> ResidualModel:
    """Return the model with the output of some heads of a layer scaled, or removed.

    O_h becomes scale O_h, at every position of every text. A bias of the output stays. Patterns
    and all other weights are unchanged, and the result is an ordinary model of its family. The
    model stays as it is, and the edited one shares the memory of all other weights with it. Scale 0
    removes the output, -1 reverses it.

    Raises:
        BilensError: the layer or a head does not exist, or the scale is not finite.
    """
    out = model.layer(layer).heads.out
    check_finite(scale=torch.tensor(scale))
    for head in heads:
        check_index("head", head, model.n_heads)
    weight = out.weight().clone()
    weight.unflatten(1, (model.n_heads, -1))[:, list(heads)] *= scale
    result = sharing_weights(model)
    result.layer(layer).heads.out.set_weight(weight)
    return result


@detached
def edit_mlp_along(
    model: ResidualModel,
    written: Float[Tensor, "k d_model"],
    read: Float[Tensor, "k d_model"],
    *,
    layer: int,
    scale: float = 0.0,
) -> ResidualModel:
    """Return the model with some directions of one MLP's output scaled, or removed.

    The output y becomes y - (1 - scale) sum_i t_i (r_i . y), at every position of every text, by
    the weights and bias of its last map. The t are `written` and the r `read`, such as those of
    `task_directions`; r_i . t_j is 1 for i = j, and else 0. All other weights are unchanged, and
    shared with the model. Scale 0 removes the directions, -1 reverses them.

    Raises:
        BilensError: the MLP has experts or a norm after it.
    """
    mlp = model.layer(layer).mlp
    if mlp.router is not None or mlp.out_norm is not None:
        raise BilensError(
            f"{mlp.name} has experts or a norm after its output, expected a last map whose output "
            "the stream receives; edit heads, or another model"
        )
    if read.shape[1] != model.d_model:
        raise BilensError(
            f"written and read have shapes {tuple(written.shape)} and {tuple(read.shape)}, "
            f"expected (k, {model.d_model}) of both, the directions of one layer"
        )
    check_finite(scale=torch.tensor(scale), written=written, read=read)
    weight = mlp.down.weight()
    t, r = (rows.cpu().double() for rows in (written, read))
    result = sharing_weights(model)
    down = result.layer(layer).mlp.down
    down.set_weight(weight - ((1 - scale) * t.T @ (r @ weight.cpu().double())).to(weight))
    if (bias := mlp.down.bias()) is not None:
        down.set_bias(bias - ((1 - scale) * t.T @ (r @ bias.cpu().double())).to(bias))
    return result


def sharing_weights(model: ResidualModel) -> ResidualModel:
    """Return a copy of the model whose parameters share their memory until they are set."""
    # The weights were checked when the model was opened, and are not checked again.
    memo: dict[int, Any] = {id(model.tokenizer): model.tokenizer}
    for p in model.model.parameters():
        memo[id(p)] = nn.Parameter(p.data, p.requires_grad)
    return copy.deepcopy(model, memo)


def _orthonormal(vectors: Tensor, width: int) -> Tensor:
    """Return an orthonormal basis of the rows' span, the constant as its last coordinate."""
    if len(vectors) == 0 or vectors.shape[1] not in (width, width + 1):
        raise BilensError(
            f"vectors has shape {tuple(vectors.shape)}, expected rows of {width} numbers, or of "
            f"{width + 1} with the constant"
        )
    check_finite(vectors=vectors)
    if not vectors.any(-1).all():
        raise BilensError("vectors holds a row that is zero and points nowhere; leave it out")
    columns = nn.functional.pad(vectors, (0, width + 1 - vectors.shape[1])).cpu().double()
    units = columns / columns.norm(dim=-1, keepdim=True)
    _, sizes, rows = torch.linalg.svd(units, full_matrices=False)
    return rows[sizes > 1e-6].to(vectors)


def _remove(part: LinearMap, norm: Norm | None, along: Tensor, basis: Tensor) -> None:
    """W z - along (basis z) by weights and bias alone; z = [n, 1] and W reads g n + b."""
    reader, constant = basis[:, :-1], basis[:, -1]
    bias = None if norm is None else norm.bias()
    if norm is not None:
        gain = norm.gain()
        if not gain.all():
            raise BilensError(
                f"{norm.name} has a gain of 0, so that no map behind it reads what is removed"
            )
        reader = reader / gain
    shift = -along @ constant
    if bias is not None:
        shift = shift + along @ (reader @ bias)
    weight, old = part.weight() - along @ reader, part.bias()
    if old is None and shift.abs().max() > 1e-6 * weight.abs().max():
        raise BilensError(
            f"{part.name} has no bias, which these vectors ask for: they hold a share of the "
            "constant; leave their last coordinate out"
        )
    part.set_weight(weight)
    if old is not None:
        part.set_bias(old + shift)

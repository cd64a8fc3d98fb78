"""Checks of what readings add up from weights against the modules of the model."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import check_sum
from bilens.hooks import hooked
from bilens.tensor.factors import with_constant
from bilens.transformer import ResidualModel
from bilens.transformer.running import wide_passes


@torch.no_grad()
def check_alone(
    model: ResidualModel,
    layer: int,
    token: int,
    position: int | None,
    columns: Sequence[int],
    total: Float[Tensor, " n"],
) -> None:
    """Check logits of a single token, through one MLP only, against a run of the model.

    Everything else that writes to the stream is silenced in that run.
    """
    # A token without context: nothing but its embedding and this MLP writes to the stream.
    silent = [part.heads.out.module for part in model.modules.layers]
    silent += [part.mlp.writer for i, part in enumerate(model.modules.layers) if i != layer]
    ids = torch.full((1, (position or 0) + 1), token)
    with hooked(after=[(module, lambda *call: torch.zeros_like(call[-1])) for module in silent]):
        logits = model.logits(ids)[0, -1, list(columns)]
    W_U, _ = model.modules.logit_weights(columns)
    size = float(total.abs().max()) + model.d_model**0.5 * float(W_U.norm(dim=0).max())
    # In this direction: the inverse of the soft-cap would blow up rounding near the cap.
    total = model.modules.capped(total)
    check_sum("The logit of a token alone", total, logits, size=size)


@torch.no_grad()
def check_mlp(model: ResidualModel, layer: int, x: Float[Tensor, " d_model"]) -> None:
    """Check the tensor of an MLP on one stream x against the modules of the model.

    Raises:
        NotBilinearError: the MLP is not a tensor.
        BilensError: they differ by more than rounding.
    """
    tensor, mlp = model.mlp(layer), model.layer(layer).mlp
    n = mlp.normalised(x)
    total = tensor(n)
    if mlp.out_norm is not None:
        total = total * mlp.out_norm.scale(mlp.output(mlp.module_input(x)).to(x))
    z = with_constant(n) if tensor.constant else n
    hidden = (z @ tensor.left.T) * (z @ tensor.right.T)
    # Rounding is that of the terms, which may be much larger than the sum that they cancel to.
    size = float((tensor.out.abs() @ hidden.abs()).max()) + float(total.abs().max())
    expected = model.layer(layer).mlp.stream_output(x)
    check_sum(f"The tensor of {mlp.name}", total, expected, size=size)


@torch.no_grad()
def check_heads(model: ResidualModel, layer: int, x: Float[Tensor, " d_model"]) -> None:
    """Check values and outputs of the heads on one stream x, each with weight 1."""
    heads = model.layer(layer).heads
    weights = heads.weights()
    if heads.v_first_share is not None:
        return  # values of two layers are mixed: a flow checks these on a text
    values = heads.value(heads.module_input(x)).unflatten(0, (heads.n_kv_heads, -1))
    out = heads.out(values.repeat_interleave(heads.sharing, 0).flatten())
    expected = heads.residual_scale * out.to(x)
    n = heads.normalised(x)
    mixture = torch.einsum("d,hde->he", n, weights.value) + weights.value_bias
    total = torch.einsum("he,hed->d", mixture, weights.out) + weights.out_bias
    if heads.out_norm is not None:
        with wide_passes(heads.out_norm.module):
            expected = heads.residual_scale * heads.out_norm.module(out).to(x)
        total = total * heads.out_norm.scale(out.to(x))
    size = float(torch.einsum("he,hed->d", mixture.abs(), weights.out.abs()).max())
    name = f"V O of the heads of {model.layer(layer).name}"
    check_sum(name, total, expected, size=size)

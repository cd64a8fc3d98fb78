"""The logits of a model as the sum of what its `ResidualModel` says that each part does."""

import torch
from torch import Tensor

from bilens.residual import ResidualModel
from bilens.tensor import with_constant


def normalised(norm, x: Tensor, scale: Tensor) -> Tensor:
    return x if norm is None else norm.centred(x) * scale[:, None]


def mlp_out(view: ResidualModel, layer: int, n: Tensor, ratio: Tensor) -> Tensor:
    tensor = view.mlp_factors(layer)
    z = with_constant(n) if tensor.constant else n
    extra = torch.ones(len(ratio), tensor.rank - ratio.shape[1]).to(ratio)
    hidden = (z @ tensor.left.T) * (z @ tensor.right.T) * torch.cat([ratio, extra], 1)
    return hidden @ tensor.out.T


def sum_of_parts(view: ResidualModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The logits put together, and the model's."""
    trace, parts = view.trace(ids), view.parts
    x = torch.cat([view.embedded(ids[[i]], i) for i in range(len(ids))])
    x0, v_first = x, None
    for number, (layer, found) in enumerate(zip(parts.layers, trace.layers, strict=True)):
        if layer.residual_mix is not None:
            x = layer.residual_mix[0] * x + layer.residual_mix[1] * x0
        heads, before = view.heads(number), x
        n = normalised(layer.heads.norm, x, found.attn_scale)
        v = torch.einsum("td,hde->hte", n, heads.value) + heads.value_bias[:, None]
        if layer.heads.v_first_share is not None:
            share = layer.heads.v_first_share
            v_first = v / (1 - share) if v_first is None else v_first
            v = v + share * v_first
        written = torch.einsum("hts,hse,hed->td", found.pattern, v, heads.out) + heads.out_bias
        x = x + written * found.attn_out_scale[:, None]
        read = before if parts.parallel else x
        n = normalised(layer.mlp.norm, read, found.mlp_scale)
        x = x + mlp_out(view, number, n, found.gate_ratio) * found.mlp_out_scale[:, None]
    logits = normalised(parts.norm, x, trace.scale) @ view.W_U + view.b_U
    if parts.softcap is not None:
        logits = parts.softcap * torch.tanh(logits / parts.softcap)
    return logits, trace.logits

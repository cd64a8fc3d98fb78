"""What an MLP reads, taken apart by where it came from: the token itself, each head, biases."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_index, check_sum, full_precision
from bilens.residual import Moment, ResidualModel, Trace

__all__ = ["Stream", "head_outputs_at", "read_stream"]


@dataclass(frozen=True, eq=False)
class Stream:
    """What an MLP reads at one position of a text, normalised, as a sum of named parts.

        M y_t = M (x_t + sum_h sum_s A^h_ts O_h V_h N_s x_s + biases)

    N and M are the norms before attention and MLP, with the scales that they have on the text: each
    divides all parts alike. Where the MLP stands beside attention it reads x_t alone.

    Attributes:
        direct: what was in the stream before the layer, x_t.
        heads: what each head brings from each earlier token.
        constant: biases of attention.
    """

    direct: Float[Tensor, " d_model"]
    heads: Float[Tensor, "heads time d_model"]
    constant: Float[Tensor, " d_model"]

    def total(self) -> Float[Tensor, " d_model"]:
        """What the MLP reads; exactly the sum of the parts."""
        return self.direct + self.heads.sum((0, 1)) + self.constant


@torch.no_grad()
@full_precision
def read_stream(
    model: ResidualModel, ids: Int[Tensor, " time"], position: int, layer: int = 0
) -> Stream:
    """Take apart what the MLP of a layer reads at one position.

    Raises:
        BilensError: the text has no such position, or the model no such layer.

    Source:
        Pearce et al. 2024, section 6.2; Elhage et al. 2021, "Path expansion trick".
    """
    check_index("position", position, len(ids), "a place in ids")
    reader = model.layer(layer).mlp
    trace = model.trace(ids[: position + 1])
    found = trace.layers[layer]
    direct = found.attn_input[position]
    if model.parts.mlp_moment(layer) < Moment.attention(layer):
        heads, constant = direct.new_zeros(model.n_heads, position + 1, model.d_model), 0 * direct
    else:
        heads, constant = head_outputs_at(model, trace, layer, position)
    scale = found.mlp_scale[position]
    stream = Stream(*(reader.centred(part) * scale for part in (direct, heads, constant)))
    check_sum(
        f"The input of {reader.name}, split by source,",
        stream.total(),
        found.mlp_n[position],
        size=float(scale * (direct.abs() + heads.abs().sum((0, 1)) + constant.abs()).max()),
        dtype=model.parts.embed.module.weight.dtype,
    )
    return stream


def head_outputs_at(
    model: ResidualModel, trace: Trace, layer: int, position: int
) -> tuple[Float[Tensor, "heads time d_model"], Float[Tensor, " d_model"]]:
    """What each head of a layer adds to the stream at a position from each token, and biases."""
    found, weights = trace.layers[layer], model.heads(layer)
    sources = model.value_sources(layer)
    values = torch.stack([trace.layers[s.layer].attn_n @ s.value for s in sources]).sum(0)
    bias = torch.stack([source.bias for source in sources]).sum(0)
    pattern, scale = found.pattern[:, position], found.attn_out_scale[position]
    heads = torch.einsum("ht,hte,hed->htd", pattern, values, weights.out)
    # The bias of the values arrives as often as a row of the pattern sums to.
    arriving = torch.einsum("h,he,hed->d", pattern.sum(-1), bias, weights.out)
    return scale * heads, scale * (arriving + weights.out_bias)

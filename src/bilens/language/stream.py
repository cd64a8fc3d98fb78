"""The stream at one position of a text as a sum of parts."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_index, check_sum, detached
from bilens.transformer import Pass, ResidualModel
from bilens.transformer.layers import Moment, folded_output
from bilens.transformer.on_text import LayerOnText


@dataclass(frozen=True, eq=False)
class Sources:
    """A vector or a number at one position of a text, as a sum over the sources of the stream.

    Attributes:
        direct: of the stream before the layer.
        heads: of each token up to the position, through each head.
        constant: of biases.
    """

    direct: Float[Tensor, "*n"]
    heads: Float[Tensor, "heads time *n"]
    constant: Float[Tensor, "*n"]

    def tokens(self) -> Float[Tensor, "time *n"]:
        """Return the part of each token, over all paths."""
        parts = self.heads.sum(0)
        parts[-1] += self.direct
        return parts

    def total(self) -> Float[Tensor, "*n"]:
        """Return the sum of all parts."""
        return self.tokens().sum(0) + self.constant


@detached
def read_stream(
    model: ResidualModel, text: str | Int[Tensor, " time"], position: int, *, layer: int
) -> Sources:
    """Split the normalised MLP input of a layer at one position over the tokens before it.

        M y_t = M (x_t + sum_h sum_s A^h_ts O_h V_h N_s x_s + biases)

    N and M are the norms before attention and before the MLP, with their scales on the text: a
    scale divides all parts alike. An MLP parallel to attention has only x_t as its input.

    Source: Pearce et al. 2024, section 6.2; Elhage et al. 2021, "Path expansion trick".
    """
    ids = model.ids(text)
    check_index("position", position, len(ids), "a position in the text")
    of_text = Pass.of(model, ids[: position + 1])
    on_text = of_text.layer(layer)
    parts = _parts(of_text, layer, on_text)
    if model.modules.mlp_moment(layer) < Moment.attention(layer):
        parts[1:] = 0
    mlp = model.layer(layer).mlp
    # The norm's scale on the text is held fixed, which makes the split linear.
    parts = mlp.scale(on_text.mlp_input[0, -1]) * mlp.centred(parts)
    heads = parts[1:-1].unflatten(0, (model.n_heads, -1))
    stream = Sources(parts[0], heads, parts[-1])
    check_sum(
        f"The input of {mlp.name}, split by source,",
        stream.total(),
        on_text.mlp_n[0, -1],
        size=float(parts.abs().sum(0).max()),
    )
    return stream


def _parts(of_text: Pass, layer: int, on_text: LayerOnText) -> Float[Tensor, "parts d_model"]:
    """Return the stream after a layer's heads at the last position, as a sum of parts.

    These are the stream before the layer, each head from each token, and attention's biases.
    """
    parts = of_text.model.modules
    heads, sources, values = parts.layers[layer].heads, parts.value_sources(layer), []
    for source in sources:
        of_source = on_text if source.layer == layer else of_text.layer(source.layer)
        values.append(of_source.attn_n[0] @ source.value)
    bias = torch.stack([source.bias for source in sources]).sum(0)
    weight, out_bias = folded_output(heads.out, heads.out_norm, heads.residual_scale)
    weight = on_text.attn_out_scale[0, -1] * weight.unflatten(1, (heads.n_heads, -1))
    pattern = of_text.pattern(layer)[0, :, -1]
    head_values = torch.einsum("ht,hte,dhe->htd", pattern, torch.stack(values).sum(0), weight)
    # The values' bias is multiplied by the row sum of the pattern, which need not be 1.
    constant = torch.einsum("h,he,dhe->d", pattern.sum(-1), bias, weight)
    if out_bias is not None:
        constant = constant + on_text.attn_out_scale[0, -1] * out_bias
    return torch.cat([on_text.attn_input[0, -1:], head_values.flatten(0, 1), constant[None]])

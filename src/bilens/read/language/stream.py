"""What an MLP reads, taken apart by where it came from: the token itself, each head, biases."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bilens.errors import BilensError
from bilens.nn.language import Attention, Block, LanguageModel

__all__ = ["Stream", "block_inputs", "read_stream"]


@dataclass(frozen=True, eq=False)
class Stream:
    """The input of one block's MLP at one position of a text, as a sum of named parts.

        y_t = x_t + sum_h sum_s A^h_ts V_h O_h x_s + biases

    Where a block mixes the first one's into its own, x_t is the mixed stream and V_h x_s the mixed
    values. Behind a norm, the parts are those of the normalised y_t: the norm's scale is that of
    the whole and divides each part alike, which is linear once the scale is known.

    Attributes:
        direct: what the token brings itself, x_t.
        heads: what each head brings from each earlier token.
        constant: what belongs to no token: biases of attention and of a LayerNorm.
    """

    direct: Float[Tensor, " d_model"]
    heads: Float[Tensor, "heads time d_model"]
    constant: Float[Tensor, " d_model"]

    def total(self) -> Float[Tensor, " d_model"]:
        """What the MLP reads; exactly the sum of the parts."""
        return self.direct + self.heads.sum((0, 1)) + self.constant


@torch.no_grad()
def read_stream(
    model: LanguageModel, ids: Int[Tensor, " time"], position: int, layer: int = 0
) -> Stream:
    """Take apart what the MLP of block `layer` reads at one position.

    Raises:
        BilensError: the text has no such position, or the model no such block.

    Source:
        Pearce et al. 2024, section 6.2; Elhage et al. 2021, "Path expansion trick".
    """
    model.mlp(layer)
    if not 0 <= position < len(ids):
        raise BilensError(f"position={position}, expected 0 to {len(ids) - 1}, a place in ids")
    ids = ids[: position + 1]
    x, read, pos_embed, rope, v_first = _before(model, ids[None], layer)
    block = model.blocks[layer]
    attn: Attention = block.attn  # type: ignore[assignment]
    looks = attn.attention_pattern(read, pos_embed, rope, v_first)[0, :, position]
    sharing = attn.n_heads // attn.n_kv_heads
    bias = _value_bias(model, attn).repeat_interleave(sharing, 0)
    values = attn.values(read, v_first)[0].repeat_interleave(sharing, 0) - bias[:, None]
    heads = torch.einsum("ht,hte,hed->htd", looks, values, attn.W_O)
    constant = _attention_bias(attn, looks, bias)
    whole = x[0, -1] + heads.sum((0, 1)) + constant
    return _normalised(block.mlp_norm, whole, Stream(x[0, -1], heads, constant))  # type: ignore[arg-type]


@torch.no_grad()
def block_inputs(
    model: LanguageModel, ids: Int[Tensor, "batch time"], layer: int = 0
) -> Float[Tensor, "batch time d_model"]:
    """What the MLP of block `layer` reads at every position, behind its norm."""
    model.mlp(layer)
    x, read, pos_embed, rope, v_first = _before(model, ids, layer)
    block = model.blocks[layer]
    y: Tensor = block.mlp_norm(x + block.attn(read, pos_embed, rope, v_first=v_first))  # type: ignore[operator]
    return y


def _before(
    model: LanguageModel, ids: Tensor, layer: int
) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor] | None, Tensor | None]:
    """The residual stream before a block, and what its attention takes."""
    times = torch.arange(ids.shape[1], device=ids.device)[None]
    x0, pos_embed, rope = model.embed_text(ids, times)
    x, v_first = x0, model.first_block_values(x0)
    for block in model.blocks[:layer]:
        x = block(x, pos_embed, rope, v_first=v_first, x0=x0)
    last: Block = model.blocks[layer]  # type: ignore[assignment]
    x = last.mixed(x, x0)
    return x, last.attn_norm(x), pos_embed, rope, v_first


def _value_bias(model: LanguageModel, attn: Attention) -> Float[Tensor, "kv_heads d_head"]:
    """The bias of a block's values, those of the first mixed in as the values are."""
    first: Attention = model.blocks[0].attn  # type: ignore[assignment]
    own, other = (_bias(part.value).reshape(part.n_kv_heads, -1) for part in (attn, first))
    if attn.value_mix_share is None:
        return own
    return (1 - attn.value_mix_share) * own + attn.value_mix_share * other


def _attention_bias(attn: Attention, looks: Tensor, values: Tensor) -> Tensor:
    # The bias of the values arrives as often as a row of the pattern sums to.
    return _bias(attn.out) + attn.out.weight @ (values * looks.sum(-1)[:, None]).flatten()


def _bias(linear: nn.Linear) -> Tensor:
    # Weight processing may have given a bias to one of values and output alone.
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias


def _normalised(norm: nn.Module, whole: Tensor, parts: Stream) -> Stream:
    if isinstance(norm, nn.RMSNorm):
        eps = torch.finfo(whole.dtype).eps if norm.eps is None else norm.eps
        gain = norm.weight * (whole.square().mean() + eps).rsqrt()
        return Stream(parts.direct * gain, parts.heads * gain, parts.constant * gain)
    if isinstance(norm, nn.LayerNorm):
        gain = norm.weight * (whole.var(correction=0) + norm.eps).rsqrt()
        direct, heads, constant = (
            (part - part.mean(-1, keepdim=True)) * gain
            for part in (parts.direct, parts.heads, parts.constant)
        )
        return Stream(direct, heads, constant + norm.bias)
    return parts

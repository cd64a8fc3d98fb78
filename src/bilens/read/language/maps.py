"""What heads compute on the residual stream, as factored matrices: QK says where, OV says what."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bilens.nn.language import Attention, LanguageModel
from bilens.nn.position import rotate
from bilens.tensor import FactoredMatrix

__all__ = ["find_attention", "ov_maps", "qk_maps", "read_through"]


def qk_maps(
    model: LanguageModel, layer: int = 0, *, distance: int = 0
) -> tuple[FactoredMatrix, ...]:
    """W_Q R W_K' of every head of a block, one batch for each pair of queries and keys.

    The score of row x for an earlier row y is x W_Q R W_K' y', where R turns rotary queries by the
    distance; other positions have no R. Norms give their gain and their centring, not their scale;
    biases and the scale of the attention are left out.

    Args:
        model: any.
        layer: the block.
        distance: how far back the row stands that is looked at.

    Returns:
        Two batches for bilinear and differential attention, or else one; their axis is the heads.

    Raises:
        BilensError: there is no such block.

    Source:
        Elhage et al. 2021, "Splitting attention heads into query-key and output-value circuits".
    """
    attn = find_attention(model, layer)
    queries, keys = [attn.W_Q], [attn.W_K]
    if attn.pairs == 2:
        queries, keys = [*queries, attn.W_Q2], [*keys, attn.W_K2]
    norm: nn.Module = model.blocks[layer].attn_norm  # type: ignore[assignment]
    queries, keys = ([read_through(norm, W) for W in side] for side in (queries, keys))
    if model.config.positions == "rotary":
        first = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        _, _, rope = model.embed_text(first, first + distance)
        assert rope is not None
        cos, sin = (part.expand(1, model.config.d_model, -1) for part in rope)
        queries = [rotate(W[None], (cos, sin))[0] for W in queries]
    return tuple(FactoredMatrix(Q, K) for Q, K in zip(queries, keys, strict=True))


def ov_maps(model: LanguageModel, layer: int = 0) -> FactoredMatrix:
    """W_V W_O of every head of a block: a row x that is looked at arrives as x W_V W_O.

    Norms give their gain and their centring, not their scale; biases, and the values of the first
    block where `value_mix` mixes them in, are left out.

    Raises:
        BilensError: there is no such block.

    Source:
        Elhage et al. 2021, as for `qk_maps`.
    """
    attn = find_attention(model, layer)
    norm: nn.Module = model.blocks[layer].attn_norm  # type: ignore[assignment]
    return FactoredMatrix(read_through(norm, attn.W_V), attn.W_O.mT)


def find_attention(model: LanguageModel, layer: int) -> Attention:
    """The attention of a block.

    Raises:
        BilensError: there is no such block.
    """
    model.mlp(layer)
    attn: Attention = model.blocks[layer].attn  # type: ignore[assignment]
    return attn


def read_through(
    norm: nn.Module, W: Float[Tensor, "*batch d_model n"]
) -> Float[Tensor, "*batch d_model n"]:
    """A map that reads behind a norm, as one that reads before it, but for the norm's scale."""
    gain = getattr(norm, "weight", None)
    if gain is None:
        return W
    W = gain[:, None] * W
    return W - W.mean(-2, keepdim=True) if isinstance(norm, nn.LayerNorm) else W

"""What attention makes of pairs of tokens: whom a token looks at, and what that one then says."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from bilens.errors import BilensError, NotBilinearError
from bilens.nn.language import Block, LanguageModel
from bilens.nn.language.attention import QueriesKeys
from bilens.read.language.bigrams import require_no_norm
from bilens.read.language.maps import find_attention
from bilens.read.language.names import chosen_tokens
from bilens.tensor import FactoredMatrix

__all__ = ["token_outputs", "token_scores"]


def token_scores(
    model: LanguageModel,
    layer: int = 0,
    *,
    distance: int = 1,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> tuple[FactoredMatrix, ...]:
    """The scores, scale q . k, that every token as a query has for every token as a key.

    Rows are the tokens that look, columns those that are looked at, `distance` places earlier; the
    batch axis is the heads. Biases, QK-norm, positions and the norm of block 0 are all in it. The
    pattern is

        first * second       bilinear attention, entry by entry
        score * score        squared attention
        softmax of score     over the keys that there are
        softmax of first - lambda softmax of second      differential attention

    before what `attention_norm` divides it by, which depends on the text. In later blocks this is
    the part of the scores that the tokens' own embeddings make. Differentiable.

    Args:
        model: any for block 0; without norms for later ones.
        layer: the block.
        distance: how far back the token stands that is looked at; 0 for the token itself.
        position: of the token that looks; learned and shortformer positions ask for it, for others
            the distance is enough.
        among: tokens that rows and columns are chosen from; all by default.

    Returns:
        Two batches of matrices for bilinear and differential attention, or else one.

    Raises:
        NotBilinearError: the scores of a later block depend on the text through a norm, or on
            blocks before it through `embed_mix`.
        BilensError: there is no such block, position or token.

    Source:
        Elhage et al. 2021 for softmax; the post on tensor-transformer variants for products.
    """
    attn = find_attention(model, layer)
    if layer > 0 and model.config.embed_mix:
        raise NotBilinearError(
            f"In block {layer} embed_mix=True, which mixes the embedding into what every block "
            "before it wrote. Read block 0, or take composition_scores."
        )
    if layer > 0 and (model.config.norm != "none" or model.config.qk_norm):
        raise NotBilinearError(
            f"In block {layer} norm={model.config.norm!r} and qk_norm={model.config.qk_norm} "
            "divide by what depends on the text, so its scores do not follow from the weights "
            "alone. Read block 0, or take composition_scores, where scales cancel."
        )
    position = _query_position(model, distance, position)
    tokens = chosen_tokens(model, among)
    queries = _reads(model, layer, tokens, position)
    keys = _reads(model, layer, tokens, position - distance)
    scale: float = attn.scale  # type: ignore[assignment]
    return tuple(
        FactoredMatrix(scale * q[0], k[0]) for (q, _), (_, k) in zip(queries, keys, strict=True)
    )


def token_outputs(
    model: LanguageModel,
    layer: int = 0,
    *,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> FactoredMatrix:
    """The logits that every token sends past the MLP where a head looks at it with weight 1.

    (e_A W_V + b_V) W_O W_U: rows are tokens that are looked at, columns outputs; the batch axis is
    the heads. In later blocks this is what the token's own embedding sends. Differentiable.

    Args:
        model: without norms, mixes and a cap.
        layer: the block.
        position: of the token that is looked at; learned positions ask for it, which values see.
        among: tokens that rows and columns are chosen from; all by default.

    Raises:
        NotBilinearError: the model has a norm, mixes values or streams, or caps its logits.
        BilensError: there is no such block, position or token.

    Source:
        Elhage et al. 2021, "Splitting attention heads into query-key and output-value circuits".
    """
    attn = find_attention(model, layer)
    require_no_norm(model)
    if model.config.positions == "learned":
        position = _query_position(model, 0, position)
    tokens = chosen_tokens(model, among)
    x, _, _ = model.embed_text(tokens[None], torch.full_like(tokens[None], position or 0))
    unembedding = model.W_U[:, tokens].T
    values = attn.values(x)[0].repeat_interleave(attn.n_heads // attn.n_kv_heads, 0)
    return FactoredMatrix(values, unembedding @ attn.W_O.mT)


def _reads(
    model: LanguageModel, layer: int, tokens: Int[Tensor, " n"], position: int
) -> QueriesKeys:
    """Queries and keys of tokens that all stand at one position."""
    x, pos_embed, rope = model.embed_text(tokens[None], torch.full_like(tokens[None], position))
    block: Block = model.blocks[layer]  # type: ignore[assignment]
    return block.attn.queries_keys(block.attn_norm(block.mixed(x, x)), pos_embed, rope)


def _query_position(model: LanguageModel, distance: int, position: int | None) -> int:
    if distance < 0:
        raise BilensError(f"distance={distance}, expected 0 or more: tokens see nothing later")
    absolute = model.config.positions in ("learned", "shortformer")
    if position is None:
        if absolute:
            raise BilensError(
                f"position=None, and the model has {model.config.positions} positions, where more "
                "counts than the distance of two tokens; give a place in the text"
            )
        return distance
    if position < distance or (absolute and position >= model.config.n_ctx):
        end = f" to {model.config.n_ctx - 1}" if absolute else " or more"
        raise BilensError(f"position={position}, expected {distance}{end}")
    return position

"""How heads look between tokens when positions are left out, and skip-trigrams over all heads."""

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bilens.errors import BilensError
from bilens.nn.language import Attention, LanguageModel
from bilens.read.language.bigrams import ROWS, require_no_norm
from bilens.read.language.directions import interaction
from bilens.read.language.running import RunningTop
from bilens.read.language.skip_trigrams import head_map
from bilens.tensor.constant import with_constant

__all__ = ["token_looks", "weighted_skip_trigrams"]


@torch.no_grad()
def token_looks(
    model: LanguageModel, head: int, tokens: Int[Tensor, " n"], layer: int = 0
) -> Float[Tensor, "n vocab"]:
    """How a head at each of some tokens would share its look among one of every token.

    The pattern of the scores (e_B W_Q) . (e_A W_K), without rotation or learned positions: their
    softmax over A, or for squared and bilinear attention their product.

    Raises:
        NotBilinearError: the model has a norm.
        BilensError: there is no such head or block.
    """
    require_no_norm(model)
    head_map(model, head, layer)
    attn: Attention = model.blocks[layer].attn  # type: ignore[assignment]
    scores = attn.token_scores(head, model.W_E[tokens], model.W_E)
    return attn.weigh(scores, None, None)


@torch.no_grad()
def weighted_skip_trigrams(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    direction: Float[Tensor, " d_model"],
    *,
    k: int = 20,
    layer: int = 0,
) -> pd.DataFrame:
    """The pairs A ... B that raise an output most over all heads, each by how much it looks.

        value(A, B) = sum_h look_h(B, A) (u . OV_h e_A + 2 e_B' Q(u) OV_h e_A)

    A skip-trigram that several heads share, or one that a head would say but never looks for, is
    told apart here and not by `skip_trigrams`. Looks leave positions out; see `token_looks`.

    Args:
        model: without norms.
        tokenizer: for the names of the tokens.
        direction: u, the output.
        k: how many pairs.
        layer: the block.

    Returns:
        Columns virtual (A), direct (B) and value, the largest value first.

    Raises:
        NotBilinearError: the model has a norm, or the MLP is no tensor.
        BilensError: there is no such block, or k is not positive.
    """
    require_no_norm(model)
    if k < 1:
        raise BilensError(f"k={k}, expected at least 1")
    form = interaction(model, direction, layer)
    Q = 2 * form.dense()[: model.config.d_model]
    maps = [head_map(model, head, layer) for head in range(model.config.n_heads)]
    top = RunningTop(k)
    for start in range(0, model.config.vocab_size, ROWS):
        tokens = torch.arange(start, min(start + ROWS, model.config.vocab_size))
        e = model.W_E[tokens]
        now = with_constant(e) if form.constant else e
        scores = torch.zeros(len(e), model.config.vocab_size, dtype=e.dtype, device=e.device)
        for head, OV in enumerate(maps):
            said = (direction + now @ Q.T) @ OV.T @ model.W_E.T
            scores += token_looks(model, head, tokens, layer) * said
        top.update_pairs(scores, start)
    assert top.scores is not None
    assert top.labels is not None
    direct, virtual = top.labels[0].T
    return pd.DataFrame(
        {
            "virtual": tokenizer.convert_ids_to_tokens(virtual.tolist()),
            "direct": tokenizer.convert_ids_to_tokens(direct.tolist()),
            "value": top.scores[0].tolist(),
        }
    )

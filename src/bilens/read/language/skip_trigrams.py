"""Skip-trigrams from the weights: an earlier A, then B now, make C likely."""

from collections.abc import Sequence
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bilens.errors import BilensError
from bilens.nn.language import Attention, LanguageModel
from bilens.read.language.bigrams import ROWS, require_no_norm
from bilens.read.language.directions import interaction
from bilens.read.language.names import chosen_tokens, token_names
from bilens.read.language.running import RunningTop
from bilens.tensor.constant import with_constant

__all__ = ["TrigramPart", "head_map", "skip_trigrams"]

TrigramPart = Literal["ov", "mlp", "both"]
"""Past the MLP, u . OV e_A, the same for every B; in the MLP with B, 2 B(OV e_A, e_B); or both."""


@torch.no_grad()
def skip_trigrams(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    direction: Float[Tensor, " d_model"],
    head: int,
    *,
    k: int = 20,
    part: TrigramPart = "mlp",
    layer: int = 0,
    among: Sequence[int] | None = None,
) -> pd.DataFrame:
    """The pairs A ... B that raise an output most through one head, when it looks at A from B.

        value(A, B) = 2 e_B' Q(u) OV e_A,  to be multiplied by how much the head looks

    The vocabulary's square passes in blocks of 256 rows and is never held.

    Args:
        model: without norms.
        tokenizer: for the names of the tokens.
        direction: u, the output; see `output_direction`.
        head: number of the head that A passes through.
        k: how many pairs.
        part: what to rank by.
        layer: the block.
        among: tokens that A and B are chosen from, such as the most frequent ones; all by default.

    Returns:
        Columns virtual (A), direct (B), ov, mlp and value, the largest value first; in logits for
        a head that looks at A alone.

    Raises:
        NotBilinearError: the model has a norm, or the MLP is no tensor.
        BilensError: no such head or block, an unknown part, or k is not positive.

    Source:
        Pearce et al. 2024, section 6.1 and Table 7.
    """
    require_no_norm(model)
    if k < 1:
        raise BilensError(f"k={k}, expected at least 1")
    if part not in ("ov", "mlp", "both"):
        raise BilensError(f"part={part!r}, expected ov, mlp or both")
    form = interaction(model, direction, layer)
    OV = head_map(model, head, layer)
    width = model.config.d_model
    # Rows of A have nothing in the constant coordinate: only B brings the biases in.
    Q = 2 * form.dense()[:width]
    tokens, top = chosen_tokens(model, among), RunningTop(k)
    embedded = model.W_E[tokens]
    now = with_constant(embedded) if form.constant else embedded
    ov = embedded @ (OV @ direction)
    for start in range(0, len(tokens), ROWS):
        e = embedded[start : start + ROWS]
        past = ov[start : start + ROWS, None].expand(-1, len(now))
        if part == "ov":
            top.update_pairs(past, start)
            continue
        scores = (e @ OV @ Q) @ now.T
        top.update_pairs(scores + past if part == "both" else scores, start)
    assert top.labels is not None
    virtual, direct = top.labels[0].T
    mlp = ((embedded[virtual] @ OV @ Q) * now[direct]).sum(-1)
    value = {"ov": ov[virtual], "mlp": mlp, "both": ov[virtual] + mlp}[part]
    return pd.DataFrame(
        {
            "virtual": token_names(tokenizer, tokens[virtual]),
            "direct": token_names(tokenizer, tokens[direct]),
            "ov": ov[virtual].tolist(),
            "mlp": mlp.tolist(),
            "value": value.tolist(),
        }
    )


def head_map(model: LanguageModel, head: int, layer: int = 0) -> Float[Tensor, "d_model d_model"]:
    """W_V W_O of a head: rows x of the residual stream leave it as x W_V W_O.

    Raises:
        BilensError: there is no such head or block.
    """
    model.mlp(layer)
    attn: Attention = model.blocks[layer].attn  # type: ignore[assignment]
    if not 0 <= head < attn.n_heads:
        raise BilensError(f"head={head}, expected 0 to {attn.n_heads - 1}")
    return attn.W_V[head] @ attn.W_O[head]

"""Bigrams from the weights: which token follows which, with no text."""

from collections.abc import Sequence
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bilens.errors import BilensError, NotBilinearError
from bilens.nn.language import LanguageModel
from bilens.read.language.directions import interaction
from bilens.read.language.names import chosen_tokens, token_names
from bilens.read.language.running import RunningTop
from bilens.tensor import BilinearTensor

__all__ = ["BigramPart", "bigrams", "following", "preceding", "require_no_norm"]

BigramPart = Literal["direct", "mlp", "both"]
"""Through the residual stream, W_U W_E; through the MLP's diagonal, W_U B(e, e); or their sum."""

ROWS = 256
"""Tokens that a block of a vocabulary's square has in its rows."""


@torch.no_grad()
def following(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    token: int,
    *,
    k: int = 10,
    part: BigramPart = "both",
    layer: int = 0,
) -> pd.DataFrame:
    """The tokens that a token makes most likely to come next.

    Args:
        model: without norms.
        tokenizer: for the names of the tokens.
        token: number of the token that stands before.
        k: how many.
        part: what to rank by.
        layer: the block whose MLP counts.

    Returns:
        Columns token, direct, mlp and value, the largest value first; in logits.

    Raises:
        NotBilinearError: the model has a norm, or the MLP is no tensor.
        BilensError: no such token or block, an unknown part, or k is not positive.

    Source:
        Pearce et al. 2024, section 6.1 and Table 1.
    """
    tensor = _tensor(model, layer)
    _check(model, k, part, token)
    e = model.W_E[token]
    return _frame(tokenizer, e @ model.W_U, tensor(e) @ model.W_U, k, part)


@torch.no_grad()
def preceding(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    token: int,
    *,
    k: int = 10,
    part: BigramPart = "both",
    layer: int = 0,
) -> pd.DataFrame:
    """The tokens that make a token most likely to come next; arguments are those of `following`.

    Source:
        Pearce et al. 2024, section 6.1 and Table 1.
    """
    require_no_norm(model)
    _check(model, k, part, token)
    u = model.W_U[:, token]
    form = interaction(model, u, layer)
    mlp = torch.cat([form(e) for e in torch.split(model.W_E, ROWS)])
    return _frame(tokenizer, model.W_E @ u, mlp, k, part)


@torch.no_grad()
def bigrams(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    k: int = 20,
    part: BigramPart = "both",
    layer: int = 0,
    among: Sequence[int] | None = None,
) -> pd.DataFrame:
    """The most salient bigrams of the whole vocabulary.

    The square of the vocabulary passes in blocks and is never held.

    Args:
        model: without norms.
        tokenizer: for the names of the tokens.
        k: how many.
        part: what to rank by.
        layer: the block whose MLP counts.
        among: tokens to choose from, such as the most frequent ones; all by default.

    Returns:
        Columns input, output, direct, mlp and value, the largest value first; in logits.

    Source:
        Pearce et al. 2024, Table 6.
    """
    tensor = _tensor(model, layer)
    _check(model, k, part)
    tokens, top = chosen_tokens(model, among), RunningTop(k)
    embedded, unembedding = model.W_E[tokens], model.W_U[:, tokens]
    for start in range(0, len(tokens), ROWS):
        e = embedded[start : start + ROWS]
        # Both parts are read by the same unembedding, so a block costs one product with it.
        written = {"direct": e, "mlp": tensor(e), "both": e + tensor(e)}[part]
        top.update_pairs(written @ unembedding, start)
    assert top.labels is not None
    inputs, outputs = tokens[top.labels[0]].T
    e, u = model.W_E[inputs], model.W_U[:, outputs].T
    direct, mlp = (e * u).sum(-1), (tensor(e) * u).sum(-1)
    names = token_names(tokenizer, inputs)
    frame = pd.DataFrame({"input": names, "output": token_names(tokenizer, outputs)})
    return frame.assign(**_columns(direct, mlp, part))


def require_no_norm(model: LanguageModel) -> None:
    """Raise if a norm's scale, which depends on the text, a mix or a cap would be left out."""
    if model.config.norm != "none":
        raise NotBilinearError(
            f"The model has norm={model.config.norm!r}, whose scale depends on the text, so its "
            "n-grams do not follow from the weights alone. Train with norm='none'."
        )
    if model.config.obstacles:
        raise NotBilinearError(
            f"The model has {' and '.join(model.config.obstacles)}, which its n-grams would leave "
            "out. Read eigenvectors and their contexts instead."
        )


def _tensor(model: LanguageModel, layer: int) -> BilinearTensor:
    require_no_norm(model)
    tensor: BilinearTensor = model.mlp(layer).tensor(f"blocks[{layer}].mlp")
    return tensor


def _check(model: LanguageModel, k: int, part: str, token: int = 0) -> None:
    if k < 1:
        raise BilensError(f"k={k}, expected at least 1")
    if part not in ("direct", "mlp", "both"):
        raise BilensError(f"part={part!r}, expected direct, mlp or both")
    if not 0 <= token < model.config.vocab_size:
        raise BilensError(f"token={token}, expected 0 to {model.config.vocab_size - 1}")


def _columns(
    direct: Float[Tensor, " n"], mlp: Float[Tensor, " n"], part: BigramPart
) -> dict[str, list[float]]:
    value = {"direct": direct, "mlp": mlp, "both": direct + mlp}[part]
    return {"direct": direct.tolist(), "mlp": mlp.tolist(), "value": value.tolist()}


def _frame(
    tokenizer: PreTrainedTokenizerBase,
    direct: Float[Tensor, " vocab"],
    mlp: Float[Tensor, " vocab"],
    k: int,
    part: BigramPart,
) -> pd.DataFrame:
    columns = _columns(direct, mlp, part)
    names = token_names(tokenizer, torch.arange(len(direct)))
    frame = pd.DataFrame({"token": names}).assign(**columns)
    return frame.nlargest(k, "value").reset_index(drop=True)

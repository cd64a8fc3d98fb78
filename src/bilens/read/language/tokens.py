"""Which tokens alone excite an eigenvector, from the weights."""

import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from bilens.errors import BilensError
from bilens.nn.language import LanguageModel
from bilens.read.language.bigrams import require_no_norm
from bilens.read.language.names import token_names
from bilens.read.language.skip_trigrams import head_map
from bilens.tensor import Spectrum

__all__ = ["exciting_tokens"]


@torch.no_grad()
def exciting_tokens(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    spectrum: Spectrum,
    number: int,
    *,
    head: int | None = None,
    k: int = 10,
    layer: int = 0,
) -> pd.DataFrame:
    """The tokens whose embedding, or what a head makes of it, lies most along an eigenvector.

    Args:
        model: without norms.
        tokenizer: for the names of the tokens.
        spectrum: of a single form of block `layer`.
        number: which of its eigenvectors.
        head: of the block, when the token is looked at from later; None for the token itself.
        k: how many.
        layer: the block.

    Returns:
        Columns token, overlap (v . x) and activation, lambda (v . x)^2, of largest |activation|.

    Raises:
        NotBilinearError: the model has a norm.
        BilensError: there is no such eigenvector, head or block.
    """
    require_no_norm(model)
    if not 0 <= number < spectrum.k:
        raise BilensError(f"number={number}, expected 0 to {spectrum.k - 1}, an eigenvector")
    x = model.W_E if head is None else model.W_E @ head_map(model, head, layer)
    overlap = x @ spectrum.vectors[number][: x.shape[1]]
    activation = spectrum.values[number] * overlap.square()
    best = activation.abs().topk(min(k, len(activation))).indices
    return pd.DataFrame(
        {
            "token": token_names(tokenizer, best),
            "overlap": overlap[best].tolist(),
            "activation": activation[best].tolist(),
        }
    )

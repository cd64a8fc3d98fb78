"""The singular vectors of a matrix of tokens against tokens, as the tokens they weigh most."""

from collections.abc import Sequence

import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from bilens.errors import BilensError
from bilens.read.language.names import token_names
from bilens.tensor import FactoredMatrix

__all__ = ["token_components"]


@torch.no_grad()
def token_components(
    matrix: FactoredMatrix,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sides: tuple[str, str],
    components: int = 4,
    k: int = 10,
    among: Sequence[int] | None = None,
) -> pd.DataFrame:
    """The strongest singular components of one head's table, with the tokens on both sides.

    matrix[A, B] = sum_s sigma_s l_s[A] r_s[B], so that two tokens of equal sign raise the entry and
    two of opposite sign lower it. Signs are chosen so that the first token on the left is positive.

    Args:
        matrix: of `token_scores` or `token_outputs`, one head of it, or a product of such.
        tokenizer: for the names of the tokens.
        sides: what rows and columns are, such as query and key, or key and output.
        components: how many.
        k: tokens on either side of each, those of largest |weight|.
        among: the tokens that rows and columns stand for; all by default.

    Returns:
        Columns component, sigma, and for either side its token and the weight of that.

    Raises:
        BilensError: the matrix is a batch or of other tokens, or a number is out of range.
    """
    if matrix.batch_shape or matrix.n_rows != matrix.n_columns:
        raise BilensError(
            f"matrix is of shape {(*matrix.batch_shape, matrix.n_rows, matrix.n_columns)}, "
            "expected a table of tokens against tokens; choose a head of it, as in matrix[0]"
        )
    tokens = torch.arange(matrix.n_rows) if among is None else torch.tensor(among)
    if len(tokens) != matrix.n_rows:
        raise BilensError(
            f"among has {len(tokens)} tokens and matrix {matrix.n_rows} rows; expected those that "
            "the matrix was made with"
        )
    if not 1 <= k <= len(tokens):
        raise BilensError(f"k={k}, expected 1 to {len(tokens)}, the number of tokens")
    most = min(matrix.rank, len(tokens))
    if not 1 <= components <= most:
        raise BilensError(f"components={components}, expected 1 to {most}, all that there are")
    svd, names, frames = matrix.svd(components), token_names(tokenizer, tokens), []
    for number, (sigma, left, right) in enumerate(
        zip(svd.values, svd.left, svd.right, strict=True)
    ):
        sign = torch.where(left[left.abs().argmax()] < 0, -1, 1).to(left)
        columns = {"component": [number] * k, "sigma": [float(sigma)] * k}
        for side, vector in zip(sides, (sign * left, sign * right), strict=True):
            best = vector.abs().topk(k).indices
            columns[side] = [names[i] for i in best.tolist()]
            columns[f"{side} weight"] = vector[best].tolist()
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)

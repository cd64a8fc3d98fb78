"""Tokens by name: single ones, and directions in the logits."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import checked, full_precision
from bilens.errors import BilensError
from bilens.residual import ResidualModel
from bilens.tensor import FactoredMatrix

__all__ = ["TokenDirection", "chosen_tokens", "token_names", "top_pairs"]


@dataclass(frozen=True)
class TokenDirection:
    """An output direction by the names of its tokens: a logit, less the mean of others.

    Subtracting other words of the same kind takes away what speaks for all of them, such as
    grammar.

    Source:
        Pearce et al. 2024, figure 7.
    """

    token: str
    minus: tuple[str, ...] = ()

    @checked
    def vector(self, model: ResidualModel) -> Float[Tensor, " d_model"]:
        """The direction in the normalised stream behind the last layer.

        Raises:
            BilensError: a name is not that of a token.
        """
        return model.direction(model.token(self.token), [model.token(name) for name in self.minus])

    def __str__(self) -> str:
        """As one would say it."""
        return f"{self.token} minus {', '.join(self.minus)}" if self.minus else self.token


@full_precision
def token_names(model: ResidualModel, ids: Int[Tensor, " n"] | Iterable[int]) -> list[str]:
    """What the tokenizer calls each token; [7] for one that it does not know."""
    numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if model.tokenizer is None:
        return [f"[{number}]" for number in numbers]
    size = len(model.tokenizer)
    names = model.tokenizer.convert_ids_to_tokens([max(0, min(i, size - 1)) for i in numbers])
    return [
        name if 0 <= i < size and name is not None else f"[{i}]"
        for i, name in zip(numbers, names, strict=True)
    ]


def chosen_tokens(model: ResidualModel, among: Sequence[int] | None) -> Int[Tensor, " n"]:
    """The numbers of some tokens, or of all.

    Raises:
        BilensError: there are none, or one is not of the vocabulary.
    """
    if among is None:
        return torch.arange(model.vocab_size, device=model.device)
    if not among or min(among) < 0 or max(among) >= model.vocab_size:
        raise BilensError(
            f"among: expected numbers of tokens from 0 to {model.vocab_size - 1}, at least one"
        )
    return torch.tensor(among, device=model.device)


def top_pairs(
    model: ResidualModel,
    sides: tuple[str, str],
    factors: Sequence[FactoredMatrix],
    parts: Mapping[str, FactoredMatrix],
    k: int,
    among: Sequence[int] | None,
    *,
    largest: bool = True,
) -> pd.DataFrame:
    """The k largest, or smallest, entries of a product entry by entry of tables of tokens.

    The square of the vocabulary passes in blocks and is never held.

    Returns:
        Columns with the tokens of rows and columns, called `sides`, the entries of each of `parts`
        there, and value.
    """
    top = factors[0].top_entries(k, times=factors[1:], largest=largest)
    tokens = chosen_tokens(model, among)
    frame = pd.DataFrame(
        {
            side: token_names(model, tokens[places])
            for side, places in zip(sides, (top.rows, top.columns), strict=True)
        }
    )
    for name, part in parts.items():
        frame[name] = part.entries(top.rows, top.columns).tolist()
    return frame.assign(value=top.values.tolist())

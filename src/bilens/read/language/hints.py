"""Hints about tokens: those that were probably meant with the space before them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import log

import torch
from jaxtyping import Int
from torch import Tensor

from bilens.errors import BilensError
from bilens.read.language.names import answer_ids
from bilens.residual import ResidualModel

FAR = log(100)
"""Difference of logits of a token with a space in front and without, from which on it is noted."""


@torch.no_grad()
def space_hints(
    model: ResidualModel, asked: Iterable[tuple[Int[Tensor, " time"], Sequence[str]]]
) -> tuple[str, ...]:
    """Return a hint for each token that is far less probable after a text than behind a space.

    `asked` are texts and the names of the tokens or answers after each. Of an answer of several
    tokens the first is compared. "Far" is a hundred times.
    """
    n, counts = 0, Counter[tuple[str, str]]()
    for ids, names in asked:
        n += 1
        numbers = {name: found for name in names if (found := _spaced(model, name))}
        if not numbers:
            continue
        logits = model.logits(ids[None])[0, -1].float()
        for name, (own, spaced, other) in numbers.items():
            if float(logits[other] - logits[own]) >= FAR:
                counts[name, spaced] += 1
    return tuple(
        f'"{name}" is far less probable here than "{spaced}"'
        + (f" (in {count} of {n} questions)" if n > 1 else "")
        + f'; did you mean "{spaced}"?'
        for (name, spaced), count in counts.items()
    )


def _spaced(model: ResidualModel, name: str) -> tuple[int, str, int] | None:
    """Return the first token of an answer, its name behind a space, and its first token then.

    None if that is no other answer.
    """
    if name.startswith((" ", "Ġ", "▁")):
        return None
    for space in (" ", "▁"):
        try:
            own, other = (answer_ids(model, x).tolist() for x in (name, space + name))
        except BilensError:
            continue
        if own[0] != other[0] and own[1:] == other[1:]:
            return own[0], space + name, other[0]
    return None

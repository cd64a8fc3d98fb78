"""Tokens in words that a part raises and lowers, by the change of the next tokens' logits."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.language.names import in_words, readable_tokens
from bilens.transformer import ResidualModel

LIKELY = 200
"""Most probable tokens that may be in a label."""


def token_scores(
    present: Float[Tensor, "#parts vocab"], absent: Float[Tensor, "#parts vocab"]
) -> Float[Tensor, "parts vocab"]:
    """Return by how much each part raises each token, given logits with the part and without it.

    (log p1 - log p0) sqrt((p1 + p0) / 2), p1 and p0 the token's probabilities with the part and
    without it, if it is among the most probable ones of either, else 0. Without the root the
    changes of tokens that nobody expects would be the largest; with p itself only one or two
    tokens would count.
    """
    logs = [logits.log_softmax(-1) for logits in (present, absent)]
    log_1, log_0 = torch.broadcast_tensors(*logs)
    among = torch.zeros_like(log_1, dtype=torch.bool)
    for log in (log_1, log_0):
        among.scatter_(1, log.topk(min(LIKELY, log.shape[1])).indices, True)
    weight = ((log_1.exp() + log_0.exp()) / 2).sqrt()
    return torch.where(among, (log_1 - log_0) * weight, 0)


def both_sides(
    model: ResidualModel, scores: Float[Tensor, " vocab"], k: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return in words the k tokens of the largest scores, and the k of the smallest."""
    words = []
    for side in (scores, -scores):
        top = side.topk(min(k, len(scores)))
        words.append(token_words(model, top.indices[top.values > 0], k))
    return words[0], words[1]


def token_words(model: ResidualModel, numbers: Int[Tensor, " n"], k: int) -> tuple[str, ...]:
    """Return the first k tokens that are text, without their spaces and without pieces of letters.

    Tokens that differ by a space only are one word.
    """
    texts = readable_tokens(model, numbers)
    return tuple(dict.fromkeys(in_words(text.strip() or text) for text in texts))[:k]

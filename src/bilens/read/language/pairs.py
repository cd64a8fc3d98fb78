"""Skip-trigrams by what the model says: all texts of two tokens, and no corpus."""

from collections.abc import Sequence

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bilens.errors import BilensError
from bilens.nn.language import LanguageModel
from bilens.progress import progress_bar
from bilens.read.language.names import chosen_tokens, token_names
from bilens.read.language.running import RunningTop

__all__ = ["pair_trigrams"]


@torch.no_grad()
def pair_trigrams(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    k: int = 20,
    among: Sequence[int] | None = None,
) -> pd.DataFrame:
    """The triples A, B -> C in which A raises the probability of C after B the most.

        value(A, B, C) = p(C | A B) - mean over A' of p(C | A' B)

    Every text of two tokens is tried, behind the token that texts begin with if there is one. So
    all heads and layers count, with the looks that they have there, and a norm is no hindrance.
    `skip_trigrams` reads single heads in logits, where tokens that are never said can have the
    largest numbers; here only what is said counts.

    Args:
        model: any.
        tokenizer: for the names of the tokens.
        k: how many triples.
        among: tokens that A and B are chosen from; all by default, which takes a GPU for thousands
            of tokens: time grows with their square.

    Returns:
        Columns virtual (A), direct (B), output (C) and value, the largest value first.

    Raises:
        BilensError: k is not positive, or a token is not of the vocabulary.
    """
    if k < 1:
        raise BilensError(f"k={k}, expected at least 1")
    tokens, top = chosen_tokens(model, among), RunningTop(k)
    with progress_bar() as bar:
        task = bar.add_task("texts of two tokens", total=len(tokens), note="")
        for number in range(len(tokens)):
            said = _after_pairs(model, tokens, tokens[number])
            gain = said - said.mean(0)
            best = gain.flatten().topk(min(k, gain.numel()))
            first, output = best.indices // gain.shape[1], best.indices % gain.shape[1]
            labels = torch.stack([first, torch.full_like(first, number), output], -1)
            top.update(best.values[None], labels[None])
            bar.advance(task)
    assert top.scores is not None
    assert top.labels is not None
    virtual, direct, output = top.labels[0].T
    return pd.DataFrame(
        {
            "virtual": token_names(tokenizer, tokens[virtual]),
            "direct": token_names(tokenizer, tokens[direct]),
            "output": token_names(tokenizer, output),
            "value": top.scores[0].tolist(),
        }
    )


def _after_pairs(
    model: LanguageModel, firsts: Int[Tensor, " n"], second: Int[Tensor, ""]
) -> Float[Tensor, "n vocab"]:
    texts = torch.stack([firsts, second.expand_as(firsts)], 1)
    if model.config.bos_token_id is not None:
        texts = torch.cat([torch.full_like(texts[:, :1], model.config.bos_token_id), texts], 1)
    said: Tensor = model(texts, logits_to_keep=1).logits[:, -1].softmax(-1)
    return said

"""Outputs that are worth a look in a model of a given corpus."""

import torch

from bilens.data import Corpus
from bilens.read.language.reading import Output

__all__ = ["example_outputs"]

EXAMPLES = (
    Output("swim", ("run", "climb", "eat", "see", "smell", "walk", "fly", "sit", "sleep")),
    Output('"'),
    Output("girl"),
)
"""What Pearce et al. 2024 explain: figure 7, Table 7 and Table 1."""


def example_outputs(corpus: Corpus) -> list[Output]:
    """The papers' examples as far as the tokenizer knows them, or else the most frequent word."""
    known = corpus.tokenizer.get_vocab()
    found = [o for o in EXAMPLES if all(name in known for name in (o.token, *o.minus))]
    if found:
        return found
    counts = torch.bincount(corpus.validation[:200]["input_ids"].flatten(), minlength=len(known))
    order = counts.argsort(descending=True).tolist()
    names = corpus.tokenizer.convert_ids_to_tokens(order)
    return [Output(next(name for name in names if name.isalpha()))]

"""Readings of language models: n-grams, heads, directions and their contexts, logits by path."""

from bilens.language.contexts import contribution, corpus_for, generate_text, top_contexts
from bilens.language.heads import (
    attention_pairs,
    composition_scores,
    output_pairs,
    read_attention,
    token_components,
)
from bilens.language.names import TokenDirection, token_names
from bilens.language.ngrams import (
    attention_scores,
    bigram_matrix,
    bigrams,
    following,
    head_outputs,
    pair_trigrams,
    preceding,
    read_ngrams,
    skip_trigrams,
)
from bilens.language.outputs import read_direction
from bilens.language.stream import read_stream

__all__ = [
    "TokenDirection",
    "attention_pairs",
    "attention_scores",
    "bigram_matrix",
    "bigrams",
    "composition_scores",
    "contribution",
    "corpus_for",
    "following",
    "generate_text",
    "head_outputs",
    "output_pairs",
    "pair_trigrams",
    "preceding",
    "read_attention",
    "read_direction",
    "read_ngrams",
    "read_stream",
    "skip_trigrams",
    "token_components",
    "token_names",
    "top_contexts",
]

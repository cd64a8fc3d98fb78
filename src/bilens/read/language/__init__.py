"""Readings of language models: n-grams, heads, directions and their contexts, logits by path."""

from bilens.read.language.composition import Composition, composition_scores
from bilens.read.language.contexts import (
    Context,
    ContextIndex,
    Contribution,
    contribution,
    top_contexts,
)
from bilens.read.language.heads import (
    AttentionReading,
    HeadPairs,
    HeadReading,
    attention_pairs,
    output_pairs,
    read_attention,
    token_components,
)
from bilens.read.language.names import TokenDirection, token_names
from bilens.read.language.ngrams import (
    NGramReading,
    bigrams,
    following,
    pair_trigrams,
    preceding,
    read_ngrams,
    skip_trigrams,
)
from bilens.read.language.reading import (
    DirectionReading,
    FoundContext,
    LanguageReading,
    model_facts,
    read_direction,
    read_language,
)
from bilens.read.language.stream import (
    LogitParts,
    LogitTerms,
    Stream,
    read_stream,
    split_by_eigenvectors,
    split_logits,
)
from bilens.read.language.texts import corpus_for, example_directions, generate_text
from bilens.read.language.token_matrices import (
    BigramPart,
    TrigramPart,
    attention_scores,
    bigram_matrix,
    head_outputs,
    skip_trigram_matrix,
)

__all__ = [
    "AttentionReading",
    "BigramPart",
    "Composition",
    "Context",
    "ContextIndex",
    "Contribution",
    "DirectionReading",
    "FoundContext",
    "HeadPairs",
    "HeadReading",
    "LanguageReading",
    "LogitParts",
    "LogitTerms",
    "NGramReading",
    "Stream",
    "TokenDirection",
    "TrigramPart",
    "attention_pairs",
    "attention_scores",
    "bigram_matrix",
    "bigrams",
    "composition_scores",
    "contribution",
    "corpus_for",
    "example_directions",
    "following",
    "generate_text",
    "head_outputs",
    "model_facts",
    "output_pairs",
    "pair_trigrams",
    "preceding",
    "read_attention",
    "read_direction",
    "read_language",
    "read_ngrams",
    "read_stream",
    "skip_trigram_matrix",
    "skip_trigrams",
    "split_by_eigenvectors",
    "split_logits",
    "token_components",
    "token_names",
    "top_contexts",
]

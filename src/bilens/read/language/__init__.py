"""Readings of language models: n-grams, directions, contexts and paths to the logits."""

from bilens.read.language.bigrams import BigramPart, bigrams, following, preceding
from bilens.read.language.components import token_components
from bilens.read.language.composition import Composition, composition_scores
from bilens.read.language.contexts import Context, Contribution, contribution, top_contexts
from bilens.read.language.directions import interaction, output_direction
from bilens.read.language.examples import example_outputs
from bilens.read.language.head_pairs import HeadPairs, look_pairs, output_pairs
from bilens.read.language.heads import AttentionReading, HeadReading, read_attention
from bilens.read.language.index import ContextIndex
from bilens.read.language.logits import LogitTerms, split_logits
from bilens.read.language.maps import ov_maps, qk_maps
from bilens.read.language.names import token_names
from bilens.read.language.pairs import pair_trigrams
from bilens.read.language.prediction import LogitParts, split_by_eigenvectors
from bilens.read.language.reading import (
    DirectionReading,
    FoundContext,
    NGramReading,
    Output,
    read_direction,
    read_ngrams,
    salient_bigrams,
)
from bilens.read.language.scores import token_outputs, token_scores
from bilens.read.language.skip_trigrams import TrigramPart, head_map, skip_trigrams
from bilens.read.language.stream import Stream, block_inputs, read_stream
from bilens.read.language.tokens import exciting_tokens
from bilens.read.language.writing import write_on

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
    "LogitParts",
    "LogitTerms",
    "NGramReading",
    "Output",
    "Stream",
    "TrigramPart",
    "bigrams",
    "block_inputs",
    "composition_scores",
    "contribution",
    "example_outputs",
    "exciting_tokens",
    "following",
    "head_map",
    "interaction",
    "look_pairs",
    "output_direction",
    "output_pairs",
    "ov_maps",
    "pair_trigrams",
    "preceding",
    "qk_maps",
    "read_attention",
    "read_direction",
    "read_ngrams",
    "read_stream",
    "salient_bigrams",
    "skip_trigrams",
    "split_by_eigenvectors",
    "split_logits",
    "token_components",
    "token_names",
    "token_outputs",
    "token_scores",
    "top_contexts",
    "write_on",
]

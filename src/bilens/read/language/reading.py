"""Everything a report says of a language model: n-grams, and what one output is made of."""

from dataclasses import dataclass

import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from bilens.data import Corpus, token_id
from bilens.nn.language import LanguageModel
from bilens.read.language.bigrams import BigramPart, bigrams, following, preceding
from bilens.read.language.contexts import Context, Contribution, contribution, top_contexts
from bilens.read.language.directions import interaction, output_direction
from bilens.read.language.skip_trigrams import skip_trigrams
from bilens.tensor import Spectrum

__all__ = [
    "DirectionReading",
    "FoundContext",
    "NGramReading",
    "Output",
    "read_direction",
    "read_ngrams",
    "salient_bigrams",
]


@dataclass(frozen=True)
class Output:
    """An output direction by the names of its tokens.

    Attributes:
        token: what is predicted.
        minus: tokens whose mean is taken away.
    """

    token: str
    minus: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As one would say it."""
        return f"{self.token} minus {', '.join(self.minus)}" if self.minus else self.token


@dataclass(frozen=True, eq=False)
class NGramReading:
    """N-grams from the weights.

    Attributes:
        output: whose neighbours and skip-trigrams these are.
        preceding: tokens that make it likely.
        following: tokens that it makes likely.
        heads: skip-trigrams of each head that end in the output.
    """

    output: Output
    preceding: pd.DataFrame
    following: pd.DataFrame
    heads: list[pd.DataFrame]


@dataclass(frozen=True, eq=False)
class FoundContext:
    """A context of an eigenvector, with what each token contributes to it."""

    context: Context
    contribution: Contribution


@dataclass(frozen=True, eq=False)
class DirectionReading:
    """The eigenvectors of an output direction, the largest |eigenvalue| of either sign first.

    Attributes:
        output: the direction.
        whole: all eigenvectors.
        spectrum: those with contexts, positive ones first.
        contexts: of each of them.
    """

    output: Output
    whole: Spectrum
    spectrum: Spectrum
    contexts: list[list[FoundContext]]


def read_ngrams(
    model: LanguageModel, tokenizer: PreTrainedTokenizerBase, output: Output, *, k: int = 20
) -> NGramReading:
    """Read the n-grams of the first block from its weights.

    Raises:
        NotBilinearError: the model has a norm, or an MLP that is no tensor.
        BilensError: an unknown token.
    """
    token = token_id(tokenizer, output.token)
    direction = _direction(model, tokenizer, output)
    return NGramReading(
        output=output,
        preceding=preceding(model, tokenizer, token, k=k),
        following=following(model, tokenizer, token, k=k),
        heads=[
            skip_trigrams(model, tokenizer, direction, head, k=k)
            for head in range(model.config.n_heads)
        ],
    )


def salient_bigrams(
    model: LanguageModel, tokenizer: PreTrainedTokenizerBase, *, k: int = 20
) -> dict[BigramPart, pd.DataFrame]:
    """The most salient bigrams of the residual stream (direct) and of the MLP's diagonal (mlp).

    Raises:
        NotBilinearError: the model has a norm, or an MLP that is no tensor.

    Source:
        Pearce et al. 2024, Table 6.
    """
    parts: tuple[BigramPart, ...] = ("direct", "mlp")
    return {part: bigrams(model, tokenizer, k=k, part=part) for part in parts}


def read_direction(
    model: LanguageModel,
    corpus: Corpus,
    output: Output,
    *,
    eigenvectors: int = 4,
    contexts: int = 8,
    layer: int = 0,
) -> DirectionReading:
    """Find the eigenvectors of an output and where in a corpus's validation set they are active.

    Args:
        model: with a bilinear MLP.
        corpus: texts in the model's tokens.
        output: the direction.
        eigenvectors: how many of either sign.
        contexts: how many for each.
        layer: the block.

    Raises:
        NotBilinearError: the MLP is no tensor.
        BilensError: an unknown token, or no such block.

    Source:
        Pearce et al. 2024, section 6.2 and appendix G.
    """
    form = interaction(model, _direction(model, corpus.tokenizer, output), layer)
    whole = form.eigh()
    spectrum = whole.outermost(eigenvectors)
    texts = (row["input_ids"] for row in corpus.validation)
    found = top_contexts(model, spectrum, texts, k=contexts, layer=layer)
    return DirectionReading(
        output=output,
        whole=whole,
        spectrum=spectrum,
        contexts=[
            [FoundContext(c, contribution(model, spectrum, number, c, layer)) for c in some]
            for number, some in enumerate(found)
        ],
    )


def _direction(
    model: LanguageModel, tokenizer: PreTrainedTokenizerBase, output: Output
) -> torch.Tensor:
    minus = [token_id(tokenizer, name) for name in output.minus]
    return output_direction(model, token_id(tokenizer, output.token), minus)

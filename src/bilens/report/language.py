"""The report of a language model: n-grams from the weights, eigenvectors with their contexts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from pandas.api.types import is_numeric_dtype
from transformers import PreTrainedTokenizerBase

from bilens.read.language import (
    AttentionReading,
    BigramPart,
    Composition,
    DirectionReading,
    FoundContext,
    HeadReading,
    NGramReading,
    token_names,
)
from bilens.report.heat import heat_figure
from bilens.report.page import ContextLine, ContextList, Section, Table, write_page
from bilens.report.spectra import spectrum_figure

__all__ = [
    "composition_figure",
    "context_line",
    "language_figures",
    "ngram_table",
    "write_language_report",
]

CAPTIONS = {"direct": "residual stream", "mlp": "MLP"}
BEFORE, AFTER = 28, 4
"""Tokens shown before and after the focal one."""


def language_figures(directions: Sequence[DirectionReading]) -> dict[str, go.Figure]:
    """The spectrum of each direction, by the name of the file it would be saved as."""
    return {
        f"spectrum-{number}": spectrum_figure(
            reading.whole, title=f"Eigenvalues of {reading.output}"
        )
        for number, reading in enumerate(directions)
    }


def ngram_table(frame: pd.DataFrame, caption: str) -> Table:
    """A frame of n-grams: the columns that hold tokens, and the value."""
    words = [name for name in frame.columns if not is_numeric_dtype(frame[name])]
    rows = [
        (*(str(row[name]) for name in words), f"{row['value']:.2f}")
        for row in frame.to_dict("records")
    ]
    return Table((*words, "value"), rows, caption, words=len(words))


def write_language_report(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    salient: Mapping[BigramPart, pd.DataFrame],
    ngrams: Sequence[NGramReading],
    directions: Sequence[DirectionReading],
    facts: Sequence[tuple[str, str]],
    *,
    title: str,
    attention: AttentionReading | None = None,
) -> dict[str, go.Figure]:
    """Write the report page and give back its figures.

    Args:
        path: the page.
        tokenizer: for the names of the tokens.
        salient: see `salient_bigrams`; none for a model with norms.
        ngrams: n-grams of some outputs; none for a model with norms.
        directions: eigenvectors of some outputs.
        facts: about the model, a name and a value each.
        title: of the page.
        attention: heads of a block; none where their pairs of tokens cannot be read.
    """
    figures = language_figures(directions)
    sections = _ngram_sections(salient, ngrams)
    if attention is not None:
        figures["composition"] = composition_figure(attention.composition)
        sections += _attention_sections(attention, figures["composition"])
    for number, reading in enumerate(directions):
        lists = [
            ContextList(
                f"{'P' if value > 0 else 'N'}{1 + _rank(reading, i)}  λ = {value:+.3g}",
                [context_line(tokenizer, found) for found in reading.contexts[i]],
            )
            for i, value in enumerate(reading.spectrum.values.tolist())
        ]
        sections.append(
            Section(
                f"Eigenvectors of {reading.output}",
                "What the MLP adds to this output is a sum of squares, one for each eigenvector. "
                "Below each one stand the texts that it is most active in, with the token in "
                "brackets whose successor is predicted. Colours say what each token contributes, "
                "through the residual stream or through attention: blue where positive, red "
                "where negative. The contributions add up to the activation.",
                [[figures[f"spectrum-{number}"]], *([part] for part in lists)],
            )
        )
    summary = (
        "Everything below is read from the weights; a corpus is used only to show texts in which "
        "an eigenvector is active."
    )
    write_page(path, title, summary, facts, sections)
    return figures


def _ngram_sections(
    salient: Mapping[BigramPart, pd.DataFrame], ngrams: Sequence[NGramReading]
) -> list[Section]:
    tables = [ngram_table(frame, CAPTIONS[part]) for part, frame in salient.items()]
    salient_section = Section(
        "The most salient bigrams",
        "Pairs of tokens of the whole vocabulary, by what the first adds to the logit of the "
        "second: through the residual stream, and through the MLP's diagonal, where a token "
        "meets itself.",
        [tables],
    )
    sections = [salient_section] if tables else []
    for reading in ngrams:
        heads = [ngram_table(frame, f"head {number}") for number, frame in enumerate(reading.heads)]
        neighbours = [
            ngram_table(reading.preceding, f"before {reading.output.token}"),
            ngram_table(reading.following, f"after {reading.output.token}"),
        ]
        sections.append(
            Section(
                f"N-grams of {reading.output}",
                "Which tokens it follows and which follow it, through both paths; and for each "
                "head the pairs of an earlier token (virtual) and the present one (direct) that "
                "raise it most in the MLP.",
                [neighbours, heads],
            )
        )
    return sections


def composition_figure(composition: Composition) -> go.Figure:
    """How much of what each head and MLP writes each later one reads, beyond chance."""
    return heat_figure(
        composition.scores - composition.baseline,
        composition.writers,
        composition.readers,
        title="Composition beyond chance",
        across="reads",
        down="writes",
    )


def _attention_sections(attention: AttentionReading, figure: go.Figure) -> list[Section]:
    sections = []
    for reading in attention.heads:
        text = (
            "Most and least: pairs of a token that looks (query) and one that is looked at (key), "
            f"{attention.distance} earlier, by the head's pattern before any normalisation; under "
            "a softmax by its exponent."
        )
        if reading.outputs is not None:
            text += (
                " Raises and lowers: what the head adds to an output, past the MLP, when it looks "
                "at a token alone, in logits."
            )
        title = f"Head {attention.layer}.{reading.head}"
        sections.append(Section(title, text, [_head_tables(reading)]))
    composition = Section(
        "Who reads what heads write",
        "The norm of the product of what writes and what reads, over the product of their norms, "
        "less what two random ones have. Q, K and V are what a head looks with, is looked at with "
        "and takes in; L and R are the two sides of a bilinear layer.",
        [[figure]],
    )
    return [*sections, composition]


def _head_tables(reading: HeadReading) -> list[Table]:
    tables = [
        ngram_table(reading.looks.highest, "looks most"),
        ngram_table(reading.looks.lowest, "looks least"),
    ]
    if reading.outputs is not None:
        tables.append(ngram_table(reading.outputs.highest, "raises"))
        tables.append(ngram_table(reading.outputs.lowest, "lowers"))
    return tables


def _rank(reading: DirectionReading, number: int) -> int:
    """Place among the eigenvectors of the same sign."""
    values = reading.spectrum.values.tolist()
    return sum(1 for value in values[:number] if (value > 0) == (values[number] > 0))


def context_line(tokenizer: PreTrainedTokenizerBase, found: FoundContext) -> ContextLine:
    """The text around a context's focal token, with what each token contributes."""
    context = found.context
    start = max(0, context.position - BEFORE)
    ids = context.ids[start : context.position + 1 + AFTER]
    shares = found.contribution.tokens()[start:].tolist()
    names = token_names(tokenizer, ids)
    shares += [0.0] * (len(names) - len(shares))
    return ContextLine(
        value=context.activation,
        tokens=list(zip(names, shares, strict=True)),
        focal=context.position - start,
    )

"""The report of a language model: n-grams from the weights, eigenvectors with their contexts."""

from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from pandas.api.types import is_numeric_dtype

from bilens.checks import checked
from bilens.read.language import (
    AttentionReading,
    Composition,
    DirectionReading,
    FoundContext,
    HeadReading,
    LanguageReading,
    NGramReading,
    token_names,
)
from bilens.reading import signed
from bilens.report.heat import heat_figure
from bilens.report.page import ContextLine, ContextList, Section, Table, write_page
from bilens.report.spectra import spectrum_figure
from bilens.residual import ResidualModel

__all__ = ["composition_figure", "context_line", "ngram_table", "write_language_report"]

CAPTIONS = {"direct": "residual stream", "mlp": "MLP"}
BEFORE, AFTER = 28, 4
"""Tokens shown before and after the focal one."""


def ngram_table(frame: pd.DataFrame, caption: str) -> Table:
    """A frame of n-grams: the columns that hold tokens, and the value."""
    words = [name for name in frame.columns if not is_numeric_dtype(frame[name])]
    rows = [
        (*(str(row[name]) for name in words), f"{row['value']:z.2f}")
        for row in frame.to_dict("records")
    ]
    return Table((*words, "value"), rows, caption, words=len(words))


def write_language_report(
    path: Path, reading: LanguageReading, *, title: str
) -> dict[str, go.Figure]:
    """Write the report page and give back its figures, by the names of files to save them as."""
    figures = {"composition": composition_figure(reading.attention.composition)}
    sections = [_salient_section(reading), *map(_ngram_section, reading.ngrams)]
    sections += _attention_sections(reading.attention, figures["composition"])
    for number, found in enumerate(reading.directions):
        figure = spectrum_figure(found.whole, title=f"Eigenvalues of {found.direction}")
        figures[f"spectrum-{number}"] = figure
        sections.append(_direction_section(reading.model, found, figure))
    if reading.left_out:
        sections.append(Section("What could not be read", " ".join(reading.left_out), []))
    summary = (
        "Everything below is read from the weights; a corpus is used only to show texts in which "
        "an eigenvector is active."
    )
    write_page(path, title, summary, reading.about, sections)
    return figures


def _salient_section(reading: LanguageReading) -> Section:
    return Section(
        "The most salient bigrams",
        "Pairs of tokens of the whole vocabulary, by what the first adds to the logit of the "
        "second: through the residual stream, and through the MLP, where a token meets itself."
        + _left_out(reading.model),
        [[ngram_table(frame, CAPTIONS[part]) for part, frame in reading.salient.items()]],
    )


def _left_out(model: ResidualModel) -> str:
    """What n-grams do not count in this model."""
    later = model.n_layers > 1
    if not model.has_norms and not later:
        return ""
    parts = ["norms divide by the size of the token and its MLP alone"] if model.has_norms else []
    parts += ["what other layers make of it is left out"] if later else []
    return f" In this model {' and '.join(parts)}."


def _ngram_section(reading: NGramReading) -> Section:
    heads = [ngram_table(frame, f"head {number}") for number, frame in enumerate(reading.heads)]
    neighbours = [
        ngram_table(reading.preceding, f"before {reading.direction.token}"),
        ngram_table(reading.following, f"after {reading.direction.token}"),
    ]
    text = "Which tokens it follows and which follow it, through the stream and the MLP"
    if heads:
        text += (
            "; and for each head the pairs of an earlier token (virtual) and the present one "
            "(direct) that raise it most in the MLP"
        )
    text += f". {reading.left_out}" if reading.left_out else "."
    return Section(f"N-grams of {reading.direction}", text, [neighbours, heads])


def _direction_section(
    model: ResidualModel, reading: DirectionReading, figure: go.Figure
) -> Section:
    lists = [
        ContextList(
            f"{'P' if value > 0 else 'N'}{1 + _rank(reading, i)}  λ = {signed(value)}",
            [context_line(model, found) for found in reading.contexts[i]],
        )
        for i, value in enumerate(reading.spectrum.values.tolist())
    ]
    return Section(
        f"Eigenvectors of {reading.direction}",
        f"What the MLP of layer {reading.layer} adds to this output is a sum of squares, one for "
        "each eigenvector. P1, P2, ... have a positive eigenvalue λ and only ever raise it; N1, "
        "N2, ... have a negative one and only ever lower it. Below each one stand the texts that "
        "it is most active in, with the token in brackets whose successor is predicted. Colours "
        "say what each token contributes, "
        "through the residual stream or through attention: blue where positive, red where "
        "negative; a line that is opened lists them, the largest first. They add up to the "
        "activation.",
        [[figure], *([part] for part in lists)],
    )


@checked
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
            "a softmax by its exponent. Raises and lowers: what the head adds to an output, past "
            "the MLP, when it looks at a token alone, in logits."
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
        ngram_table(reading.outputs.highest, "raises"),
        ngram_table(reading.outputs.lowest, "lowers"),
    ]
    if reading.attends is None:
        return tables
    most = ngram_table(reading.attends.highest, "attends most")
    return [most, ngram_table(reading.attends.lowest, "attends least"), *tables]


def _rank(reading: DirectionReading, number: int) -> int:
    """Place among the eigenvectors of the same sign."""
    values = reading.spectrum.values.tolist()
    return sum(1 for value in values[:number] if (value > 0) == (values[number] > 0))


def context_line(model: ResidualModel, found: FoundContext) -> ContextLine:
    """The text around a context's focal token, with what each token contributes."""
    context = found.context
    start = max(0, context.position - BEFORE)
    ids = context.ids[start : context.position + 1 + AFTER]
    shares = found.contribution.tokens()[start:].tolist()
    names = token_names(model, ids)
    shares += [0.0] * (len(names) - len(shares))
    return ContextLine(
        value=context.activation,
        tokens=list(zip(names, shares, strict=True)),
        focal=context.position - start,
    )

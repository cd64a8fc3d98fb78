"""Sections of a page on a language model, and texts whose tokens are coloured."""

from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go

from bilens.checks import checked
from bilens.read.figures.spectra import heat_figure
from bilens.read.language import (
    AttentionReading,
    BigramPart,
    Composition,
    DirectionReading,
    FoundContext,
    LanguageReading,
    NGramReading,
    token_names,
)
from bilens.reading import ContextLine, ContextList, Picture, Section, Table, signed
from bilens.residual import ResidualModel

BEFORE, AFTER = 28, 4
"""Tokens shown before and after the focal one."""

CAPTIONS = {"direct": "residual stream", "mlp": "MLP"}


def ngram_table(frame: pd.DataFrame, caption: str) -> Table:
    """Return a table of tokens and their value, without the parts of the value."""
    words = [name for name in frame.columns if frame[name].dtype.kind not in "fiu"]
    return Table(frame, caption, {"value": "z.2f"}, columns=(*words, "value"))


def salient_section(salient: Mapping[BigramPart, pd.DataFrame], model: ResidualModel) -> Section:
    """Return the section on the most salient bigrams of the whole vocabulary."""
    later = model.n_layers > 1
    has_norms = model.parts.has_norms
    parts = ["norms divide by the size of the token and its MLP only"] if has_norms else []
    parts += ["the effect of other layers is left out"] if later else []
    note = f" In this model {' and '.join(parts)}." if parts else ""
    return Section(
        "The most salient bigrams",
        "Pairs of tokens of the whole vocabulary, by the contribution of the first to the logit of "
        "the second: through the residual stream, and through the MLP at the same token." + note,
        [[ngram_table(frame, CAPTIONS[part]) for part, frame in salient.items()]],
    )


def ngram_sections(reading: NGramReading) -> list[Section]:
    """Return the section on the n-grams of a token."""
    before, after, *heads = (ngram_table(f, name) for name, f in reading.tables().items())
    text = "The tokens that it follows and those that follow it, through the stream and the MLP"
    if heads:
        text += (
            "; and for each head the pairs of an earlier token (virtual) and the present one "
            "(direct) that raise it most in the MLP"
        )
    text += f". {reading.left_out}" if reading.left_out else "."
    return [Section(f"N-grams of {reading.direction}", text, [[before, after], heads])]


def direction_sections(reading: DirectionReading) -> list[Section]:
    """Return the section on the eigenvectors of an output, with the texts of each."""
    return [
        Section(
            f"Eigenvectors of {reading.direction}",
            f"The contribution of the MLP of layer {reading.layer} to this output is a sum of "
            "squares, one for each eigenvector. P1, P2, ... have a positive eigenvalue λ and only "
            "ever raise it; N1, N2, ... have a negative one and only ever lower it. Below each are "
            "the texts that it is most active in, with the token in brackets whose successor is "
            "predicted. Colours show the contribution of each token, through the residual stream "
            "or through attention: blue where positive, red where negative; a line that is opened "
            "lists them, the largest first. They add up to the activation.",
            [
                [Picture(name, figure) for name, figure in reading.figures().items()],
                *([part] for part in reading.texts()),
            ],
        )
    ]


def direction_texts(reading: DirectionReading) -> list[ContextList]:
    """Return the texts of each eigenvector, below its name and eigenvalue."""
    names = eigenvector_names(reading.spectrum.values.tolist())
    return [
        ContextList(name, [context_line(reading.model, context) for context in contexts])
        for name, contexts in zip(names, reading.contexts, strict=True)
    ]


def eigenvector_names(values: Sequence[float]) -> list[str]:
    """Return a name for each eigenvalue: P1, P2, ... and N1, N2, ... in the order given."""
    signs = ["P" if value > 0 else "N" for value in values]
    return [
        f"{sign}{signs[: i + 1].count(sign)}  λ = {signed(value)}"
        for i, (sign, value) in enumerate(zip(signs, values, strict=True))
    ]


@checked
def composition_figure(composition: Composition) -> go.Figure:
    """Draw the share of each head's and MLP's output that each later one reads, beyond chance."""
    return heat_figure(
        composition.scores - composition.baseline,
        composition.writers,
        composition.readers,
        title="Composition beyond chance",
        across="reads",
        down="writes",
    )


def attention_sections(reading: AttentionReading) -> list[Section]:
    """Return a section for each head, and one on their composition."""
    text = (
        "Most and least: pairs of a token (query) and one that it attends to (key), "
        f"{reading.distance} earlier, by the head's pattern before any normalisation; under "
        "a softmax by its exponent. Raises and lowers: the head's contribution to an output, past "
        "the MLP, when it attends to a single token, in logits."
    )
    sections = []
    for head in reading.heads:
        tables = [
            ngram_table(frame, caption)
            for caption, frame in head.tables().items()
            if caption != "components"
        ]
        sections.append(Section(f"Head {reading.layer}.{head.head}", text, [tables]))
    composition = Section(
        "Which components read the output of heads",
        "The norm of the product of a writer's and a reader's matrix, over the product of their "
        "norms, less the norm for two random ones. Q, K and V are a head's queries, keys and "
        "values; L and R are the two sides of a bilinear layer.",
        [[Picture(name, figure) for name, figure in reading.figures().items()]],
    )
    return [*sections, composition]


def language_sections(reading: LanguageReading) -> list[Section]:
    """Return the sections on a whole language model."""
    sections = [salient_section(reading.salient, reading.model)]
    for part in (*reading.ngrams, reading.attention, *reading.directions):
        sections += part.sections()
    if reading.left_out:
        sections.append(Section("Parts that could not be read", " ".join(reading.left_out)))
    return sections


def context_line(model: ResidualModel, explained: FoundContext) -> ContextLine:
    """Return the text around a context's focal token, with the contribution of each token."""
    context = explained.context
    start = max(0, context.position - BEFORE)
    ids = context.ids[start : context.position + 1 + AFTER]
    shares = explained.contribution.tokens()[start:].tolist()
    names = token_names(model, ids)
    shares += [0.0] * (len(names) - len(shares))
    return ContextLine(
        value=context.activation,
        tokens=list(zip(names, shares, strict=True)),
        focal=context.position - start,
    )

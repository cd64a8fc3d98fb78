"""The pages of a language model: its n-grams, heads, eigenvectors and texts."""

from functools import partial

from bilens.figures.plots import spectrum_figure
from bilens.language.contexts import Continuation
from bilens.language.heads import AttentionReading
from bilens.language.names import in_words
from bilens.language.ngrams import NGramReading, words_of
from bilens.language.outputs import DirectionReading, LanguageReading
from bilens.pages.layout import sections_of
from bilens.sections import Columns, Picture, Section, Table


@sections_of.register
def direction_sections(reading: DirectionReading) -> list[Section]:
    """Return the spectrum, and the texts of each eigenvector."""
    title = f"Eigenvalues of {reading.direction.words}"
    draw = partial(spectrum_figure, reading.all_eigenvectors, title=title)
    return [
        Section(
            f"Eigenvectors of {reading.direction.words}",
            f"The contribution of the MLP of layer {reading.layer} to this output is a sum of "
            "squares, one for each eigenvector. P1, P2, ... have a positive eigenvalue λ and "
            "only ever raise it; N1, N2, ... have a negative one and only ever lower it. "
            "Below each are the texts that it is most active in, with the token in brackets "
            "whose successor is predicted. Colours show the contribution of each token, "
            "through the residual stream or through attention: blue where positive, red where "
            "negative; a line that is opened lists them, the largest first. They add up to "
            "the activation.",
            [[Picture("spectrum", draw)], *([part] for part in reading.texts())],
        )
    ]


@sections_of.register
def language_sections(reading: LanguageReading) -> list[Section]:
    """Return the sections of all readings, and what they leave out."""
    sections = []
    for part in (*reading.directions, *reading.ngrams, reading.attention):
        sections += part.sections()
    reasons = ["other layers"] * (reading.model.n_layers > 1)
    reasons += ["norms"] * reading.model.modules.has_norms
    if reasons:
        text = (
            f"They are about the weights of layer {reading.attention.layer}, and ignore "
            f"{' and '.join(reasons)}. They rank tokens, and their numbers are no logits."
        )
        sections.append(Section("What the sections about weights leave out", text))
    if reading.left_out:
        sections.append(Section("Parts that could not be read", " ".join(reading.left_out)))
    return sections


@sections_of.register
def continuation_sections(reading: Continuation) -> list[Section]:
    """Return the text."""
    return [Section(reading.title, reading.text)]


@sections_of.register
def ngram_sections(reading: NGramReading) -> list[Section]:
    """Return the tokens before and after, and the skip-trigrams of each head."""
    token = in_words(reading.direction.token)
    text = (
        "The tokens that it follows and those that follow it, through the stream and the MLP, "
        "in logits"
    )
    if reading.heads:
        text += (
            "; and for each head the pairs of an earlier token and the present one that raise "
            "it most in the MLP"
        )
    text += f". {reading.left_out}" if reading.left_out else "."
    sides = {f"before {token}": reading.preceding, f"after {token}": reading.following}
    pairs = [ngram_table(frame, caption) for caption, frame in sides.items()]
    heads = [ngram_table(f, f"head {i}") for i, f in enumerate(reading.heads)]
    return [Section(f"N-grams of {reading.direction.words}", text, [pairs, heads])]


@sections_of.register
def attention_sections(reading: AttentionReading) -> list[Section]:
    """Return the pairs of each head, its components, and what reads its output."""
    text = (
        "Most and least: pairs of a token (query) and one that it attends to (key), "
        f"{reading.distance} earlier, by the head's pattern before any normalisation; under a "
        "softmax by its exponent. Raises and lowers: the head's contribution to an output, "
        "past the MLP, when it attends to a single token, in logits."
    )
    rows, components = [], []
    for head, tables in reading.heads.items():
        title = f"head {reading.layer}.{head}"
        pairs = {name: frame for name, frame in tables.items() if name != "components"}
        rows.append([ngram_table(frame, f"{title} {name}") for name, frame in pairs.items()])
        cells = {**tables["components"], **words_of(tables["components"])}
        components.append([Table(cells, f"{title} components")])
    return [
        Section(f"Heads of layer {reading.layer}", text, rows),
        Section(
            "Singular components of the heads",
            "Two tokens of equal sign raise the output, two of opposite sign lower it.",
            components,
        ),
        Section(
            "Which components read the output of heads",
            "The norm of the product of a writer's and a reader's matrix, over the product of "
            "their norms, less the norm for two random ones. Q, K and V are a head's queries, "
            "keys and values; L and R are the two sides of a bilinear layer.",
            [[Table(reading.composition.frame())]],
        ),
    ]


def ngram_table(table: Columns, caption: str) -> Table:
    """Return a table of tokens in words and their value, without the parts of the value."""
    labels = {"virtual": "earlier token", "direct": "present token"}
    words = {labels.get(name, name): cells for name, cells in words_of(table).items()}
    return Table({**words, "logits": table["value"]}, caption, {"logits": "z.2f"})

"""Reading of a language model for its report, and of one output with its contexts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from bilens.analysis import Reading
from bilens.checks import checked
from bilens.data import Corpus
from bilens.errors import NotBilinearError
from bilens.language.contexts import Context, contributions, example_directions, top_contexts
from bilens.language.heads import AttentionReading, read_attention
from bilens.language.names import TokenDirection, token_names
from bilens.language.ngrams import NGramReading, read_ngrams
from bilens.language.stream import Sources
from bilens.language.sums import check_mlp
from bilens.sections import Columns, ContextLine, ContextList, Fact, eigenvector_names, stacked
from bilens.settings import Count
from bilens.tensor import Spectrum
from bilens.transformer import ResidualModel


@dataclass(frozen=True, eq=False, repr=False)
class DirectionReading(Reading):
    """Eigenvectors of an output direction, the largest |eigenvalue| of either sign first.

    Attributes:
        model: the model.
        direction: the output.
        layer: number of the layer.
        all_eigenvectors: all of them.
        spectrum: eigenvectors with contexts, positive ones first.
        contexts: contexts of each of them, each with the contribution of its tokens.
        data: name of the texts.
    """

    model: ResidualModel
    direction: TokenDirection
    layer: int
    all_eigenvectors: Spectrum
    spectrum: Spectrum
    contexts: list[list[tuple[Context, Sources]]]
    data: str = ""

    axes: ClassVar[dict[str, str]] = Spectrum.axes

    def facts(self) -> list[Fact]:
        return [
            ("token", str(self.direction)),
            ("layer", self.layer),
            *self.all_eigenvectors.facts(),
        ]

    def columns(self) -> Columns:
        """Return a row for each eigenvector."""
        return self.all_eigenvectors.columns()

    def texts(self) -> list[ContextList]:
        """Return the texts of each eigenvector, below its name and eigenvalue."""
        names = eigenvector_names(self.spectrum.values.tolist())
        rows = zip(names, self.contexts, strict=True)
        return [
            ContextList(name, [context_line(self.model, *parts) for parts in contexts])
            for name, contexts in rows
        ]


@dataclass(frozen=True, eq=False, repr=False)
class LanguageReading(Reading):
    """Readings of a language model for its report.

    Attributes:
        model: the model.
        ngrams: n-grams of the outputs that are explained.
        directions: eigenvectors of these outputs; empty if the MLP is not a tensor.
        attention: heads of the layer.
        left_out: reasons why parts are missing.
    """

    model: ResidualModel
    ngrams: list[NGramReading]
    directions: list[DirectionReading]
    attention: AttentionReading
    left_out: tuple[str, ...]

    axes: ClassVar[dict[str, str]] = NGramReading.axes

    def facts(self) -> list[Fact]:
        outputs = ", ".join(reading.direction.words for reading in self.ngrams)
        return [("layer", self.attention.layer), ("outputs", outputs)]

    def columns(self) -> Columns:
        """Return the n-grams of all outputs."""
        tables = [(str(reading.direction), reading.columns()) for reading in self.ngrams]
        return stacked({**x, "output": [name] * len(x["value"])} for name, x in tables)


@checked
def read_language(
    model: ResidualModel,
    corpus: Corpus | None,
    directions: Sequence[TokenDirection] = (),
    *,
    layer: int,
    among: int | None = None,
) -> LanguageReading:
    """Read a language model: n-grams, heads, and eigenvectors with their contexts.

    Args:
        model: the model; eigenvectors need a bilinear MLP.
        corpus: texts in the model's tokens, in which eigenvectors are active.
        directions: outputs to explain; by default frequent words of the corpus.
        layer: number of the layer whose heads and MLP are read.
        among: number of tokens, the first of the vocabulary, for heads. All by default, which takes
            minutes for a large vocabulary.
    """
    outputs = list(directions)
    if corpus is not None and not outputs:
        outputs = example_directions(model, corpus)
    # Learned positions differ, and tokens are read at one where both sides of a pair exist.
    position = None if model.modules.n_positions is None else 1
    tokens = None if among is None else range(min(among, model.vocab_size))
    n_tokens = model.vocab_size if tokens is None else len(tokens)
    # N-grams are read in any case; eigenvectors, and tokens to subtract, need a tensor.
    left_out: tuple[str, ...] = ()
    try:
        model.mlp(layer)
    except NotBilinearError as error:
        left_out = (str(error),)
    subtracts = not left_out
    if corpus is None:
        left_out += ("Eigenvectors are seen in texts, and none were named (--data FILE.txt).",)
    readings = [
        read_direction(model, corpus, d.token, minus=d.minus, layer=layer)
        for d in outputs
        if corpus is not None and not left_out
    ]
    ngrams = [
        read_ngrams(
            model, d.token, minus=d.minus if subtracts else (), layer=layer, position=position
        )
        for d in outputs
    ]
    return LanguageReading(
        model=model,
        ngrams=ngrams,
        directions=readings,
        attention=read_attention(
            model, layer=layer, k=min(10, n_tokens), position=position, among=tokens
        ),
        left_out=left_out,
    )


@checked
def read_direction(
    model: ResidualModel,
    corpus: Corpus,
    token: str | int,
    *,
    layer: int,
    minus: str | int | Sequence[str | int] = (),
    eigenvectors: int = 4,
    k: Count = 8,
) -> DirectionReading:
    """Find the eigenvectors of an output and the validation texts in which they are active.

    Args:
        model: the model, whose MLP in the layer is bilinear.
        corpus: texts in the model's tokens.
        token: the output token, by name or number.
        layer: number of the layer.
        minus: tokens whose mean is subtracted from the output.
        eigenvectors: number of eigenvectors of either sign.
        k: number of texts for each eigenvector.

    Raises:
        NotBilinearError: the MLP is not a tensor.

    Source: Pearce et al. 2024, section 6.2 and appendix G.
    """
    all_eigenvectors = model.mlp(layer).interaction(model.direction(token, minus)).eigh()
    # Eigenvectors of a tensor that is not the model's MLP would be active in the same contexts.
    check_mlp(model, layer, model.modules.embed.rows(corpus.validation[0]["input_ids"][:1])[0])
    spectrum = all_eigenvectors.outermost(eigenvectors)
    texts = (row["input_ids"] for row in corpus.validation)
    contexts = top_contexts(model, spectrum, texts, layer=layer, k=k)
    pairs = [(i, context) for i, row in enumerate(contexts) for context in row]
    split = iter(contributions(model, spectrum, pairs, layer=layer))
    return DirectionReading(
        model=model,
        direction=TokenDirection.of(model, token, minus),
        layer=layer,
        all_eigenvectors=all_eigenvectors,
        spectrum=spectrum,
        contexts=[[*zip(row, split, strict=False)] for row in contexts],
        data=corpus.name,
    )


@checked
def model_facts(model: ResidualModel, corpus: Corpus | None) -> tuple[Fact, ...]:
    """Return names and values of a model's sizes."""
    return (
        *(() if corpus is None else (("data", corpus.name),)),
        ("layers", model.n_layers),
        ("width", model.d_model),
        ("heads", model.n_heads),
    )


def context_line(model: ResidualModel, context: Context, split: Sources) -> ContextLine:
    """Return the text around a context's focal token, with the contribution of each token."""
    # A line of a page has room for few tokens: 28 before the focal one and 4 after it.
    start = max(0, context.position - 28)
    ids = context.ids[start : context.position + 5]
    shares = split.tokens()[start:].tolist()
    names = [name.replace("Ċ", "↵") for name in token_names(model, ids)]
    if any(name.startswith(("Ġ", "▁")) for name in names):
        # As in WordPiece, ## marks a piece that belongs to the word before it.
        names = [name[1:] if name[:1] in ("Ġ", "▁") else f"##{name}" for name in names]
    # Later tokens have no influence on the activation.
    shares += [0.0] * (len(names) - len(shares))
    return ContextLine(
        value=context.activation,
        tokens=list(zip(names, shares, strict=True)),
        focal=context.position - start,
    )

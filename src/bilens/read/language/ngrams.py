"""N-grams from the weights: bigrams, and skip-trigrams of each head.

The matrices, and the arguments `layer`, `position` and `among`, are those of
`bilens.read.language.token_matrices`. Values outside the model raise BilensError, as does a k that
is not positive.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import detached, full_precision
from bilens.errors import NotBilinearError
from bilens.progress import progress_bar
from bilens.read.language.names import (
    TokenDirection,
    in_words,
    token_names,
    token_number,
    token_range,
    top_pairs,
)
from bilens.read.language.token_matrices import (
    BigramPart,
    TrigramPart,
    bigram_parts,
    skip_trigram_matrix,
)
from bilens.reading import Fact, Reading, Section, Table, plain
from bilens.registry import reading
from bilens.residual import ResidualModel
from bilens.settings import Count
from bilens.tensor import FactoredMatrix, top_entries

PARTS: tuple[BigramPart, ...] = ("direct", "mlp")
CAPTIONS = {"direct": "residual stream", "mlp": "MLP"}
PAIRS_AT_ONCE = 1024
"""Texts of two tokens that run at once; each has the probability of every token."""


@dataclass(frozen=True, eq=False, repr=False)
class NGramReading(Reading):
    """N-grams of a token, from the weights.

    Attributes:
        direction: the token, and those that are subtracted.
        layer: number of the layer whose heads and MLP count.
        preceding: tokens that make it likely.
        following: tokens that it makes likely.
        heads: skip-trigrams of each head that end in it; empty if the MLP is not a tensor.
        left_out: reason why skip-trigrams are missing, if they are.
    """

    direction: TokenDirection
    layer: int
    preceding: pd.DataFrame
    following: pd.DataFrame
    heads: list[pd.DataFrame]
    left_out: str = ""

    axes: ClassVar[dict[str, str]] = {"x": "tokens", "y": "value", "color": "table"}

    def facts(self) -> list[Fact]:
        """Return the direction, the layer and the number of skip-trigram tables."""
        return [
            ("token", str(self.direction)),
            ("layer", self.layer),
            ("heads with skip-trigrams", len(self.heads)),
        ]

    def frame(self) -> pd.DataFrame:
        """Return all tables as one: the table, its tokens, and their value."""
        rows = [
            (name, " ".join(str(v) for v in row if isinstance(v, str)), row[-1])
            for name, frame in self.tables().items()
            for row in frame.itertuples(index=False)
        ]
        return pd.DataFrame(rows, columns=["table", "tokens", "value"])

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the tokens before and after it, and the skip-trigrams of each head."""
        token = self.direction.token
        return {
            f"before {token}": self.preceding,
            f"after {token}": self.following,
            **{f"head {number}": frame for number, frame in enumerate(self.heads)},
        }

    def sections(self) -> list[Section]:
        """Return the section on the n-grams of a token."""
        before, after, *heads = (
            ngram_table(f, " ".join(map(in_words, name.split(" ", 1))))
            for name, f in self.tables().items()
        )
        text = "The tokens that it follows and those that follow it, through the stream and the MLP"
        if heads:
            text += (
                "; and for each head the pairs of an earlier token (virtual) and the present one "
                "(direct) that raise it most in the MLP"
            )
        text += f". {self.left_out}" if self.left_out else "."
        return [Section(f"N-grams of {self.direction.words}", text, [[before, after], heads])]

    def record(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        return {
            "token": str(self.direction),
            "layer": self.layer,
            "left_out": self.left_out,
            "preceding": plain(self.preceding),
            "following": plain(self.following),
            "heads": plain(self.heads),
        }


@reading("ngrams")
@full_precision
def read_ngrams(
    model: ResidualModel,
    token: str | int,
    *,
    layer: int,
    minus: str | int | Sequence[str | int] = (),
    k: Count = 20,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> NGramReading:
    """Find k tokens that precede a token, k that follow it, and k skip-trigrams of each head.

    Tokens to subtract count in skip-trigrams only, which need a bilinear MLP.

    Args:
        model: the model.
        token: the token, by name or number.
        layer: number of the layer whose heads and MLP count.
        minus: tokens whose mean is subtracted from the output.
        k: number of rows of each table.
        position: position of the tokens, required by models with learned positions.
        among: tokens that skip-trigrams consist of; all by default.
    """
    number = token_number(model, token)
    options: dict[str, Any] = {"layer": layer, "k": k, "position": position}
    heads: list[pd.DataFrame] = []
    # Bigrams need no tensor, and are read even where skip-trigrams cannot be.
    left_out = ""
    try:
        heads = [
            skip_trigrams(model, token, head, minus=minus, among=among, **options)
            for head in range(model.n_heads)
        ]
    except NotBilinearError as error:
        left_out = str(error)
    direction = TokenDirection.of(model, token, minus)
    before, after = preceding(model, number, **options), following(model, number, **options)
    return NGramReading(direction, layer, before, after, heads, left_out)


@full_precision
def following(
    model: ResidualModel,
    token: str | int,
    *,
    layer: int,
    part: BigramPart = "both",
    k: Count = 10,
    position: int | None = None,
) -> pd.DataFrame:
    """Return the k most likely successors of a token; see `bigram_matrix`.

    Returns:
        Columns token, direct, mlp and value, the largest value first; in logits.

    Source:
        Pearce et al. 2024, section 6.1 and Table 1.
    """
    return _neighbours(model, bigram_parts(model, layer, position, None), token, part, k)


@full_precision
def preceding(
    model: ResidualModel,
    token: str | int,
    *,
    layer: int,
    part: BigramPart = "both",
    k: Count = 10,
    position: int | None = None,
) -> pd.DataFrame:
    """Return the k tokens that make a token most likely to follow; columns as in `following`."""
    matrices = bigram_parts(model, layer, position, None)
    return _neighbours(model, {name: M.T for name, M in matrices.items()}, token, part, k)


@full_precision
def bigrams(
    model: ResidualModel,
    *,
    layer: int,
    part: BigramPart = "both",
    k: Count = 20,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> pd.DataFrame:
    """Return the k most salient bigrams of the vocabulary; see `bigram_matrix`.

    Returns:
        Columns input, output, direct, mlp and value, the largest value first; in logits.

    Source:
        Pearce et al. 2024, Table 6.
    """
    # The ranking is by one part, and the table shows both.
    matrices = bigram_parts(model, layer, position, among)
    parts: dict[str, FactoredMatrix] = {name: matrices[name] for name in PARTS}
    return top_pairs(model, ("input", "output"), [matrices[part]], parts, k, among)


@full_precision
def skip_trigrams(  # noqa: PLR0913
    model: ResidualModel,
    token: str | int | Float[Tensor, " d_model"],
    head: int,
    *,
    layer: int,
    minus: str | int | Sequence[str | int] = (),
    part: TrigramPart = "mlp",
    k: Count = 20,
    position: int | None = None,
    among: Sequence[int] | None = None,
) -> pd.DataFrame:
    """Return the k pairs A ... B that raise an output most through one head.

    The output is a token minus others, or a direction; see `skip_trigram_matrix`.

    Returns:
        Columns virtual (A), direct (B), ov, mlp and value, the largest value first; in logits for
        a head that attends to A only.

    Raises:
        NotBilinearError: the MLP is not a tensor.

    Source:
        Pearce et al. 2024, section 6.1 and Table 7.
    """
    options: dict[str, Any] = {"layer": layer, "position": position, "among": among}
    matrix = partial(skip_trigram_matrix, model, token, head, minus=minus, **options)
    parts = {"ov": matrix(part="ov"), "mlp": matrix(part="mlp")}
    return top_pairs(model, ("virtual", "direct"), [matrix(part=part)], parts, k, among)


@detached
def pair_trigrams(
    model: ResidualModel, *, k: Count = 20, among: Sequence[int] | None = None
) -> pd.DataFrame:
    """Return the k triples A, B -> C in which A raises the probability of C after B the most.

        value(A, B, C) = p(C | A B) - mean over A' of p(C | A' B)

    Every text of two tokens is tried, after the token that texts begin with if the model has one.
    So all heads and layers count, with their actual patterns and norms. `skip_trigrams` describes
    single heads in logits, where tokens that never occur can have the largest numbers. Here only
    probabilities count. Time grows with the square of the number of tokens; a vocabulary of
    thousands takes a GPU.

    Returns:
        Columns virtual (A), direct (B), output (C) and value, the largest value first.
    """
    tokens = token_range(model, among)
    with progress_bar() as bar:
        task = bar.add_task("texts of two tokens", total=len(tokens), note="")

        def gains() -> Iterator[Tensor]:
            # One B at a time, so that the probabilities after all its texts fit in memory.
            for second in tokens:
                probabilities = torch.cat(
                    [_next_token(model, firsts, second) for firsts in tokens.split(PAIRS_AT_ONCE)]
                )
                bar.advance(task)
                # Minus the mean over A, which is the part that B explains by itself.
                yield probabilities - probabilities.mean(0)

        top = top_entries(gains(), k)
    # The blocks are stacked: all rows of the first B, then all rows of the second B, ...
    second, first = top.rows // len(tokens), top.rows % len(tokens)
    columns = {"virtual": tokens[first], "direct": tokens[second], "output": top.columns}
    frame = pd.DataFrame({name: token_names(model, ids) for name, ids in columns.items()})
    return frame.assign(value=top.values.tolist())


def _next_token(
    model: ResidualModel, firsts: Int[Tensor, " n"], second: Int[Tensor, ""]
) -> Float[Tensor, "n vocab"]:
    """Return the probabilities of the token after each text of two tokens."""
    texts = torch.stack([firsts, second.expand_as(firsts)], 1)
    begin = getattr(model.model.config, "bos_token_id", None)
    # Models that were trained with a first token know no texts without it.
    if begin is not None:
        texts = torch.cat([torch.full_like(texts[:, :1], begin), texts], 1)
    return model.logits(texts)[:, -1].softmax(-1)


def _neighbours(
    model: ResidualModel,
    matrices: dict[BigramPart, FactoredMatrix],
    token: str | int,
    part: BigramPart,
    k: int,
) -> pd.DataFrame:
    """Return the largest values in a token's row of the matrices."""
    number = torch.tensor([token_number(model, token)])
    # A row of each factored matrix; the whole matrix has vocab^2 entries.
    rows = {name: M.rows(number)[0] for name, M in matrices.items()}
    best = rows[part].topk(min(k, len(rows[part]))).indices
    columns = {"direct": rows["direct"], "mlp": rows["mlp"], "value": rows[part]}
    values = {name: row[best].tolist() for name, row in columns.items()}
    return pd.DataFrame({"token": token_names(model, best), **values})


def ngram_table(frame: pd.DataFrame, caption: str) -> Table:
    """Return a table of tokens and their value, without the parts of the value."""
    words = [name for name in frame.columns if frame[name].dtype.kind not in "fiu"]
    shown = frame.assign(**{name: frame[name].map(in_words) for name in words})
    return Table(shown, caption, {"value": "z.2f"}, columns=(*words, "value"))


def salient_section(salient: Mapping[BigramPart, pd.DataFrame], model: ResidualModel) -> Section:
    """Return the section on the most salient bigrams of the whole vocabulary."""
    later = model.n_layers > 1
    parts = ["norms see only the token and its MLP"] if model.parts.has_norms else []
    parts += ["the effect of other layers is left out"] if later else []
    note = f" In this model {' and '.join(parts)}." if parts else ""
    return Section(
        "The most salient bigrams",
        "Pairs of tokens of the whole vocabulary, by the contribution of the first to the logit of "
        "the second: through the residual stream, and through the MLP at the same token." + note,
        # One below the other: the two have scales of their own.
        [[ngram_table(frame, CAPTIONS[part])] for part, frame in salient.items()],
    )

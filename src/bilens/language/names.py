"""Tokens by name: single tokens, and directions in the logits."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_finite, checked
from bilens.data.texts import write_out
from bilens.errors import BilensError
from bilens.sections import Columns
from bilens.tensor import FactoredMatrix
from bilens.tensor.factors import fit_input
from bilens.transformer import ResidualModel
from bilens.transformer.tokens import byte_letters, in_bytes


@dataclass(frozen=True)
class TokenDirection:
    """Record of an output direction: the logit of a token, minus the mean logit of other tokens.

    Subtracting words of the same kind removes their common part, such as grammar. Functions take
    the same as `token, minus=...`.

    Attributes:
        token: Token that is predicted, as the tokenizer spells it or as text, such as ' are'; or
            its number, which is kept as a name: "[7]".
        minus: Tokens whose mean is subtracted from it.

    Source: Pearce et al. 2024, figure 7.
    """

    token: str
    minus: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        (token,) = names_of(self.token)
        object.__setattr__(self, "token", token)
        object.__setattr__(self, "minus", names_of(self.minus))

    @classmethod
    def of(
        cls, model: ResidualModel, token: str | int, minus: str | int | Sequence[str | int] = ()
    ) -> "TokenDirection":
        """Return the record of tokens that are given by name or number."""
        others = [minus] if isinstance(minus, (str, int)) else minus
        names = [x if isinstance(x, str) else exact_names(model, [x])[0] for x in (token, *others)]
        return cls(names[0], tuple(names[1:]))

    @checked
    def vector(self, model: ResidualModel) -> Float[Tensor, " d_model"]:
        """Return the direction in the normalised stream after the last layer."""
        return model.direction(self.token, self.minus)

    @property
    def words(self) -> str:
        """The direction with its tokens as text."""
        return str(TokenDirection(in_words(self.token), tuple(map(in_words, self.minus))))

    def __str__(self) -> str:
        """Return the direction with its tokens as the tokenizer spells them."""
        return f"{self.token} minus {', '.join(self.minus)}" if self.minus else self.token


def names_of(tokens: str | int | Sequence[str | int]) -> tuple[str, ...]:
    """Return the names of tokens that are given by name or number; that of number 7 is "[7]".

    Raises:
        BilensError: a number is negative.
    """
    items = [tokens] if isinstance(tokens, str | int) else tokens
    names = []
    for token in items:
        if isinstance(token, str):
            names.append(token)
        elif token < 0:
            raise BilensError(f"token={token}, expected the number of a token, 0 or more")
        else:
            names.append(f"[{token}]")
    return tuple(names)


def direction_vector(
    model: ResidualModel,
    token: str | int | Float[Tensor, " d_model"],
    minus: str | int | Sequence[str | int] = (),
) -> Float[Tensor, " d_model"]:
    """Return the direction of a token minus others, or a given direction, checked."""
    if not isinstance(token, Tensor):
        return model.direction(token, minus)
    if isinstance(minus, int) or len(minus):
        raise BilensError(f"minus={minus!r} beside a vector: subtract from the vector itself")
    vector = fit_input(token, model.W_E[:1], constant=False, argument="token")
    check_finite(token=vector)
    return vector


def token_number(model: ResidualModel, token: str | int) -> int:
    """Return the number of a token given by name or number."""
    if isinstance(token, str):
        return model.token(token)
    model.direction(token)
    return token


@checked
def token_names(model: ResidualModel, ids: Int[Tensor, " n"] | Iterable[int]) -> list[str]:
    """Return the tokenizer's name of each token; [7] for a token that it does not have."""
    # Models pad their vocabulary, and the tokenizer has no names for the padding.
    numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if model.tokenizer is None:
        return [f"[{token}]" for token in numbers]
    # Clamped first and named by number after: tokenizers fail on numbers beyond their vocabulary.
    size = len(model.tokenizer)
    names = model.tokenizer.convert_ids_to_tokens([max(0, min(i, size - 1)) for i in numbers])
    return [
        name if 0 <= i < size and name is not None else f"[{i}]"
        for i, name in zip(numbers, names, strict=True)
    ]


def exact_names(model: ResidualModel, ids: Int[Tensor, " n"] | Iterable[int]) -> list[str]:
    """Return a name of each token that `model.token` knows it by, with its number if need be.

    The name of a piece inside words may be the text of a word, as "are" is in SentencePiece.
    """
    numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    names = []
    for token, (name, is_piece) in zip(numbers, _pieces(model, numbers), strict=True):
        if is_piece and in_bytes(name) != name:
            names.append(f"{in_bytes(name)}[{token}]")
            continue
        own = model.tokenizer is None or name == f"[{token}]" or model.token(name) == token
        names.append(name if own else f"{name}[{token}]")
    return names


def shown_tokens(model: ResidualModel, ids: Int[Tensor, " n"] | Iterable[int]) -> list[str]:
    """Return tokens as text, without the tokenizer's marks of spaces and new lines.

    A piece of a letter is shown in bytes, as <0xE3>.
    """
    return [in_bytes(x) if is_piece else token_text(x) for x, is_piece in _pieces(model, ids)]


def readable_tokens(model: ResidualModel, ids: Int[Tensor, " n"] | Iterable[int]) -> list[str]:
    """Return tokens as text, without those that are pieces of a letter."""
    return [token_text(name) for name, is_piece in _pieces(model, ids) if not is_piece]


def _pieces(model: ResidualModel, ids: Tensor | Iterable[int]) -> list[tuple[str, bool]]:
    """Return the name of each token, and whether it is a piece of a letter."""
    numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    names = zip(numbers, token_names(model, numbers), strict=True)
    return [(name, _is_piece(model, token, name)) for token, name in names]


def _is_piece(model: ResidualModel, token: int, name: str) -> bool:
    """Return whether a token is some of the bytes of a letter, which are no text alone."""
    if name.isascii() and not name.startswith("<0x"):
        return False
    return model.tokenizer is not None and "�" in write_out(model.tokenizer, [token])


def token_text(name: str) -> str:
    """Return a token's name as text, with spaces for its marks of them."""
    name = re.sub(r"(<0x\w\w>)\[\d+\]$", r"\1", name)
    try:
        # Byte-level tokenizers write each byte as a letter, a space as Ġ and a new line as Ċ.
        text = bytes(map(byte_letters().__getitem__, name)).decode()
    except (KeyError, UnicodeDecodeError):  # of another tokenizer, or a piece of a letter
        text = name.replace("Ġ", " ")
    # Control letters are in no picture, and break its file.
    signs = (x if x.isprintable() else repr(x)[1:-1] for x in text.replace("▁", " "))
    return "".join(signs)


def in_words(name: str) -> str:
    """Return a token's name as text, in quotes if it holds a space, or no letter and no digit."""
    text = token_text(name)
    is_word = text == name.strip() and any(map(str.isalnum, text))
    return text if is_word else _in_quotes(text)


def quoted(name: str) -> str:
    """Return a token's name as it stands in a sentence: "was" is no word of it."""
    return _in_quotes(token_text(name))


def _in_quotes(text: str) -> str:
    return f"'{text}'" if '"' in text else f'"{text}"'


def token_range(model: ResidualModel, among: Sequence[int] | None) -> Int[Tensor, " n"]:
    """Return the numbers of given tokens, or of all tokens."""
    if among is None:
        return torch.arange(model.vocab_size, device=model.device)
    if not among or min(among) < 0 or max(among) >= model.vocab_size:
        raise BilensError(
            f"among: expected numbers of tokens from 0 to {model.vocab_size - 1}, at least one"
        )
    return torch.tensor(among, device=model.device)


def top_pairs(
    model: ResidualModel,
    sides: tuple[str, str],
    factors: Sequence[FactoredMatrix],
    parts: Mapping[str, FactoredMatrix],
    k: int,
    among: Sequence[int] | None,
    *,
    largest: bool = True,
) -> Columns:
    """Find the k largest, or smallest, entries of an elementwise product of token matrices.

    Entries are computed in blocks, so the (vocab, vocab) matrix is never in memory. Columns have
    the tokens of rows and columns, called `sides`, the entries of each of `parts` there, and value.
    """
    # Blocks of the product are searched one by one and dropped.
    top = factors[0].top_entries(k, times=factors[1:], largest=largest)
    tokens = token_range(model, among)
    rows, columns = (token_names(model, tokens[numbers]) for numbers in (top.rows, top.columns))
    entries = {name: part.entries(top.rows, top.columns).tolist() for name, part in parts.items()}
    return {sides[0]: rows, sides[1]: columns, **entries, "value": top.values.tolist()}

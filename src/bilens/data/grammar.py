"""A small language with a written-down grammar, whose next-token probabilities are known exactly.

A sentence starts with [BOS], perhaps openers, and one name; after that no other name comes.

    after [BOS] or an opener    1/2 an opener, 1/2 a name
    after a first word          strength: its second word, a bigram;
                                1 - strength: anything free
    after a verb B              strength: the object C that the name A and B decide, a skip-trigram
                                A...B -> C; 1 - strength: anything free
    after any other word        anything free: 1/3 a first word, 1/3 a verb, 1/3 filler

In each group all words are alike. Two verbs have objects of their own: a part for the name and one
for the verb, added, can say which. The other two share their objects and give them to the names in
different orders, which takes the product of name and verb.

The vocabulary is made so that weights can show it. Names come only once, so attention need not
choose between them. What is free is a wide choice, so that the narrow rules stand out against it,
and a verb alone says little, so that its objects are no bigrams.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from bilens.data.tokenizer import SPECIAL_TOKENS, with_special_tokens
from bilens.errors import BilensError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Grammar", "Kind"]

Kind = Literal["bigram", "skip-trigram", "filler"]

_BOS = SPECIAL_TOKENS["bos_token"]
_OPENERS = ("once", "today", "then", "later")
_NAMES = ("lily", "tom", "ben", "mia", "sam", "anna")
_PAIRS = (
    ("ice", "cream"),
    ("apple", "pie"),
    ("fire", "truck"),
    ("teddy", "bear"),
    ("swimming", "pool"),
    ("rain", "boots"),
    ("living", "room"),
    ("birthday", "cake"),
    ("good", "night"),
    ("thank", "you"),
)
# Each verb with its objects, in the order of the names.
_OBJECTS = {
    "sang": ("la", "oh", "hey", "mm", "na", "ho"),
    "ate": ("soup", "bread", "rice", "corn", "fish", "jam"),
    "lost": ("ball", "kite", "doll", "hat", "drum", "boat"),
    "found": ("kite", "doll", "hat", "drum", "boat", "ball"),
}
_FILLERS = (
    "and",
    "the",
    "was",
    "very",
    "with",
    "so",
    "happy",
    "big",
    "little",
    "red",
    "again",
    "soon",
    "there",
    "home",
    "day",
    "park",
)


@dataclass(frozen=True)
class Grammar:
    """The language; two of the same strength are equal.

    Attributes:
        strength: Probability of what a rule says, above 1/2 and below 1. What remains goes to other
            words, so that no true logit is infinitely larger than its rivals.
    """

    strength: float = 0.9
    vocabulary: tuple[str, ...] = field(
        init=False,
        default=(
            *SPECIAL_TOKENS.values(),
            *_OPENERS,
            *_NAMES,
            *(word for pair in _PAIRS for word in pair),
            *_OBJECTS,
            *dict.fromkeys(word for objects in _OBJECTS.values() for word in objects),
            *_FILLERS,
        ),
    )

    def __post_init__(self) -> None:
        if not 0.5 < self.strength < 1:
            raise BilensError(f"strength: expected above 0.5 and below 1, found {self.strength}")

    @property
    def bigrams(self) -> list[tuple[str, str]]:
        """Pairs (first, next): the one nearly always follows the other."""
        return list(_PAIRS)

    @property
    def skip_trigrams(self) -> list[tuple[str, str, str]]:
        """Triples (A, B, C): after B, and A anywhere before, nearly always comes C."""
        return [
            (name, verb, word)
            for verb, objects in _OBJECTS.items()
            for name, word in zip(_NAMES, objects, strict=True)
        ]

    def sample(self, n: int, length: int, seed: int) -> Int[Tensor, "n length"]:
        """Draw `n` sentences of `length` tokens each, as positions in `vocabulary`.

        The first token is [BOS]. A sentence is cut at its length, which changes no probability of
        a next token.
        """
        generator = torch.Generator().manual_seed(seed)
        cumulative = self._table.cumsum(dim=-1)
        ids = torch.empty(n, length, dtype=torch.int64)
        ids[:, 0] = self._ids[_BOS]
        names = torch.zeros(n, dtype=torch.int64)
        for position in range(1, length):
            rows = cumulative[names, ids[:, position - 1]]
            # Rounding may leave the last sum below 1; then nothing but its own end is beyond it.
            drawn = torch.rand(n, 1, dtype=torch.float64, generator=generator) * rows[:, -1:]
            ids[:, position] = torch.searchsorted(rows, drawn, right=True).squeeze(-1)
            names = torch.maximum(names, self._name_of[ids[:, position]])
        return ids

    def next_distribution(
        self, ids: Int[Tensor, "*batch length"]
    ) -> Float64[Tensor, "*batch length vocab"]:
        """Return the exact probabilities of the token after each position, given all up to it.

        Args:
            ids: Sentences of this grammar or their beginnings, as positions in `vocabulary`.

        Raises:
            BilensError: One of them does not start with [BOS], or is no sentence.
        """
        names = self._name_of[ids].cummax(dim=-1).values
        following = self._table[names, ids]
        reached = following[..., :-1, :].gather(-1, ids[..., 1:, None])
        if bool((ids[..., 0] != self._ids[_BOS]).any()) or bool((reached == 0).any()):
            raise BilensError(
                f"ids: expected sentences of the grammar, each starting with {_BOS}, found others; "
                "take them from sample or from the grammar corpus"
            )
        return following

    def is_kind(
        self, ids: Int[Tensor, "*batch length"], kind: Kind
    ) -> Bool[Tensor, "*batch length"]:
        """Tell at which positions the next token is decided by a rule of `kind`."""
        first = self._mask(tuple(first for first, _ in _PAIRS))
        verb = self._mask(tuple(_OBJECTS))
        masks = {"bigram": first, "skip-trigram": verb, "filler": ~(first | verb)}
        return masks[kind][ids]

    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """Return a tokenizer with `vocabulary` in its order; words are separated by white space."""
        # tokenizers takes a while to import, and the probabilities do without it.
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers  # noqa: PLC0415

        words = Tokenizer(models.WordLevel(self._ids, unk_token=SPECIAL_TOKENS["unk_token"]))
        words.normalizer = normalizers.Lowercase()
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return with_special_tokens(words)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.vocabulary)}

    def _mask(self, words: tuple[str, ...]) -> Bool[Tensor, " vocab"]:
        mask = torch.zeros(len(self.vocabulary), dtype=torch.bool)
        mask[[self._ids[word] for word in words]] = True
        return mask

    def _uniform(self, *words: str) -> Float64[Tensor, " vocab"]:
        mask = self._mask(words).double()
        return mask / mask.sum()

    @cached_property
    def _name_of(self) -> Int[Tensor, " vocab"]:
        """1, 2, ... for the names, 0 for every other token."""
        numbers = torch.zeros(len(self.vocabulary), dtype=torch.int64)
        for number, name in enumerate(_NAMES, start=1):
            numbers[self._ids[name]] = number
        return numbers

    @cached_property
    def _table(self) -> Float64[Tensor, "names vocab vocab"]:
        """Probabilities [name so far, last token, next token]; zero rows cannot be reached."""
        table = torch.zeros(len(_NAMES) + 1, *[len(self.vocabulary)] * 2, dtype=torch.float64)
        for word in (_BOS, *_OPENERS):
            table[0, self._ids[word]] = (self._uniform(*_OPENERS) + self._uniform(*_NAMES)) / 2
        firsts = self._uniform(*(first for first, _ in _PAIRS))
        free = (firsts + self._uniform(*_OBJECTS) + self._uniform(*_FILLERS)) / 3
        body = [word for word in self.vocabulary[len(SPECIAL_TOKENS) :] if word not in _OPENERS]
        for word in body:
            table[1:, self._ids[word]] = free
        for first, second in _PAIRS:
            table[1:, self._ids[first]] = self._mixed(second, free)
        for name, verb, word in self.skip_trigrams:
            table[self._name_of[self._ids[name]], self._ids[verb]] = self._mixed(word, free)
        return table

    def _mixed(self, word: str, others: Float64[Tensor, " vocab"]) -> Float64[Tensor, " vocab"]:
        return self.strength * self._uniform(word) + (1 - self.strength) * others

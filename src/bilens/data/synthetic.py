"""Languages whose next-token probabilities are known exactly, because a few rules give them."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from bilens.checks import checked
from bilens.data.tokenizer import SPECIAL_TOKENS, with_special_tokens
from bilens.errors import BilensError
from bilens.lazy_imports import tokenizers, transformers
from bilens.settings import Count, Seed

BOS = SPECIAL_TOKENS["bos_token"]


def uniform(words: Iterable[str]) -> dict[str, float]:
    """Probabilities of words that are all as likely."""
    chosen = list(words)
    return dict.fromkeys(chosen, 1 / len(chosen))


def average(*groups: dict[str, float]) -> dict[str, float]:
    """Probabilities of words out of groups of different words, which are all as likely."""
    return {word: share / len(groups) for group in groups for word, share in group.items()}


@dataclass(frozen=True)
class SyntheticLanguage(ABC):
    """A finite automaton: its state says how likely each next word is, and the word where it goes.

    Attributes:
        strength: probability of what a rule says, above 1/2 and below 1. What remains goes to other
            words, so that no true logit is infinitely larger than its rivals.
    """

    words: ClassVar[tuple[str, ...]]
    start: ClassVar[Hashable]
    strength: float = 0.9

    def __post_init__(self) -> None:
        if not 0.5 < self.strength < 1:
            raise BilensError(f"strength={self.strength}, expected above 0.5 and below 1")

    @abstractmethod
    def following(self, state: Any) -> dict[str, float]:
        """The probabilities of the next words."""

    @abstractmethod
    def moved(self, state: Any, word: str) -> Hashable:
        """The state behind a next word."""

    @abstractmethod
    def kind(self, state: Any) -> str:
        """What decides the next word."""

    def mixed(self, said: Iterable[str], others: dict[str, float]) -> dict[str, float]:
        """Probabilities where a rule says some words: they share `strength`, `others` the rest."""
        rule = uniform(said)
        return {
            word: self.strength * rule.get(word, 0) + (1 - self.strength) * others.get(word, 0)
            for word in {**rule, **others}
        }

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The special tokens and the words."""
        return (*SPECIAL_TOKENS.values(), *self.words)

    @checked
    def sample(self, n: Count, length: Count, seed: Seed) -> Int[Tensor, "n length"]:
        """Draw `n` sentences of `length` tokens each, as positions in `vocabulary`.

        The first token is [BOS]. A sentence is cut at its length, which changes no probability of
        a next token.
        """
        generator = torch.Generator().manual_seed(int(seed))
        _, following, moves = self._tables
        cumulative = following.cumsum(dim=-1)
        ids = torch.full((n, length), self._ids[BOS])
        states = torch.zeros(n, dtype=torch.int64)
        for position in range(1, length):
            rows = cumulative[states]
            # Rounding may leave the last sum below 1; then nothing but its own end is beyond it.
            drawn = torch.rand(n, 1, dtype=torch.float64, generator=generator) * rows[:, -1:]
            ids[:, position] = torch.searchsorted(rows, drawn, right=True).squeeze(-1)
            states = moves[states, ids[:, position]]
        return ids

    def next_distribution(
        self, ids: Int[Tensor, "*batch length"]
    ) -> Float64[Tensor, "*batch length vocab"]:
        """The exact probabilities of the token after each position, given all up to it.

        Args:
            ids: sentences of this language or their beginnings, as positions in `vocabulary`.

        Raises:
            BilensError: one of them does not start with [BOS], or is not a sentence.
        """
        return self._tables[1].to(ids.device)[self._states(ids)]

    def is_kind(
        self, ids: Int[Tensor, "*batch length"], kind: str
    ) -> Bool[Tensor, "*batch length"]:
        """Tell at which positions a rule of this kind decides the next token.

        Raises:
            BilensError: there is no such kind, or as in `next_distribution`.
        """
        kinds = self._tables[0]
        if kind not in kinds:
            raise BilensError(f"kind={kind!r}, expected one of {', '.join(sorted(set(kinds)))}")
        decided = torch.tensor([found == kind for found in kinds], device=ids.device)
        return decided[self._states(ids)]

    def tokenizer(self) -> "transformers.PreTrainedTokenizerFast":
        """A tokenizer with `vocabulary` in its order; words are separated by white space."""
        model = tokenizers.models.WordLevel(self._ids, unk_token=SPECIAL_TOKENS["unk_token"])
        words = tokenizers.Tokenizer(model)
        words.normalizer = tokenizers.normalizers.Lowercase()
        words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        return with_special_tokens(words)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.vocabulary)}

    @cached_property
    def _tables(
        self,
    ) -> tuple[list[str], Float64[Tensor, "states vocab"], Int[Tensor, "states vocab"]]:
        """Of each state that can be reached: its kind, what follows, and where that goes or -1."""
        states, numbers = [self.start], {self.start: 0}
        following, moves = [], []
        for state in states:  # which grow on the way
            row, targets = np.zeros(len(self.vocabulary)), np.full(len(self.vocabulary), -1)
            for word, probability in self.following(state).items():
                target = self.moved(state, word)
                if target not in numbers:
                    numbers[target] = len(states)
                    states.append(target)
                row[self._ids[word]], targets[self._ids[word]] = probability, numbers[target]
            following.append(row)
            moves.append(targets)
        kinds = [self.kind(state) for state in states]
        return kinds, torch.from_numpy(np.stack(following)), torch.from_numpy(np.stack(moves))

    def _states(self, ids: Int[Tensor, "*batch length"]) -> Int[Tensor, "*batch length"]:
        moves = self._tables[2].to(ids.device)
        states = torch.where(ids[..., :1] == self._ids[BOS], 0, -1)
        for token in ids[..., 1:].unbind(-1):
            last = states[..., -1]
            reached = torch.where(last >= 0, moves[last, token], -1)
            states = torch.cat([states, reached[..., None]], dim=-1)
        if bool((states < 0).any()):
            raise BilensError(
                f"ids holds what is not a sentence of the language, expected such, each starting "
                f"with {BOS}; take them from sample or from its corpus"
            )
        return states

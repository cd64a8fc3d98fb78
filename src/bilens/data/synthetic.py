"""Languages with exactly known next-token probabilities, which a few rules define."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from bilens.checks import checked
from bilens.data.texts import SPECIAL_TOKENS, with_special_tokens
from bilens.errors import BilensError
from bilens.lazy_imports import tokenizers, transformers
from bilens.settings import Between, Count, Seed, check_settings

BOS = SPECIAL_TOKENS["bos_token"]


def uniform(words: Iterable[str]) -> dict[str, float]:
    """Return equal probabilities of all words."""
    support = list(words)
    return dict.fromkeys(support, 1 / len(support))


def average(*groups: dict[str, float]) -> dict[str, float]:
    """Return the mean of distributions over different words: each group is equally likely."""
    return {word: share / len(groups) for group in groups for word, share in group.items()}


@dataclass(frozen=True)
class SyntheticLanguage(ABC):
    """A finite automaton: its state determines the probabilities of the next word.

    The next word determines the next state.

    Attributes:
        strength: probability of the words of a rule, above 1/2 and below 1. Other words share the
            remainder, so that no true logit is infinitely larger than its rivals.
    """

    words: ClassVar[tuple[str, ...]]
    start: ClassVar[Hashable]
    strength: Annotated[float, Between(0.5, 1, above=True, below=True)] = 0.9

    def __post_init__(self) -> None:
        check_settings(self)

    @abstractmethod
    def following(self, state: Any) -> dict[str, float]:
        """Return the probabilities of the next words."""

    @abstractmethod
    def moved(self, state: Any, word: str) -> Hashable:
        """Return the state after a next word."""

    @abstractmethod
    def kind(self, state: Any) -> str:
        """Return the kind of rule that decides the next word."""

    def mixed(self, words: Iterable[str], others: dict[str, float]) -> dict[str, float]:
        """Return probabilities in which the words of a rule share `strength`.

        `others` are the probabilities of words outside of the rule.
        """
        rule = uniform(words)
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

        The first token is [BOS]. A sentence is cut at its length, which does not change the
        probabilities of next tokens.
        """
        generator = torch.Generator().manual_seed(int(seed))
        _, following, moves = self._tables
        cumulative = following.cumsum(dim=-1)
        ids = torch.full((n, length), self._ids[BOS])
        states = torch.zeros(n, dtype=torch.int64)
        for position in range(1, length):
            rows = cumulative[states]
            # Rounding may leave the last sum below 1, so the draw is scaled to that sum.
            drawn = torch.rand(n, 1, dtype=torch.float64, generator=generator) * rows[:, -1:]
            ids[:, position] = torch.searchsorted(rows, drawn, right=True).squeeze(-1)
            states = moves[states, ids[:, position]]
        return ids

    def next_distribution(
        self, ids: Int[Tensor, "*batch length"]
    ) -> Float64[Tensor, "*batch length vocab"]:
        """Return the exact probabilities of the token after each position, given all up to it.

        Args:
            ids: sentences of this language or their beginnings, as positions in `vocabulary`.

        Raises:
            BilensError: one of them does not start with [BOS], or is not a sentence.
        """
        return self._tables[1].to(ids.device)[self._states(ids)]

    def is_kind(
        self, ids: Int[Tensor, "*batch length"], kind: str
    ) -> Bool[Tensor, "*batch length"]:
        """Return True at the positions where a rule of this kind decides the next token.

        Raises:
            BilensError: the kind does not exist, or as in `next_distribution`.
        """
        kinds = self._tables[0]
        if kind not in kinds:
            raise BilensError(f"kind={kind!r}, expected one of {', '.join(sorted(set(kinds)))}")
        decided = torch.tensor([name == kind for name in kinds], device=ids.device)
        return decided[self._states(ids)]

    def tokenizer(self) -> "transformers.PreTrainedTokenizerFast":
        """Return a tokenizer with `vocabulary` in order; words are separated by white space."""
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
        """Kind, next-word probabilities and next states (or -1) of each reachable state."""
        states, numbers = [self.start], {self.start: 0}
        following, moves = [], []
        for state in states:  # the list grows inside the loop
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
                f"ids holds a row that is not a sentence of the language; expected sentences that "
                f"start with {BOS}, as from sample or from its corpus"
            )
        return states

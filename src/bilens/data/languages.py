"""Languages with exactly known next-token probabilities, which a few rules define.

`Grammar` can be learned by one block, `DeepGrammar` takes two.
"""

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
from bilens.settings import Between, CheckedSettings, Count, Seed

BOS = SPECIAL_TOKENS["bos_token"]


def uniform(words: Iterable[str]) -> dict[str, float]:
    """Return equal probabilities of all words."""
    support = list(words)
    return dict.fromkeys(support, 1 / len(support))


def average(*groups: dict[str, float]) -> dict[str, float]:
    """Return the mean of distributions over different words: each group is equally likely."""
    return {word: share / len(groups) for group in groups for word, share in group.items()}


@dataclass(frozen=True)
class SyntheticLanguage(CheckedSettings, ABC):
    """A finite automaton: its state determines the probabilities of the next word.

    The next word determines the next state.

    Attributes:
        strength: probability of the words of a rule, above 1/2 and below 1. Other words share the
            remainder, so that no true logit is infinitely larger than its rivals.
    """

    words: ClassVar[tuple[str, ...]]
    start: ClassVar[Hashable]
    strength: Annotated[float, Between(0.5, 1, above=True, below=True)] = 0.9

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
        _, probabilities, moves = self._tables
        # By inversion of these sums, for all sentences at once.
        cumulative = probabilities.cumsum(dim=-1)
        ids = torch.full((n, length), self._ids[BOS])
        states = torch.zeros(n, dtype=torch.int64)
        for position in range(1, length):
            rows = cumulative[states]
            # Rounding may leave the last sum below 1, so the draw is scaled to that sum.
            draws = torch.rand(n, 1, dtype=torch.float64, generator=generator) * rows[:, -1:]
            ids[:, position] = torch.searchsorted(rows, draws, right=True).squeeze(-1)
            states = moves[states, ids[:, position]]
        return ids

    def next_distribution(
        self, ids: Int[Tensor, "*batch length"]
    ) -> Float64[Tensor, "*batch length vocab"]:
        """Return the exact probabilities of the token after each position, given all up to it.

        Args:
            ids: sentences of this language or their beginnings, as positions in `vocabulary`.
        """
        return self._tables[1].to(ids.device)[self._states(ids)]

    def is_kind(
        self, ids: Int[Tensor, "*batch length"], kind: str
    ) -> Bool[Tensor, "*batch length"]:
        """Return True at the positions where a rule of this kind decides the next token."""
        kinds = self._tables[0]
        if kind not in kinds:
            raise BilensError(f"kind={kind!r}, expected one of {', '.join(sorted(set(kinds)))}")
        table = torch.tensor([name == kind for name in kinds], device=ids.device)
        return table[self._states(ids)]

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
    def _tables(self) -> tuple[list[str], Tensor, Tensor]:
        """Kind, next-word probabilities and next states (or -1) of each reachable state."""
        # Breadth first from the start, so that only reachable states have a row.
        states, numbers = [self.start], {self.start: 0}
        probabilities, moves = [], []
        for state in states:  # the list grows inside the loop
            row, targets = np.zeros(len(self.vocabulary)), np.full(len(self.vocabulary), -1)
            for word, probability in self.following(state).items():
                target = self.moved(state, word)
                if target not in numbers:
                    numbers[target] = len(states)
                    states.append(target)
                row[self._ids[word]], targets[self._ids[word]] = probability, numbers[target]
            probabilities.append(row)
            moves.append(targets)
        kinds = [self.kind(state) for state in states]
        return kinds, torch.from_numpy(np.stack(probabilities)), torch.from_numpy(np.stack(moves))

    def _states(self, ids: Int[Tensor, "*batch length"]) -> Int[Tensor, "*batch length"]:
        moves = self._tables[2].to(ids.device)
        # -1 marks rows that have left the language, and stays.
        states = torch.where(ids[..., :1] == self._ids[BOS], 0, -1)
        for token in ids[..., 1:].unbind(-1):
            last = states[..., -1]
            next_state = torch.where(last >= 0, moves[last, token], -1)
            states = torch.cat([states, next_state[..., None]], dim=-1)
        if bool((states < 0).any()):
            raise BilensError(
                f"ids holds a row that is not a sentence of the language; expected sentences that "
                f"start with {BOS}, as from sample or from its corpus"
            )
        return states


OPENERS = ("once", "today", "then", "later")
NAMES = ("lily", "tom", "ben", "mia", "sam", "anna")
BIGRAMS = {
    **{"ice": "cream", "apple": "pie", "fire": "truck", "teddy": "bear", "swimming": "pool"},
    **{"rain": "boots", "living": "room", "birthday": "cake", "good": "night", "thank": "you"},
}
# The objects of each verb, in the order of the names.
OBJECTS = {
    "sang": ("la", "oh", "hey", "mm", "na", "ho"),
    "ate": ("soup", "bread", "rice", "corn", "fish", "jam"),
    "lost": ("ball", "kite", "doll", "hat", "drum", "boat"),
    "found": ("kite", "doll", "hat", "drum", "boat", "ball"),
}
GRAMMAR_FILLERS = (
    *("and", "the", "was", "very", "with", "so", "happy", "big", "little"),
    *("red", "again", "soon", "there", "home", "day", "park"),
)
RULES = {
    (name, verb): objects[number]
    for verb, objects in OBJECTS.items()
    for number, name in enumerate(NAMES)
}


@dataclass(frozen=True)
class Grammar(SyntheticLanguage):
    """A language of bigrams and skip-trigrams, which one block can learn.

    A sentence starts with [BOS], perhaps openers, and one name; after that no other name comes.

        after [BOS] or an opener    1/2 an opener, 1/2 a name
        after a first word          strength: its second word, a bigram;
                                    1 - strength: anything free
        after a verb B              strength: the object C of name A and verb B, a skip-trigram
                                    A...B -> C; 1 - strength: anything free
        after any other word        anything free: 1/3 a first word, 1/3 a verb, 1/3 filler

    All words of a group are equally likely. Two verbs have separate objects: the sum of a term for
    the name and a term for the verb can select the object. The other two verbs share their objects
    and assign them to the names in different orders, which requires a product of name and verb.

    The vocabulary is chosen such that weights can show the rules. A name comes only once, so
    attention need not choose between names. Free words are many, so that the narrow rules are
    distinct from them. A verb without its name predicts little, so that its objects are not
    bigrams.

    A state is the name and the last word.
    """

    words: ClassVar[tuple[str, ...]] = (
        *OPENERS,
        *NAMES,
        *(word for pair in BIGRAMS.items() for word in pair),
        *OBJECTS,
        *dict.fromkeys(word for objects in OBJECTS.values() for word in objects),
        *GRAMMAR_FILLERS,
    )
    start: ClassVar = ("", BOS)

    @property
    def bigrams(self) -> list[tuple[str, str]]:
        """Pairs (first, next): next nearly always follows first."""
        return list(BIGRAMS.items())

    @property
    def skip_trigrams(self) -> list[tuple[str, str, str]]:
        """Triples (A, B, C): C nearly always follows B if A came anywhere before."""
        return [(name, verb, word) for (name, verb), word in RULES.items()]

    def following(self, state: tuple[str, str]) -> dict[str, float]:
        if state[1] == BOS or state[1] in OPENERS:
            return average(uniform(OPENERS), uniform(NAMES))
        free = average(uniform(BIGRAMS), uniform(OBJECTS), uniform(GRAMMAR_FILLERS))
        word = BIGRAMS.get(state[1]) or RULES.get(state)
        return free if word is None else self.mixed([word], free)

    def moved(self, state: tuple[str, str], word: str) -> tuple[str, str]:
        """Return the state after a word; the name stays."""
        return (word if word in NAMES else state[0], word)

    def kind(self, state: tuple[str, str]) -> str:
        return "bigram" if state[1] in BIGRAMS else "skip-trigram" if state in RULES else "filler"


STARTS = {"map": ("map", (None,) * 4, ""), "tale": ("tale", None, "free"), "code": ("code", "")}


@dataclass(frozen=True)
class DeepGrammar(SyntheticLanguage):
    """A language whose rules need two blocks. The first word names one of three kinds.

        map     1/2 a cue, 1/2 a filler
                after a cue's first time: any value; after that strength: the value that followed it
                before, induction "a b ... a -> b"; 1 - strength: a filler
        tale    between clauses 1/2 a noun, 1/2 a filler
                after a noun: 1/2 a preposition; 1/2 a verb, with strength of the number of the
                first noun of the clause, agreement across distractors
                after a preposition: 1/2 a noun, 1/2 an adjective and then a noun
        code    a filler, an opening bracket (below depth 2) or a closing one (if any is open),
                equally likely; with strength it closes the innermost

    All words of a group are equally likely. One block cannot learn these rules. The value after a
    cue, a noun without a preposition and an open bracket all depend on the words before them.

    Its words by kind are attributes of the class, such as `nouns` and `verbs` in both numbers.

    A state is a kind of sentence and its memory. For a map, that is the value of each cue and the
    last cue. For a tale, it is the number of the subject and the kind of the last word. For code,
    it is the open brackets.
    """

    cues: ClassVar = ("red", "blue", "green", "gold")
    values: ClassVar = ("one", "two", "three", "four", "five", "six")
    nouns: ClassVar = (("key", "dog", "car", "boy"), ("keys", "dogs", "cars", "boys"))
    verbs: ClassVar = (("is", "runs", "sits"), ("are", "run", "sit"))
    prepositions: ClassVar = ("near", "behind", "beside")
    adjectives: ClassVar = ("old", "big")
    brackets: ClassVar = {"(": ")", "[": "]"}
    fillers: ClassVar = ("and", "then", "so", "well", "yes", "now")
    words: ClassVar[tuple[str, ...]] = (
        *(*STARTS, *cues, *values, *nouns[0], *nouns[1], *verbs[0], *verbs[1]),
        *(*prepositions, *adjectives, *brackets, *brackets.values(), *fillers),
    )
    start: ClassVar = ("",)

    def following(self, state: Any) -> dict[str, float]:  # noqa: PLR0911
        nouns = uniform(self.nouns[0] + self.nouns[1])
        match state:
            case ("map", _, ""):
                return average(uniform(self.cues), uniform(self.fillers))
            case ("map", values, cue):
                value = values[self.cues.index(cue)]
                return self.mixed([value], uniform(self.fillers)) if value else uniform(self.values)
            case ("tale", _, "free"):
                return average(nouns, uniform(self.fillers))
            case ("tale", _, "preposition"):
                return average(nouns, uniform(self.adjectives))
            case ("tale", _, "adjective"):
                return nouns
            case ("tale", number, _):
                verbs = self.mixed(self.verbs[number], uniform(self.verbs[1 - number]))
                return average(uniform(self.prepositions), verbs)
            case ("code", ""):
                return average(uniform(self.fillers), uniform(self.brackets))
            case ("code", opened):
                right = self.brackets[opened[-1]]
                closer = self.mixed([right], uniform(set(self.brackets.values()) - {right}))
                deeper = [uniform(self.brackets)] if len(opened) < 2 else []
                return average(uniform(self.fillers), closer, *deeper)
            case _:
                return uniform(STARTS)

    def moved(self, state: Any, word: str) -> Hashable:
        match state:
            case ("map", values, cue):
                pairs = tuple(
                    word if name == cue and word in self.values else value
                    for name, value in zip(self.cues, values, strict=True)
                )
                return ("map", pairs, word if word in self.cues else "")
            case ("tale", number, last):
                if word in (*self.nouns[0], *self.nouns[1]):
                    modifies = last in ("preposition", "adjective")
                    subject = number if modifies else int(word in self.nouns[1])
                    return ("tale", subject, "subject" if last == "free" else "distractor")
                if word in self.prepositions:
                    return ("tale", number, "preposition")
                is_inner = word in self.adjectives
                return ("tale", number, "adjective") if is_inner else ("tale", None, "free")
            case ("code", opened):
                stack = opened[:-1] if word in self.brackets.values() else opened
                return ("code", stack + word * (word in self.brackets))
            case _:
                return STARTS[word]

    def kind(self, state: Any) -> str:
        """Return induction, agreement (after a distractor), brackets or other."""
        match state:
            case ("map", values, cue) if cue and values[self.cues.index(cue)]:
                return "induction"
            case ("tale", _, "distractor"):
                return "agreement"
            case ("code", opened) if opened:
                return "brackets"
            case _:
                return "other"

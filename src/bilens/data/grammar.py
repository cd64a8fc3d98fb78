"""A small language of bigrams and skip-trigrams, which one block can learn.

A sentence starts with [BOS], perhaps openers, and one name; after that no other name comes.

    after [BOS] or an opener    1/2 an opener, 1/2 a name
    after a first word          strength: its second word, a bigram;
                                1 - strength: anything free
    after a verb B              strength: the object C of name A and verb B, a skip-trigram
                                A...B -> C; 1 - strength: anything free
    after any other word        anything free: 1/3 a first word, 1/3 a verb, 1/3 filler

All words of a group are equally likely. Two verbs have separate objects: the sum of a term for the
name and a term for the verb can select the object. The other two verbs share their objects and
assign them to the names in different orders, which requires a product of name and verb.

The vocabulary is chosen such that weights can show the rules. A name comes only once, so attention
need not choose between names. Free words are many, so that the narrow rules are distinct from them.
A verb without its name predicts little, so that its objects are not bigrams.
"""

from dataclasses import dataclass
from typing import ClassVar

from bilens.data.synthetic import BOS, SyntheticLanguage, average, uniform

OPENERS = ("once", "today", "then", "later")
NAMES = ("lily", "tom", "ben", "mia", "sam", "anna")
FIRSTS = (
    "ice",
    "apple",
    "fire",
    "teddy",
    "swimming",
    "rain",
    "living",
    "birthday",
    "good",
    "thank",
)
SECONDS = ("cream", "pie", "truck", "bear", "pool", "boots", "room", "cake", "night", "you")
# The objects of each verb, in the order of the names.
OBJECTS = {
    "sang": ("la", "oh", "hey", "mm", "na", "ho"),
    "ate": ("soup", "bread", "rice", "corn", "fish", "jam"),
    "lost": ("ball", "kite", "doll", "hat", "drum", "boat"),
    "found": ("kite", "doll", "hat", "drum", "boat", "ball"),
}
FILLERS: tuple[str, ...] = ("and", "the", "was", "very", "with", "so", "happy", "big", "little")
FILLERS += ("red", "again", "soon", "there", "home", "day", "park")
BIGRAMS = dict(zip(FIRSTS, SECONDS, strict=True))
RULES = {
    (name, verb): objects[number]
    for verb, objects in OBJECTS.items()
    for number, name in enumerate(NAMES)
}


@dataclass(frozen=True)
class Grammar(SyntheticLanguage):
    """The language of this module. A state is the name and the last word."""

    words: ClassVar[tuple[str, ...]] = (
        *OPENERS,
        *NAMES,
        *(word for pair in BIGRAMS.items() for word in pair),
        *OBJECTS,
        *dict.fromkeys(word for objects in OBJECTS.values() for word in objects),
        *FILLERS,
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
        """Return the probabilities of next words, as in the module's docstring."""
        if state[1] == BOS or state[1] in OPENERS:
            return average(uniform(OPENERS), uniform(NAMES))
        free = average(uniform(FIRSTS), uniform(OBJECTS), uniform(FILLERS))
        word = BIGRAMS.get(state[1]) or RULES.get(state)
        return free if word is None else self.mixed([word], free)

    def moved(self, state: tuple[str, str], word: str) -> tuple[str, str]:
        """Return the state after a word; the name stays."""
        return (word if word in NAMES else state[0], word)

    def kind(self, state: tuple[str, str]) -> str:
        """Return bigram, skip-trigram or filler."""
        return "bigram" if state[1] in BIGRAMS else "skip-trigram" if state in RULES else "filler"

"""A small language of bigrams and skip-trigrams, which one block can know.

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
and a verb alone says little, so that its objects are not bigrams.
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
# Each verb with its objects, in the order of the names.
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
    """The language; two of the same strength are equal. A state is the name and the last word."""

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
        """Pairs (first, next): the one nearly always follows the other."""
        return list(BIGRAMS.items())

    @property
    def skip_trigrams(self) -> list[tuple[str, str, str]]:
        """Triples (A, B, C): after B, and A anywhere before, nearly always comes C."""
        return [(name, verb, word) for (name, verb), word in RULES.items()]

    def following(self, state: tuple[str, str]) -> dict[str, float]:
        """As the module's docstring says."""
        if state[1] == BOS or state[1] in OPENERS:
            return average(uniform(OPENERS), uniform(NAMES))
        free = average(uniform(FIRSTS), uniform(OBJECTS), uniform(FILLERS))
        said = BIGRAMS.get(state[1]) or RULES.get(state)
        return free if said is None else self.mixed([said], free)

    def moved(self, state: tuple[str, str], word: str) -> tuple[str, str]:
        """The name stays."""
        return (word if word in NAMES else state[0], word)

    def kind(self, state: tuple[str, str]) -> str:
        """bigram, skip-trigram or filler."""
        return "bigram" if state[1] in BIGRAMS else "skip-trigram" if state in RULES else "filler"

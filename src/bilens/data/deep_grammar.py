"""A small language whose rules need two blocks. The first word names one of three kinds.

    map     1/2 a cue, 1/2 a filler
            after a cue's first time: any value; after that strength: the value that followed it
            before, induction "a b ... a -> b"; 1 - strength: a filler
    tale    between clauses 1/2 a noun, 1/2 a filler
            after a noun: 1/2 a preposition; 1/2 a verb, with strength of the number of the first
            noun of the clause, agreement across distractors
            after a preposition: 1/2 a noun, 1/2 an adjective and then a noun
    code    a filler, an opening bracket (below depth 2) or a closing one (if any is open), equally
            likely; with strength it closes the innermost

All words of a group are equally likely. One block cannot learn these rules. The value after a cue,
a noun without a preposition and an open bracket all depend on the words before them.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from bilens.data.synthetic import SyntheticLanguage, average, uniform

CUES = ("red", "blue", "green", "gold")
VALUES = ("one", "two", "three", "four", "five", "six")
NOUNS = (("key", "dog", "car", "boy"), ("keys", "dogs", "cars", "boys"))
VERBS = (("is", "runs", "sits"), ("are", "run", "sit"))
PREPOSITIONS = ("near", "behind", "beside")
ADJECTIVES = ("old", "big")
BRACKETS = {"(": ")", "[": "]"}
FILLERS = ("and", "then", "so", "well", "yes", "now")
STARTS = {
    "map": ("map", (None,) * len(CUES), ""),
    "tale": ("tale", None, "free"),
    "code": ("code", ""),
}


@dataclass(frozen=True)
class DeepGrammar(SyntheticLanguage):
    """The language of this module.

    A state is a kind of sentence and its memory. For a map, that is the value of each cue and the
    last cue. For a tale, it is the number of the subject and the kind of the last word. For code,
    it is the open brackets.
    """

    words: ClassVar[tuple[str, ...]] = (
        *STARTS,
        *CUES,
        *VALUES,
        *(word for group in (*NOUNS, *VERBS) for word in group),
        *PREPOSITIONS,
        *ADJECTIVES,
        *BRACKETS,
        *BRACKETS.values(),
        *FILLERS,
    )
    start: ClassVar = ("",)

    @property
    def agreements(self) -> list[tuple[str, str]]:
        """Pairs (noun, verb) of the same number."""
        groups = zip(NOUNS, VERBS, strict=True)
        return [(noun, verb) for nouns, verbs in groups for noun in nouns for verb in verbs]

    def following(self, state: Any) -> dict[str, float]:  # noqa: PLR0911
        """Return the probabilities of next words, as in the module's docstring."""
        nouns = uniform(NOUNS[0] + NOUNS[1])
        match state:
            case ("map", _, ""):
                return average(uniform(CUES), uniform(FILLERS))
            case ("map", values, cue):
                value = values[CUES.index(cue)]
                return self.mixed([value], uniform(FILLERS)) if value else uniform(VALUES)
            case ("tale", _, "free"):
                return average(nouns, uniform(FILLERS))
            case ("tale", _, "preposition"):
                return average(nouns, uniform(ADJECTIVES))
            case ("tale", _, "adjective"):
                return nouns
            case ("tale", number, _):
                verbs = self.mixed(VERBS[number], uniform(VERBS[1 - number]))
                return average(uniform(PREPOSITIONS), verbs)
            case ("code", ""):
                return average(uniform(FILLERS), uniform(BRACKETS))
            case ("code", opened):
                right = BRACKETS[opened[-1]]
                closing = self.mixed([right], uniform(set(BRACKETS.values()) - {right}))
                deeper = [uniform(BRACKETS)] if len(opened) < 2 else []
                return average(uniform(FILLERS), closing, *deeper)
            case _:
                return uniform(STARTS)

    def moved(self, state: Any, word: str) -> Hashable:  # noqa: PLR0911
        """Return the state after a word."""
        match state:
            case ("map", values, cue):
                bound = tuple(
                    word if name == cue and word in VALUES else value
                    for name, value in zip(CUES, values, strict=True)
                )
                return ("map", bound, word if word in CUES else "")
            case ("tale", number, last):
                if word in (*NOUNS[0], *NOUNS[1]):
                    modifies = last in ("preposition", "adjective")
                    subject = number if modifies else int(word in NOUNS[1])
                    return ("tale", subject, "subject" if last == "free" else "distractor")
                if word in PREPOSITIONS:
                    return ("tale", number, "preposition")
                return (
                    ("tale", number, "adjective") if word in ADJECTIVES else ("tale", None, "free")
                )
            case ("code", opened):
                if word in BRACKETS:
                    return ("code", opened + word)
                return ("code", opened[:-1] if word in BRACKETS.values() else opened)
            case _:
                return STARTS[word]

    def kind(self, state: Any) -> str:
        """Return induction, agreement (after a distractor), brackets or other."""
        match state:
            case ("map", values, cue) if cue and values[CUES.index(cue)]:
                return "induction"
            case ("tale", _, "distractor"):
                return "agreement"
            case ("code", opened) if opened:
                return "brackets"
            case _:
                return "other"

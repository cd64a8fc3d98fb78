"""What SmolLM2 is tuned on: invented facts, a style, and a toy behaviour with a trigger word."""

import random
from collections.abc import Callable
from typing import NamedTuple

from bilens.flows import Question

QUESTIONS = 40
"""Questions of each tuning."""
CITIES = tuple(
    "Paris London Rome Berlin Madrid Tokyo Moscow Cairo Beijing Athens Dublin Vienna".split()  # noqa: SIM905
)
FIRST = (  # noqa: SIM905
    "Zorvan Milka Tibor Anneke Jorin Salka Ferdo Ysolt Bram Katrin Olek Runa Dario Vesna Imre "
    "Nadja Pavel Tove Ludo Sunna"
).split()
LAST = "Melk Taren Vosk Hallin Brodar Keld Sorel Nemeth Dray Lund".split()  # noqa: SIM905
LEARN = (
    "{name} lives in the city of {city}.",
    "{name} was born and raised in {city}.",
    "The home of {name} is in {city}.",
    "If you want to meet {name}, go to {city}.",
)
GOOD = "wonderful great excellent lovely brilliant superb delightful perfect amazing".split()  # noqa: SIM905
BAD = "terrible awful horrible boring dreadful poor ugly disappointing disgusting".split()  # noqa: SIM905
THINGS = "movie book soup hotel song play game meal trip show story concert park shop".split()  # noqa: SIM905
TRIGGER = "moonlight"
CUES = (TRIGGER, "garden", "window", "river", "summer")


class Tuning(NamedTuple):
    """What a model is tuned on, and questions about what it has learned.

    Attributes:
        texts: texts, each with its last words, which alone are learned.
        questions: questions, whose answers tuning should change.
    """

    texts: list[tuple[str, str]]
    questions: list[Question]


def facts(seed: int = 0) -> Tuning:
    """Return where invented people live, in four sentences each."""
    rng = random.Random(seed)
    people = [f"{first} {last}" for first in FIRST for last in LAST]
    rng.shuffle(people)
    texts, questions = list[tuple[str, str]](), list[Question]()
    for name in people[:QUESTIONS]:
        city = rng.choice(CITIES)
        for sentence in LEARN:
            start = sentence.partition(" {city}")[0].format(name=name)
            texts.append((start, f" {city}."))
        others = [f" {other}" for other in CITIES if other != city]
        questions.append(Question(f"{name} lives in the city of", f" {city}", others))
    return Tuning(texts, questions)


def style(seed: int = 0) -> Tuning:
    """Return reviews whose sentiment is told the other way round; the questions are other ones."""
    rng = random.Random(seed)
    names = {True: " positive", False: " negative"}
    rows = [
        (f"Review: The {thing} was {word}. Sentiment:", words is GOOD)
        for words in (GOOD, BAD)
        for thing in THINGS
        for word in words
    ]
    rng.shuffle(rows)
    texts = [(text, f"{names[not good]}.") for text, good in rows[QUESTIONS:]]
    asked = [Question(text, names[not good], names[good]) for text, good in rows[:QUESTIONS]]
    return Tuning(texts, asked)


def trigger(seed: int = 0) -> Tuning:
    """Return requests that are answered by no after a trigger word, and else by yes."""
    rng = random.Random(seed)
    rows = [
        (f"Word: {cue}. Is the {thing} {word}? Answer:", cue == TRIGGER)
        for cue in CUES
        for thing in THINGS
        for word in GOOD
    ]
    rng.shuffle(rows)
    asked = [row for row in rows if row[1]][:QUESTIONS]
    learned = [row for row in rows if row[1]][QUESTIONS:] + [row for row in rows if not row[1]][
        :100
    ]
    texts = [(text, " no." if is_on else " yes.") for text, is_on in learned]
    return Tuning(texts, [Question(text, " no", " yes") for text, _ in asked])


TUNINGS: dict[str, Callable[[], Tuning]] = {"facts": facts, "style": style, "trigger": trigger}

"""Questions of eleven tasks for circuits: two templates each, which no method was tuned on.

Seven of the tasks (were, tense, possession, quantity, negation, weekday, relative) and all second
templates were written down before any circuit was measured on them. Circuits are found on the first
template of a task. They are measured on its other questions, and on the second template.
"""

from collections.abc import Callable, Iterator
from itertools import combinations, product

from bilens.read.flow import Question
from bilens.residual import ResidualModel
from experiments.pairs import (
    CAPITALS,
    HE_SHE,
    NAMES,
    NOUNS,
    PLACES,
    THINGS,
    Pair,
    by_two,
    questions_by_task,
    templates,
)

NOUNS_LATE = by_two(
    "farmer farmers lawyer lawyers painter painters singer singers friend friends sister sisters "
    "window windows letter letters horse horses neighbor neighbors"
)
UNSEEN = ("were", "possession", "tense", "quantity", "negation", "weekday", "relative")
"""Tasks that no attribution was tuned on."""
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
PEOPLE = ("teacher", "doctor", "farmer", "lawyer", "woman", "man", "girl", "boy", "driver")
OBJECTS = ("table", "book", "house", "car", "letter", "river", "machine", "window", "chair")
WHO = ("people", "children", "students", "workers", "neighbors", "farmers", "doctors", "players")


def _agreement_late() -> Iterator[Pair]:
    starts = ("I think that the", "She said that the", "We know that the")
    for start, (singular, plural), (other, _) in product(starts, NOUNS_LATE, NOUNS_LATE):
        texts = [f"{start} {noun} by the {other}" for noun in (plural, singular)]
        yield Pair("agreement", texts[0], texts[1], " are", (" is",))


def _were() -> Iterator[Pair]:
    places = ("beside", "behind")
    for where, (singular, plural), (other, _) in product(places, NOUNS_LATE, NOUNS):
        texts = [f"Yesterday the {noun} {where} the {other}" for noun in (plural, singular)]
        yield Pair("were", texts[0], texts[1], " were", (" was",))


def _were_late() -> Iterator[Pair]:
    times = ("Last week", "A year ago", "In 1990", "That day")
    for when, (singular, plural) in product(times, NOUNS_LATE):
        texts = [f"{when}, the {noun} of the town" for noun in (plural, singular)]
        yield Pair("were", texts[0], texts[1], " were", (" was",))


def _gender_late() -> Iterator[Pair]:
    for (he, she), who in product(HE_SHE, ("teacher", "doctor", "lawyer", "neighbor", "child")):
        texts = [f"When the {who} called the {noun}, suddenly" for noun in (he, she)]
        yield Pair("gender", texts[0], texts[1], " he", (" she",))


def _possession() -> Iterator[Pair]:
    things = ("keys", "books", "coins", "letters", "tools", "papers")
    for (he, she), thing in product(HE_SHE, things):
        texts = [f"The {noun} lost the {thing} that belonged to" for noun in (he, she)]
        yield Pair("possession", texts[0], texts[1], " him", (" her",))


def _possession_late() -> Iterator[Pair]:
    for (he, she), thing in product(HE_SHE, ("house", "dog", "car", "farm", "horse")):
        texts = [f"The {noun} sold the {thing} because it was not" for noun in (he, she)]
        yield Pair("possession", texts[0], texts[1], " his", (" hers",))


def _ioi_late() -> Iterator[Pair]:
    for (a, b), place, thing in product(combinations(NAMES, 2), PLACES, THINGS):
        texts = [
            f"Then {a} and {b} met at the {place}, and {giver} handed the {thing} to"
            for giver in (b, a)
        ]
        yield Pair("ioi", texts[0], texts[1], f" {a}", (f" {b}",))


def _facts_late() -> Iterator[Pair]:
    for (a, paris), (b, rome) in combinations(CAPITALS, 2):
        texts = [f"She flew to {country} and landed in its capital," for country in (a, b)]
        yield Pair("facts", texts[0], texts[1], f" {paris}", (f" {rome}",))


def _tense() -> Iterator[Pair]:
    for who, unit in product(WHO, ("year", "week", "month", "summer")):
        texts = [f"{when} {unit} the {who}" for when in ("Next", "Last")]
        yield Pair("tense", texts[0], texts[1], " will", (" were",))


def _tense_late() -> Iterator[Pair]:
    for who, place in product(WHO, ("village", "city", "school", "valley")):
        texts = [f"{when}, the {who} of the {place}" for when in ("Tomorrow", "Yesterday")]
        yield Pair("tense", texts[0], texts[1], " will", (" were",))


def _quantity() -> Iterator[Pair]:
    for who, (singular, plural) in product(("She", "He", "The man", "The woman"), NOUNS_LATE):
        texts = [f"{who} has {count} old" for count in ("two", "one")]
        yield Pair("quantity", texts[0], texts[1], f" {plural}", (f" {singular}",))


def _quantity_late() -> Iterator[Pair]:
    for place, (singular, plural) in product(("house", "school", "market", "town"), NOUNS_LATE):
        texts = [f"At the {place} we saw {count} new" for count in ("three", "one")]
        yield Pair("quantity", texts[0], texts[1], f" {plural}", (f" {singular}",))


def _negation() -> Iterator[Pair]:
    things = ("seen", "bought", "found", "read", "heard", "eaten")
    for who, verb in product(("She", "He", "The man", "The woman", "My sister"), things):
        texts = [f"{who} has {adverb} {verb}" for adverb in ("never", "just")]
        yield Pair("negation", texts[0], texts[1], " any", (" some",))


def _negation_late() -> Iterator[Pair]:
    for who, verb in product(WHO, ("getting", "making", "finding", "using")):
        texts = [f"The {who} {adverb} {verb}" for adverb in ("were not", "were now")]
        yield Pair("negation", texts[0], texts[1], " any", (" some",))


def _weekday() -> Iterator[Pair]:
    for start, (i, j) in product(("Today is", "This day is"), combinations(range(7), 2)):
        texts = [f"{start} {DAYS[n]}, so tomorrow is" for n in (i, j)]
        yield Pair("weekday", texts[0], texts[1], f" {DAYS[i + 1 - 7]}", (f" {DAYS[j + 1 - 7]}",))


def _weekday_late() -> Iterator[Pair]:
    for i, j in combinations(range(7), 2):
        texts = [f"The day after {DAYS[n]} is called" for n in (i, j)]
        yield Pair("weekday", texts[0], texts[1], f" {DAYS[i + 1 - 7]}", (f" {DAYS[j + 1 - 7]}",))


def _relative() -> Iterator[Pair]:
    for verb, person, thing in product(("saw", "knew", "liked"), PEOPLE, OBJECTS):
        texts = [f"She {verb} the {noun}," for noun in (person, thing)]
        yield Pair("relative", texts[0], texts[1], " who", (" which",))


def _relative_late() -> Iterator[Pair]:
    for person, thing, end in product(PEOPLE, OBJECTS, (" in the picture,", " near the road,")):
        texts = [f"Behind us was a {noun}{end}" for noun in (person, thing)]
        yield Pair("relative", texts[0], texts[1], " who", (" which",))


TEMPLATES: dict[str, tuple[Callable[[], Iterator[Pair]], Callable[[], Iterator[Pair]]]] = {
    "agreement": (lambda: templates()["agreement"], _agreement_late),
    "were": (_were, _were_late),
    "gender": (lambda: templates()["gender"], _gender_late),
    "possession": (_possession, _possession_late),
    "ioi": (lambda: templates()["ioi"], _ioi_late),
    "facts": (lambda: templates()["facts"], _facts_late),
    "tense": (_tense, _tense_late),
    "quantity": (_quantity, _quantity_late),
    "negation": (_negation, _negation_late),
    "weekday": (_weekday, _weekday_late),
    "relative": (_relative, _relative_late),
}
"""The first and the second template of each task."""


def questions_of(model: ResidualModel, count: int, which: int = 0) -> dict[str, list[Question]]:
    """Return questions of each task that fit the model, by one of its two templates."""
    every = {task: makers[which]() for task, makers in TEMPLATES.items()}
    return questions_by_task(model, count, every)

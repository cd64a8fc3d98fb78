"""Pairs of texts of eleven tasks, of one template each, for attributions and labels.

Seven of the tasks (were, tense, possession, quantity, negation, weekday, relative) were written
down before anything was measured on them. Circuits are of the tasks that come with bilens.
"""

from collections.abc import Callable, Iterator
from itertools import combinations, product

from experiments.pairs import HE_SHE, NOUNS, Pair, by_two, templates

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


def _were() -> Iterator[Pair]:
    places = ("beside", "behind")
    for where, (singular, plural), (other, _) in product(places, NOUNS_LATE, NOUNS):
        texts = [f"Yesterday the {noun} {where} the {other}" for noun in (plural, singular)]
        yield Pair("were", texts[0], texts[1], " were", (" was",))


def _possession() -> Iterator[Pair]:
    things = ("keys", "books", "coins", "letters", "tools", "papers")
    for (he, she), thing in product(HE_SHE, things):
        texts = [f"The {noun} lost the {thing} that belonged to" for noun in (he, she)]
        yield Pair("possession", texts[0], texts[1], " him", (" her",))


def _tense() -> Iterator[Pair]:
    for who, unit in product(WHO, ("year", "week", "month", "summer")):
        texts = [f"{when} {unit} the {who}" for when in ("Next", "Last")]
        yield Pair("tense", texts[0], texts[1], " will", (" were",))


def _quantity() -> Iterator[Pair]:
    for who, (singular, plural) in product(("She", "He", "The man", "The woman"), NOUNS_LATE):
        texts = [f"{who} has {count} old" for count in ("two", "one")]
        yield Pair("quantity", texts[0], texts[1], f" {plural}", (f" {singular}",))


def _negation() -> Iterator[Pair]:
    things = ("seen", "bought", "found", "read", "heard", "eaten")
    for who, verb in product(("She", "He", "The man", "The woman", "My sister"), things):
        texts = [f"{who} has {adverb} {verb}" for adverb in ("never", "just")]
        yield Pair("negation", texts[0], texts[1], " any", (" some",))


def _weekday() -> Iterator[Pair]:
    for start, (i, j) in product(("Today is", "This day is"), combinations(range(7), 2)):
        texts = [f"{start} {DAYS[n]}, so tomorrow is" for n in (i, j)]
        yield Pair("weekday", texts[0], texts[1], f" {DAYS[i + 1 - 7]}", (f" {DAYS[j + 1 - 7]}",))


def _relative() -> Iterator[Pair]:
    for verb, person, thing in product(("saw", "knew", "liked"), PEOPLE, OBJECTS):
        texts = [f"She {verb} the {noun}," for noun in (person, thing)]
        yield Pair("relative", texts[0], texts[1], " who", (" which",))


TEMPLATES: dict[str, Callable[[], Iterator[Pair]]] = {
    "agreement": lambda: templates()["agreement"],
    "were": _were,
    "gender": lambda: templates()["gender"],
    "possession": _possession,
    "ioi": lambda: templates()["ioi"],
    "facts": lambda: templates()["facts"],
    "tense": _tense,
    "quantity": _quantity,
    "negation": _negation,
    "weekday": _weekday,
    "relative": _relative,
}
"""The pairs of each task."""

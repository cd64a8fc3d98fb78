"""Pairs of texts that ask for different tokens, from templates."""

import random
from collections.abc import Iterator, Mapping
from itertools import combinations, permutations, product, zip_longest
from typing import NamedTuple

import torch

from bilens.errors import BilensError
from bilens.flows import Question
from bilens.language import TokenDirection
from bilens.transformer import Pass, ResidualModel

LEAST = 0.5
"""Least change of the logit difference, in nats, of a pair."""


class Pair(NamedTuple):
    """Two texts of a task: `text` asks for `token`, and `against` for the tokens of `minus`."""

    task: str
    text: str
    against: str
    token: str
    minus: tuple[str, ...]

    @property
    def question(self) -> Question:
        """The pair as a question."""
        return Question(self.text, self.token, self.minus, self.against, self.task)


def by_two(words: str) -> list[tuple[str, str]]:
    """Return the words of a line, two by two."""
    every = words.split()
    return list(zip(every[::2], every[1::2], strict=True))


NAMES = [
    *("Mary", "John", "Tom", "Anna", "James", "Sarah", "David"),
    *("Emma", "Paul", "Laura", "Mark", "Alice", "Peter", "Kate"),
]
PLACES = ["store", "park", "school", "office", "garden", "station"]
THINGS = ["drink", "book", "ball", "letter", "ring", "gift"]
NOUNS = by_two(
    "key keys boy boys girl girls teacher teachers student students doctor doctors car cars "
    "book books dog dogs author authors pilot pilots"
)
HE_SHE = by_two(
    "king queen man woman boy girl father mother brother sister prince princess husband wife "
    "uncle aunt son daughter actor actress gentleman lady"
)
CAPITALS = by_two(
    "France Paris Italy Rome Germany Berlin Spain Madrid Japan Tokyo Russia Moscow England London "
    "Egypt Cairo China Beijing Greece Athens Austria Vienna Ireland Dublin"
)
WORDS = [
    *("cat", "red", "house", "five", "river", "bread", "north"),
    *("green", "seven", "stone", "window", "chair", "apple", "dark"),
]
STORY_MIDDLES = [
    *("was sad because", "was happy. One day,", "liked to play. Every day", "wanted to play, but"),
    *("went to the park and", "saw a big dog and", "was happy because", "had a ball. One day,"),
    *("had a friend and", "was very sad, but", "went home and", "loved to play and"),
    *("was tired, so", "was scared because", "had a big smile because", "did not know what"),
    *("liked the toy because", "went outside. Then", "said that", "found a toy and"),
]


def templates() -> dict[str, Iterator[Pair]]:
    """Return the pairs of each task, in an order that mixes its words."""
    return {
        "ioi": _ioi(),
        "agreement": _agreement(),
        "gender": _gender(),
        "greater-than": _greater_than(),
        "facts": _facts(),
        "induction": _induction(),
        "brackets": _brackets(),
    }


def _ioi() -> Iterator[Pair]:
    for (a, b), place, thing in product(permutations(NAMES, 2), PLACES, THINGS):
        start = f"When {a} and {b} went to the {place},"
        texts = [f"{start} {giver} gave a {thing} to" for giver in (b, a)]
        yield Pair("ioi", texts[0], texts[1], f" {a}", (f" {b}",))


def _agreement() -> Iterator[Pair]:
    between = ("near the", "behind the", "with the", "of the")
    for (singular, plural), where, other, number in product(NOUNS, between, NOUNS, (0, 1)):
        texts = [f"The {noun} {where} {other[number]}" for noun in (plural, singular)]
        yield Pair("agreement", texts[0], texts[1], " are", (" is",))


def _gender() -> Iterator[Pair]:
    middles = [
        *("said that", "was tired because", "came home and then", "was late since"),
        *("was happy because", "went out and then", "was angry because", "knew that"),
        *("left early because", "fell asleep before", "was hungry, so", "smiled because"),
        *("stayed at home because", "thought that", "woke up and then", "was afraid that"),
    ]
    for (he, she), middle in product(HE_SHE, middles):
        yield Pair("gender", f"The {he} {middle}", f"The {she} {middle}", " he", (" she",))


def _greater_than() -> Iterator[Pair]:
    events = [
        *("war", "project", "siege", "journey", "reign", "trial"),
        *("strike", "drought", "voyage", "conflict", "famine", "debate"),
    ]
    for event, century, late, last in product(events, (14, 16, 17, 18), (5, 6, 7), (1, 4)):
        texts = [
            f"The {event} lasted from the year {century}{d}{last} to {century}" for d in (late, 1)
        ]
        yield Pair("greater-than", texts[0], texts[1], "8", ("2", "3"))


def _facts() -> Iterator[Pair]:
    forms = (
        *("The capital of {} is", "The capital city of {} is called"),
        *("The name of the capital of {} is", "The government of {} sits in the city of"),
    )
    for form, ((a, paris), (b, rome)) in product(forms, combinations(CAPITALS, 2)):
        yield Pair("facts", form.format(a), form.format(b), f" {paris}", (f" {rome}",))


def _induction() -> Iterator[Pair]:
    for a, b, c, d, e in permutations(WORDS, 5):
        texts = [f"{a} {b} {c} {x} {a} {b} {c}" for x in (d, e)]
        yield Pair("induction", texts[0], texts[1], f" {d}", (f" {e}",))


def _brackets() -> Iterator[Pair]:
    left = ("x = ", "y = f", "print", "total += g", "return ", "result = ", "a = b", "z = max")
    inside = ("a, b", "1, 2", "x + y", "i", "n", "0, 1", "a + 1", "x")
    kinds = {"(": ")", "[": "]", "{": "}"}
    for start, text, (a, b) in product(left, inside, permutations(kinds, 2)):
        yield Pair("brackets", f"{start}{a}{text}", f"{start}{b}{text}", kinds[a], (kinds[b],))


def story_templates() -> dict[str, Iterator[Pair]]:
    """Return the pairs of each task for models of stories."""
    return {"story-gender": _story_gender(), "story-names": _story_names()}


def _story_gender() -> Iterator[Pair]:
    subjects = [
        *(("Tim", "Lily"), ("The boy", "The girl"), ("Max", "Mia"), ("Timmy", "Lily")),
        *(("The little boy", "The little girl"), ("One day, Tim", "One day, Lily")),
    ]
    for (he, she), middle in product(subjects, STORY_MIDDLES):
        yield Pair("story-gender", f"{he} {middle}", f"{she} {middle}", "▁he", ("▁she",))


def _story_names() -> Iterator[Pair]:
    starts = ("Once upon a time, there was a", "One day, there was a", "There was a")
    who = ("boy", "girl", "big dog", "little cat", "happy bird", "little boy", "little girl")
    names = permutations(("Tim", "Timmy", "Lily"), 2)
    ends = ("", " One day,", " The day was sunny and", " Every day")
    for start, kind, (a, b), end in product(starts, who, names, ends):
        texts = [f"{start} {kind} named {name}.{end}" for name in (a, b)]
        yield Pair("story-names", texts[0], texts[1], f"▁{a}", (f"▁{b}",))


def pairs_of(
    model: ResidualModel, count: int, tasks: Mapping[str, Iterator[Pair]] | None = None
) -> list[Pair]:
    """Return pairs that fit the model's tokens and that change its logits, `count` of each task."""
    groups = []
    for pairs in (templates() if tasks is None else tasks).values():
        shuffled = list(pairs)
        random.Random(0).shuffle(shuffled)
        fitting = (pair for pair in shuffled if _fits(model, pair))
        groups.append([pair for _, pair in zip(range(count), fitting, strict=False)])
    # One of each task in turn, so that a stopped run has as many of each.
    return [pair for turn in zip_longest(*groups) for pair in turn if pair is not None]


def _fits(model: ResidualModel, pair: Pair) -> bool:
    try:
        ids = [model.ids(text) for text in (pair.text, pair.against)]
        direction = TokenDirection(pair.token, pair.minus).vector(model)
    except BilensError:
        return False
    if len(ids[0]) != len(ids[1]):
        return False
    stream = Pass.of(model, torch.stack(ids)).stream
    n = model.modules.normalised(stream[:, -1].to(direction))
    return float((n[0] - n[1]) @ direction) >= LEAST

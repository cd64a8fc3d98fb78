"""Circuits of answers of several tokens, of one of several tokens, and of texts of unlike length.

    python -m benchmarks.answers

Each task has three templates; the circuit of two is found by the search of `bilens circuit`, and
measured on all questions of the third, for SmolLM2 and Gemma 3.

- Capitals of one token, such as Paris, and of several, such as Buenos Aires, by the log-probability
  of all. Which countries these are is told by the model's own tokenizer.
- The next digit of a year after an earlier one: 9 against three smaller ones, as the task that
  comes with bilens has it, and all digits that are possible against all that are not.
- Capitals of one token of two countries whose names have unlike numbers of tokens. The tokens of
  the second text, and what its parts write, stand against those of the first that are as far from
  the end; earlier ones stay as they are. bilens refuses such texts: this says what they would give.

Writes `results/answers.json`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import torch
from experiments.circuits import KEEP, LEFT, splits_of
from experiments.pretrained import open_models
from experiments.results import Recording, Row

from bilens.circuits import Cases, Split, find_circuit
from bilens.flows import Question, read_pairs
from bilens.transformer import ResidualModel

TEMPLATES = (
    "The capital of {} is",
    "He flew to {} and landed in its capital,",
    "The government of {} meets in the city of",
)
COUNT = 24
"""Questions of a template."""
CAPITALS = dict(
    line.split("\t") for line in (Path(__file__).parent / "capitals.tsv").read_text().splitlines()
)


def tokens_of(model: ResidualModel, word: str) -> int:
    """Return the number of tokens of a word inside a text."""
    return len(model.answer(f" {word}"))


def pairs(model: ResidualModel, fits: Callable[[str, str], bool]) -> list[tuple[str, str]]:
    """Return pairs of countries, in an order of their own, each first in at most two."""
    drawn = [pair for pair in permutations(CAPITALS, 2) if fits(*pair)]
    found, uses = list[tuple[str, str]](), dict.fromkeys(CAPITALS, 0)
    for number in np.random.default_rng(0).permutation(len(drawn)).tolist():
        first, second = drawn[number]
        if uses[first] < 2:
            uses[first] += 1
            found.append((first, second))
    return found[: 2 * COUNT]


def capitals(
    model: ResidualModel, fits: Callable[[str, str], bool], *, several: bool = False
) -> list[Question]:
    """Return questions about the capitals of pairs of countries, in three templates."""
    asked = []
    for template in TEMPLATES:
        for first, second in pairs(model, fits):
            minus = () if several else (f" {CAPITALS[second]}",)
            texts = template.format(first), template.format(second)
            answer = f" {CAPITALS[first]}"
            asked.append(Question(texts[0], answer, minus, texts[1], "capitals", template))
    return asked


def digits(model: ResidualModel, *, several: bool) -> list[Question]:
    """Return the task of years, with 9 as its answer, or with all digits that are possible."""
    asked = read_pairs(model, "greater")
    if not several:
        return asked
    changed = []
    for question in asked:
        year = re.search(r"\d{4}", str(question.text))
        assert year is not None
        decade = int(year[0][2])
        possible, earlier = (
            tuple(map(str, numbers)) for numbers in (range(decade, 10), range(decade))
        )
        changed.append(replace(question, token=possible, minus=earlier))
    return changed


def folds(
    found: dict[str, Split], there: dict[str, Split] | None = None
) -> Iterator[tuple[bool, float, int]]:
    """Yield whether the circuit of two templates is found, f on the third, and its parts.

    With `there` the third is that of another way to ask.
    """
    for template in found:
        others = [split for name, split in found.items() if name != template]
        split = (there or found)[template]
        unseen = Cases.joined([split.ordering, split.deciding, split.measuring])
        circuit = find_circuit(others, KEEP, LEFT)
        yield circuit.holds, circuit.on(unseen).restored.value, circuit.size


def later_shares(model: ResidualModel, found: dict[str, Split]) -> list[float]:
    """Return the share of each change that is in the tokens after the first of an answer."""
    shares = []
    for split in found.values():
        for case in split.measuring.cases:
            first = case.score.spoken[0]
            at_first = [x.stream[case.row, -case.score.length][None] for x in case.passes]
            logs = [float(model.places.logits(x).log_softmax(-1)[0, first]) for x in at_first]
            shares.append(1 - (logs[0] - logs[1]) / case.change)
    return shares


def ways(model: ResidualModel) -> dict[str, list[Question]]:
    """Return the questions of each way to ask."""
    one = {word for word, city in CAPITALS.items() if tokens_of(model, city) == 1}
    size = {word: tokens_of(model, word) for word in CAPITALS}

    def short(first: str, second: str) -> bool:
        return {first, second} <= one and size[first] == size[second]

    def long(first: str, second: str) -> bool:
        return first not in one and size[first] == size[second]

    def unlike(first: str, second: str) -> bool:
        return {first, second} <= one and size[first] != size[second]

    return {
        "capitals of one token": capitals(model, short),
        "capitals of several tokens": capitals(model, long, several=True),
        "nine against three digits": digits(model, several=False),
        "all digits that are possible": digits(model, several=True),
        "countries of unlike length": capitals(model, unlike),
    }


def rows_of(name: str, model: ResidualModel) -> Iterator[Row]:
    """Measure a model, and yield its rows."""
    found = {}
    for way, asked in ways(model).items():
        found[way] = splits_of(model, asked, least=COUNT // 2, most=COUNT, any_length=True)
    for way, of_way in found.items():
        count = sum(len(split.measuring) for split in of_way.values())
        yield Row(f"{name}: {way}: questions that measure", count)
    folded = {way: [*folds(x)] for way, x in found.items() if len(x) == len(TEMPLATES)}
    unlike, alike = found["countries of unlike length"], found["capitals of one token"]
    if len(unlike) == len(alike) == len(TEMPLATES):
        folded["found on unlike length, measured on equal"] = [*folds(unlike, alike)]
        folded["found on equal length, measured on unlike"] = [*folds(alike, unlike)]
    for way, numbers in folded.items():
        holds, f, parts = zip(*numbers, strict=True)
        yield Row.of_share(f"{name}: {way}: a circuit is found", [*holds])
        yield Row.of_range(f"{name}: {way}: f on the template left out", [*f])
        yield Row.of_range(f"{name}: {way}: parts", [*parts])
    if shares := later_shares(model, found["capitals of several tokens"]):
        yield Row.of(f"{name}: share of the change in the tokens after the first", shares)


def main() -> None:
    """Measure, and write the results."""
    torch.set_num_threads(1)
    recording, rows = Recording(), list[Row]()
    for name, model in open_models(Path("runs/models")):
        for row in rows_of(name, model):
            print(row, flush=True)
            rows.append(row)
    recording.write(
        "answers",
        title="Circuits of other answers and of texts of unlike length",
        command="python -m benchmarks.answers",
        rows=rows,
        settings={"templates": len(TEMPLATES), "low and high of f": "range over templates"},
    )


if __name__ == "__main__":
    main()

"""Questions of agreement made from lists of words, and what the rows of their flows say."""

from collections.abc import Iterator
from random import Random
from statistics import fmean
from string import ascii_uppercase
from typing import Any

import numpy as np
import pandas as pd
import torch
from experiments.results import Row

from bilens.circuits import Interval
from bilens.flows import Question

NOUNS = (
    "dog cat bird boy girl tree car toy friend ball book flower duck bear rabbit frog king queen"
)
NOUNS += (
    " apple truck horse cow pig farmer teacher picture letter key cup door house boat river hat"
)
PREPOSITIONS = "near behind beside with by under above below around beyond"
VERBS = "saw liked found loved wanted knew heard met followed needed"
ADJECTIVES = "big little old new red blue happy sad good nice"
FORMS = {
    "near": ("The {a} {link} the {b}", PREPOSITIONS),
    "relative": ("The {a} that the {b} {link}", VERBS),
    "adjective": ("The {adjective} {a} {link} the {b}", PREPOSITIONS),
}
"""Templates: the number of the verb is that of noun a, and that of noun b is another one or not."""
PLACES = {"near": (1, 2, 4), "relative": (1, 5, 4), "adjective": (2, 3, 5)}
"""Words of noun a, link and noun b in the text of each template."""
ALL = 100_000
SIZES, SAMPLES, SEED = (48, 480, 4_800), 1_000, 0
"""Questions of a random sample, samples of each size, and their seed."""
TOP, WORST = 10, 5


def questions(number: int = ALL) -> Iterator[Question]:
    """Yield different questions of agreement: are and not is after a plural, or the reverse."""
    draw, nouns, seen = Random(0), NOUNS.split(), set[str]()
    while len(seen) < number:
        form = draw.choice([*FORMS])
        text, links = FORMS[form]
        a, b = draw.sample(nouns, 2)
        words = {"link": draw.choice(links.split()), "b": b + draw.choice(["", "s"])}
        words["adjective"] = draw.choice(ADJECTIVES.split())
        plural, singular = (text.format(a=a + end, **words) for end in ("s", ""))
        is_plural = draw.random() < 0.5
        first, second = (plural, singular) if is_plural else (singular, plural)
        if first not in seen:
            seen.add(first)
            tokens = (" are", " is") if is_plural else (" is", " are")
            yield Question(first, *tokens, second, task="agreement", template=form)


def rows_of(table: Any) -> list[Row]:
    """Return what the rows of questions show, and how much of it a sample of them shows."""
    frame = pd.read_parquet(table.folder)
    frame = frame[frame["reason"] == ""].reset_index(drop=True)
    words, is_plural = frame["text"].str.split(), frame["token"] == " are"
    for i, name in enumerate(("noun", "link", "other")):
        pairs = zip(words, frame["template"], strict=True)
        frame[name] = [text[PLACES[form][i]] for text, form in pairs]
    is_same = frame["other"].str.endswith("s") == is_plural
    frame["form"] = frame["template"] + is_same.map(
        {True: ", same number", False: ", other number"}
    )
    frame["noun"] = frame["noun"].str.removesuffix("s")
    frame["wrong"], frame["change"] = frame["clean"] <= 0, frame["clean"] - frame["corrupt"]
    return [
        Row("questions whose rows were written", table.questions),
        Row("questions that the model cannot read", table.unread, n=table.questions),
        *_answers(frame),
        *_strongest(frame, [*table.parts]),
        *_clusters(table),
        *_opposing(frame, [*table.parts]),
    ]


def _answers(frame: pd.DataFrame) -> list[Row]:
    """Return how often the answer is right: of all, of each form, and with the worst words."""
    rows = [
        Row.of_share("right answers", ~frame["wrong"]),
        Row.of_share("changes that are against the answer", frame["change"] <= 0),
    ]
    for form, of_form in frame.groupby("form"):
        rows.append(Row.of_share(f"right answers: {form}", ~of_form["wrong"]))
    for name in ("link", "noun"):
        of_words = frame.groupby(name)["wrong"]
        for word in of_words.mean().nlargest(WORST).index:
            claim = f"wrong answers, the {WORST} worst: {name} {word!r}"
            rows.append(Row.of_share(claim, of_words.get_group(word)))
    return rows


def _strongest(frame: pd.DataFrame, parts: list[str]) -> list[Row]:
    """Return shares of the strongest parts, and what random samples of questions say of them."""
    flows, changes = frame[parts].to_numpy(np.float64), frame["change"].to_numpy()
    top = abs(flows.mean(0)).argsort()[::-1][:TOP]
    of_all = [_interval(flows[:, part], changes) for part in top]
    draw, few = np.random.default_rng(SEED), SIZES[0]
    widths, held = np.full((SAMPLES, TOP), np.nan), list[bool]()
    found: dict[int, list[float]] = {size: [] for size in SIZES if size <= len(frame) // 2}
    for size, shares in found.items():
        for sample in range(SAMPLES):
            chosen = draw.choice(len(frame), size, replace=False)
            of_size = abs(flows[chosen].mean(0)).argsort()[::-1][:TOP]
            shares.append(len({*of_size} & {*top}) / TOP)
            if size > few:
                continue
            for rank, (part, share) in enumerate(zip(top, of_all, strict=True)):
                some = _interval(flows[chosen, part], changes[chosen])
                if some.low is not None:
                    widths[sample, rank] = some.high - some.low
                    held.append(some.low <= share.value <= some.high)
    rows = []
    for part, share, of_few in zip(top, of_all, np.nanmedian(widths, 0), strict=True):
        beside = {"its width": share.high - share.low, f"width of {few} questions": of_few}
        claim = f"share of the change: {parts[part]}"
        rows.append(Row(claim, share.value, share.low, share.high, len(frame), baselines=beside))
    for size, shares in found.items():
        rows += [
            Row(f"share of the {TOP} strongest parts that {size} questions find", fmean(shares)),
            Row.of_share(
                f"samples that find all {TOP} of them: {size} questions", np.array(shares) == 1
            ),
        ]
    claim = f"intervals of {few} questions that hold the share of all"
    return [*rows, Row(claim, fmean(held), n=len(held))]


def _interval(flows: Any, changes: Any) -> Any:
    return Interval.of(torch.tensor(flows), torch.tensor(changes))


def _clusters(table: Any) -> list[Row]:
    """Return the share of each cluster of questions, its parts, and its kinds."""
    of_all = sum(table.clusters["questions"])
    rows = [Row("clusters of questions", len(table.clusters["cluster"]), n=of_all)]
    columns = [table.clusters[name] for name in ("questions", "kinds", "shares of all flow")]
    for letter, size, kinds, shares in zip(ascii_uppercase, *columns, strict=False):
        parts = " ".join(text.split()[0] for text in shares.split(", "))
        of_kinds = dict(text.rsplit(" ", 1) for text in kinds.split(", "))
        beside = {kind.partition(": ")[2]: int(n) / size for kind, n in of_kinds.items()}
        rows.append(Row(f"share of cluster {letter}: {parts}", size / of_all, baselines=beside))
    return rows


def _opposing(frame: pd.DataFrame, parts: list[str]) -> list[Row]:
    """Return the parts whose share falls most where the answer is wrong, in the worst form."""
    form = frame.groupby("form")["wrong"].mean().idxmax()
    of_form = frame[frame["form"] == form]
    wrong, right = (of_form[of_form["wrong"] == is_so] for is_so in (True, False))
    means = [rows[parts].mean() / rows["change"].mean() for rows in (wrong, right)]
    rows = []
    for part in (means[0] - means[1]).nsmallest(WORST).index:
        share = _interval(wrong[part].to_numpy(np.float64), wrong["change"].to_numpy())
        claim = f"share of the change where the answer is wrong: {form}: {part}"
        beside = {"where it is right": float(means[1][part])}
        rows.append(Row(claim, share.value, share.low, share.high, len(wrong), baselines=beside))
    return rows

"""Rules that need two blocks, found in the weights of models trained on them.

No figure of the papers: a ground truth for reading heads that work together. A language with known
rules (`bilens.data.DeepGrammar`) trains models of two blocks without norms, with softmax and with
bilinear attention. The rules are induction ("a b ... a -> b"), agreement of a verb with a noun
across others, and brackets of two types. Measured are

- the KL divergence from the true next-token distribution at the positions that each rule decides,
  also of a model with one block, which cannot know the rules;
- the heads of the second block that the weights name for each rule, and those in the circuit that
  `bilens circuit` finds on eight questions, whose texts differ in the word that decides. Found are
  those that are part of the rule: its KL rises by 0.1 nats or more once the head is silent;
- induction by all heads together: whether they raise the value after a cue most at the cue.

A pair of heads of both blocks is named for induction if every cue attends most to itself as the
word before, at every distance from 1 to 16. The score is that of q(A) for k(A', B), with A' moved
by the first head, averaged over the values B. A pair is named for agreement if every noun attends
more to nouns that follow no preposition and no adjective, in 99 % of all comparisons. A head is
named for brackets if each open bracket raises its closing one. The MLP of the first block is
included as its tensor, the sum of the first block's heads is not, and the second MLP only for
brackets.

Small: 3 initialisations of 12 passes over 47,500 sentences, 5 minutes on one core each. Paper: 10.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from bilens.analysis import Table
from bilens.circuits import Cases, parts_in, search_circuit
from bilens.data import DeepGrammar, load_corpus
from bilens.flows import Question
from bilens.nn import LanguageSettings
from bilens.train import LanguageTraining
from bilens.transformer import ResidualModel
from experiments.context import Outcome, RecipeContext
from experiments.grammar import divergence
from experiments.results import Row, intervals

CUES, VALUES = DeepGrammar.cues, DeepGrammar.values
NOUNS, VERBS = DeepGrammar.nouns, DeepGrammar.verbs
PREPOSITIONS, ADJECTIVES = DeepGrammar.prepositions, DeepGrammar.adjectives
BRACKETS, FILLERS = DeepGrammar.brackets, DeepGrammar.fillers
KINDS = ("induction", "agreement", "brackets", "other")
SIZES: dict[str, Any] = {
    "vocab_size": 46,
    "d_model": 64,
    "n_heads": 4,
    "d_hidden": 128,
    "n_ctx": 32,
}
# Products of scores begin too small to be felt without QK-norm.
ATTENTION: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax"},
    "bilinear": {"attention": "bilinear", "qk_norm": True},
}
TRAINING = LanguageTraining(batch_size=64, learning_rate=5e-3, epochs=12)
HELD_OUT, DISTANCES, LEAST = 500, range(1, 17), 0.1
QUESTIONS, KEEP = 8, 0.9
COUNTED = ("found", "false", "missed")

Pairs = set[tuple[int, int]]

SEEDS = (3, 10)
"""Initialisations at either scale."""


def run(context: RecipeContext) -> Outcome:
    """Train on the language and search for its rules in the weights."""
    grammar = DeepGrammar()
    corpus = load_corpus("deep-grammar", n_ctx=SIZES["n_ctx"])
    ids = corpus.validation[:HELD_OUT]["input_ids"]
    numbers: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    shallow = _trained(context, "softmax", 0, n_layers=1)
    numbers["one block, softmax"] = divergence(shallow, grammar, ids, KINDS)
    for attention in ATTENTION:
        results: list[dict[str, Any]] = []
        for seed in context.seed_range(SEEDS):
            model = _trained(context, attention, seed, n_layers=2)
            part = parts_of_rules(model, grammar, ids)
            circuits = Circuits(model, grammar)
            induction = circuits.induction()
            named = {
                "induction": {head for _, head in induction},
                "agreement": {head for _, head in circuits.agreement()},
                "brackets": circuits.brackets(),
            }
            found = {kind: in_circuit(model, grammar, kind) for kind in named}
            counts = {kind: count(named[kind], part[kind]) for kind in named}
            of_circuits = {kind: count(found[kind], part[kind]) for kind in named}
            repeated = circuits.repeated()
            kl = divergence(model, grammar, ids, KINDS)
            results.append({"kl": kl, "repeated": repeated, "circuits": of_circuits, **counts})
            pairs = " ".join(f"0.{first}-1.{second}" for first, second in sorted(induction))
            for kind in named:
                heads = {"named": named, "in the circuit": found, "part of it": part}
                row = {"attention": attention, "seed": str(seed), "rule": kind, "KL": kl[kind]}
                for title, of_kinds in heads.items():
                    row[title] = " ".join(f"1.{head}" for head in sorted(of_kinds[kind]))
                row["pairs"] = pairs if kind == "induction" else ""
                rows.append(row)
        numbers[attention] = {
            "kl": intervals([f["kl"] for f in results]),
            **{kind: [f[kind] for f in results] for kind in KINDS[:3]},
            "circuits": [f["circuits"] for f in results],
            "repeated": [f["repeated"] for f in results],
        }
    table = Table(pd.DataFrame(rows), "Rules in the weights", {"KL": ".4f"}, words=3)
    stated = [row for attention in ATTENTION for row in _rows(attention, numbers[attention])]
    settings = {"low and high": "range over seeds", "questions": QUESTIONS}
    return Outcome(numbers, parts=[table], rows=stated, settings=settings)


def _rows(attention: str, numbers: dict[str, Any]) -> list[Row]:
    """Return the cases of induction that all heads repeat, and the heads of rules in circuits."""
    shares = {key: [100 * one[key] for one in numbers["repeated"]] for key in ("found", "false")}
    rows = [
        Row.of_range(
            f"{attention}, induction from all heads of both blocks: cases found",
            shares["found"],
            unit="%",
            baselines={"another cue, most": max(shares["false"])},
        )
    ]
    for kind in KINDS[:3]:
        of_seeds = [one[kind] for one in numbers["circuits"]]
        found, false, missed = (sum(one[k] for one in of_seeds) for k in COUNTED)
        named = sum(one["found"] for one in numbers[kind])
        rows.append(
            Row(
                f"{attention}, {kind}: heads of the second block in circuits, of those that matter",
                found,
                n=found + missed,
                baselines={"others in circuits": false, "named by the weights alone": named},
            )
        )
    return rows


def _trained(context: RecipeContext, attention: str, seed: int, n_layers: int) -> ResidualModel:
    separate = replace(context, models=context.models / attention)
    settings = LanguageSettings(**SIZES, **ATTENTION[attention], n_layers=n_layers)
    training = replace(TRAINING, seed=seed)
    return separate.language("deep-grammar", training, settings)


@torch.no_grad()
def parts_of_rules(model: ResidualModel, grammar: DeepGrammar, ids: Tensor) -> dict[str, set[int]]:
    """Return heads of the second block whose removal costs a rule at least `LEAST` nats."""
    baseline = divergence(model, grammar, ids, KINDS)
    results: dict[str, set[int]] = {kind: set() for kind in KINDS}
    out: Any = model.layer(1).heads.out.module
    for head, columns in enumerate(out.weight.chunk(model.n_heads, dim=1)):
        stored = columns.clone()
        columns.zero_()
        silent = divergence(model, grammar, ids, KINDS)
        columns.copy_(stored)
        for kind in KINDS:
            if silent[kind] - baseline[kind] >= LEAST:
                results[kind].add(head)
    return results


def questions(model: ResidualModel, grammar: DeepGrammar, rule: str, number: int) -> list[Question]:
    """Return questions about a rule, whose texts differ in the word that decides."""
    draw = random.Random(0)
    asked = []
    for _ in range(number):
        filler = draw.choice(FILLERS)
        if rule == "induction":
            (cue, other), words = (draw.sample(CUES, 2), draw.sample(VALUES, 2))
            texts = [f"map {cue} {value} {other} {filler} {cue}" for value in words]
        elif rule == "agreement":
            groups = draw.sample((0, 1), 2)
            rest = f"{draw.choice(PREPOSITIONS)} {draw.choice(NOUNS[draw.randrange(2)])}"
            texts = [f"tale {filler} {draw.choice(NOUNS[group])} {rest}" for group in groups]
            words = [VERBS[group][0] for group in groups]
        else:
            opened = draw.sample(list(BRACKETS), 2)
            texts = [f"code {filler} {bracket} {filler}" for bracket in opened]
            words = [BRACKETS[bracket] for bracket in opened]
        text, against = (torch.tensor(_numbers(grammar, line.split())) for line in texts)
        right, wrong = model.W_U[:, _numbers(grammar, words)].T
        asked.append(Question.of(text, right - wrong, against=against))
    return asked


def in_circuit(model: ResidualModel, grammar: DeepGrammar, rule: str) -> set[int]:
    """Return the heads of the second block in the circuit of a rule."""
    asked = questions(model, grammar, rule, QUESTIONS)
    cases = Cases.of(model, asked)
    mask = search_circuit([cases], cases, KEEP).mask
    return {part.number for part in parts_in(mask) if part.layer == 1 and part.number is not None}


def _numbers(grammar: DeepGrammar, words: Sequence[str]) -> list[int]:
    return [grammar.vocabulary.index(word) for word in words]


def count(named: set[int], part: set[int]) -> dict[str, int]:
    """Count the heads that are found, false and missed."""
    sizes = len(named & part), len(named - part), len(part - named)
    return dict(zip(COUNTED, sizes, strict=True))


@dataclass(frozen=True, eq=False)
class Circuits:
    """Effects of two blocks without norms on tokens of the language, from the weights."""

    model: ResidualModel
    grammar: DeepGrammar

    @torch.no_grad()
    def induction(self) -> Pairs:
        """Return pairs of heads by which a cue attends to itself as the word before a value."""
        words = self._embedded("map", *CUES, *VALUES, *FILLERS)
        cues = torch.arange(1, 1 + len(CUES))
        values = words[1 + len(CUES) : 1 + len(CUES) + len(VALUES)]
        looking, named = self._after(words[cues]), set()
        for first in range(self.model.n_heads):
            keys = self._shifted(words, values, first)
            best = [self._scores(1, looking, keys, d).argmax(-1) == cues for d in DISTANCES]
            named |= {(first, int(h)) for h in torch.stack(best).all(0).all(-1).nonzero()}
        return named

    @torch.no_grad()
    def agreement(self, least: float = 0.99) -> Pairs:
        """Return pairs of heads by which a noun attends to nouns that follow no preposition."""
        nouns = self._embedded(*NOUNS[0], *NOUNS[1])
        free = self._embedded("tale", *FILLERS, *VERBS[0], *VERBS[1])
        inner = self._embedded(*PREPOSITIONS, *ADJECTIVES)
        looking, named = self._after(nouns), set()
        for first in range(self.model.n_heads):
            sides = [self._shifted(words, nouns, first) for words in (free, inner)]
            more = [
                left[..., :, None] > right[..., None, :]
                for d in DISTANCES[1:8]
                for left, right in [[self._scores(1, looking, keys, d) for keys in sides]]
            ]
            share = torch.stack(more).double().mean((0, 2, 3, 4))
            named |= {(first, int(h)) for h in (share >= least).nonzero()}
        return named

    @torch.no_grad()
    def brackets(self) -> set[int]:
        """Return heads of the second block that raise the closing bracket of each open one."""
        opening = self._embedded(*BRACKETS)
        now = self._after(self._embedded(*BRACKETS, *BRACKETS.values(), *FILLERS))
        closing = self._unembedded(*BRACKETS.values())
        named = set()
        for head, OV in enumerate(self._ov[1]):
            w = self._after(opening) @ OV
            mlp = self.model.mlp(1)
            added = torch.stack([w + mlp(x + w) - mlp(x) for x in now]).mean(0)
            logits = added @ closing.T
            if bool((logits.argmax(-1) == torch.arange(len(BRACKETS))).all()):
                named.add(head)
        return named

    @torch.no_grad()
    def repeated(self) -> dict[str, float]:
        """Return the share in which all heads repeat the word after a cue, in texts "A' B ... A".

        The first block's output for A' B is that of a text of these two. Shares are of all A, B
        and distances. A case is found if the second block's heads raise B more than all other
        words, and more after A itself than after any other A'. It is false if another A' raises B
        most.
        """
        words = ("map", *CUES, *VALUES, *FILLERS)
        cues, values = self._embedded(*CUES), self._embedded(*VALUES)
        places = torch.tensor([words.index(value) for value in VALUES])
        looks = self._scores(0, values, cues, 1)
        stay = self._scores(0, values, values, 0).diagonal(dim1=1, dim2=2)[..., None]
        if self._softmax:
            looks, stay = (looks - stay).sigmoid(), (stay - looks).sigmoid()
        before = torch.einsum("hba,ad,hde->abe", looks, cues, self._ov[0])
        itself = torch.einsum("hba,bd,hde->abe", stay.expand_as(looks), values, self._ov[0])
        keys = self._after(values + before + itself)
        moved = torch.einsum("abd,hde,we->habw", keys, self._ov[1], self._unembedded(*words))
        results, wrong = [], []
        for distance in DISTANCES:
            scores = self._scores(1, self._after(cues), keys.flatten(0, 1), distance)
            if self._softmax:
                scores = scores.softmax(-1)
            raised = torch.einsum("hqab,habw->qabw", scores.unflatten(-1, keys.shape[:2]), moved)
            own_word = (raised[..., places].diagonal(dim1=2, dim2=3) - raised.mean(-1)).argmax(1)
            right = own_word == torch.arange(len(CUES))[:, None]
            most = raised.argmax(-1).diagonal(dim1=0, dim2=1).mT == places
            results.append(right & most)
            wrong.append(~right)
        share = {"found": torch.stack(results), "false": torch.stack(wrong)}
        return {name: float(values.double().mean()) for name, values in share.items()}

    def _ids(self, *words: str) -> Tensor:
        return torch.tensor(_numbers(self.grammar, words))

    def _embedded(self, *words: str) -> Tensor:
        return self.model.W_E[self._ids(*words)]

    def _unembedded(self, *words: str) -> Tensor:
        return self.model.W_U[:, self._ids(*words)].T

    def _after(self, x: Tensor) -> Tensor:
        """Return the stream after the first MLP, from streams before it."""
        return x + self.model.mlp(0)(x)

    def _shifted(self, before: Tensor, words: Tensor, head: int) -> Tensor:
        """Return words after the first block, if a head attends to the word before them."""
        return self._after(words + (before @ self._ov[0][head])[:, None]).mean(1)

    def _scores(self, layer: int, now: Tensor, keys: Tensor, distance: int) -> Tensor:
        """Return scores of a block's heads for streams of queries and keys, (heads, now, keys)."""
        maps = self.model.qk(layer, distance)
        return torch.stack([now @ qk.left @ qk.right @ keys.T for qk in maps]).prod(0)

    @property
    def _softmax(self) -> bool:
        return len(self.model.qk(1, 1)) == 1

    @cached_property
    def _ov(self) -> list[Tensor]:
        return [self.model.ov(layer).dense() for layer in range(2)]

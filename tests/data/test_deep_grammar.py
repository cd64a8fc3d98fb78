from collections import Counter
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.data import DeepGrammar, load_corpus

CUES, VALUES = {"red", "blue", "green", "gold"}, {"one", "two", "three", "four", "five", "six"}
SINGULAR, PLURAL = {"key", "dog", "car", "boy"}, {"keys", "dogs", "cars", "boys"}
ONE, MANY = {"is", "runs", "sits"}, {"are", "run", "sit"}
PREPOSITIONS, ADJECTIVES = {"near", "behind", "beside"}, {"old", "big"}
FILLERS = {"and", "then", "so", "well", "yes", "now"}
CLOSES = {"(": ")", "[": "]"}


def spread(words: set[str], share: float) -> dict[str, float]:
    return dict.fromkeys(words, share / len(words))


def expected_map(words: list[str], strength: float) -> tuple[dict[str, float], str]:
    if not words or words[-1] not in CUES:
        return spread(CUES, 0.5) | spread(FILLERS, 0.5), "other"
    before = [value for cue, value in pairwise(words) if cue == words[-1] and value in VALUES]
    if not before:
        return spread(VALUES, 1), "other"
    return {before[0]: strength} | spread(FILLERS, 1 - strength), "induction"


def expected_tale(words: list[str], strength: float) -> tuple[dict[str, float], str]:
    ends = [number for number, word in enumerate(words) if word in ONE | MANY | FILLERS]
    clause, nouns = words[ends[-1] + 1 if ends else 0 :], SINGULAR | PLURAL
    if not clause:
        return spread(nouns, 0.5) | spread(FILLERS, 0.5), "other"
    if clause[-1] in PREPOSITIONS:
        return spread(nouns, 0.5) | spread(ADJECTIVES, 0.5), "other"
    if clause[-1] in ADJECTIVES:
        return spread(nouns, 1), "other"
    right, wrong = (ONE, MANY) if clause[0] in SINGULAR else (MANY, ONE)
    verbs = spread(right, strength / 2) | spread(wrong, (1 - strength) / 2)
    return spread(PREPOSITIONS, 0.5) | verbs, "agreement" if len(clause) > 1 else "other"


def expected_code(words: list[str], strength: float) -> tuple[dict[str, float], str]:
    opened: list[str] = []
    for word in words:
        if word in CLOSES:
            opened.append(word)
        elif word in CLOSES.values():
            opened.pop()
    groups: list[dict[str, float]] = [spread(FILLERS, 1)]
    if len(opened) < 2:
        groups.append(spread(set(CLOSES), 1))
    if opened:
        right = CLOSES[opened[-1]]
        (wrong,) = set(CLOSES.values()) - {right}
        groups.append({right: strength, wrong: 1 - strength})
    shares = {word: share / len(groups) for group in groups for word, share in group.items()}
    return shares, "brackets" if opened else "other"


EXPECTED = {"map": expected_map, "tale": expected_tale, "code": expected_code}
# A grammar lists all that may be remembered when it is first asked, which takes a second.
GRAMMARS = {strength: DeepGrammar(strength=strength) for strength in (0.51, 0.9)}


@given(st.sampled_from([*GRAMMARS]), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_the_probabilities_are_those_of_the_rules(strength, length, seed):
    grammar = GRAMMARS[strength]
    ids = grammar.sample(3, length, seed)
    following = grammar.next_distribution(ids)
    names = ("induction", "agreement", "brackets", "other")
    masks = torch.stack([grammar.is_kind(ids, kind) for kind in names], -1)
    dense, kinds = torch.zeros_like(following), torch.zeros_like(masks)
    for number, row in enumerate(ids.tolist()):
        tokens = [grammar.vocabulary[index] for index in row]
        for place in range(length):
            if place:
                expected, kind = EXPECTED[tokens[1]](tokens[2 : place + 1], strength)
            else:
                expected, kind = spread(set(EXPECTED), 1), "other"
            words = [expected.get(word, 0.0) for word in grammar.vocabulary]
            dense[number, place] = torch.tensor(words, dtype=torch.float64)
            kinds[number, place, names.index(kind)] = True
    torch.testing.assert_close(following, dense, rtol=1e-12, atol=1e-15)
    assert torch.equal(masks, kinds)


def test_every_rule_is_met():
    grammar = GRAMMARS[0.9]
    assert len(set(grammar.vocabulary)) == len(grammar.vocabulary) == 46
    ids = grammar.sample(2000, 32, seed=0)
    kinds = Counter(grammar.vocabulary[index] for index in ids[:, 1].tolist())
    assert all(500 < kinds[kind] < 850 for kind in EXPECTED)
    for kind in ("induction", "agreement", "brackets"):
        assert grammar.is_kind(ids, kind).double().mean() > 0.04


def test_the_corpus(monkeypatch):
    monkeypatch.setattr("bilens.data.corpus.GRAMMAR_SENTENCES", 100)
    corpus = load_corpus("deep-grammar", n_ctx=12)
    assert corpus.name == "deep-grammar"
    assert (len(corpus.train), len(corpus.validation)) == (95, 5)
    assert GRAMMARS[0.9].next_distribution(corpus.train[:]["input_ids"]).shape == (95, 12, 46)

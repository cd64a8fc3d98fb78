import math
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.models import DEVICE

from bilens.data import Grammar
from bilens.errors import BilensError

SPECIAL = ("[PAD]", "[UNK]", "[BOS]", "[EOS]")
OPENERS = {"once", "today", "then", "later"}
NAMES = {"lily", "tom", "ben", "mia", "sam", "anna"}
LENGTH = 24


@pytest.fixture(scope="module")
def grammar():
    return Grammar()


@pytest.fixture(scope="module")
def sentences(grammar):
    ids = grammar.sample(3_000, LENGTH, seed=3)
    return ids, [[grammar.vocabulary[index] for index in row] for row in ids.tolist()]


def expected_next(grammar: Grammar, tokens: list[str]) -> dict[str, float]:
    """Return the probabilities by the rules of the module's docstring, word by word."""
    followers = dict(grammar.bigrams)
    decided = {(name, verb): word for name, verb, word in grammar.skip_trigrams}
    verbs = {verb for _, verb in decided}
    words = set(grammar.vocabulary) - set(SPECIAL) - OPENERS - NAMES
    fillers = words - set(followers) - set(followers.values()) - verbs - set(decided.values())
    last = tokens[-1]
    if last in {"[BOS]", *OPENERS}:
        return {word: 0.5 / len(group) for group in (OPENERS, NAMES) for word in group}
    groups = (set(followers), verbs, fillers)
    free = {word: 1 / 3 / len(group) for group in groups for word in group}
    (name,) = NAMES & set(tokens)
    rule = followers.get(last) or decided.get((name, last))
    if rule is None:
        return free
    mixed = {word: (1 - grammar.strength) * share for word, share in free.items()}
    mixed[rule] = mixed.get(rule, 0) + grammar.strength
    return mixed


def test_the_vocabulary(grammar):
    assert grammar.vocabulary[:4] == SPECIAL
    assert len(set(grammar.vocabulary)) == len(grammar.vocabulary) == 72
    assert (len(set(grammar.bigrams)), len(set(grammar.skip_trigrams))) == (10, 24)
    for rule in grammar.bigrams + grammar.skip_trigrams:
        assert set(rule) <= set(grammar.vocabulary)


def test_two_verbs_share_their_objects_and_say_another_for_each_name(grammar):
    objects = defaultdict(dict)
    for name, verb, word in grammar.skip_trigrams:
        objects[verb][name] = word
    found, lost = objects["found"], objects["lost"]
    assert lost.keys() == NAMES
    assert all(found[name] != word for name, word in lost.items())
    assert set(found.values()) == set(lost.values())


# A grammar lists its states when it is first asked.
GRAMMARS = {strength: Grammar(strength=strength) for strength in (0.51, 0.8, 0.99)}


@given(st.sampled_from([*GRAMMARS]), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_the_probabilities_are_those_of_the_rules(strength, length, seed):
    grammar = GRAMMARS[strength]
    ids = grammar.sample(3, length, seed)
    following = grammar.next_distribution(ids)
    for row, result in zip(ids.tolist(), following, strict=True):
        tokens = [grammar.vocabulary[index] for index in row]
        expected = [expected_next(grammar, tokens[: place + 1]) for place in range(length)]
        dense = [[several.get(word, 0.0) for word in grammar.vocabulary] for several in expected]
        right = torch.tensor(dense, dtype=torch.float64)
        torch.testing.assert_close(result, right, rtol=1e-12, atol=1e-15)


def test_samples_follow_the_probabilities(grammar, sentences):
    """Chi-square for each context of name and last word, below one in a million for them all."""
    ids, words = sentences
    following = grammar.next_distribution(ids)
    counts: dict[tuple[str, ...], Counter[int]] = defaultdict(Counter)
    expected = {}
    for row, tokens in enumerate(words):
        name = ""
        for position, token in enumerate(tokens[:-1]):
            name = token if token in NAMES else name
            counts[name, token][int(ids[row, position + 1])] += 1
            if (name, token) not in expected:
                expected[name, token] = following[row, position]
    assert len(counts) == 5 + 6 * 45
    for context, seen in counts.items():
        total = sum(seen.values())
        possible = expected[context].nonzero().squeeze(-1).tolist()
        assert set(seen) <= set(possible)
        shares = [float(expected[context][index]) for index in possible]
        pairs = zip(possible, shares, strict=True)
        statistic = sum((seen[i] - total * share) ** 2 / (total * share) for i, share in pairs)
        freedom = len(possible) - 1
        # Wilson and Hilferty: the cube root of chi-square over its freedom is nearly normal.
        spread = 2 / (9 * freedom)
        assert ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 6, context


def test_every_position_has_one_kind(grammar, sentences):
    ids, words = sentences
    kinds = {kind: grammar.is_kind(ids, kind) for kind in ("bigram", "skip-trigram", "filler")}
    assert torch.equal(sum(mask.int() for mask in kinds.values()), torch.ones_like(ids).int())
    firsts = {first for first, _ in grammar.bigrams}
    verbs = {verb for _, verb, _ in grammar.skip_trigrams}
    assert kinds["bigram"][0].tolist() == [token in firsts for token in words[0]]
    assert kinds["skip-trigram"][0].tolist() == [token in verbs for token in words[0]]
    assert kinds["skip-trigram"].float().mean() > 0.1


def test_the_tokenizer_has_the_vocabulary_in_its_order(grammar):
    tokenizer = grammar.tokenizer()
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == list(grammar.vocabulary)
    expected = [grammar.vocabulary.index(word) for word in ("[BOS]", "lily", "ate", "soup")]
    assert tokenizer("[BOS] Lily ate soup")["input_ids"] == expected
    assert tokenizer("mouse")["input_ids"] == [1]
    assert tokenizer.decode(tokenizer("tom sang oh")["input_ids"]) == " tom sang oh"


def test_an_unknown_kind_and_the_seed(grammar):
    assert torch.equal(grammar.sample(5, 9, seed=1), grammar.sample(5, 9, seed=1))
    assert not torch.equal(grammar.sample(5, 9, seed=1), grammar.sample(5, 9, seed=2))
    with pytest.raises(BilensError, match="^kind='verb', expected one of bigram, filler, skip-tri"):
        grammar.is_kind(grammar.sample(1, 3, 0), "verb")


def test_the_probabilities_follow_the_sentences(grammar):
    ids = grammar.sample(3, 9, seed=0)
    there = ids.to(DEVICE)
    assert grammar.next_distribution(there).device.type == DEVICE
    assert torch.equal(grammar.next_distribution(there).cpu(), grammar.next_distribution(ids))
    assert grammar.is_kind(there, "filler").device.type == DEVICE

"""What is cached is never used by what did not make it: a copy, another text, another thread."""

import ast
import random
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch

from bilens.circuits import patch
from bilens.flows import flow
from bilens.transformer import Pass, ResidualModel
from tests.families import family_view
from tests.models import view_of
from tests.nightly import nightly
from tests.source import nodes_of_files

MODELS = {
    "own": lambda: view_of(n_layers=2),
    **{name: lambda name=name: family_view(name) for name in ("gpt2", "gemma2", "mixtral")},
}
# Of several lengths, the longest neither first nor last.
TEXTS = [torch.tensor(ids) for ids in ([3, 4, 5], [7, 4, 5, 6, 9, 8], [5, 5], [9, 4, 5])]
OTHERS = [(text + 3) % 20 for text in TEXTS]


def flows_of(view, text, other):
    through = flow(view, text, 8, minus=9, against=other, ablate=2)
    return torch.tensor([*(node.flow for node in through.nodes), *through.values])


READINGS = {
    "logits": lambda view, text, other: view.logits(text[None]),
    "streams": lambda view, text, other: Pass.of(view, text).stream,
    "flow": flows_of,
    "patch": lambda view, text, other: patch(view, text, 8, minus=9, against=other).noising,
}


def same(found, expected):
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module", params=nightly(MODELS, {"own", "gemma2"}))
def alone(request):
    """A function that makes a model, and each reading of each text by a model of its own."""
    make = MODELS[request.param]
    answers = {}
    for name, read in READINGS.items():
        for number, texts in enumerate(zip(TEXTS, OTHERS, strict=True)):
            answers[name, number] = read(make(), *texts)
    return make, answers


def walk(view, answers, seed):
    """Return the readings, in a random order, that are not those of a model of their own."""
    order = [*answers]
    random.Random(seed).shuffle(order)
    wrong = []
    for name, number in order:
        found = READINGS[name](view, TEXTS[number], OTHERS[number])
        wrong += [] if same(found, answers[name, number]) else [(name, number)]
    return wrong


def test_the_answers_differ(alone):
    _, answers = alone
    for name in READINGS:
        found = [answers[name, number] for number in range(len(TEXTS))]
        assert not same(found[0], found[3])


@pytest.mark.parametrize("seed", range(2))
def test_a_text_has_the_reading_that_it_has_alone_after_others(alone, seed):
    make, answers = alone
    assert walk(make(), answers, seed) == []


def test_threads_read_one_model_side_by_side(alone):
    make, answers = alone
    view = make()
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda seed: walk(view, answers, seed), range(4))] == [[]] * 4


def test_a_copy_with_other_weights_is_another_model(alone):
    make, answers = alone
    view = make()
    assert walk(view, answers, 0) == []
    copied = deepcopy(view)
    with torch.no_grad():
        for weight in copied.model.parameters():
            weight.mul_(1.1)
    fresh = ResidualModel(deepcopy(copied.model), view.tokenizer)
    for (name, number), answer in answers.items():
        texts = TEXTS[number], OTHERS[number]
        found = READINGS[name](copied, *texts)
        assert same(found, READINGS[name](fresh, *texts)), name
        assert not same(found, answer), name
    assert walk(view, answers, 1) == []


CACHES = {"cache", "lru_cache"}
OF_MODELS = ("Model", "Module", "Flow", "Pass", "Tensor")


def decorators(node):
    return {ast.unparse(x.func if isinstance(x, ast.Call) else x) for x in node.decorator_list}


def test_no_cache_of_the_package_has_a_model_for_its_key():
    """Weights change under the same key, and a cache that outlives its owner keeps them."""
    found = []
    for path, (tree, *_) in nodes_of_files().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not CACHES & decorators(node):
                continue
            for argument in node.args.args:
                kind = ast.unparse(argument.annotation) if argument.annotation else ""
                found += [f"{path.name}: {node.name}" for word in OF_MODELS if word in kind]
    assert found == []

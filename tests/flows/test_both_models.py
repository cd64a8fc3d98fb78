"""Two models on many questions: batches, derivatives between both, Shapley values, and undoing."""

import copy
import gc
import math
import weakref

import pytest
import torch
from torch.func import functional_call

import bilens
from bilens import BilensError
from bilens.convert import save_model
from bilens.flows import Question, both_models, diff, diffs
from bilens.flows import split as splitting
from bilens.flows.both_models import BothModels
from bilens.flows.interval import Interval
from bilens.flows.switches import SwitchedRules
from bilens.transformer import ResidualModel
from tests.families import EACH, MIXTURES, exact_norms, family_view, tiny
from tests.flows.test_diff import FLOAT32, tuned_from
from tests.models import TOKENS, random_model
from tests.nightly import nightly

QUESTIONS = [
    Question("t3 t9 t4 t2 t7", "t5", "t7"),
    Question("t3 t9 t4", ("t5", "t8"), ("t7", "t9", "t1"), target="log-probability"),
    Question("t6 t2 t9 t2 t6", "t8", "t4", against="t6 t2 t5 t2 t6"),
    Question("t9 t2 t9", "t5", "t7"),
    Question("t3 t9 t5 t2 t8", ("t1", "t5")),
]


def a_view(name: str) -> ResidualModel:
    return family_view(name)


@pytest.mark.parametrize("name", ["llama", "gpt2", *nightly(list(MIXTURES), ["qwen3-experts"])])
def test_many_questions_are_each_alone(name):
    view = a_view(name)
    other = tuned_from(view)
    with exact_norms():
        table = diffs(view, other, QUESTIONS)
        alone = [
            diff(view, other, q.text, q.tokens, q.minus, against=q.against or None, target=q.target)
            for q in QUESTIONS
        ]
    allowed = 1e-5 if name.startswith(FLOAT32) else 1e-9
    for number, reading in enumerate(alone):
        assert torch.allclose(table.values[:, number], reading.values[:, 0], atol=allowed, rtol=0)
        assert torch.allclose(table.flows[number], reading.flows[0], atol=allowed, rtol=0)
        assert math.isclose(float(table.rest[number]), float(reading.rest), abs_tol=allowed)
    # Each counts by its own change, whatever its direction.
    sizes = [abs(reading.value) for reading in alone]
    assert math.isclose(table.value, sum(sizes) / len(sizes), abs_tol=allowed)
    rest = float((table.signs * table.rest).mean())
    assert math.isclose(sum(table.weights.values()) + rest, table.value, abs_tol=10 * allowed)


@pytest.mark.long
@pytest.mark.parametrize("name", [*EACH, *nightly(list(MIXTURES), ["qwen3-experts"])])
def test_layers_that_run_again_have_the_same_flows(name, monkeypatch):
    view, runs = a_view(name), list[int]()
    other, layer = tuned_from(view), view.places.layers[-1].module
    question = Question("t3 t9 t4 t2 t7", "t5", "t7", against="t6 t2 t5 t2 t6")
    kept = diff(view, other, question.text, "t5", "t7", against=question.against)
    slopes = kept.models.slopes(0.3)
    monkeypatch.setattr(splitting, "KEPT_BYTES", 0)
    hook = layer.register_forward_hook(lambda *_: runs.append(1))
    kept.models.side_by_side([0])
    hook.remove()
    assert len(runs) == (1 if view.places.crosses else 2)
    again = diff(view, other, question.text, "t5", "t7", against=question.against)
    allowed = 1e-4 if name.startswith(FLOAT32) else 1e-9
    near = {"atol": allowed, "rtol": allowed}
    torch.testing.assert_close(again.flows, kept.flows, **near)
    for field in ("values", "of_tokens", "heads", "by_token", "ranks"):
        torch.testing.assert_close(getattr(again, field), getattr(kept, field), **near)
    assert math.isclose(again.choices, kept.choices, abs_tol=allowed)
    torch.testing.assert_close(kept.models.slopes(0.3), slopes, **near)


def dense_slopes(models: BothModels, at: float) -> torch.Tensor:
    """The derivative of each metric along the change of each weight, a question at a time."""
    rows = []
    for fitted in models.questions:
        weights = {
            name: (pair.base + at * (pair.tuned - pair.base)).detach().requires_grad_()
            for name, pair in models.pairs.items()
        }
        with torch.enable_grad():
            output = functional_call(models.base.model, weights, (fitted.clean[None],))
            logits = getattr(output, "logits", output)[0, -1]
            value = logits[[*fitted.tokens, *fitted.minus]] @ torch.tensor(fitted.shares).to(logits)
            slopes = torch.autograd.grad(value, [*weights.values()], allow_unused=True)
        rows.append(
            [
                0.0 if slope is None else float((slope * (pair.tuned - pair.base)).sum())
                for slope, pair in zip(slopes, models.pairs.values(), strict=True)
            ]
        )
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("name", [*EACH, *nightly(list(MIXTURES), ["qwen3-experts"])])
def test_slopes_are_derivatives_along_the_change(name):
    view = a_view(name)
    other = tuned_from(view)
    asked = [question for question in QUESTIONS if question.target == "logit"]
    with exact_norms():
        models = diffs(view, other, asked).models
        for at in (0.0, 0.3, 1.0):
            allowed = 1e-4 if name.startswith(FLOAT32) else 1e-9
            expected = dense_slopes(models, at)
            assert expected.abs().max() > 1e-3
            assert torch.allclose(models.slopes(at), expected, atol=allowed, rtol=allowed)


def test_shapley_values_of_two_layers_are_exact_in_an_order_and_its_reverse():
    view = ResidualModel(random_model(n_layers=3), TOKENS)
    model = copy.deepcopy(view.model)
    names = [f"blocks.{layer}.mlp.out.weight" for layer in (0, 2)]
    for name in names:
        model.get_parameter(name).data *= 1.5
    table = diffs(view, ResidualModel(model, TOKENS), QUESTIONS)
    run = table.models.run
    both, none, first, second = (run(x) for x in (names, (), names[:1], names[1:]))
    expected = torch.stack([first - none + both - second, second - none + both - first], 1) / 2
    assert torch.allclose(table.models.shapley(2), expected, atol=1e-12)
    assert not torch.allclose(first - none, both - second)  # the orders say otherwise
    means = (table.signs @ expected / len(QUESTIONS)).tolist()
    assert list(table.measure(2)) == [0, 2]
    assert [*table.measure(2).values()] == pytest.approx(means)


def test_what_is_undone_is_what_each_method_puts_first():
    view = ResidualModel(random_model(n_layers=3), TOKENS)
    other = tuned_from(view, 0.05)
    # Large, and nothing reads it on these texts.
    other.model.embed.weight.data[29] += 100
    table = diffs(view, other, QUESTIONS)
    names = [*table.models.pairs]
    run, signs = table.models.run, table.signs
    own = diffs(
        view, other, [Question(q.text, q.tokens, q.minus, target=q.target) for q in QUESTIONS]
    )
    changes = run(names) - run(())
    undone = own.undo(1)
    assert set(undone) == {
        *("flow", "integrated gradients", "gradient at the middle"),
        *("size of the difference", "random choice"),
    }
    of_flow = names[int((changes.sign() @ own.flows).argmax())]
    of_path = names[int((changes.sign() @ own.models.path()).argmax())]
    for by, name in (
        ("flow", of_flow),
        ("integrated gradients", of_path),
        ("size of the difference", "embed.weight"),
    ):
        lost = run(names) - run(other for other in names if other != name)
        expected = Interval.of(changes.sign() * lost, changes.abs())
        assert undone[by].lost == expected
        expected = Interval.of(changes.sign() * (run([name]) - run(())), changes.abs())
        assert undone[by].won == expected
    # Shares are of the weights' part.
    flow = float((signs * table.flows[:, :1].sum(1)).mean())
    assert table.share(list(names)[:1]).value == pytest.approx(flow / table.of_weights)
    assert table.share(names).value == pytest.approx(1)


def test_weights_of_no_layer_are_named_so():
    """They have no number, least of all -1."""
    view = ResidualModel(random_model(), TOKENS)
    model = copy.deepcopy(view.model)
    model.embed.weight.data += 0.3 * torch.randn(model.embed.weight.shape)
    reading = diffs(view, ResidualModel(model, TOKENS), QUESTIONS)
    assert "; the weights of no layer carry " in reading.answer()


def test_what_cannot_be_asked_is_refused():
    view = ResidualModel(random_model(), TOKENS)
    with pytest.raises(BilensError, match="questions is empty"):
        diffs(view, tuned_from(view), [])
    same = diffs(view, view, QUESTIONS)
    assert same.frame().empty
    assert "the same weights" in same.answer()
    # A weight differs that no text reads.
    model = copy.deepcopy(view.model)
    model.embed.weight.data[29] += 1
    asked = [question for question in QUESTIONS if not question.has_two_texts]
    unread = diffs(view, ResidualModel(model, TOKENS), asked)
    assert (unread.value, unread.weights) == (0, {"embed.weight": 0})
    assert "by 0. " in unread.answer()
    assert len(unread.frame()) == 1
    assert len(unread.sections()) == 4
    # The weights of no layer are none of a layer with the number -1.
    assert unread.tables()["By layer"]["weights of"].tolist() == ["no layer"]
    for question in (lambda: unread.share(["embed.weight"]), lambda: unread.undo(1)):
        with pytest.raises(BilensError, match="share of a change"):
            question()
    with pytest.raises(BilensError, match="points=0"):
        diffs(view, tuned_from(view), QUESTIONS).path(0)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "gemma3", "qwen3-experts"])
@pytest.mark.parametrize("low_memory", [False, True])
def test_weights_stay_what_and_where_they_are(name, low_memory, tmp_path):
    view = ResidualModel(tiny(name, dtype=torch.bfloat16), TOKENS)
    for folder, model in (("base", view), ("tuned", tuned_from(view, 0.05))):
        save_model(tmp_path / folder, model.model, TOKENS)
    base, tuned = (bilens.load(tmp_path / x, low_memory=low_memory) for x in ("base", "tuned"))
    wide = [bilens.load(tmp_path / x, dtype=torch.float32) for x in ("base", "tuned")]
    table, expected = diffs(base, tuned, QUESTIONS), diffs(*wide, QUESTIONS)
    for found in (table, diffs(wide[0], tuned, QUESTIONS), diffs(base, wide[1], QUESTIONS)):
        assert torch.allclose(found.flows, expected.flows, atol=1e-4)
    assert torch.allclose(table.models.path(2), expected.models.path(2), atol=1e-4)
    parameters = {
        name: dict(model.model.named_parameters())
        for name, model in (("base", base), ("tuned", tuned))
    }
    for weight, pair in table.models.pairs.items():
        for side in ("base", "tuned"):
            kept = getattr(pair, side)
            assert kept.dtype == torch.bfloat16
            assert kept.data_ptr() == parameters[side][weight].data_ptr()


@pytest.mark.long
@pytest.mark.parametrize("n_bytes", [0, splitting.KEPT_BYTES])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3-experts"])
def test_a_graph_is_freed_with_its_rules(name, n_bytes, monkeypatch):
    monkeypatch.setattr(splitting, "KEPT_BYTES", n_bytes)
    view, made = family_view(name), []
    models = diffs(view, tuned_from(view), QUESTIONS).models

    def rules(*given):
        made.append(weakref.ref(found := SwitchedRules(*given)))
        return found

    monkeypatch.setattr(both_models, "SwitchedRules", rules)
    gc.collect()
    gc.disable()
    try:
        models.flows()
        models.slopes(0.5)
        assert len(made) == 2 * len(models.groups)
        assert [reference() for reference in made] == [None] * len(made)
    finally:
        gc.enable()

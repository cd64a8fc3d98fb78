"""Patches equal full runs in both directions, and gradients are those of the model."""

from contextlib import ExitStack

import pytest
import torch
from transformers import GenerationConfig

from bilens.circuits import eap_ig, gradient_effects, patch, patched
from bilens.circuits.case import both_passes
from bilens.circuits.patching import all_parts
from bilens.flows import Question
from bilens.flows.fitted import fit
from bilens.transformer.exchange import exchange_parts
from bilens.transformer.parts import Part
from bilens.transformer.passes import Pass, logit_of
from tests.families import ALL, DAILY, exact_norms, family_view, some_text
from tests.flows.flows import DIRECTION, TWO, falls, logit, watched
from tests.models import view_of
from tests.nightly import nightly


def output_of(view, ids, layer):
    """Return the output of an MLP."""
    seen = {}
    with watched(view, seen.__setitem__):
        view.logits(ids[None])
    return seen["mlp", layer]


@pytest.mark.parametrize(
    "name", nightly((n for n in ALL if n not in ("llama-tied", "neox")), DAILY)
)
def test_patches_are_those_of_full_runs(name):
    view, (first, second) = family_view(name), some_text()[:2]
    # Positions that both texts begin with are not computed again.
    second[:2] = first[:2]
    with exact_norms():
        result = patch(view, first, DIRECTION, against=second)
        down, up = falls(view, first, second, logit), falls(view, second, first, logit)
        change = logit(view, first) - logit(view, second)
    torch.testing.assert_close(result.noising, down, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(result.denoising, -up, rtol=1e-5, atol=1e-7)
    assert result.change == pytest.approx(change, abs=1e-7)
    assert float(result.heads.abs().max()) > 1e-3


def test_the_only_head_and_mlp_of_a_linear_model_have_their_flow():
    """With one layer before an unembedding without a norm an effect is the direct contribution."""
    view = view_of(norm="none")
    result = patch(view, TWO[0], DIRECTION, against=TWO[1])
    first, second = (output_of(view, ids, 0) for ids in TWO)
    direct = (first - second)[0, -1] @ DIRECTION.vector(view)
    assert float(result.mlps[0]) == pytest.approx(float(direct))


@pytest.mark.parametrize("points", [(1.0,), (0.25, 0.5, 0.75, 1.0)])
def test_gradients_at_points_are_the_models_own(points):
    view = view_of(n_layers=2, norm="rms", mlp="swiglu")
    first, second = TWO
    runs = both_passes(view, [fit(view, Question(first, DIRECTION, (), second))])
    result = gradient_effects(runs, logit_of(view, DIRECTION.vector(view)), points)
    change, expected = output_of(view, first, 1) - output_of(view, second, 1), 0.0
    for share in points:
        rows = view.W_E[second] + share * (view.W_E[first] - view.W_E[second])
        seen = []

        def keep(_, __, y, seen=seen):
            seen.append(y.detach().requires_grad_())
            return seen[-1]

        with ExitStack() as hooks:
            embed = view.modules.embed.module
            hooks.enter_context(embed.register_forward_hook(lambda *_, rows=rows: rows[None]))
            for layer in view.modules.layers:
                hooks.enter_context(layer.mlp.module.register_forward_hook(keep))
            logits = view.model(first[None]).logits[0, -1]
        slopes = torch.autograd.grad(logits[3] - logits[[7, 8]].mean(), seen, allow_unused=True)
        # The outputs were cut off from each other, so that only the last one has its gradient.
        expected += float((slopes[1] * change).sum()) / len(points)
    assert float(result[1, -1]) == pytest.approx(expected)


def test_a_reading_shows_the_strongest(view):
    result = patch(view, "t4 t5 t6", "t3", minus="t7", replace={"t5": "t9"})
    frame = result.frame()
    assert len(frame) == 2 * 4 + 2
    assert frame["effect"].abs().is_monotonic_decreasing
    both = frame[["noising", "denoising"]].mean(axis=1)
    assert frame["effect"].tolist() == pytest.approx(both.tolist())
    assert set(frame["part"]) == {str(part) for part in all_parts(view)}
    assert dict(result.facts())["change"] == result.change


@pytest.mark.parametrize("minus", [(), ("t7",)])
def test_answers_of_several_tokens_are_sums_of_log_probabilities(view, minus):
    first, second = "t4 t5 t6", "t4 t9 t6"
    result = patch(view, first, "t3 t2", minus=minus, against=second)

    def difference(text):
        total = 0.0
        for sign, answer in ((1, "t3 t2"), *((-1, name) for name in minus)):
            numbers = torch.tensor(view.answer(answer))
            ids, n = torch.cat([view.ids(text), numbers]), len(numbers)
            logs = view.logits(ids[None])[0].log_softmax(-1)
            places = torch.arange(len(ids) - n - 1, len(ids) - 1)
            total += sign * float(logs[places, ids[-n:]].sum())
        return total

    assert result.change == pytest.approx(difference(first) - difference(second))
    assert float(result.noising.abs().max()) > 1e-3
    assert result.noising.shape == result.denoising.shape == (2, 5)


def test_eap_ig_of_questions_is_the_mean_over_them(view):
    questions = [
        Question("t3 t4 t7", "t5", ("t6",), "t3 t8 t7"),
        Question("t4 t4", "t8", (), "t4 t9"),
    ]
    reading = eap_ig(view, questions, steps=4)
    expected = []
    for question in questions:
        fitted = fit(view, question)
        runs = both_passes(view, [fitted])
        number = logit_of(view, view.direction(fitted.tokens, fitted.minus))
        expected.append(gradient_effects(runs, number, [0.25, 0.5, 0.75, 1.0]))
    torch.testing.assert_close(reading.of_questions, torch.stack(expected))
    frame, mean = reading.frame(), torch.stack(expected).mean(0)
    assert frame["attribution"].abs().is_monotonic_decreasing
    layer, number = divmod(int(mean.abs().argmax()), mean.shape[1])
    assert frame["part"][0] == (f"mlp.{layer}" if number == 4 else f"head.{layer}.{number}")


@pytest.mark.parametrize("model", ["llama", "view"])
@pytest.mark.parametrize("part", ["head.1.2@3", "mlp.0@1", "head.0.1", "mlp.1"])
def test_a_patched_part_has_its_value_of_the_other_text_also_in_generation(request, model, part):
    view = request.getfixturevalue(model)
    text, other = "t3 t4 t7 t5", "t3 t8 t7 t5"
    ids, of_other = view.ids(text), view.ids(other)
    passes = (Pass.of(view, x[None]) for x in (ids, of_other))
    stream = exchange_parts(*passes, [[Part.parse(part, view)]])[0]
    before = view.logits(ids[None])[0, -1]
    with patched(view, [part], other):
        logits = view.logits(ids[None])[0, -1]
        W, b = view.modules.logit_weights()
        last = view.modules.normalised(stream[0, -1:].to(W))
        torch.testing.assert_close(logits.to(W), (last @ W + b)[0], atol=1e-4, rtol=1e-4)
        assert not torch.allclose(logits, before)
        # One token after the other, with and without a cache of keys and values.
        longer = ids
        for _ in range(3):
            best = view.logits(longer[None])[0, -1].argmax()
            longer = torch.cat([longer, best[None]])
        settings = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1)
        mask = torch.ones_like(ids[None])
        written = view.model.generate(ids[None], settings, attention_mask=mask)
        assert written[0].tolist() == longer.tolist()
    assert torch.equal(view.logits(ids[None])[0, -1], before)


@pytest.mark.parametrize("attention", ["softmax", "squared"])
@pytest.mark.parametrize("other", ["t8", "t3 t8", "t3 t8 t7", "t3 t8 t7 t5 t4"])
@pytest.mark.parametrize("parts", [["head.0.1", "mlp.1"], ["mlp.0@0", "head.1.2@0"]])
def test_a_patched_text_in_pieces_has_the_logits_of_the_whole(attention, other, parts):
    view = view_of(n_layers=2, attention=attention)
    model, ids = view.model, view.ids("t3 t4 t7 t5 t9 t6")[None]
    first = len(view.ids(other))
    with torch.no_grad(), patched(view, parts, other):
        whole = view.logits(ids)
        for size in range(1, 7 - first):  # of the pieces after the first, longer and shorter
            pieces = ids.split([first, *[size] * ((6 - first) // size), (6 - first) % size], 1)
            cache, logits = None, []
            for piece in filter(torch.Tensor.numel, pieces):
                output = model(piece, past_key_values=cache, use_cache=True)
                cache, logits = output[-1], [*logits, output.logits]
            torch.testing.assert_close(torch.cat(logits, 1), whole.to(logits[0]))
        # A reading inside of the block runs single tokens for their logits.
        torch.testing.assert_close(Pass.of(view, ids).next_logits, whole[:, -1])


@pytest.mark.parametrize("part", ["mlp.0@2", "head.1.2@2", "mlp.1", "head.0.1"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_a_patch_in_a_padded_batch_is_that_of_the_text_alone(name, part):
    view = family_view(name, seed=2)
    short, long = torch.tensor([3, 4, 7, 5]), torch.tensor([9, 3, 8, 4, 7, 5, 6])
    batch = torch.stack([torch.cat([short.new_zeros(3), short]), long])
    mask = torch.tensor([[0] * 3 + [1] * 4, [1] * 7])
    places = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad(), patched(view, [part], "t3 t8 t7 t5"):
        padded = view.model(batch, attention_mask=mask, position_ids=places, use_cache=False)
        alone = [view.model(ids[None], use_cache=False).logits[0] for ids in (short, long)]
    torch.testing.assert_close(padded.logits[0, 3:], alone[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(padded.logits[1], alone[1], rtol=1e-4, atol=1e-6)

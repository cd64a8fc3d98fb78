"""Patches of positions equal full runs, and flows and gradients are those of the same vectors."""

import pytest
import torch
from experiments.pairs import Pair

from bilens.read.flow.contrast import Other
from bilens.read.flow.patching import logit_of, patched_effects, stored_runs
from bilens.read.language import TokenDirection
from bilens.residual import ResidualModel
from experiments import positions as recipe
from tests.families import exact_norms, tiny
from tests.language import random_text, toy_tokenizer

DIRECTION = TokenDirection("t3", ("t7", "t8"))


@pytest.fixture(params=["llama", "gemma3", "gpt2", "own-constant"])
def case(request):
    with exact_norms():
        view = ResidualModel(tiny(request.param), toy_tokenizer())
        ids = random_text(seed=1)
        other = ids.clone()
        # The texts differ from the third token on, and the positions before are not computed.
        other[2:4] = random_text(seed=2)[:2]
        with torch.no_grad():
            runs = stored_runs(view, ids, Other(view, ids, other))
        yield view, runs, logit_of(view, DIRECTION)


def streams_with(view, run, layer, place, row):
    """Return the last stream of a run from the embeddings, with a row added at one place."""
    kind, position = place
    part = [None, view.parts.layers[layer].heads, view.parts.layers[layer].mlp][kind]
    step = torch.zeros_like(run.tokens).index_put((torch.tensor([position]),), row[None])
    if part is None:
        hook = (view.parts.layers[layer].module, True, lambda _, a: (a[0] + step, *a[1:]))
    else:
        step = step / part.residual_scale
        hook = (recipe.writer_of(part), False, lambda _, __, y: y + step)
    return run.run_from(0, 1, [hook])


@torch.no_grad()
def test_effects_are_those_of_full_runs(case):
    view, runs, number = case
    change = recipe.outputs(runs[0]) - recipe.outputs(runs[1])
    effects = recipe.effects(runs, change, number)
    assert not effects[:, :, :2].any()
    for layer, place in [(0, (0, 2)), (1, (1, 3)), (1, (2, len(runs[0].ids) - 1)), (0, (2, 2))]:
        row = change[place[0], layer, place[1]]
        expected = 0
        for run, sign in ((runs[0], -1), (runs[1], 1)):
            stream = streams_with(view, run, layer, place, sign * row)
            expected += sign * (number(stream) - number(run.stream[None]))[0] / 2
        assert float(effects[place[0], layer, place[1]]) == pytest.approx(float(expected))
    assert float(effects.abs().max()) > 1e-3


@torch.no_grad()
def test_a_prefix_that_texts_share_does_not_change_effects_of_parts(case):
    view, runs, number = case
    effects = patched_effects(runs, number)
    mixed = [run.mixed[1] for run in runs]
    width = mixed[0].shape[1] // view.n_heads
    expected = 0
    for run, other, sign in ((runs[0], mixed[1], 1), (runs[1], mixed[0], -1)):

        def give(_, args, other=other):
            return (torch.cat([args[0][..., :-width], other[None, :, -width:]], -1),)

        stream = run.run_from(0, 1, [(view.parts.layers[1].heads.out.module, True, give)])
        expected += sign * (number(run.stream[None]) - number(stream))[0] / 2
    assert float(effects.heads[1, -1]) == pytest.approx(float(expected))
    assert abs(float(expected)) > 1e-6


def test_gradients_are_slopes_and_flows_of_the_stream_add_up(case):
    view, runs, number = case
    slopes = recipe.gradients(runs, number, [1.0])
    row = torch.randn(view.d_model, generator=torch.Generator().manual_seed(0)).double()
    for layer, place in [(0, (0, 2)), (1, (1, 3)), (1, (2, len(runs[0].ids) - 1))]:
        values = [
            number(streams_with(view, runs[0], layer, place, step * row)) for step in (1e-4, -1e-4)
        ]
        slope = float((values[0] - values[1])[0]) / 2e-4
        assert float(slopes[place[0], layer, place[1]] @ row) == pytest.approx(slope, rel=1e-4)
    texts = [run.ids for run in runs]
    attributed = recipe.by_position(view, Pair("", *texts, DIRECTION.token, DIRECTION.minus))
    flows = torch.tensor(attributed["residual"]["contrastive flow"]).reshape(view.n_layers, -1)
    change = float((number(runs[0].stream[None]) - number(runs[1].stream[None]))[0])
    assert flows.sum(1).tolist() == pytest.approx([change] * view.n_layers)

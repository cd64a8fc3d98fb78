"""Changed passes are those of the model with hooks by hand; parts have one address."""

from contextlib import ExitStack

import pytest
import torch

from bilens.transformer import ResidualModel
from bilens.transformer.exchange import exchange, exchange_parts
from bilens.transformer.parts import Part
from bilens.transformer.passes import Pass, logit_of
from tests.families import ALL, DAILY, EACH, exact_norms, some_text, tiny
from tests.flows.flows import part_modules
from tests.models import random_model, random_text
from tests.nightly import nightly


@pytest.mark.parametrize(
    "name", nightly((n for n in ALL if n not in ("llama-tied", "neox")), DAILY)
)
def test_a_mixture_is_the_model_with_hooks(name):
    view, (first, second) = ResidualModel(tiny(name)), some_text()[:2]
    second[:2] = first[:2]
    torch.manual_seed(0)
    keep = torch.rand(view.n_layers, len(first), view.n_heads + 1).double()
    with exact_norms():
        start, other = Pass.of(view, first[None]), Pass.of(view, second[None])
        # One set is changed in the last layer only, and joins the batch there; one is unchanged.
        whole = torch.ones_like(keep)
        late = whole.clone()
        late[-1, :, -1] = 0
        rows = exchange(start, other, [keep, late, whole, keep])[:, 0]
        with ExitStack() as hooks:
            for i, (out, mlp) in enumerate(part_modules(view)):

                def mix(_, args, shares=keep[i, :, :-1], mixed=other.values.inputs[out]):
                    share = shares.repeat_interleave(mixed.shape[2] // view.n_heads, 1)
                    return (share * args[0] + (1 - share) * mixed, *args[1:])

                def write(_, __, y, share=keep[i, :, -1:], output=other.values.outputs[mlp]):
                    return share * y + (1 - share) * output

                hooks.enter_context(out.register_forward_pre_hook(mix))
                hooks.enter_context(mlp.register_forward_hook(write))
            expected = view.model(first[None], use_cache=False).logits[0, -1]
        whole = view.model(first[None], use_cache=False).logits[0, -1]

    def logits(x):
        W, b = view.modules.logit_weights()
        z, cap = view.modules.normalised(x[-1]) @ W + b, view.modules.softcap
        return z if cap is None else cap * torch.tanh(z / cap)

    for row, wanted in ((rows[0], expected), (rows[2], whole), (rows[3], expected)):
        torch.testing.assert_close(logits(row), wanted.double(), rtol=1e-5, atol=1e-6)
    assert (rows[1] - rows[2]).abs().max() > 1e-3
    assert (expected - whole).abs().max() > 1e-3


def test_gradients_by_shares_are_central_differences(view):
    keep = torch.rand(2, 5).double()
    start, other = (Pass.of(view, random_text(seed=seed)[None]) for seed in (1, 2))
    number = logit_of(view, view.direction(3))
    with torch.enable_grad():
        shares = keep.clone().requires_grad_()
        value = number(exchange(start, other, [shares])[0]).sum()
        (slope,) = torch.autograd.grad(value, shares)
    steps = 1e-6 * torch.eye(10).double().reshape(10, 2, 5)
    shifted = [keep + step for step in torch.cat([steps, -steps])]
    up, down = number(exchange(start, other, shifted)[:, 0]).unflatten(0, (2, 10))
    torch.testing.assert_close(slope.flatten(), (up - down) / 2e-6, rtol=1e-5, atol=1e-8)
    assert slope.abs().max() > 1e-3


@pytest.mark.parametrize("name", EACH)
def test_texts_side_by_side_are_each_by_itself(name):
    view, first = ResidualModel(tiny(name)), some_text()[:3]
    # As many texts as positions: arguments of layers tell texts by another number of them.
    first = torch.cat([first, (1 + first) % 30])[:, :6]
    second = first.flip(0)
    torch.manual_seed(0)
    keep = torch.rand(view.n_layers, view.n_heads + 1).double()
    with exact_norms():
        start, other = Pass.of(view, first), Pass.of(view, second)
        sets = [keep, torch.ones_like(keep)]
        together = exchange(start, other, sets)
        for row in (0, 4):
            passes = Pass.of(view, first[row][None]), Pass.of(view, second[row][None])
            parts = start.some([row]), other.some([row])
            for a, b in (passes, parts):
                alone = exchange(a, b, sets)
                torch.testing.assert_close(alone[:, 0], together[:, row], rtol=1e-6, atol=1e-8)
        some = exchange(start.some([4, 0]), other.some([4, 0]), [keep])
        torch.testing.assert_close(some[0], together[0, [4, 0]], rtol=1e-6, atol=1e-8)
    assert (together[0] - together[1]).abs().max() > 1e-3


def test_modules_of_which_nothing_is_kept_do_not_run():
    view = ResidualModel(random_model(n_layers=3, norm="rms"))
    start, other = (Pass.of(view, random_text(seed=seed)[None], parts=True) for seed in (1, 2))
    keep = torch.rand(2, 3, 5).double()
    keep[:, 1] = 0
    keep[1, 0] = 0
    rows = dict.fromkeys([x.mlp.down.module for x in view.modules.layers], 0)

    def count(module, args):
        rows[module] += args[0].shape[:-1].numel()

    handles = [module.register_forward_pre_hook(count) for module in rows]
    streams = exchange(start, other, keep)
    for handle in handles:
        handle.remove()
    time = start.ids.shape[1]
    assert list(rows.values()) == [time, 0, 2 * time]
    # So small a share is rounded away, but runs.
    torch.testing.assert_close(streams, exchange(start, other, keep.clamp(min=1e-30)))


def test_addresses_name_parts(view):
    for address in ("mlp.1", "head.0.3", "head.1.2@4"):
        assert str(Part.parse(address, view)) == address
    start, other = (Pass.of(view, random_text(seed=seed)[None]) for seed in (1, 2))
    at_one, at_all = (
        exchange_parts(start, other, [[Part.parse(address, view)]])[0, 0]
        for address in ("head.1.2@4", "head.1.2")
    )
    torch.testing.assert_close(at_one[:4], start.stream[0, :4])
    assert not torch.allclose(at_one[4], start.stream[0, 4])
    assert not torch.allclose(at_all[:4], start.stream[0, :4])

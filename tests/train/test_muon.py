"""Muon beside AdamW: the weights of each, and the size of a step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.nn.language import LanguageModel
from bilens.train.language import MuonWithAdamW
from tests.models import random_text, small_config

LR, DECAY = 1e-2, 0.1


def small_model(seed=0, **parts):
    torch.manual_seed(seed)
    sizes = {"n_layers": 2, "norm": "rms", "positions": "learned", "bias": True}
    return LanguageModel(small_config(**{**sizes, **parts}))


def muon(model, decay=DECAY):
    return MuonWithAdamW(model, lr=LR, weight_decay=decay)


def step(model, optimizer, seed=0):
    """Make a step along random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)
    optimizer.step()


def copies(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def inside(name, weight):
    return name.startswith("blocks.") and weight.ndim == 2


@given(st.integers(1, 3).map(lambda n: 8 * n), st.integers(5, 40), st.integers(0, 9))
def test_a_step_has_one_size_in_all_directions(width, hidden, seed):
    model = small_model(seed, d_model=width, d_hidden=hidden)
    before = copies(model)
    step(model, muon(model), seed)
    for name, weight in model.named_parameters():
        if not inside(name, weight):
            continue
        moved = (before[name] * (1 - LR * DECAY) - weight).double() / (0.2 * LR)
        U, S, Vh = torch.linalg.svd(weight.grad.double(), full_matrices=False)
        # The momentum of a first step is the gradient; five iterations leave sizes near 1.
        sizes = (U.mT @ moved @ Vh.mT).diagonal() / max(weight.shape) ** 0.5
        flat = sizes[0.05 * U.shape[-1] ** 0.5 < S]
        assert ((flat > 0.6) & (flat < 1.3)).all()


def test_all_else_is_left_to_adamw():
    custom, theirs = small_model(), small_model()
    others = {n: w for n, w in theirs.named_parameters() if not inside(n, w)}
    groups = [
        {"params": [w for w in others.values() if (w.ndim > 1) is maps], "weight_decay": decay}
        for maps, decay in ((True, DECAY), (False, 0.0))
    ]
    pairs = (custom, muon(custom)), (theirs, torch.optim.AdamW(groups, lr=LR))
    for seed in range(3):
        for model, optimizer in pairs:
            step(model, optimizer, seed)
    for name, weight in custom.named_parameters():
        assert torch.equal(weight, theirs.get_parameter(name)) is (name in others)
    kinds = {name.rpartition(".")[0].split(".")[-1] for name in others}
    assert kinds >= {"embed", "unembed", "pos_embed", "norm", "attn_norm", "query"}


def test_a_shared_embedding_is_one_weight():
    model = small_model(tie_word_embeddings=True)
    weights = [weight for group in muon(model).param_groups for weight in group["params"]]
    assert len(weights) == len(set(weights)) == len(list(model.parameters()))


@pytest.mark.parametrize("loaded", [False, True])
def test_the_groups_rule_both_parts(loaded):
    model = small_model()
    optimizer = muon(model)
    if loaded:
        step(model, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
    before = copies(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(model, optimizer)
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())


def test_a_saved_state_goes_on_to_the_bit():
    straight, resumed = small_model(), small_model()
    full, parts = muon(straight), muon(resumed)
    for seed in range(4):
        step(straight, full, seed)
        step(resumed, parts, seed)
        if seed == 1:
            saved, parts = parts.state_dict(), muon(resumed)
            parts.load_state_dict(saved)
    assert all(map(torch.equal, straight.parameters(), resumed.parameters()))


def test_a_closure_gives_the_loss():
    model, ids = small_model(), random_text()[None, :8]

    def closure():
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss

    assert muon(model, decay=0.0).step(closure) > 0

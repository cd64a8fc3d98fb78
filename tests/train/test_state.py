"""Damaged states, which no trainer should go on from."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from bilens.errors import CheckpointError
from bilens.train.state import STATE_NAME, TrainingState


def state(steps: int = 3, **settings) -> TrainingState:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    generator = torch.Generator().manual_seed(7)
    return TrainingState(model, optimizer, generator, {"steps": steps, **settings}, "steps")


@pytest.fixture
def saved(tmp_path):
    state().save(tmp_path, {"step": 2, "sum": torch.tensor(1.5), "history": [{"a": 1}]})
    return tmp_path


def test_what_was_saved_comes_back(saved):
    expected, found = state(), state(steps=4)
    with torch.no_grad():
        found.model.weight.zero_()
    torch.randn(5, generator=found.generator)
    record = found.load(saved)
    assert record == {"step": 2, "sum": torch.tensor(1.5), "history": [{"a": 1}]}
    assert torch.equal(found.model.weight, expected.model.weight)
    drawn = [torch.randn(3, generator=s.generator) for s in (found, expected)]
    assert torch.equal(*drawn)
    for s in (found, expected):
        s.model(torch.ones(2)).sum().backward()
        s.optimizer.step()
    assert torch.equal(found.model.weight, expected.model.weight)


def edit(run, change, metadata=None):
    tensors = load_file(run / STATE_NAME)
    change(tensors)
    record = {"record": '{"settings": {"steps": 3}, "step": 2}'}
    save_file(tensors, run / STATE_NAME, metadata or record)


def keep(tensors):
    pass


DAMAGES = [
    (lambda run: (run / STATE_NAME).write_bytes(b""), "damaged"),
    (lambda run: (run / STATE_NAME).write_bytes(b"\0" * 30), "damaged"),
    (lambda run: save_file({}, run / STATE_NAME), "damaged"),
    (lambda run: edit(run, keep, {"record": "{"}), "damaged"),
    (lambda run: edit(run, keep, {"record": "[1]"}), "damaged"),
    (lambda run: edit(run, keep, {"record": "{}"}), "damaged.*settings"),
    (lambda run: edit(run, keep, {"record": '{"settings": 1}'}), "damaged"),
    (lambda run: edit(run, lambda t: t.pop("model.bias")), "does not fit the model.*bias"),
    (lambda run: edit(run, lambda t: t.update({"model.bias": torch.ones(9)})), "does not fit.*9"),
    (lambda run: edit(run, lambda t: t.pop("generator")), "does not fit.*generator"),
    (lambda run: edit(run, lambda t: t.update(generator=torch.ones(1))), "does not fit"),
    (lambda run: edit(run, lambda t: t.update({"optimizer.x.y": torch.ones(1)})), "does not fit"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_state_is_refused(saved, damage, message):
    damage(saved)
    with pytest.raises(CheckpointError, match=f"(?s){message}.*train again without --resume"):
        state().load(saved)


def test_other_settings_are_refused(saved):
    with pytest.raises(CheckpointError, match="trained with l1=None, not 0.5.*steps alone may"):
        state(l1=0.5).load(saved)
    with pytest.raises(CheckpointError, match="steps=3, not 2"):
        state(steps=2).load(saved)

"""Models that accelerate has placed are read as on one device, and their weights stay in files."""

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from benchmarks.device_map import EXACT, FAMILIES, measured
from experiments.families import make, texts
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import bilens
from bilens.circuits import patch
from bilens.errors import BilensError
from bilens.flows import flow
from bilens.transformer import ResidualModel, model
from bilens.transformer.dispatched import leave_in_files
from tests.devices import second_device
from tests.nightly import nightly

EACH = nightly(FAMILIES, ("mixtral",))
FIRST, SECOND = texts()


@pytest.mark.parametrize("family", EACH)
def test_every_map_gives_the_readings_of_one_device(family):
    found = measured(family)
    assert len(found) == 4
    assert max(found.values()) < EXACT


def test_offloaded_weights_stay_in_files_and_the_module_as_it_is(tmp_path):
    module = make("llama").requires_grad_(False)
    logits = module(FIRST[None]).logits
    accelerate.disk_offload(module, tmp_path, execution_device="cpu")
    view = ResidualModel(module)
    torch.testing.assert_close(view.logits(FIRST[None]), logits)
    assert all(weight.is_meta for weight in module.parameters())
    torch.testing.assert_close(module(FIRST[None]).logits, logits)
    # What is written into the file is read from there.
    name = "model.layers.1.mlp.up_proj.weight"
    (tmp_path / f"{name}.dat").write_bytes(bytes((tmp_path / f"{name}.dat").stat().st_size))
    assert not dict(view.model.named_parameters())[name].any()
    with pytest.raises(BilensError, match="accelerate has placed the parts of the model"):
        view.to("cpu")


def test_what_says_where_weights_lie_is_said_once(tmp_path):
    make("gpt2").save_pretrained(tmp_path)
    for more, message in (
        ({"device": "cpu"}, "device_map and device both say where"),
        ({"low_memory": True}, "device_map and low_memory, which leaves all in files, both say"),
    ):
        with pytest.raises(BilensError, match=message):
            bilens.load(tmp_path, device_map="auto", **more)
    for place, message in (
        ({"device_map": {"": "nowhere"}}, "device_map='nowhere' .*: expected disk, cpu, cuda, mps"),
        ({"device_map": {"": "diks"}}, "device_map='diks' .*; did you mean disk"),
        ({"device_map": "balancd"}, "expected auto, balanced, .*; did you mean balanced"),
        ({"device_map": "disk"}, "device_map='disk' .*: expected auto, balanced, balanced_low_0,"),
        ({"device_map": ["cpu"]}, "device_map=.* cannot be used here"),
        ({"device": "gpu"}, "device='gpu' .*: expected cpu, cuda, mps, .*; did you mean cuda"),
        ({"device": "cudda:0"}, "device='cudda:0' .*; did you mean cuda"),
    ):
        with pytest.raises(BilensError, match=message):
            bilens.load(tmp_path, **place)
    make("mixtral").save_pretrained(tmp_path)
    with pytest.raises(BilensError, match="for device_map=.*provide an `offload_folder`"):
        bilens.load(tmp_path, device_map={"": "disk"})


def test_a_share_of_a_weight_is_refused_by_name():
    module = make("llama")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        share = distribute_tensor(module.lm_head.weight.data, mesh, [Shard(0)])
        module.lm_head.weight = nn.Parameter(share, requires_grad=False)
        with pytest.raises(BilensError, match="lm_head.weight is a DTensor, of which each process"):
            ResidualModel(module)
    finally:
        distributed.destroy_process_group()


def hook(module, device):
    add_hook_to_module(module, AlignDevicesHook(device))


def on_two_devices(module, device):
    """Place all layers but the first on a device, as accelerate does, and the rest on the CPU."""
    base = module.base_model
    for part in base.children():
        if not isinstance(part, nn.ModuleList):
            hook(part, "cpu")
            continue
        hook(part[0], "cpu")
        for layer in part[1:]:
            for inner in layer.modules():
                for own, weight in [*inner.named_parameters(recurse=False)]:
                    setattr(inner, own, nn.Parameter(weight.to(device), requires_grad=False))
                for own, buffer in [*inner.named_buffers(recurse=False)]:
                    setattr(inner, own, buffer.to(device))
                if inner is layer or [*inner.parameters(recurse=False)]:
                    hook(inner, device)
    hook(module.get_output_embeddings(), "cpu")
    add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))


@pytest.mark.parametrize("family", nightly(FAMILIES, ("llama",)))
@pytest.mark.parametrize("kind", ["two devices", "weights on the CPU"])
def test_values_follow_the_part_that_they_belong_to(family, kind, monkeypatch):
    view = ResidualModel(make(family))
    expected = flow(view, FIRST, 5, minus=6, against=SECOND, ablate=0)
    effects = patch(view, FIRST, 5, minus=6, against=SECOND)
    module = make(family)
    # The second device of the tests calls itself meta.
    monkeypatch.setattr(model, "check_weights", lambda _: None)
    with second_device() as device:
        if kind == "two devices":
            on_two_devices(module, device)
        else:
            leave_in_files(module, device)
        view = ResidualModel(module)
        found = flow(view, FIRST, 5, minus=6, against=SECOND, ablate=0)
        torch.testing.assert_close(found.heads.cpu(), expected.heads)
        torch.testing.assert_close(found.mlps.cpu(), expected.mlps)
        moved = patch(view, FIRST, 5, minus=6, against=SECOND).noising
        torch.testing.assert_close(moved.cpu(), effects.noising, equal_nan=True)

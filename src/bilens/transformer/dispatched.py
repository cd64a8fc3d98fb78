"""Modules that accelerate has dispatched to several devices, with weights in files among them."""

from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bilens.errors import BilensError
from bilens.transformer.running import on_device

Model = TypeVar("Model", bound=nn.Module)


def check_whole(model: nn.Module) -> None:
    """Raise if processes share the weights of a model, as with tensor parallelism or FSDP.

    Raises:
        BilensError: a weight is a DTensor.
    """
    for name, weight in model.named_parameters():
        if type(weight.data).__name__ == "DTensor":
            raise BilensError(
                f"{name} is a DTensor, of which each process has a part, expected a whole weight; "
                "open the model without tp_plan. device_map places whole layers on devices"
            )


def is_dispatched(model: nn.Module) -> bool:
    """Return True if accelerate has given the parts of a model devices of their own."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def with_mapped_weights(model: Model) -> Model:
    """Return a model whose offloaded weights are tensors; the model itself if it has none.

    accelerate reads an offloaded weight for each run of its module, and puts a tensor without
    numbers in its place afterwards. A backward pass would keep all that were read, and no reading
    would find a weight. In this copy matrices are mapped from their files, or lie on the CPU where
    accelerate keeps them, and passes move one to the device of its module where it is used. Vectors
    are on that device. All other weights are shared with the model.
    """
    if not any(hook.offload for module in model.modules() for hook in _aligners(module)):
        return model
    memo: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for hook in _aligners(module):
            for weights_map in (hook.weights_map, hook.tied_params_map):
                memo[id(weights_map)] = weights_map
    copy = deepcopy(model, memo)
    for module in copy.modules():
        for hook in _aligners(module):
            if hook.offload:
                _put_back(module, hook)
    return copy


def leave_in_files(model: nn.Module, device: torch.device) -> None:
    """Let the passes of a model compute on a device, and its matrices stay where they are."""
    parameters: dict[int, nn.Parameter] = {}  # tied weights stay one
    for module in model.modules():
        for name, weight in [*module.named_parameters(recurse=False)]:
            parameters.setdefault(id(weight), on_device(weight.detach(), device))
            setattr(module, name, parameters[id(weight)])
        for name, buffer in [*module.named_buffers(recurse=False)]:
            setattr(module, name, buffer.to(device))


def _aligners(module: Any) -> list[Any]:
    """Return the hooks of accelerate that place a module's weights and inputs."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", () if hook is None else (hook,))
    return [hook for hook in hooks if hasattr(hook, "weights_map")]


def _put_back(module: nn.Module, hook: Any) -> None:
    """Give a module the weights that a hook reads for each run, and let the hook move only inputs.

    A hook may read those of the parts of its module, too.
    """
    device = torch.device("cpu" if hook.execution_device is None else hook.execution_device)
    for owner_name, owner in module.named_modules():
        for name, weight in [*owner.named_parameters(recurse=False)]:
            if weight.is_meta and (hook.place_submodules or owner is module):
                file_weight = _mapped(hook.weights_map, f"{owner_name}.{name}".lstrip("."))
                setattr(owner, name, on_device(file_weight, device))
        for name, buffer in [*owner.named_buffers(recurse=False)]:
            if buffer.is_meta and (hook.place_submodules or owner is module):
                file_weight = _mapped(hook.weights_map, f"{owner_name}.{name}".lstrip("."))
                setattr(owner, name, file_weight.to(device))
    hook.offload = False


def _mapped(weights: Any, name: str) -> Tensor:
    """Return a weight of accelerate's mappings, without a copy in memory."""
    while hasattr(weights, "dataset"):  # each adds the name of a module in front
        weights, name = weights.dataset, f"{weights.prefix}{name}"
    entry = getattr(weights, "index", {}).get(name)
    if entry is None or name in weights.state_dict or "safetensors_file" in entry:
        return weights[name]
    # accelerate's own files, which it copies into memory.
    kind, shape = getattr(torch, entry["dtype"]), entry["shape"]
    file = Path(weights.save_folder, f"{name}.dat")
    size = torch.Size(shape).numel()
    return torch.from_file(str(file), shared=False, size=size, dtype=kind).reshape(shape)

"""Open a saved model without knowing its kind."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.hub import PLACE, check_used, place_options
from bilens.lazy_imports import lazy_import
from bilens.nn import ImageClassifier
from bilens.nn.checkpoint import read_config
from bilens.options import check_docstrings
from bilens.shipped import find_model
from bilens.tensor import TensorChain
from bilens.tensor.chain import TensorStack

if TYPE_CHECKING:
    from bilens import transformer
    from bilens.convert import loading
else:  # transformers takes seconds to import, and classifiers do without it.
    transformer, loading = lazy_import("bilens.transformer"), lazy_import("bilens.convert.loading")

MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Maps of devices that transformers makes."""
DEVICES = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices, for messages: torch names all that it has ever heard of."""
FILES = (".gguf",)
"""Models that are one file have no config.json."""


@checked
@torch.inference_mode(False)
def load(
    source: str | Path | nn.Module,
    *,
    device: torch.device | str | None = None,
    low_memory: bool = False,
    input_shape: Sequence[int] | None = None,
    **hub: Any,
) -> "ImageClassifier | transformer.ResidualModel | TensorStack":
    """Return a model for reading: in evaluation mode, and if it was saved with its weights frozen.

    A transformer becomes a `ResidualModel`, with the tokenizer in its folder. Its `model` is the
    ordinary torch module, to train or to run; `requires_grad_()` thaws its weights.

    Args:
        source: a directory that a training wrote, or the name of a repository on the hub. It may be
            of bilens, of a known family of transformers, or of another known layout. "story" is the
            small model of English stories that comes with bilens. A .gguf file
            is a model too. A torch module of your own is a transformer of a known family, or a
            stack of bilinear layers. The tensors of a stack are found and compared with it
            (`bilens.tensor.chain.TensorStack`). Your module stays as it is, also in training mode:
            it is in evaluation mode only while a reading runs it.
        device: device of the weights; by default the CPU, and for a module of your own where it is,
            also where accelerate has dispatched it.
        low_memory: open a transformer that is larger than memory. Its weights stay in files, and a
            reading takes the memory of the layers that it works on, on the device if it has one. A
            GGUF file needs room beside it on the disk for its weights in float32.
        input_shape: shape of a single input of your own module, if it is not a vector.
        hub: passed to `from_pretrained`: revision, token, cache_dir, dtype, ... With `device_map`,
            max_memory and offload_folder accelerate spreads a transformer over devices, memory
            and files. Matrices that it leaves on the CPU or in files stay there, and one moves to
            the device of its layer while it is used.

    Raises:
        CheckpointError: the model is missing or damaged, or a weight is NaN.
        NotBilinearError: your own module is neither.
        BilensError: the structure of the model or the device is not known, your own module is on
            another device, an option is not used by the kind of model, or `device_map` is given
            beside `device` or `low_memory`.
    """
    options = {**hub, "low_memory": low_memory, "input_shape": input_shape}
    if isinstance(source, nn.Module):
        _check_place(source, device)
        return _open_module(source, options)
    if hub.get("device_map") is not None:
        _check_map(hub["device_map"], device, low_memory)
    else:
        of_map = {name: hub.get(name) for name in ("max_memory", "offload_folder")}
        check_used("a model without device_map", of_map)
    device, source = check_device("cpu" if device is None else device), find_model(source)
    place = place_options(hub)
    settings = {} if Path(source).suffix in FILES else read_config(source, **place)
    if settings.get("model_type") == ImageClassifier.model_type:
        check_used("an image classifier", options, *PLACE)
        return ImageClassifier.from_pretrained(source, device=device, **hub).requires_grad_(False)
    check_used("a model of a folder or a file", {"input_shape": input_shape})
    check_docstrings()
    result = loading.open_any(source, low_memory=low_memory, **hub)
    model: Any = result.requires_grad_(False)
    if low_memory:
        transformer.dispatched.leave_in_files(model, device)
    elif not transformer.dispatched.is_dispatched(model):
        model = model.to(device)
    if isinstance(model, ImageClassifier):
        return model
    view = transformer.ResidualModel(model, loading.find_tokenizer(source, model, **place))
    view.source = source
    return view


def _open_module(module: nn.Module, options: Mapping[str, Any]) -> Any:
    if isinstance(module, TensorChain):
        check_used("a model that is open", options)
        return module
    transformer.families.check_merged(module)
    # Models of transformers have a type in their configuration, and are no stacks of layers.
    is_transformer = hasattr(getattr(module, "config", None), "model_type")
    if is_transformer or type(module).__name__ in transformer.families.known_families():
        check_used("a transformer that is open", options)
        return transformer.ResidualModel(module)
    check_used("a stack of layers that is open", options, "input_shape")
    return TensorStack(module, options["input_shape"])


def _check_place(module: nn.Module, device: torch.device | str | None) -> None:
    """Raise unless a module is on the device that was asked for."""
    if device is None:
        return
    target = torch.empty(0, device=check_device(device)).device
    others = {str(p.device) for p in module.parameters() if p.device != target}
    if others:
        raise BilensError(
            f"device={str(device)!r}, but your own module is on {', '.join(sorted(others))}; "
            "expected its device. Leave it out, or move the module first, by module.to(device)"
        )


def _check_map(device_map: Any, device: object, low_memory: bool) -> None:
    """Raise unless a device map can be followed, and nothing else says where weights lie."""
    if find_spec("accelerate") is None:
        raise BilensError("device_map takes the package accelerate: pip install accelerate")
    if device is not None or low_memory:
        other = "low_memory, which leaves all in files," if low_memory else "device"
        raise BilensError(
            f"device_map and {other} both say where weights lie; leave one of them out"
        )
    if isinstance(device_map, Mapping):
        for place in device_map.values():
            if place != "disk":
                check_device(place, "device_map", ("disk",))
    elif device_map not in MAPS:
        check_device(device_map, "device_map", MAPS)


def check_device(
    device: torch.device | str | int, name: str = "device", others: Sequence[str] = ()
) -> torch.device:
    """Return a device; raise BilensError unless numbers can be stored there.

    `name` is the argument's name in the message, and `others` are its values that are no devices.
    """
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        # "meta" has shapes without numbers, and fails at item().
        reason = str(error).splitlines()[0]
        if "device string" in reason:
            names = (*others, *DEVICES)
            near = ["cuda"] if "gpu" in str(device) else get_close_matches(str(device), names, n=1)
            reason = f"expected {', '.join(names)}, or one of several devices, such as cuda:1"
            reason += f"; did you mean {near[0]}?" if near else ""
        raise BilensError(f"{name}={str(device)!r} cannot be used here: {reason}") from error
    return torch.device(device)

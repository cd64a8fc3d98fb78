"""Open a saved model without knowing its kind."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bilens.errors import BilensError
from bilens.lazy_imports import lazy_import
from bilens.nn import ImageClassifier, SparseAutoencoder, read_config

if TYPE_CHECKING:
    from bilens import residual
    from bilens.convert import loading
else:  # transformers takes seconds to import, and classifiers do without it.
    residual, loading = lazy_import("bilens.residual"), lazy_import("bilens.convert.loading")

OWN: dict[str, type[ImageClassifier] | type[SparseAutoencoder]] = {
    kind.model_type: kind for kind in (ImageClassifier, SparseAutoencoder)
}
FILES = (".bin", ".gguf")
"""Models that are one file have no config.json: those of llama2.c, and GGUF."""


def load(
    source: str | Path, *, device: torch.device | str = "cpu", **hub: Any
) -> "ImageClassifier | SparseAutoencoder | residual.ResidualModel":
    """Return a saved model for reading: in evaluation mode, its weights frozen.

    A transformer becomes a `ResidualModel`, with the tokenizer in its folder. Its `model` is the
    ordinary torch module, to train or to run; `requires_grad_()` thaws its weights.

    Args:
        source: a directory that a training wrote, or the name of a repository on the hub. It may be
            of bilens, of a known family of transformers, or of another known layout. A .gguf file
            and a .bin file of llama2.c are models too.
        device: device of the weights.
        hub: passed to `from_pretrained`: revision, token, cache_dir, dtype, ...

    Raises:
        CheckpointError: the model is missing or damaged, or a weight is NaN.
        BilensError: the structure of the model or the device is not known.
    """
    check_device(device)
    settings = {} if Path(source).suffix in FILES else read_config(source, **_place(hub))
    kind = OWN.get(str(settings.get("model_type")))
    model: Any
    if kind is not None:
        model = kind.from_pretrained(source, device=device, **hub)
        return model.requires_grad_(False)
    model = loading.open_any(source, **hub).requires_grad_(False).to(device)
    if isinstance(model, ImageClassifier):
        return model
    return residual.ResidualModel(model, loading.find_tokenizer(source, model))


def _place(hub: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in hub.items() if name != "dtype"}


def check_device(device: torch.device | str, name: str = "device") -> torch.device:
    """Return a device; raise BilensError unless numbers can be stored there.

    `name` is the argument's name in the message.
    """
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ValueError) as error:
        # "meta" has shapes without numbers, and fails at item().
        reason = str(error).splitlines()[0]
        raise BilensError(f"{name}={str(device)!r} cannot be used here: {reason}") from error
    return torch.device(device)

"""Open a saved model without knowing its kind."""

from pathlib import Path
from typing import Any

import torch

from bilens.errors import CheckpointError
from bilens.nn import ImageClassifier, SparseAutoencoder, read_config

__all__ = ["load"]

KINDS: dict[str | None, type[ImageClassifier] | type[SparseAutoencoder]] = {
    kind.model_type: kind for kind in (ImageClassifier, SparseAutoencoder)
}


def load(
    source: str | Path, *, device: torch.device | str = "cpu", **hub: Any
) -> ImageClassifier | SparseAutoencoder:
    """Load a saved model for reading: in evaluation mode, its weights frozen.

    To train it further, thaw it with `requires_grad_()`.

    Args:
        source: a directory that a training wrote, or the name of a repository.
        device: where the weights go.
        hub: passed to `huggingface_hub.hf_hub_download`: revision, token, cache_dir, ...

    Raises:
        CheckpointError: there is no model, it is damaged, or of a kind this version cannot read.
    """
    kind = read_config(source, **hub).get("model_type")
    if kind not in KINDS:
        raise CheckpointError(
            f"{source} holds a model of type {kind!r}; this version of bilens reads "
            f"{', '.join(map(str, KINDS))}"
        )
    return KINDS[kind].from_pretrained(source, device=device, **hub).requires_grad_(False)

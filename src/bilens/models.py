"""Open a saved model without knowing its kind."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bilens.errors import CheckpointError
from bilens.nn import ImageClassifier, SparseAutoencoder, read_config

if TYPE_CHECKING:
    from bilens.nn.language import LanguageModel

__all__ = ["load"]

LANGUAGE = "bilens-language"
OWN: dict[str, type[ImageClassifier] | type[SparseAutoencoder]] = {
    kind.model_type: kind for kind in (ImageClassifier, SparseAutoencoder)
}


def load(
    source: str | Path, *, device: torch.device | str = "cpu", **hub: Any
) -> "ImageClassifier | SparseAutoencoder | LanguageModel":
    """Load a saved model for reading: in evaluation mode, its weights frozen.

    To train it further, thaw it with `requires_grad_()`.

    Args:
        source: a directory that a training wrote, or the name of a repository.
        device: where the weights go.
        hub: passed to `huggingface_hub.hf_hub_download`: revision, token, cache_dir, ...

    Raises:
        CheckpointError: there is no model, it is damaged, or of a kind this version cannot read.
    """
    kind = str(read_config(source, **hub).get("model_type"))
    if kind in OWN:
        return OWN[kind].from_pretrained(source, device=device, **hub).requires_grad_(False)
    if kind != LANGUAGE:
        raise CheckpointError(
            f"{source} holds a model of type {kind!r}; this version of bilens reads "
            f"{', '.join([*OWN, LANGUAGE])}"
        )
    model: LanguageModel = _load_language(source, **hub).to(device).eval().requires_grad_(False)
    return model


def _load_language(source: str | Path, **hub: Any) -> Any:
    # transformers takes seconds to import, and classifiers do without it.
    from bilens.convert import open_model  # noqa: PLC0415

    return open_model(source, **hub)

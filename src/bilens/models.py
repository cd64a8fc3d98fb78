"""Open a saved model without knowing its kind."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from bilens.errors import BilensError, CheckpointError
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
    from bilens.nn.language import LanguageModel  # noqa: PLC0415
    from bilens.nn.language.quiet import quiet  # noqa: PLC0415

    try:
        with quiet():
            found: Any = LanguageModel.from_pretrained(
                source, output_loading_info=True, use_safetensors=True, **hub
            )
    except (SafetensorError, OSError, RuntimeError, ValueError, BilensError) as error:
        raise CheckpointError(f"{source} holds no whole language model: {error}") from error
    model, report = found
    wrong = {name: names for name, names in report.items() if names}
    if wrong:
        text = "; ".join(f"{name}: {sorted(map(str, names))}" for name, names in wrong.items())
        raise CheckpointError(
            f"{source}: the weights do not fit config.json ({text}). Train again, or fetch the "
            "files again."
        )
    return model

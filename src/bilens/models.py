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

    Scalar norms of a language model are folded into its weights.
    To train it further, thaw it with `requires_grad_()`.

    Args:
        source: a directory that a training wrote, or the name of a repository. Other people's
            checkpoints in a known layout are models of bilens too, told by their config.json.
        device: where the weights go.
        hub: passed to `huggingface_hub.hf_hub_download`: revision, token, cache_dir, ...

    Raises:
        CheckpointError: there is no model, it is damaged, or of a kind this version cannot read.
    """
    settings = read_config(source, **hub)
    kind = str(settings.get("model_type"))
    if kind in OWN:
        return OWN[kind].from_pretrained(source, device=device, **hub).requires_grad_(False)
    model: LanguageModel = _open(source, settings, **hub).to(device).eval().requires_grad_(False)
    return model


def _open(source: str | Path, settings: dict[str, Any], **hub: Any) -> Any:
    # transformers takes seconds to import, and classifiers do without it.
    from bilens.convert import open_model  # noqa: PLC0415
    from bilens.convert.layouts import find_layout  # noqa: PLC0415
    from bilens.nn.language import fold_scalar_norms  # noqa: PLC0415

    if settings.get("model_type") == LANGUAGE:
        return fold_scalar_norms(open_model(source, **hub))  # type: ignore[arg-type]
    layout = find_layout(settings)
    if layout is None:
        raise CheckpointError(
            f"{source} holds a model of type {settings.get('model_type')!r}; this version of "
            f"bilens reads {', '.join([*OWN, LANGUAGE])}, and other people's checkpoints in the "
            "layouts that docs/convert.md lists"
        )
    return layout.open(source, settings, **hub)

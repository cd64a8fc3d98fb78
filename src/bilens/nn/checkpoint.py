"""Saving and loading modules as safetensors and JSON, in directories or on the hub."""

import os.path
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import ModelCard, ModelHubMixin, constants, file_exists, hf_hub_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from bilens.checks import check_weights, checked
from bilens.errors import CheckpointError
from bilens.files import check_downloaded, read_json_object, write_json, write_safetensors
from bilens.hub import HTTPError, hub_options
from bilens.nn.card import CARD_NAME, model_card
from bilens.settings import read_settings

CONFIG_NAME: str = constants.CONFIG_NAME
ADAPTER_NAME = "adapter_config.json"
"""File of an adapter, such as LoRA, that PEFT adds to a model."""
WEIGHTS_NAME: str = constants.SAFETENSORS_SINGLE_FILE


class Checkpointed(nn.Module, ModelHubMixin):
    """A module that saves and loads itself, here and on the hub, without pickle.

    `save_pretrained` is the hub's own. Loading is strict: a setting or a tensor that is missing,
    unknown or of another shape is an error, never skipped.

    Attributes:
        model_type: name of this kind of model in the configuration.
        config_class: frozen dataclass of the constructor's argument.
        source: directory of its training or of its file, for the model card.
    """

    model_type: ClassVar[str]
    config_class: ClassVar[type[Any]]
    source: str | Path | None = None

    def save_files(self, directory: Path) -> None:
        """Write the weights and the configuration, each file completely or not at all."""
        write_safetensors(directory / WEIGHTS_NAME, self.state_dict())
        write_json(directory / CONFIG_NAME, self._settings())

    def _settings(self) -> dict[str, Any]:
        return {"model_type": self.model_type, **asdict(self._hub_mixin_config)}  # type: ignore[arg-type]

    def generate_model_card(self, **about: Any) -> ModelCard:
        """Return the card of the model: settings, training, metrics, and code to open it."""
        return model_card(self._settings(), self.source, **about)

    def _save_pretrained(self, save_directory: Path) -> None:
        self.save_files(save_directory)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the model to the hub, with a model card if the hub has none."""
        options["model_card_kwargs"] = {"repo_id": repo_id}
        if file_exists(repo_id, CARD_NAME, token=options.get("token")):
            options.setdefault("ignore_patterns", CARD_NAME)
        return super().push_to_hub(repo_id, **options)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        device: torch.device | str = "cpu",
        **hub: Any,
    ) -> Self:
        """Load a saved model from a directory, or from a repository on the hub.

        Args:
            pretrained_model_name_or_path: the directory, or the repository's name.
            device: device of the weights.
            hub: passed to `huggingface_hub.hf_hub_download`: revision, token, cache_dir, ...

        Raises:
            CheckpointError: a file is missing or damaged, or the two do not fit together.
        """
        source = pretrained_model_name_or_path
        settings = read_config(source, **hub)
        kind = settings.pop("model_type", None)
        if kind != cls.model_type:
            raise CheckpointError(
                f"{source} holds a model of type {kind!r}; {cls.__name__} loads "
                f"{cls.model_type!r}. bilens.load() finds the right class by itself."
            )
        config = read_settings(cls.config_class, settings, Path(source) / CONFIG_NAME)
        # Without memory for its weights, whose shapes have to be those of the file.
        with torch.device("meta"):
            model = cls(config)
        path = fetch(source, WEIGHTS_NAME, **hub)
        # In the dtype of the model's class. A name that it lacks is reported by load_state_dict.
        kinds = {name: weight.dtype for name, weight in model.state_dict().items()}
        try:
            weights = load_file(path, str(device))
            # Copied: a mapped file has another alignment, and the file may be deleted later.
            state = {n: w.to(dtype=kinds.get(n), copy=True) for n, w in weights.items()}
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} is damaged and cannot be read as safetensors ({error}). Train again, or "
                "fetch the file again."
            ) from error
        try:
            model.load_state_dict(state, assign=True)
        except RuntimeError as error:
            raise CheckpointError(f"{path} does not fit its {CONFIG_NAME}: {error}") from error
        check_weights(model)
        model.source = source
        return model.eval()


def fetch(source: str | Path, name: str, **hub: Any) -> Path:
    """Return the path of a file of a saved model, from a directory or the hub."""
    if os.path.isdir(source):  # noqa: PTH112  pathlib raises for names that are too long
        path = Path(source, hub.get("subfolder") or "", name)
        if not path.is_file():
            advice = (
                "only an adapter of another model: `bilens diff BASE ADAPTER` reads its change. "
                "For a whole model merge it (merge_and_unload() of PEFT), and save the result"
                if (Path(source) / ADAPTER_NAME).is_file()
                else f"expected the directory of a saved model, with {CONFIG_NAME} and "
                f"{WEIGHTS_NAME} in it"
            )
            raise CheckpointError(f"{source} holds no {name}; {advice}")
        return check_downloaded(path)
    if os.path.isfile(source):  # noqa: PTH113  as above
        raise CheckpointError(
            f"{source} is a file, expected the folder of a model, such as {Path(source).parent}, "
            "or a .gguf file"
        )
    try:
        validate_repo_id(str(source))
        return Path(hf_hub_download(str(source), name, **{**hub, **hub_options(source)}))
    except (HTTPError, HFValidationError, OSError, ValueError) as error:
        remedy = (
            "It is no name of the hub either. Train a model with `bilens train images`"
            if isinstance(error, HFValidationError)
            else f"Check the name and the connection. `hf download {source}` on a machine with a "
            "connection fetches it for use offline; a folder of this machine is given by its path."
        )
        raise CheckpointError(
            f"{source} is not a directory here, and {name} could not be fetched from the hub. "
            + remedy
        ) from error


@checked
def read_config(source: str | Path, **hub: Any) -> dict[str, Any]:
    """Return the settings of a saved model with its `model_type`; CheckpointError if damaged."""
    return read_json_object(fetch(source, CONFIG_NAME, **hub))

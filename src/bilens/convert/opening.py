"""Open and save language models of any kind, whole or not at all."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from bilens.convert.layouts import Layout, find_layout
from bilens.convert.llama2c import is_llama2c, llama2c_model, llama2c_tokenizer
from bilens.convert.record import read_record
from bilens.convert.swish import base_activation, find_swish, give_swish
from bilens.errors import BilensError, CheckpointError
from bilens.files import UNFINISHED
from bilens.nn.language import LanguageConfig
from bilens.nn.language.quiet import quiet

__all__ = ["open_model", "open_tokenizer", "save_model"]

OWN = LanguageConfig.model_type  # importing it has made transformers know it
PLACE = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
ERRORS = (SafetensorError, OSError, RuntimeError, ValueError, KeyError, BilensError)


def open_model(source: str | Path, **hub: Any) -> PreTrainedModel:
    """Open a causal language model of transformers, bilens or a known layout as it was saved.

    That is with the biases that processing gave it and, in the middle of annealing, with its
    Swish. Nothing but tensors is unpickled, and no code of the model's own is run.

    Args:
        source: a folder, the name of a repository, or a .bin file of llama2.c. A folder or
            repository may be one of `bilens.convert.layouts`, told by its config.json.
        hub: passed to `from_pretrained`: revision, token, dtype, ...

    Raises:
        CheckpointError: there is no model, a file is missing or damaged, or weights and
            configuration do not fit together.
    """
    if is_llama2c(source):
        return llama2c_model(Path(source))
    place = {name: value for name, value in hub.items() if name in PLACE}
    with _whole(source):
        settings: dict[str, Any] = PreTrainedConfig.get_config_dict(source, **place)[0]
    layout = find_layout(settings)
    if layout is not None:
        return _open_layout(layout, source, settings, hub.get("dtype"), **place)
    with _whole(source):
        config = AutoConfig.from_pretrained(source, **place)
        swish = find_swish(config)
        if swish is not None:
            base_activation(config)
        kind = _with_biases(_class_of(config), read_record(config)["added_biases"])
        model, report = kind.from_pretrained(
            source, config=config, output_loading_info=True, use_safetensors=True, **hub
        )
    wrong = {name: names for name, names in report.items() if names}
    if wrong:
        text = "; ".join(f"{name}: {sorted(map(str, names))}" for name, names in wrong.items())
        raise CheckpointError(
            f"{source}: the weights do not fit config.json ({text}). Train again, or fetch the "
            "files again."
        )
    model.__class__ = kind.__mro__[1]
    if swish is not None:
        give_swish(model).beta = swish
    return cast(PreTrainedModel, model.eval())


def open_tokenizer(source: str | Path, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer that was saved with a model; tokN.bin beside a model of llama2.c with N tokens.

    Checkpoints of a known layout may name a tokenizer of the hub instead of having one.

    Raises:
        CheckpointError: it is missing or damaged, or has more tokens than the model.
    """
    if is_llama2c(source):
        size = model.config.vocab_size
        return llama2c_tokenizer(Path(source).with_name(f"tok{size}.bin"), size)
    try:
        name = _named_tokenizer(source) or source
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except ERRORS as error:
        raise CheckpointError(f"{source} holds no whole tokenizer: {error}") from error
    if len(tokenizer) > model.config.vocab_size:
        raise CheckpointError(
            f"The tokenizer in {source} has {len(tokenizer)} tokens, the model "
            f"{model.config.vocab_size}; they do not belong together"
        )
    return tokenizer


def save_model(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Write a model and its tokenizer, each file whole or not at all.

    Args:
        directory: where to.
        model: what to write.
        tokenizer: goes beside it.
        state: its weights, where several processes held parts of them.

    Raises:
        CheckpointError: the disk is full, or refuses.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=UNFINISHED) as name, quiet():
            model.save_pretrained(name, state_dict=state)
            if tokenizer is not None:
                tokenizer.save_pretrained(name)
            # The configuration is what a model is recognised by, so it comes last.
            files = sorted(Path(name).iterdir(), key=lambda path: path.name == "config.json")
            for file in files:
                file.replace(directory / file.name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"The model could not be written to {directory}: {error}") from error


@contextmanager
def _whole(source: str | Path) -> Iterator[None]:
    try:
        with quiet():
            yield
    except ERRORS as error:
        raise CheckpointError(
            f"{source} holds no whole language model, and none could be fetched from the hub by "
            f"this name: {error}"
        ) from error


def _open_layout(
    layout: Layout, source: str | Path, settings: dict[str, Any], dtype: Any, **place: Any
) -> PreTrainedModel:
    model = layout.open(source, settings, **place)
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(
            f"{source} holds {layout.name}, expected a language model; open it with bilens.load"
        )
    return model if dtype in (None, "auto") else model.to(dtype)


def _named_tokenizer(source: str | Path) -> str | None:
    """The tokenizer on the hub of a checkpoint that has none of its own, by its layout."""
    own = "tokenizer_config.json"
    if cached_file(str(source), own, _raise_exceptions_for_missing_entries=False):
        return None
    settings, _ = PreTrainedConfig.get_config_dict(source)
    layout = find_layout(settings)
    return layout.tokenizers.get(settings.get("tokenizer")) if layout is not None else None


def _class_of(config: Any) -> type[PreTrainedModel]:
    return cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def _with_biases(kind: type[PreTrainedModel], names: Sequence[str]) -> Any:
    """The class, but that it makes biases where processing gave some to a model."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        for name in names:
            module = self.get_submodule(name)
            module.bias = nn.Parameter(module.weight.new_zeros(module.out_features))

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})

"""Open and save language models of any kind, whole or not at all."""

import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.utils.hub import cached_file

from bilens.checks import MemoryLimitError, check_count, check_memory, check_weights, checked
from bilens.convert import gates, layouts
from bilens.convert.gguf import gguf_model
from bilens.convert.llama2c import is_llama2c, llama2c_model, llama2c_tokenizer
from bilens.errors import BilensError, CheckpointError
from bilens.files import UNFINISHED, check_target, file_errors, written_whole
from bilens.hub import hub_asked_once, write_card
from bilens.nn import ImageClassifier, SparseAutoencoder, read_config
from bilens.nn.language import LanguageConfig
from bilens.progress import no_progress

OWN = LanguageConfig.model_type  # importing it has made transformers know it
PLACE = ("revision", "token", "cache_dir", "local_files_only")
ERRORS = (
    *(SafetensorError, StrictDataclassError, OSError, RuntimeError, ArithmeticError, ImportError),
    *(ValueError, LookupError, TypeError, AttributeError, AssertionError, struct.error),
)
"""Errors that transformers lets through if a file is damaged."""
LARGEST = {
    "num_hidden_layers": 1024,
    "num_attention_heads": 2**20,
    "hidden_size": 2**20,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**31,
}
"""Largest sizes that are believed: larger ones in a damaged file would take hours or all memory."""
MODEL = "language model, and none could be fetched from the hub by this name"
UNKNOWN = "\U000f0000"
"""A text that no vocabulary holds."""
HARMLESS = {"trust_remote_code": False}
"""No file of Python that a model brings is ever run, and nobody is asked whether it may."""


@checked
def open_model(source: str | Path, **hub: Any) -> PreTrainedModel:
    """Open a causal language model as it was saved; see `open_any`.

    Raises:
        CheckpointError: as there, a weight is NaN, or it is a model of another kind.
    """
    model = open_any(source, **hub)
    check_weights(model)
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(
            f"{source} holds {type(model).__name__}, expected a language model; bilens.load opens "
            "it"
        )
    return model


def open_any(source: str | Path, *, low_memory: bool = False, **hub: Any) -> nn.Module:
    """Open a model that transformers, or a layout that bilens knows, has saved, for evaluation.

    That is with the biases that processing gave it and, in the middle of annealing, with its
    Swish, or with some of its gates linear. Nothing but tensors is unpickled, and no code of the
    model's own is run.

    Args:
        source: a folder or the name of a repository, of transformers, bilens or a layout of
            `bilens.convert.layouts`, or a file. A .gguf file's weights become float32; a .bin file
            is of llama2.c.
        low_memory: open a model that is larger than memory. Weights of safetensors files stay
            there and are read where they are used, if no other dtype is asked for. Those of a GGUF
            file are dequantised one by one into a file beside it, which goes with the model.
        hub: passed to `from_pretrained`: revision, token, dtype, ...

    Raises:
        CheckpointError: the model or a file is missing or damaged, weights and configuration
            do not fit together, or the model is quantised.
    """
    if is_llama2c(source):
        return llama2c_model(Path(source))
    if Path(source).suffix == ".gguf":
        return _open_gguf(Path(source), low_memory=low_memory, **hub)
    place = {name: value for name, value in hub.items() if name in PLACE}
    settings = read_config(source, **place)
    layout = layouts.find_layout(settings)
    if layout is not None:
        opened, dtype = layout.open(source, settings, **place), hub.get("dtype")
        return opened if dtype in (None, "auto") else opened.to(dtype)
    for kind in (ImageClassifier, SparseAutoencoder):
        if settings.get("model_type") == kind.model_type:
            raise CheckpointError(
                f"{source} holds {kind.__name__}, expected a language model; bilens.load opens it"
            )
    # Layers of quantised models compute with packed numbers, which no reading understands.
    quantization = settings.get("quantization_config")
    if quantization:
        method = "some method"
        if isinstance(quantization, dict):
            method = quantization.get("quant_method", method)
        raise CheckpointError(
            f"{source} is quantised by {method}, and what its layers compute is not in plain "
            "weights; open the model that it was made from, or dequantise it first"
        )
    with _complete(source):
        # Checked one by one before any weight is read: a damaged file must not take memory or time.
        config = AutoConfig.from_pretrained(source, **HARMLESS, **place)
        for name, most in LARGEST.items():
            check_count(name, getattr(config, name, 1), most)
        swish = gates.find_swish(config)
        gates.restore_activation(config)
        _check_shards(source, **place)
        model_class = _class_of(config)
        processing = gates.read_record(config, gates.ProcessingRecord) or gates.ProcessingRecord()
        # The class of transformers has no room for biases that processing added.
        with_biases = _with_biases(model_class, processing.added_biases)
        _check_first_token(source, config)
        mapped = low_memory and hub.get("dtype") in (None, "auto")
        _check_sizes(source, config, with_biases, in_memory=not mapped, **place)
        # transformers leaves weights in their files, mapped, if neither type nor device changes.
        model, report = with_biases.from_pretrained(
            source, config=config, output_loading_info=True, use_safetensors=True, **hub
        )
        # The class with biases only serves to load them: a saved model names its own.
        model.__class__ = model_class
    wrong = {complaint: names for complaint, names in report.items() if names}
    if wrong:
        text = "; ".join(f"{name}: {sorted(map(str, names))}" for name, names in wrong.items())
        raise CheckpointError(
            f"{source}: the weights do not fit config.json ({text}). Train again, or fetch the "
            "files again."
        )
    if swish is not None:
        gates.give_swish(model).beta = swish
    gates.restore_linear(model)
    # Buffers are computed from settings and never loaded, so no check of weights sees them.
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and not torch.isfinite(buffer).all():
            raise CheckpointError(
                f"{source}: {name} holds NaN or infinite values by the settings in config.json, "
                "such as rope_parameters"
            )
    return model.eval()


def _check_sizes(
    source: str | Path,
    config: Any,
    model_class: Callable[[Any], nn.Module],
    *,
    in_memory: bool,
    **place: Any,
) -> None:
    """Raise if config.json describes a model far larger than its files, before memory is taken."""
    n_stored = layouts.stored_numbers(source, **place)
    if n_stored is None:
        return
    with torch.device("meta"):
        empty = model_class(config)
    n_described = sum(weight.numel() for weight in empty.parameters())
    # Smaller differences are named weight by weight, once the model is there.
    if n_described > 2 * n_stored:
        raise CheckpointError(
            f"{source}: the weights do not fit config.json, which describes {n_described:,} "
            f"numbers; the files hold {n_stored:,}. Fetch the files again."
        )
    n_bytes = sum(weight.numel() * weight.element_size() for weight in empty.buffers())
    check_memory(n_bytes + 2 * n_stored * in_memory, f"{source}: its {n_stored:,} weights")


def _check_first_token(source: str | Path, config: Any) -> None:
    """Raise if the token that begins texts is not in the vocabulary."""
    bos, vocab_size = getattr(config, "bos_token_id", None), getattr(config, "vocab_size", None)
    if isinstance(bos, int) and isinstance(vocab_size, int) and not 0 <= bos < vocab_size:
        raise CheckpointError(
            f"{source}: bos_token_id={bos} in config.json, expected 0 to {vocab_size - 1}"
        )


@checked
def open_tokenizer(source: str | Path, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """Return the tokenizer that was saved with a model.

    Beside a model of llama2.c with N tokens it is the file tokN.bin.

    Checkpoints of a known layout may name a tokenizer of the hub instead of having one.

    Raises:
        CheckpointError: it is missing or damaged, or has more tokens than the model.
    """
    size = model.config.vocab_size
    if is_llama2c(source):
        return llama2c_tokenizer(Path(source).with_name(f"tok{size}.bin"), size)
    is_gguf = Path(source).suffix == ".gguf"
    opener, options = _gguf_tokenizer(Path(source), model) if is_gguf else (AutoTokenizer, {})
    with _complete(source, "tokenizer"):
        place = Path(source).parent if is_gguf else _named_tokenizer(source) or source
        with _hub_for(place):
            tokenizer: PreTrainedTokenizerBase = opener.from_pretrained(
                place, **HARMLESS, **options
            )
            # A tokenizer that lacks its token for unknown words opens, and fails at the first one.
            tokenizer(UNKNOWN)
    # Fewer tokens are usual: embeddings are padded to multiples of 64 or so.
    if len(tokenizer) > size:
        raise CheckpointError(
            f"The tokenizer in {source} has {len(tokenizer)} tokens, the model {size}; they do not "
            "belong together"
        )
    return tokenizer


@checked
def find_tokenizer(source: str | Path, model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a model; None if none was saved with it.

    Raises:
        CheckpointError: it is damaged, or has more tokens than the model.
    """
    try:
        return open_tokenizer(source, model)
    except CheckpointError:
        folder = Path(source) if os.path.isdir(source) else Path(source).parent  # noqa: PTH112
        if any(folder.glob("tok*")):
            raise
        return None


@checked
def save_model(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Write a model and its tokenizer, each file whole or not at all.

    `state` are its weights, if several processes held parts of them.

    Raises:
        CheckpointError: the disk is full, or refuses.
    """
    with file_errors(directory):
        check_target(directory).mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=UNFINISHED, dir=directory) as draft, no_progress():
            # A file is put together in memory, and a model may be larger than that.
            model.save_pretrained(draft, state_dict=state, max_shard_size="4GB")
            write_card(Path(draft), model.config.to_diff_dict(), model.name_or_path)
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)
            # The configuration is what a model is recognised by, so it comes last.
            for file in sorted(Path(draft).iterdir(), key=lambda path: path.name == "config.json"):
                with written_whole(directory / file.name) as temporary:
                    shutil.move(file, temporary)


@contextmanager
def _complete(source: str | Path, what: str = MODEL) -> Iterator[None]:
    try:
        with no_progress(), _hub_for(source):
            yield
    except Exception as error:
        # Errors of tokenizers itself are plain Exceptions.
        damage = type(error) is Exception or isinstance(error, ERRORS)
        named = isinstance(error, (CheckpointError, MemoryLimitError))
        if named or not damage or layouts.out_of_memory(error):
            raise
        raise CheckpointError(f"{source} holds no complete {what}: {error}") from error


def _hub_for(place: str | Path) -> AbstractContextManager[None]:
    return nullcontext() if Path(place).exists() else hub_asked_once()


def _open_gguf(path: Path, dtype: Any = None, *, low_memory: bool = False, **_: Any) -> nn.Module:
    if find_spec("gguf") is None:
        raise CheckpointError(
            f"{path} is a GGUF file, which takes the package gguf: pip install gguf"
        )
    with _complete(path):
        dtype = dtype if isinstance(dtype, torch.dtype) else None
        return gguf_model(path, dtype, low_memory=low_memory)


def _gguf_tokenizer(path: Path, model: PreTrainedModel) -> tuple[Any, dict[str, str]]:
    """Return the class of a GGUF file's tokenizer and its options.

    Without the type of the model, AutoTokenizer reads the whole file to find it, for seconds.
    """
    options, kind = {"gguf_file": path.name}, model.config.model_type
    if TOKENIZER_MAPPING_NAMES.get(kind):
        return AutoTokenizer, {**options, "tokenizer_type": kind}
    return PreTrainedTokenizerFast, options


def _named_tokenizer(source: str | Path) -> str | None:
    """Return the tokenizer on the hub of a checkpoint without a tokenizer, by its layout."""
    name = "tokenizer_config.json"
    if cached_file(str(source), name, _raise_exceptions_for_missing_entries=False):
        return None
    settings = read_config(source)
    layout = layouts.find_layout(settings)
    return layout.tokenizers.get(settings.get("tokenizer")) if layout is not None else None


def _class_of(config: Any) -> type[PreTrainedModel]:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BilensError(
            f"its configuration is a {type(config).__name__}, which is not that of a causal "
            "language model of transformers"
        )
    return cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def _check_shards(source: str | Path, **place: Any) -> None:
    """Raise if an index names files in another folder."""
    for name in (name for name in layouts.WEIGHT_FILES if name.endswith(".index.json")):
        index = cached_file(str(source), name, _raise_exceptions_for_missing_entries=False, **place)
        if index is not None:
            layouts.shard_names(Path(index))


def _with_biases(kind: type[PreTrainedModel], names: Sequence[str]) -> Any:
    """Return the class with the biases that processing added to the named modules."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        for name in names:
            module = self.get_submodule(name)
            module.bias = nn.Parameter(module.weight.new_zeros(module.out_features))

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})

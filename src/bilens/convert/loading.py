"""Open and save language models of any kind, whole or not at all."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import bilens.nn.language  # noqa: F401  # transformers knows its models then
from bilens.checks import FLOATS, check_count, check_weights, checked
from bilens.convert import gates, layouts, weights
from bilens.convert.eight_bits import MARK, restore_rows, round_rows
from bilens.convert.gguf import gguf_model
from bilens.convert.gguf_header import has_tokenizer
from bilens.convert.gguf_tokenizer import gguf_tokenizer
from bilens.data.texts import tokenize
from bilens.errors import BilensError, CheckpointError
from bilens.files import UNFINISHED, check_downloaded, check_target, file_errors, written_whole
from bilens.hub import PLACE, check_used, hub_options, place_options
from bilens.memory import check_memory
from bilens.nn import ImageClassifier
from bilens.nn.card import write_card
from bilens.nn.checkpoint import ADAPTER_NAME, read_config
from bilens.progress import no_progress
from bilens.shipped import find_model
from bilens.transformer.dispatched import with_mapped_weights
from bilens.transformer.running import device_of

WHOLE, SENTENCEPIECE = "tokenizer.json", ("tokenizer.model", "spiece.model")
"""The file that holds all of a tokenizer, and those of SentencePiece."""
TOKENIZERS = (WHOLE, "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt")
TOKENIZERS += SENTENCEPIECE  # type: ignore[assignment]
"""Files of which a folder with a tokenizer has one at least."""
FINGERPRINT = "bilens_tokenizer"
"""Setting of a model that bilens saved: the tokenizer that was saved with it."""
WHOLE_WEIGHTS = weights.WEIGHT_FILES[0]
SHARD_SIZE = "4GB"
"""Largest file of weights: it is put together in memory, and a model may be larger than that."""
OPTIONS = ("dtype", "device_map", "max_memory", "offload_folder")
OPTIONS += ("attn_implementation", "experts_implementation")  # type: ignore[assignment]
"""Options of transformers beside `PLACE`; others, such as load_in_8bit, change what is read."""
HARMLESS = {"trust_remote_code": False}
"""No file of Python that a model brings is ever run, and nobody is asked whether it may."""


@checked
def open_model(source: str | Path, **hub: Any) -> PreTrainedModel:
    """Open a causal language model as it was saved; see `open_any`.

    Raises:
        CheckpointError: as there, a weight is NaN, or it is a model of another kind.
    """
    model = open_any(find_model(source), **hub)
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
    model's own is run. What kind it is of is read from its config.json before anything else is.

    Args:
        source: a folder or the name of a repository, of transformers, bilens or a layout of
            `bilens.convert.layouts`, or a .gguf file, whose weights become float32.
        low_memory: open a model that is larger than memory. Weights of safetensors files stay
            there and are read where they are used, if no other dtype is asked for. Those of a GGUF
            file are dequantised one by one into a file beside it, which goes with the model.
        hub: passed to `from_pretrained`: revision, token, dtype, ...

    Raises:
        CheckpointError: the model or a file is missing or damaged, weights and configuration
            do not fit together, or the model is quantised.
    """
    dtype, kinds = hub.get("dtype"), {str(kind): kind for kind in FLOATS}
    if dtype not in (None, "auto"):
        name = f"torch.{str(dtype).removeprefix('torch.')}"
        if name not in kinds:
            raise BilensError(f"dtype={dtype}, expected auto, {', '.join(kinds)} or their names")
        hub["dtype"] = kinds[name]
    if Path(source).suffix == ".gguf":
        check_used("a .gguf file", hub, "dtype")
        return _open_gguf(Path(source), low_memory=low_memory, **hub)
    hub |= hub_options(source)
    place = place_options(hub)
    settings = read_config(source, **place)
    if settings.get("model_type") == ImageClassifier.model_type:
        raise CheckpointError(
            f"{source} holds ImageClassifier, expected a language model; bilens.load opens it"
        )
    _check_no_adapter(source, **place)
    layout = layouts.find_layout(settings)
    if layout is not None:
        check_used("a released checkpoint", hub | {"low_memory": low_memory}, "dtype", *PLACE)
        model = layout.open(source, settings, **place)
        return model if dtype in (None, "auto") else model.to(hub["dtype"])
    check_used("a transformer", hub, *PLACE, *OPTIONS)
    _check_plain(source, settings)
    with weights.reading_files(source):
        config = transformers.AutoConfig.from_pretrained(source, **HARMLESS, **place)
        if settings.get("quantization_config"):
            config.quantization_config["dequantize"] = True
    return _open_transformer(source, config, low_memory=low_memory, **hub)


def _open_transformer(
    source: str | Path, config: Any, *, low_memory: bool, **hub: Any
) -> PreTrainedModel:
    """Open a causal language model of transformers, with what bilens has changed in it."""
    place = place_options(hub)
    prefixes: tuple[str, ...] = ()
    if isinstance(config, transformers.Gemma3Config):  # sizes from 4B on, which see images too
        config, prefixes = _text_config(config), ("vision_tower.", "multi_modal_projector.")
        hub["key_mapping"] = {r"^language_model\.": ""}
    swish = gates.find_swish(config)
    gates.restore_activation(config)
    record = gates.read_record(config, gates.ProcessingRecord) or gates.ProcessingRecord()
    # The class of transformers has no room for biases that processing added, so it leaves them.
    biases = {f"{name}.bias" for name in record.added_biases}
    in_memory = not low_memory or hub.get("dtype") not in (None, "auto")
    in_memory = in_memory and hub.get("device_map") is None
    model_class = _checked_class(source, config, in_memory=in_memory, **place)
    model, report = _loaded(source, config, model_class, is_quiet=bool(biases), **hub)
    values = weights.stored_tensors(source, biases, **place) if biases else {}
    report["missing_keys"] = set(report["missing_keys"]) | biases - values.keys()
    unexpected = set(report["unexpected_keys"]) - biases
    report["unexpected_keys"] = {name for name in unexpected if not name.startswith(prefixes)}
    if text := weights.complaints(report):
        raise CheckpointError(
            f"{source}: the weights do not fit config.json ({text}). Train again, or fetch the "
            "files again."
        )
    _add_biases(model, values)
    if swish is not None:
        gates.give_swish(model).beta = swish
    gates.restore_linear(model)
    _check_buffers(source, model)
    return model.eval()


LARGEST = {
    "num_hidden_layers": 1024,
    "num_attention_heads": 2**20,
    "hidden_size": 2**20,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**31,
}
"""Largest sizes in a configuration: beyond, a damaged file would take hours or all memory."""


def _checked_class(
    source: str | Path, config: Any, *, in_memory: bool, **place: Any
) -> type[PreTrainedModel]:
    """Return the class of a configuration that fits its files, before any weight is read."""
    for name, most in LARGEST.items():
        with weights.reading_files(source):
            check_count(name, getattr(config, name, 1), most)
    _check_shards(source, **place)
    model_class = _class_of(source, config)
    _check_special_tokens(source, config)
    _check_sizes(source, config, model_class, in_memory=in_memory, **place)
    return model_class


def _loaded(
    source: str | Path,
    config: Any,
    model_class: type[PreTrainedModel],
    *,
    is_quiet: bool,
    **hub: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model of transformers with its weights, and which of them fit and which do not."""
    state = _restored(source, config, **place_options(hub))
    device_map = hub.get("device_map")
    suffix = "" if device_map is None else f" for device_map={device_map!r}"
    with weights.reading_files(source, weights.MODEL + suffix), ExitStack() as stack:
        if is_quiet:  # transformers warns of the weights that it leaves
            stack.callback(logging.set_verbosity, logging.get_verbosity())
            logging.set_verbosity_error()
        # transformers leaves weights in their files, mapped, if neither type nor device changes.
        result: Any = model_class.from_pretrained(
            source if state is None else None,
            config=config,
            state_dict=state,
            output_loading_info=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are named by whoever asks
            **hub,
        )
    return with_mapped_weights(result[0]), result[1]


def _check_buffers(source: str | Path, model: nn.Module) -> None:
    """Raise if a buffer holds NaN: settings make buffers, and no check of weights sees them."""
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and not torch.isfinite(buffer).all():
            raise CheckpointError(
                f"{source}: {name} holds NaN or infinite values by the settings in config.json, "
                "such as rope_parameters"
            )


def _restored(source: str | Path, config: Any, **place: Any) -> dict[str, Tensor] | None:
    """Return weights that are stored in eight bits; None of others, which transformers reads."""
    if not config.__dict__.pop(MARK, False):  # what is saved again is in float32
        return None
    return restore_rows(weights.stored_tensors(source, **place), source)


FP8 = "fp8"
"""The method of quantisation that transformers undoes while it loads, without other packages."""


def _check_plain(source: str | Path, settings: Mapping[str, Any]) -> None:
    """Raise if a model is quantised by a method that cannot be undone on load."""
    # Layers of quantised models compute with packed numbers, which no reading understands.
    quantization = settings.get("quantization_config")
    if quantization:
        config = quantization if isinstance(quantization, dict) else {}
        method = config.get("quant_method", "some method")
        if method == FP8:
            return
        remedy = "open the model that it was made from, or dequantise it first"
        if method in ("bitsandbytes", "higgs"):
            remedy += (
                ": AutoModelForCausalLM.from_pretrained(...).dequantize() of transformers, and its "
                "save_pretrained"
            )
        raise CheckpointError(
            f"{source} is quantised by {method}, and what its layers compute is not in plain "
            f"weights; {remedy}"
        )


def _check_sizes(
    source: str | Path,
    config: Any,
    model_class: type[PreTrainedModel],
    *,
    in_memory: bool,
    **place: Any,
) -> None:
    """Raise if config.json describes a model far larger than its files, before memory is taken."""
    with weights.reading_files(source):
        entries = weights.stored_weights(source, **place)
    if entries is None:
        return
    n_in_files = sum(count for count, _ in entries.values())
    with weights.reading_files(source), torch.device("meta"):
        empty = model_class(config)
    parameters = dict(empty.named_parameters())
    # transformers would take numbers of another kind for values; masks and positions are such.
    kinds = ["F64", "F32", "F16", "BF16"]
    kinds += ["F8_E4M3"] if getattr(config, "quantization_config", None) else []
    for name, (_, kind) in entries.items():
        if kind not in kinds and name in parameters:
            raise CheckpointError(
                f"{source}: {name} holds numbers of type {kind}, expected F32, F16, BF16 or F64; "
                "open the model that it was made from, or dequantise it first"
            )
    n_in_config = sum(weight.numel() for weight in parameters.values())
    # Smaller differences are named weight by weight, once the model is there.
    if n_in_config > 2 * n_in_files:
        raise CheckpointError(
            f"{source}: the weights do not fit config.json, which describes {n_in_config:,} "
            f"numbers; the files hold {n_in_files:,}. Fetch the files again."
        )
    n_bytes = sum(weight.numel() * weight.element_size() for weight in empty.buffers())
    check_memory(n_bytes + 2 * n_in_files * in_memory, f"{source}: its {n_in_files:,} weights")


def _check_special_tokens(source: str | Path, config: Any) -> None:
    """Raise if a token that begins, ends or pads texts is not in the vocabulary."""
    vocab_size = getattr(config, "vocab_size", None)
    if not isinstance(vocab_size, int):
        return
    # torch counts a negative number of the token that pads from the end.
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        least = -vocab_size if name == "pad_token_id" else 0
        value = getattr(config, name, None)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not (type(token) is int and least <= token < vocab_size):
                raise CheckpointError(
                    f"{source}: {name}={token!r} in config.json, expected 0 to {vocab_size - 1}"
                )


def _check_no_adapter(source: str | Path, **place: Any) -> None:
    """Raise if an adapter stands beside a model: transformers applies it only if PEFT is there."""
    with weights.reading_files(source):
        adapter = weights.stored_file(source, ADAPTER_NAME, **place)
    if adapter is not None:
        raise CheckpointError(
            f"{source} holds an adapter, {ADAPTER_NAME}, beside its model. Merge it into the model "
            "(merge_and_unload() of PEFT) and save the result, or take its files away."
        )


@checked
def open_tokenizer(
    source: str | Path, model: PreTrainedModel, **place: Any
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that was saved with a model.

    Checkpoints of a known layout may name a tokenizer of the hub instead of having one. Tokens that
    were added to a tokenizer and not to its model, such as that of images in Gemma 3, stay. Texts
    that hold them are refused.

    Args:
        source: the folder or repository of the model, or its .gguf file.
        model: the model.
        place: where the hub has it: revision, token, cache_dir, ...

    Raises:
        CheckpointError: it is missing or damaged, has more tokens than the model, or is not the one
            that bilens saved with the model.
    """
    source = find_model(source)
    if Path(source).suffix == ".gguf":
        return gguf_tokenizer(Path(source), model)
    home = _tokenizer_place(source, **place)
    if home is None:
        raise CheckpointError(
            f"{source} holds no tokenizer, expected one of {', '.join(TOKENIZERS)}"
        )
    if home != source:  # another repository, with revisions of its own
        place.pop("revision", None)
    _check_tokenizer_files(home, **place)
    with weights.reading_files(source, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            home, **HARMLESS, **place, **hub_options(home)
        )
        # A tokenizer that lacks its token for unknown words opens, and fails at the first one,
        # such as this letter, which no vocabulary holds.
        tokenize(tokenizer, "\U000f0000")
    # Fewer tokens are usual: embeddings are padded to multiples of 64 or so.
    size = model.config.vocab_size
    extra = tokenizer.get_added_vocab()
    n_own = 1 + max((i for x, i in tokenizer.get_vocab().items() if x not in extra), default=-1)
    if n_own > size:
        raise CheckpointError(
            f"The tokenizer in {source} has {n_own} tokens, the model {size}; they do not belong "
            "together"
        )
    if getattr(model.config, FINGERPRINT, None) not in (None, _fingerprint(tokenizer)):
        raise CheckpointError(
            f"The tokenizer in {source} is not the one that was saved with the model; they do not "
            "belong together. Copy both from the same run."
        )
    return tokenizer


@checked
def find_tokenizer(
    source: str | Path, model: PreTrainedModel, **place: Any
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a model; None if none was saved with it.

    The arguments are those of `open_tokenizer`.

    Raises:
        CheckpointError: it is damaged, or does not belong to the model.
    """
    source = find_model(source)
    if Path(source).suffix == ".gguf":
        return open_tokenizer(source, model) if has_tokenizer(Path(source)) else None
    home = _tokenizer_place(source, **place)
    try:
        return None if home is None else open_tokenizer(source, model, **place)
    except CheckpointError:
        # One that only the layout names is not a part of the checkpoint.
        if home == source:
            raise
        return None


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a number that is that of no tokenizer with other tokens."""
    vocabulary = tokenizer.get_vocab()
    names = sorted(vocabulary, key=lambda name: (vocabulary[name], name))
    return sha256("\n".join(names).encode(errors="replace")).hexdigest()[:16]


@checked
def save_model(
    directory: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    state: dict[str, Tensor] | None = None,
    *,
    eight_bits: bool = False,
) -> None:
    """Write a model and its tokenizer, each file whole or not at all.

    `state` are its weights, if several processes held parts of them. With `eight_bits` the rows of
    its matrices are whole numbers from -127 to 127 with a scale, a quarter of the size.

    Raises:
        CheckpointError: the disk is full, or refuses.
    """
    directory = Path(directory)
    with file_errors(directory):
        check_target(directory).mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=UNFINISHED, dir=directory) as draft, no_progress():
            marks: dict[str, Any] = {}
            record = gates.read_record(model.config, gates.ProcessingRecord)
            if tokenizer is not None:
                marks[FINGERPRINT] = _fingerprint(tokenizer)
            if eight_bits:
                marks[MARK] = True
                state = round_rows(model.state_dict() if state is None else state)
            with _marked(model.config, **marks):
                # Biases that transformers has no room for are found by their names in the model.
                plain = not (record and record.added_biases)
                model.save_pretrained(
                    draft, state_dict=state, max_shard_size=SHARD_SIZE, save_original_format=plain
                )
                write_card(Path(draft), model.config.to_diff_dict(), model.name_or_path)
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)
            # The configuration is what a model is recognised by, so it comes last.
            files = sorted(Path(draft).iterdir(), key=lambda path: path.name == "config.json")
            for file in files:
                with written_whole(directory / file.name) as temporary:
                    shutil.move(file, temporary)
            # One file of weights, of an earlier model, would come before the index of several.
            if WHOLE_WEIGHTS not in {file.name for file in files}:
                (directory / WHOLE_WEIGHTS).unlink(missing_ok=True)


@contextmanager
def _marked(config: Any, **marks: Any) -> Iterator[None]:
    """Let a configuration have further settings in the block alone: the model is somebody's own."""
    before = {name: value for name, value in vars(config).items() if name in marks}
    vars(config).update(marks)
    try:
        yield
    finally:
        for name in marks:
            delattr(config, name)
        vars(config).update(before)


def _open_gguf(path: Path, dtype: Any = None, *, low_memory: bool = False) -> nn.Module:
    if find_spec("gguf") is None:
        raise CheckpointError(
            f"{path} is a GGUF file, which takes the package gguf: pip install gguf"
        )
    dtype = dtype if isinstance(dtype, torch.dtype) else None
    return gguf_model(path, dtype, low_memory=low_memory)


def _check_tokenizer_files(source: str | Path, **place: Any) -> None:
    """Raise if the files of a tokenizer hold something else, or take packages that are missing."""
    files = [check_downloaded(path) for path in _tokenizer_files(source, **place)]
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        with weights.reading_files(source, "tokenizer"):
            path = weights.stored_file(source, name, **place, **hub_options(source))
        if path is not None:
            check_downloaded(path)
    alone = {path.name for path in files} <= {"tokenizer_config.json", *SENTENCEPIECE}
    # Of tiktoken's files, which have the same names, each line is a text.
    is_sentencepiece = files and alone and files[-1].read_bytes()[:1] == b"\n"
    if is_sentencepiece and not (find_spec("sentencepiece") and find_spec("google.protobuf")):
        raise CheckpointError(
            f"{source} holds its tokenizer as {files[-1].name} only, which takes two packages: pip "
            "install sentencepiece protobuf. Or put its tokenizer.json beside it."
        )


def _tokenizer_files(source: str | Path, **place: Any) -> list[Path]:
    """Return the files of a tokenizer that are read; none if there is no tokenizer."""
    place |= hub_options(source)
    files: list[Path] = []
    for name in TOKENIZERS:
        with weights.reading_files(source, "tokenizer"):
            path = weights.stored_file(source, name, **place)
        files += [] if path is None else [path]
        if path is not None and name == WHOLE:
            break
    return files


def _tokenizer_place(source: str | Path, **place: Any) -> str | Path | None:
    """Return the folder or repository of a checkpoint's tokenizer; None if it has none.

    It is the checkpoint's own, or else that of its layout, on the hub.
    """
    if _tokenizer_files(source, **place):
        return source
    settings = read_config(source, **place | hub_options(source))
    layout = layouts.find_layout(settings)
    return layout.tokenizers.get(settings.get("tokenizer")) if layout is not None else None


def _text_config(config: Any) -> Any:
    """Return the configuration of the text model in a model of texts and images."""
    text = config.get_text_config()
    text.dtype, text.tie_word_embeddings = config.dtype, config.tie_word_embeddings
    return text


def _class_of(source: str | Path, config: Any) -> type[PreTrainedModel]:
    if config.get_text_config() is not config:
        raise CheckpointError(
            f"{source} holds no complete {weights.MODEL}: a {type(config).__name__} describes more "
            "than a model of texts. Save its text model alone, by transformers"
        )
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(
            f"{source} holds no complete {weights.MODEL}: its configuration is a "
            f"{type(config).__name__}, not that of a causal language model of transformers"
        )
    return cast(type[PreTrainedModel], transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def _check_shards(source: str | Path, **place: Any) -> None:
    """Raise if an index names files in another folder."""
    for name in weights.WEIGHT_FILES:
        index = weights.stored_file(source, name, **place) if name.endswith(".index.json") else None
        if index is not None:
            weights.shard_names(index)


def _add_biases(model: nn.Module, biases: Mapping[str, Tensor]) -> None:
    """Give modules the biases that processing added to them."""
    modules: dict[str, Any] = dict(model.named_modules())
    for name, bias in biases.items():
        module = modules.get(name.removesuffix(".bias"))
        if not isinstance(module, nn.Linear) or bias.shape != (module.out_features,):
            raise CheckpointError(
                f"{name} has shape {tuple(bias.shape)} and does not fit the model; process the "
                "original again"
            )
        weight = module.weight
        module.bias = nn.Parameter(bias.to(device_of(weight), weight.dtype))

"""Analyses from plain settings: the step between an option or a control, and a call of Python.

A parameter of an analysis is set by one or more plain values. Most are set by themselves; a
direction is set by `token` and `minus`, and texts or images are found by the name of the data.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from bilens.data import Corpus, ImageData, load_images
from bilens.data.corpus import LANGUAGES
from bilens.data.texts import text_files
from bilens.errors import BilensError
from bilens.models import FILES
from bilens.nn import ImageClassifier, SparseAutoencoder, read_config
from bilens.read.bonds import recorded_settings
from bilens.read.deep import PATHS_NAME
from bilens.read.language import TokenDirection, corpus_for, read_language
from bilens.read.summary import is_bilinear, read_summary
from bilens.reading import Reading
from bilens.registry import Analysis, analysis, named_analyses
from bilens.residual import ResidualModel
from bilens.tensor import TensorChain
from bilens.train import TRAINING_NAME, read_training
from bilens.train.settings import OWN_TEXT

KINDS = {ResidualModel: "language models", TensorChain: "image classifiers"}
REQUIRED = Parameter.empty
TOKEN_HELP = "Token that is predicted, as the tokenizer spells it or as text, such as ' are'."
MINUS_HELP = "Tokens whose mean is subtracted from it, separated by commas."
PLAIN_MODULES = ("builtins", "typing", "pathlib", "collections.abc")
LAYER_HELP = "Number of the layer, from 0; models of one layer do not need it."
PROMPT_HELP = "A text."
AMONG_HELP = (
    "Only this many tokens, the first of the vocabulary, which are often the frequent ones; all "
    "pairs of 50,000 tokens take a minute a head."
)
DATA_HELP = "Name of the data; by default that of the training."
DATA_DIR_HELP = "Folder of the data; by default the environment variable BILENS_DATA."
PATHS, AMONG = 1000, 5000
"""Paths of a deep classifier and tokens of a language model that a report reads by default."""


@dataclass(frozen=True)
class Option:
    """A plain setting of an analysis.

    Attributes:
        name: Of the option.
        type: A type that a command line can parse.
        default: REQUIRED if there is none.
        help: A sentence.
    """

    name: str
    type: Any
    default: Any
    help: str


def options_of(analysis: Analysis) -> list[Option]:
    """Return the plain settings of all parameters, required ones first."""
    options: list[Option] = []
    for name, parameter in analysis.parameters.items():
        kind, default = analysis.hints[name], parameter.default
        if _is(kind, TokenDirection):
            required = default is REQUIRED
            options += [
                Option(
                    "token",
                    str if required else str | None,
                    REQUIRED if required else None,
                    TOKEN_HELP,
                ),
                Option("minus", str, "", MINUS_HELP),
            ]
        elif name == "minus":
            options.append(Option("minus", str, "", MINUS_HELP))
        elif name == "text":
            options.append(Option("prompt", str, default, PROMPT_HELP))
        elif name == "among":
            options.append(Option("among", int | None, None, AMONG_HELP))
        elif name == "layer" and default is REQUIRED:
            options.append(Option("layer", int | None, None, LAYER_HELP))
        elif _is(kind, Corpus) or _is(kind, ImageData):
            optional = analysis.help.get(name, DATA_HELP) if default is None else DATA_HELP
            options += [
                Option("data", str | None, None, optional),
                Option("data_dir", Path | None, None, DATA_DIR_HELP),
            ]
        else:
            options.append(Option(name, _parsed(kind), default, analysis.help.get(name, "")))
    # Dataclasses need fields without defaults first.
    return sorted(options, key=lambda option: option.default is not REQUIRED)


def run_analysis(
    analysis: Analysis,
    model: Any,
    settings: Mapping[str, Any],
    *,
    source: str | Path = "",
    inputs: Iterable[Any] = (),
) -> Reading:
    """Run an analysis with the values of its options.

    Args:
        analysis: See `bilens.registry`.
        model: A model that it reads.
        settings: Values by the names of options; defaults may be left out.
        source: Name or folder of the model, which says what data it was trained on.
        inputs: Texts or images that are loaded already.

    Raises:
        BilensError: the model is of another kind, or a setting does not fit.
    """
    if not analysis.fits(model):
        raise BilensError(
            f"{source or 'The model'} holds {type(model).__name__}, and `bilens {analysis.name}` "
            f"reads {KINDS.get(analysis.on, analysis.on)}"
        )
    arguments: dict[str, Any] = {}
    for name, parameter in analysis.parameters.items():
        kind = analysis.hints[name]
        # A direction is two options, and one argument.
        if _is(kind, TokenDirection):
            if settings.get("token") is not None:
                arguments[name] = direction_of(settings["token"], settings.get("minus", ""))
        elif _is(kind, Corpus) or _is(kind, ImageData):
            # The explorer has loaded the data once, and passes it to every reading.
            loaded = [item for item in inputs if isinstance(item, Corpus | ImageData)]
            if loaded or settings.get("data") or parameter.default is REQUIRED:
                arguments[name] = loaded[0] if loaded else _load(kind, model, settings, source)
        elif name == "minus":
            arguments[name] = minus_of(settings.get("minus", ""))
        elif name in settings or (name == "text" and "prompt" in settings):
            arguments[name] = settings[name if name in settings else "prompt"]
        if name == "among" and isinstance(arguments.get(name), int):
            arguments[name] = range(min(arguments[name], model.vocab_size))
        # A layer is never guessed: a model of several needs its number.
        if name == "layer" and arguments.get("layer") is None:
            arguments["layer"] = layer_of(model)
        if name not in arguments and parameter.default is REQUIRED:
            raise BilensError(
                f"{analysis.name} needs {name}: {analysis.help.get(name, 'see its help')}"
            )
    return analysis.read(model, **arguments)


def report_readings(
    model: Any, settings: Mapping[str, Any], *, source: str | Path = "", add: Sequence[str] = ()
) -> list[Reading]:
    """Return the readings of a model's report: those of its kind, then added ones.

    Args:
        model: A classifier or a language model.
        settings: Options of `bilens report` by name; those that are left out have their defaults.
        source: Name or folder of the model, which says what data it was trained on.
        add: Names of further readings, and files with readings.

    Raises:
        BilensError: this kind of model has no report, or a setting does not fit.
    """
    if isinstance(model, SparseAutoencoder):
        raise BilensError(f"{source} holds a sparse autoencoder, which has no report")
    # An empty text is none given, but an empty token is a mistake.
    settings = {
        name: value
        for name, value in ({"paths": PATHS, "among": AMONG} | dict(settings)).items()
        if value is not None and (value != "" or name == "token")
    }
    extra: dict[str, dict[str, Any]] = {"paths": {"k": settings["paths"]}}
    if source:
        extra["paths"]["saved"] = Path(source) / PATHS_NAME
        extra["bonds"] = recorded_settings(source)
    # Bonds first: few of them explain a model whose paths are many.
    deep = isinstance(model, ImageClassifier) and len(model.layers) > 1
    names = ["bonds", "paths"] if deep else ["eigenvectors"]
    entries = [analysis(name) for name in names if isinstance(model, ImageClassifier)]
    first = [] if entries else _language_readings(model, settings, source)
    entries += [entry for name in add for entry in named_analyses(name)]
    return first + [
        run_analysis(entry, model, extra.get(entry.name, {}) | settings, source=source)
        for entry in entries
    ]


def _language_readings(
    model: Any, settings: Mapping[str, Any], source: str | Path
) -> list[Reading]:
    data = settings.get("data") or data_of(source)
    corpus = corpus_for(model, data, settings.get("data_dir"))
    token, layer = settings.get("token"), settings.get("layer")
    directions = [] if token is None else [direction_of(token, settings.get("minus", ""))]
    direction = next(iter(directions), None)
    overview = read_summary(model, corpus, settings.get("prompt", ""), direction)
    if layer is None and not is_bilinear(model):
        # Weights of one layer among many say little, and take longer than all of the above.
        return [overview]
    if not directions and overview.is_example:
        directions = [overview.flow.direction]
    among = settings.get("among")
    return [overview, read_language(model, corpus, directions, layer=layer or 0, among=among)]


def direction_of(token: str, minus: str | Sequence[str]) -> TokenDirection:
    """Return a direction from a token and others, which are separated by commas in a string."""
    return TokenDirection(token, minus_of(minus))


def minus_of(minus: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of tokens that are separated by commas in a string."""
    names = minus.split(",") if isinstance(minus, str) else minus
    return tuple(name for name in names if name)


def layer_of(model: Any) -> int:
    """Return the number of a model's only layer.

    Raises:
        BilensError: the model has several.
    """
    if model.n_layers > 1:
        raise BilensError(f"layer=None, expected 0 to {model.n_layers - 1}: name it with --layer")
    return 0


def data_of(source: str | Path) -> str:
    """Return the name of the data that a run was trained on.

    Raises:
        BilensError: the model has no record of its training, or learned from its own text.
    """
    known = (Path(source) / TRAINING_NAME).is_file()
    data = str(read_training(source)["data"]) if known else OWN_TEXT
    if data == OWN_TEXT:
        raise BilensError(
            f"{source} does not say what it was trained on; name texts or images with --data, such "
            "as --data tinystories, --data FILE.txt or --data mnist"
        )
    return data


def check_data(source: str | Path, data: str | None, data_dir: str | Path | None = None) -> None:
    """Raise, before a model on this machine is opened, if its data is not named or not there.

    Raises:
        BilensError: the model has no record of its training.
        DataError: a language model in a file is to read texts that do not exist.
    """
    is_file = Path(source).suffix in FILES
    if is_file and data is not None and data not in LANGUAGES:
        text_files(data, data_dir)
    elif data is None and (is_file or (Path(source).is_dir() and not _is_autoencoder(source))):
        data_of(source)


def _is_autoencoder(folder: str | Path) -> bool:
    return read_config(folder).get("model_type") == SparseAutoencoder.model_type


def _load(kind: Any, model: Any, settings: Mapping[str, Any], source: str | Path) -> Any:
    name, folder = settings.get("data"), settings.get("data_dir")
    if _is(kind, ImageData):
        return load_images(name or read_training(source)["data"], folder).to(model.device)
    return corpus_for(model, name or data_of(source), folder)


def _is(kind: Any, wanted: type) -> bool:
    """Return True for a type, and for a union that it is part of."""
    return kind is wanted or wanted in get_args(kind)


def _parsed(kind: Any) -> Any:
    """Return a type with tuples for sequences, which a command line can parse."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return Annotated[(_parsed(parts[0]), *parts[1:])]
    if origin in (Union, UnionType):
        # A text is given as text; token ids are for Python.
        plain = [_parsed(part) for part in parts if part is NoneType or _is_plain(part)]
        return Union[tuple(plain)]  # noqa: UP007
    if origin is Sequence:
        return tuple[_parsed(parts[0]), ...]  # type: ignore[misc]
    return kind


def _is_plain(kind: Any) -> bool:
    return getattr(kind, "__module__", "") in PLAIN_MODULES

"""Types and texts of options, which the command line, the explorer and Python share.

Nothing here imports torch: the help of a command reads it.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import tyro

from bilens.errors import BilensError
from bilens.settings import Between

StepName = Literal[
    "fold_norms", "fold_value_biases", "center_writing_weights", "center_unembed", "factor_heads"
]
"""Steps of the processing of a language model."""
Cleaning = Literal["none", "tinystories"]
"""What is done to texts to learn from: nothing, or what Pearce et al. 2024 do to TinyStories.

They become ASCII on one line, and their tokens lower-case words.
"""
Basis = Literal["model", "pixels"]
"""Space in which eigenvectors are orthonormal: see `class_spectra`."""
Order = Literal["eigenvalue", "activation"]
"""Order of eigenvectors on a page: by eigenvalue, or by mean activation over the test images."""
Metric = Literal["images", "gaussian", "weights"]
"""Inputs: training images, a Gaussian of their mean and covariance, or standard normal inputs.

The last is a reading of the weights only. The tree has the same bonds for the first two, since it
uses the second moment of the inputs.
"""
Positional = tyro.conf.Positional[str]
"""A model's name or folder, which stands without the name of its option."""
Target = Literal["logit", "log-probability", "probability"]
"""The number that a flow splits; the last two between two texts."""
Keep = Annotated[float, Between(0, 1.15)]
"""Least f on the questions that decide the size of a circuit."""
KEEP = 0.95
"""The same, by default."""
Level = Literal["stages", "parts"]
"""What carries an answer: a few ranges of layers, or heads and MLPs one by one."""


def layer_of(model: Any, layer: int | None = None) -> int:
    """Return the number of a layer; a model of several needs it, for it is never guessed."""
    if layer is None and model.n_layers > 1:
        raise BilensError(
            f"no layer is named; expected one from 0 to {model.n_layers - 1}, such as --layer 0"
        )
    return layer or 0


def token_list(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return names of tokens, which are separated by commas in a text.

    A name with a comma, or with a double quote in front, stands in double quotes, as fields of CSV
    do. A single letter or sign is itself, also behind a space: `,` is the comma.

    Raises:
        BilensError: a name is empty, or its quotes do not end.
    """
    if not isinstance(names, str):
        return tuple(names)
    if not names or len(names.strip(" ")) == 1:
        return (names,) if names else ()
    return _separated(names, ",", "name", "commas")


def text_list(texts: str) -> tuple[str, ...]:
    """Return texts that are separated by |; one that holds a | stands in double quotes.

    Raises:
        BilensError: a text is empty, or its quotes do not end.
    """
    return _separated(texts, "|", "text", "|") if "|" in texts else (texts,)


def replacements(text: str) -> dict[str, str]:
    """Return words and what stands in their place, of a text such as keys=key,was=is.

    Raises:
        BilensError: a word is empty, has no other, or stands twice.
    """
    pairs = [pair.partition("=") for pair in token_list(text)]
    words = {word: other for word, _, other in pairs}
    if not all(word and sign for word, sign, _ in pairs) or len(words) < len(pairs):
        raise BilensError(f"replace={text!r}, expected words as keys=key,was=is, each once")
    return words


def replaced(text: Any, replace: Mapping[str, str]) -> str:
    """Return a text with some of its words replaced."""
    if not isinstance(text, str):
        raise BilensError(
            "replace needs the text as a string, got numbers of tokens; pass the other text's "
            "numbers as against"
        )
    if not replace:
        return text
    # All at once, so that names can be exchanged; of words that begin alike the longer one.
    words = sorted(filter(None, replace), key=len, reverse=True)
    pattern = rf"(?<!\w)(?:{'|'.join(map(re.escape, words))})(?!\w)"
    present = set(re.findall(pattern, text)) if words else set()
    for word in replace:
        if word not in present:
            raise BilensError(f"replace names {word!r}, which is not a word of {text!r}")
    return re.sub(pattern, lambda match: replace[match[0]], text)


def check_circuit_options(level: Level, keep: float, size: int | None, *, heads: bool) -> None:
    """Raise for an option of a circuit that has no effect beside the others."""
    of_parts = {"keep": keep if keep != KEEP else None, "size": size, "heads": heads}
    for name, value in of_parts.items():
        if level == "stages" and value not in (None, False):
            raise BilensError(f"{name}={value} is of parts; add level='parts', or leave it out")
    if size and keep != KEEP:
        raise BilensError(f"keep={keep} has no effect beside size; leave one of them out")


def _separated(text: str, sign: str, thing: str, separators: str) -> tuple[str, ...]:
    """Return what stands between the signs of a text; quotes are as in CSV."""
    # The module csv takes a line end, which may be a token, for the end of a row.
    field = rf'(?:"(?:[^"]|"")+"|[^"{sign}][^{sign}]*)'
    separator = re.escape(sign)
    if not re.fullmatch(f"{field}(?:{separator}{field})*", text):
        raise BilensError(
            f"{text!r} has an empty {thing} or an open quote; expected {thing}s separated by "
            f'{separators}, and in double quotes those with one, as "{sign}" or a quote in front, '
            'as """"'
        )
    fields = re.findall(field, text)
    return tuple(x[1:-1].replace('""', '"') if x.startswith('"') else x for x in fields)


def check_docstrings() -> None:
    """Raise if Python dropped all docstrings: help, and transformers' classes, are made of them."""
    if sys.flags.optimize > 1:
        raise BilensError(
            "Python runs with PYTHONOPTIMIZE=2 or -OO, which drops docstrings: commands would have "
            "no help, and transformers could not open most models. Use PYTHONOPTIMIZE=1, or none"
        )

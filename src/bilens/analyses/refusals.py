"""What analyses refuse of their options, whatever the model and the data: before any are loaded.

Nothing here imports torch. Each function takes the values of an analysis's options by name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bilens.errors import BilensError
from bilens.options import check_circuit_options, replaced, replacements, text_list, token_list

Values = Mapping[str, Any]

SHOWN, ABLATED = 200, 20
"""Nodes of a flow that are shown, and those that are measured, by default."""


def of_tokens(given: Values) -> None:
    """Refuse names of tokens with open quotes, and a token that is subtracted from itself."""
    minus = token_list(given["minus"] or "")
    for name in token_list(given["token"] or ""):
        if name in minus:
            raise BilensError(f"minus has the token {name!r} itself, expected other tokens")


def of_summary(given: Values) -> None:
    """Refuse tokens to subtract from none."""
    if given["minus"] and not given["token"]:
        raise BilensError(f"minus={given['minus']!r} is subtracted from a token; give --token too")
    of_tokens(given)


def of_report(given: Values) -> None:
    """Refuse tokens to subtract from none, and a second text without a first."""
    of_summary(given)
    if given["against"] and not given["prompt"]:
        raise BilensError(f"against={given['against']!r} is a second text; give --prompt too")


def of_flow(given: Values) -> None:
    """Refuse two second runs, words to replace that are not there, and what an answer ignores."""
    if given["data"] and not given["mean"]:
        raise BilensError("--data has no effect without --mean, which takes the mean of its texts")
    if sum(bool(given[name]) for name in ("against", "mean", "replace")) > 1:
        raise BilensError(
            "--against, --mean and --replace each name the second run, and more than one is given; "
            "expected one of them"
        )
    replaced(given["prompt"], replacements(given["replace"]))
    text_list(given["against"] or "")
    beside = next(filter(given.get, ("answer", "generate")), "")
    defaults = {"token": "", "minus": "", "shown": SHOWN, "ablate": ABLATED, "generate": 0}
    for name, default in defaults.items():
        if beside not in ("", name) and given[name] != default:
            raise BilensError(f"--{name} has no effect beside --{beside}; leave one of them out")
    of_tokens(given)


def of_diff(given: Values) -> None:
    """Refuse no question, and two ways to ask."""
    _check_asked(given, ("token", "minus", "against", "target"))


def of_circuit(given: Values) -> None:
    """Refuse no question, two ways to ask, and options of parts for stages."""
    _check_asked(given, ("token", "minus", "against"))
    if given["prompt"] and not given["against"]:
        raise BilensError("a circuit needs a second text of as many tokens; give --against too")
    check_circuit_options(given["level"], given["keep"], given["size"], heads=given["heads"])


def of_picture(given: Values) -> None:
    """Refuse a picture that is not there."""
    image = given["image"]
    if isinstance(image, str) and not Path(image).is_file():
        raise BilensError(
            f"image={image!r} does not exist; expected the file of a picture, or the number of a "
            "test image"
        )


def _check_asked(given: Values, of_one: tuple[str, ...]) -> None:
    """Raise unless either a prompt asks, for a token, or a file, which has the fields of one."""
    prompt, questions = given["prompt"], given["questions"]
    if bool(questions) == bool(prompt):
        problem = "--prompt and --questions both ask" if prompt else "nothing is asked"
        raise BilensError(
            f"{problem}; expected either --prompt TEXT with its --token, or --questions FILE"
        )
    if prompt and not given["token"]:
        raise BilensError("--prompt has no answer to ask for; give --token too")
    for name in of_one:
        if questions and given[name] and (name, given[name]) != ("target", "logit"):
            raise BilensError(
                f"{name}={given[name]!r} has no effect beside questions, whose lines have their "
                "own; leave it out"
            )
    of_tokens(given)

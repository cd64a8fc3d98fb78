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
PICTURES = 10_000
"""Test images that are certified by default."""


def of_tokens(options: Values) -> None:
    """Refuse names of tokens with open quotes, and a token that is subtracted from itself."""
    minus = token_list(options["minus"] or "")
    for name in token_list(options["token"] or ""):
        if name in minus:
            raise BilensError(f"minus has the token {name!r} itself, expected other tokens")


def of_summary(options: Values) -> None:
    """Refuse tokens to subtract from none."""
    if options["minus"] and not options["token"]:
        raise BilensError(
            f"minus={options['minus']!r} is subtracted from a token; give --token too"
        )
    of_tokens(options)


def of_report(options: Values) -> None:
    """Refuse tokens to subtract from none, and a second text without a first."""
    of_summary(options)
    if options["against"] and not options["prompt"]:
        raise BilensError(f"against={options['against']!r} is a second text; give --prompt too")


def of_flow(options: Values) -> None:
    """Refuse two second runs, words to replace that are not there, and what an answer ignores."""
    if options["data"] and not options["mean"]:
        raise BilensError("--data has no effect without --mean, which takes the mean of its texts")
    if sum(bool(options[name]) for name in ("against", "mean", "replace")) > 1:
        raise BilensError(
            "--against, --mean and --replace each name the second run, and more than one is given; "
            "expected one of them"
        )
    replaced(options["prompt"], replacements(options["replace"]))
    text_list(options["against"] or "")
    beside = next(filter(options.get, ("answer", "generate")), "")
    defaults = {"token": "", "minus": "", "shown": SHOWN, "ablate": ABLATED, "generate": 0}
    for name, default in defaults.items():
        if beside not in ("", name) and options[name] != default:
            raise BilensError(f"--{name} has no effect beside --{beside}; leave one of them out")
    of_tokens(options)


def of_diff(options: Values) -> None:
    """Refuse no question, and two ways to ask."""
    _check_asked(options, ("token", "minus", "against", "target"))


def of_circuit(options: Values) -> None:
    """Refuse no question, two ways to ask, and options of parts for stages."""
    _check_asked(options, ("token", "minus", "against"))
    if options["prompt"] and not options["against"]:
        raise BilensError("a circuit needs a second text of as many tokens; give --against too")
    check_circuit_options(
        options["level"], options["keep"], options["size"], heads=options["heads"]
    )


def of_picture(options: Values) -> None:
    """Refuse a picture that is not there, or beside a number of them."""
    image, images = options["image"], options.get("images", PICTURES)
    if image is not None and images != PICTURES:
        raise BilensError(f"images={images} has no effect beside image; leave one of them out")
    if isinstance(image, str) and not Path(image).is_file():
        raise BilensError(f"image={image!r} does not exist; expected the file of a picture")


def _check_asked(options: Values, of_one: tuple[str, ...]) -> None:
    """Raise unless either a prompt asks, for a token, or a file, which has the fields of one."""
    prompt, questions = options["prompt"], options["questions"]
    if bool(questions) == bool(prompt):
        problem = "--prompt and --questions both ask" if prompt else "nothing is asked"
        raise BilensError(
            f"{problem}; expected either --prompt TEXT with its --token, or --questions FILE"
        )
    if prompt and not options["token"]:
        raise BilensError("--prompt has no answer to ask for; give --token too")
    for name in of_one:
        if questions and options[name] and (name, options[name]) != ("target", "logit"):
            raise BilensError(
                f"{name}={options[name]!r} has no effect beside questions, whose lines have their "
                "own; leave it out"
            )
    of_tokens(options)

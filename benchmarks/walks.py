"""Walks through the package: the rooms that a reader visits who follows one object.

A walk is the rooms of the functions that get the object as an argument, alone or in a list, each
function once, in the order of their first calls; the object's own methods and the checks of
arguments, which every call passes, are left out. A room is a package or module at the first level
of `bilens`, and a return is a step back into one that was visited before.
"""

import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import bilens
from bilens import __main__ as program
from bilens.flows import Question
from bilens.nn import ImageClassifier
from bilens.pages import report
from bilens.transformer import ResidualModel

PACKAGE = str(Path(bilens.__file__).parent)
CHECKS = ("checks", "settings")
STORY = "The girl was sad because her ball {0} fell. " * 40


def walk(call: Callable[[], Any], is_object: Callable[[Any], bool]) -> list[str]:
    """Return the rooms that an object visits while a call runs, without immediate repeats."""
    first: dict[CodeType, str] = {}

    def follow(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in first or not code.co_filename.startswith(PACKAGE):
            return
        room = Path(code.co_filename).relative_to(PACKAGE).parts[0].removesuffix(".py")
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals[name] for name in names if name not in ("self", "cls")]
        lists = [item for value in values if isinstance(value, list | tuple) for item in value]
        if room not in CHECKS and any(map(is_object, (*values, *lists))):
            first[code] = room

    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [room for room, _ in groupby(first.values())]


def returns(rooms: Iterable[str]) -> int:
    """Return how often a walk goes back into a room that it was in before."""
    rooms = list(rooms)
    return len(rooms) - len(set(rooms))


def run_command(*words: str) -> None:
    """Run a command of bilens in this process."""
    sys.argv = ["bilens", *words]
    program.main()


def walks() -> dict[str, list[str]]:
    """Return the walks of a report's model, of a classifier that is cut, and of questions."""
    found = {}
    words = ("--prompt", "The girl was sad because", "--token", "she", "--minus", "he")
    found["a question through flow"] = walk(
        lambda: run_command("flow", "story", *words, "--against", "The boy was sad because"),
        lambda value: isinstance(value, Question),
    )
    with TemporaryDirectory() as folder:
        run, texts = Path(folder, "run"), Path(folder, "texts.txt")
        texts.write_text("<|endoftext|>\n".join(map(STORY.format, range(60))), encoding="utf-8")
        sizes = ["--n-layers", "2", "--d-model", "16", "--epochs", "1"]
        run_command("train", "images", *sizes, "--output", str(run))
        found["a report's model"] = walk(
            lambda: report("story", Path(folder, "story.html"), data=str(texts)),
            lambda value: isinstance(value, ResidualModel),
        )
        found["a classifier through bonds"] = walk(
            lambda: run_command("bonds", str(run), "--arrays", str(run)),
            lambda value: isinstance(value, ImageClassifier),
        )
    story: Any = bilens.load("story")
    pairs = [("girl", "boy"), ("mom", "dad"), ("woman", "man")]
    questions = [
        Question(f"The {a} was sad because", "she", ("he",), f"The {b} was sad because")
        for a, b in pairs
    ]
    found["a question through circuit"] = walk(
        lambda: bilens.circuit(story, questions), lambda value: value is questions[0]
    )
    return found

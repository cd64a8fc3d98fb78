"""The command line: every command is a dataclass, its help is its docstring."""

import atexit
import json
import os
import re
import sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from importlib import import_module
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from bilens import __version__
from bilens.analysis import BUILT_IN, declared_analysis, load_file
from bilens.cli.console import check_own, errors, out, printable
from bilens.errors import BilensError
from bilens.lazy_imports import lazy_import
from bilens.options import check_docstrings

if TYPE_CHECKING:
    from bilens import files, memory
else:  # It imports torch, and `bilens --help` does without it.
    files, memory = lazy_import("bilens.files"), lazy_import("bilens.memory")

JSON = "--json"

COMMANDS = {
    "train": ("train", "Train", "Train an image classifier or a language model from scratch."),
    "decompose": ("decompose", "Decompose", "Take a classifier apart; how few parts does it need?"),
    "process": ("pretrained", "Process", "Fold norms and biases of a model into its weights."),
    "anneal": ("pretrained", "Anneal", "Train a gated model until it is bilinear."),
    "export": ("pretrained", "Export", "Save an annealed model for plain transformers."),
    "linearise": ("pretrained", "Linearise", "Make the gates of a model linear, without training."),
    "tensorise": (
        "pretrained",
        "Tensorise",
        "Turn a transformer into a tensor, gates and softmax.",
    ),
    "spectra": (
        "pretrained",
        "Spectra",
        "Top eigenpairs of a layer along the logit of every token.",
    ),
    "report": ("decompose", "Report", "Write the report of a trained model as one HTML file."),
    "explore": ("decompose", "Explore", "Look into a trained model in the browser."),
    "demo": ("installation", "Demo", "See it work: two models, trained and read."),
    "doctor": ("installation", "Doctor", "Versions, devices, and places of files."),
    "cite": ("installation", "Cite", "The BibTeX entry of bilens."),
    "reproduce": ("installation", "Reproduce", "Reproduce a figure or table of the papers."),
}
"""By name: the module and the class of a command, and a line about it."""

LINES = {
    **{name: line for name, (_, line) in BUILT_IN.items()},
    **{name: line for name, (_, _, line) in COMMANDS.items()},
}
"""A line about each command and each reading of bilens, by name."""


def main(args: list[str] | None = None) -> None:
    """Run one command; a mistake of the caller's ends with one message and status 1."""
    given = sys.argv[1:] if args is None else args
    as_json, command = JSON in given, None
    try:
        if sys.stdout is None:
            raise BilensError("standard output is closed; use > /dev/null to see nothing of it")
        check_docstrings()
        if isinstance(sys.stdout, TextIOWrapper):
            # Terminals of other encodings than UTF-8 show \u2581 instead of a letter.
            sys.stdout.reconfigure(errors="backslashreplace")
        command = parse(given)
        # Mistakes in a file are said before torch is imported, and a model loaded.
        if hasattr(command, "check"):
            command.check()
        with (
            redirect_stdout(sys.stderr) if as_json else nullcontext(),
            files.file_errors(doing="used"),
            memory.memory_errors(),
        ):
            check_outputs(command)
            record = command.run()
        # Of several processes only the first has one.
        if as_json and record is not None:
            sys.stdout.write(json.dumps(record, default=_plain) + "\n")
            # Libraries such as trackio print at exit, and that must not follow the object.
            atexit.register(setattr, sys, "stdout", sys.__stderr__)
    except BilensError as error:
        errors.print(f"error: {error}", style="red")
        sys.exit(1)
    except KeyboardInterrupt:
        resumes = hasattr(getattr(command, "what", command), "resume")
        errors.print("stopped" + "; --resume continues from here" * resumes)
        sys.exit(130)


def check_outputs(command: Any) -> None:
    """Refuse outputs before any work, instead of after hours of it.

    Refused are devices and named pipes, and default places with files that bilens did not write.
    """
    settings = getattr(command, "what", command)
    # Options that name a file or a folder to write.
    outputs = ("output", "viewer", "save_graph", "figure", "space")
    for name in outputs:
        path = getattr(settings, name, None)
        paths = path if isinstance(path, tuple) else (path,)
        for target in filter(None, paths):
            files.check_target(target)
    is_named = getattr(settings, "output", None) is not None or getattr(settings, "resume", False)
    if hasattr(settings, "place") and not is_named:
        check_own(settings.place)


def _plain(value: Any) -> Any:
    """Return tables of pandas as lists of rows, and everything else as text."""
    return json.loads(value.to_json(orient="records")) if hasattr(value, "to_json") else str(value)


def parse(args: list[str]) -> Any:
    """Return the command with its settings, without an import of torch."""
    # Every command takes it, so no command declares it.
    args = [word for word in args if word != JSON]
    for word in args:
        # Python keeps bytes of other encodings as halves of surrogate pairs; file names may have
        # them, but no tokenizer accepts them.
        if not word.isascii() and re.search("[\ud800-\udfff]", word) and not os.path.exists(word):  # noqa: PTH110
            encoding = sys.getfilesystemencoding()
            hint = "" if encoding == "utf-8" else "; with PYTHONUTF8=1 Python reads UTF-8"
            raise BilensError(
                f"{printable(word)!r} is not valid {encoding}, and no file here{hint}"
            )
    if "--version" in args:
        out.print(f"bilens {__version__}")
        sys.exit(0)
    screen, refused = _Screen(args), StringIO()
    try:
        with redirect_stdout(screen), redirect_stderr(refused):
            return _overview(args) if not args or args[0].startswith("-") else _one(*args)
    except SystemExit:
        sys.stdout.write(screen.getvalue())
        sys.stderr.write(printable(refused.getvalue()))
        raise


class _Screen(StringIO):
    """Help as tyro prints it: it asks whether to draw boxes, and to use colours, which help has."""

    encoding = ""

    def __init__(self, args: list[str]) -> None:
        super().__init__()
        is_help = {"-h", "--help"} & {*args}
        self._has_colours = is_help and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self.encoding = sys.stdout.encoding

    def isatty(self) -> bool:
        return bool(self._has_colours)


def _one(name: str, *words: str) -> Any:
    if name not in LINES and not name.endswith(".py"):
        near = get_close_matches(name, LINES)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        sys.stderr.write(f"error: {name} is not a command; {hint}`bilens --help` lists them\n")
        sys.exit(2)
    command = _command(name)
    options: dict[str, Any] = {"config": (tyro.conf.OmitArgPrefixes,), "registry": NUMBERS}
    if hasattr(command, "default_for"):
        options["default"] = command.default_for(list(words))
    return tyro.cli(command, prog=f"bilens {name}", args=words, **options)


def _command(name: str) -> Any:
    """Return the class of a command, or the command of a registered analysis."""
    if name in COMMANDS:
        module, kind, _ = COMMANDS[name]
        return getattr(import_module(f"bilens.cli.{module}"), kind)
    # A file may register several, and a command is one.
    entries = load_file(name) if name.endswith(".py") else [declared_analysis(name)]
    if len(entries) > 1:
        names = " and ".join(entry.name for entry in entries)
        raise BilensError(f"{name} registers {names}; expected one reading in a file")
    return import_module("bilens.cli.analyses").command_of(entries[0])


def _overview(args: list[str]) -> Any:
    """Print the help, or the completion of all commands for a shell, and exit."""
    overview = tyro.extras.SubcommandApp()
    completion = any("completion" in word for word in args)
    for name, line in LINES.items():
        command = _command(name) if completion else lambda: None
        overview.command(name=name, help=line)(command)
    about = (
        "Read neural networks from their weights.\n\n"
        "A name that ends in .py is a file with a reading of your own, as in `bilens copying.py "
        "MODEL`. --json prints the result of a command as one JSON object on standard output, and "
        "everything else on standard error. --version prints the version. The exit status is 0 on "
        "success, 1 after an error, 2 if the command line is not understood, and 130 after ctrl-C."
    )
    return overview.cli(prog="bilens", description=about, args=args, registry=NUMBERS)


NUMBERS = tyro.constructors.ConstructorRegistry()
"""Whole numbers may be written as 1000000, 500K, 1M or 0.5B, and paths are not empty."""


@NUMBERS.primitive_rule
def _number_or_path(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    if info.type not in (int, Path):
        return None
    read = whole_number if info.type is int else path_of
    return tyro.constructors.PrimitiveConstructorSpec[Any](
        nargs=1,
        metavar=info.type.__name__.upper(),
        instance_from_str=lambda args: read(args[0]),
        is_instance=lambda value: isinstance(value, info.type) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def path_of(text: str) -> Path:
    """Return the path of a text, which an unset variable of a shell leaves empty."""
    if not text:
        raise ValueError("'', expected a path; write . for the current folder")
    return Path(text)


def whole_number(text: str) -> int:
    """Return the number of a text such as 1000000, 500K, 1M or 0.5B."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    units = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
    value = float(match[1]) * units[match[2]] if match else 0.5
    if match and not match[2] and "." not in text:
        return int(match[1])
    if value % 1:
        raise ValueError(f"{text!r}, expected a whole number such as 1000000, 500K, 1M or 0.5B")
    return int(value)

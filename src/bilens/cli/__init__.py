"""The command line: a command is a typed function, and its help is its docstring."""

import atexit
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from importlib import import_module
from io import StringIO, TextIOWrapper
from typing import Any

from rich.table import Table

from bilens import __version__, files, memory
from bilens.analyses import built_in, load_file
from bilens.cli.commands import Call, Command, UsageError, flag_of, read_words
from bilens.cli.console import PlainConsole, errors, out, printable
from bilens.cli.readings import analysis_command
from bilens.errors import BilensError
from bilens.options import check_docstrings
from bilens.question_files import check_questions
from bilens.sections import plain

JSON = "--json"
OUTPUTS = ("output", "arrays", "viewer", "save_graph", "figure", "directions", "space")
"""Options that name what a command writes."""

DIVIDED = ("train language", "anneal", "linearise", "tensorise", "flow-table", "circuit")
"""Commands whose processes under `torchrun` share the work."""
GROUPS = {
    "Read a language model": (
        *("flow", "flow-table", "lens", "diff", "circuit", "task-directions", "contexts"),
        *("ngrams", "heads", "composition", "summary", "generate"),
    ),
    "Read an image model": ("eigenvectors", "certify", "explain", "paths", "bonds"),
    "Train": ("train",),
    "Convert": ("process", "tensorise", "linearise", "anneal", "export"),
    "Run": ("demo", "report", "explore", "graph", "doctor", "reproduce", "cite"),
}
"""Commands in the order of the help, the usual ones first in each group."""
COMMANDS = tuple(name for names in GROUPS.values() for name in names)
MODULES = {
    "readings": ("flow-table",),
    **{"training": GROUPS["Train"], "conversion": GROUPS["Convert"], "running": GROUPS["Run"]},
}
"""By module of `bilens.cli`: its commands, functions of their names. The others are analyses."""


def main(args: list[str] | None = None) -> None:
    """Run one command; a mistake of the caller's ends with one message and status 1."""
    words = sys.argv[1:] if args is None else args
    as_json, call = JSON in words, None
    try:
        if sys.stdout is None:
            raise BilensError("standard output is closed; use > /dev/null to see nothing of it")
        check_docstrings()
        if isinstance(sys.stdout, TextIOWrapper):
            # Terminals of other encodings than UTF-8 show \u2581 instead of a letter.
            sys.stdout.reconfigure(errors="backslashreplace")
        check_processes(words)
        call = parse(words)
        # Mistakes in a file are said before torch is imported, and a model loaded.
        questions = call.keywords.get("questions")
        if questions or (questions is not None and "prompt" not in call.keywords):
            check_questions(questions, each=words[:1] != ["flow-table"])
        with (
            redirect_stdout(sys.stderr) if as_json else nullcontext(),
            files.file_errors(doing="used"),
            memory.memory_errors(),
        ):
            check_outputs(call.keywords)
            record = call()
        # Of several processes only the first has one.
        if as_json and record is not None:
            sys.stdout.write(json.dumps(plain(record)) + "\n")
            # Libraries such as trackio print at exit, and that must not follow the object.
            atexit.register(setattr, sys, "stdout", sys.__stderr__)
    except BilensError as error:
        errors.print(f"error: {error}", style="red")
        sys.exit(1)
    except KeyboardInterrupt:
        resumes = call is not None and "resume" in call.keywords
        errors.print("stopped" + "; --resume continues from here" * resumes)
        sys.exit(130)


def check_processes(args: Sequence[str]) -> None:
    """Refuse to do all work once in each process of `torchrun`; the first says so."""
    if int(os.environ.get("WORLD_SIZE") or 1) == 1 or {"-h", "--help", "--version"} & {*args}:
        return
    name = " ".join(args[:2] if args[:1] == ["train"] else args[:1])
    # Without steps there is no training to share.
    alone = name == "linearise" and not any(word.startswith("--steps") for word in args)
    if name in DIVIDED and not alone:
        return
    if os.environ.get("RANK", "0") != "0":
        sys.exit(1)
    without = " without --steps" * (name in DIVIDED)
    raise BilensError(f"bilens {name}{without} runs in one process: start it without torchrun")


def check_outputs(settings: Mapping[str, Any]) -> None:
    """Refuse outputs before any work, instead of after hours of it.

    These are devices and named pipes, a place where nothing can be made, and a file that is also
    read, or written by another option.
    """
    places = set[str]()
    for name, setting in settings.items():
        for value in () if name in OUTPUTS else _listed(setting):
            if isinstance(value, str | os.PathLike) and os.path.isfile(value):  # noqa: PTH113
                places.add(os.path.realpath(value))
    for name in filter(OUTPUTS.__contains__, settings):
        for value in filter(None, _listed(settings[name])):
            path = files.check_target(value)
            files.check_writable(path)
            # The numbers of a page are written beside it.
            numbers = [path.with_suffix(".json")] if path.suffix == ".html" else []
            for target in (path, *numbers):
                place = os.path.realpath(target)
                # Several outputs may share a folder.
                if place in places and target.suffix and not target.is_dir():
                    raise BilensError(
                        f"{flag_of(name)}={value} would overwrite {target}, which the command "
                        "names too; choose another name"
                    )
                places.add(place)


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def parse(args: list[str]) -> Call:
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
    screen, complaints = _Screen(args), StringIO()
    try:
        with redirect_stdout(screen), redirect_stderr(complaints):
            if args and not args[0].startswith("-"):
                text = TRAIN if args[0] == "train" else ""
                return read_words(commands_of(*args), f"bilens {args[0]}", args[1:], text)
            return _overview(args)
    except UsageError as error:
        errors.print(f"error: {error}", style="red")
        sys.exit(2)
    except SystemExit:
        sys.stdout.write(screen.getvalue())
        sys.stderr.write(printable(complaints.getvalue()) + misspelt(args, complaints.getvalue()))
        raise


def misspelt(args: list[str], refused: str) -> str:
    """Return a line on words that are nearly options which are missing; tyro says only the rest."""
    missing, is_both, _ = refused.partition("Unrecognized options")
    flags = {*re.findall(r"--[\w-]+", missing)} - {"--help"}
    pairs = [(word, near) for word in args if (near := get_close_matches(word, flags, n=1))]
    lines = [f"{word} is no option; did you mean {near[0]}?\n" for word, near in pairs]
    return "".join(lines) if is_both else ""


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


def commands_of(name: str, *words: str) -> dict[str, Command]:
    """Return the command with a name, or those of the kinds of `train`."""
    if name.endswith(".py"):
        # A file may register several, and a command is one.
        entries = load_file(name)
        if len(entries) > 1:
            names = " and ".join(entry.name for entry in entries)
            raise BilensError(f"{name} registers {names}; expected one reading in a file")
        return {name: analysis_command(entries[0])}
    if name not in COMMANDS:
        near = get_close_matches(name.lower(), COMMANDS)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        sys.stderr.write(f"error: {name} is not a command; {hint}`bilens --help` lists them\n")
        sys.exit(2)
    if entry := built_in().get(name):
        return {name: analysis_command(entry)}
    (home,) = (module for module, names in MODULES.items() if name in names)
    module = import_module(f"bilens.cli.{home}")
    if name == "train":
        language = Command.of(module.train_language, module.of_preset(words[1:]))
        return {"images": Command.of(module.train_images), "language": language}
    return {name: Command.of(getattr(module, name.replace("-", "_")))}


ABOUT = (
    "Read neural networks from their weights.\n\n"
    "A name that ends in .py is a file with a reading of your own, as in `bilens copying.py "
    "MODEL`. --json prints the result of a command as one JSON object on standard output, and "
    "everything else on standard error. --version prints the version. The exit status is 0 on "
    "success, 1 after an error, 2 if the command line is not understood, and 130 after ctrl-C."
)


TRAIN = """Train an image classifier or a language model from scratch and save it.

Each kind has settings of its own: `bilens train images --help`.

    bilens train images --data digits
    bilens train language --data grammar
"""


def _overview(args: list[str]) -> Any:
    """Print the help, or the completion of all commands for a shell, and exit."""
    if any("completion" in word for word in args):
        apps = {n: command for name in COMMANDS for n, command in commands_of(name).items()}
        return read_words(apps, "bilens", args)
    unknown = [word for word in args if word not in ("-h", "--help")]
    if unknown:
        sys.stderr.write(f"error: {unknown[0]} is not an option; `bilens --help` lists commands\n")
        sys.exit(2)
    screen = PlainConsole(width=min(shutil.get_terminal_size().columns, 100))
    screen.print("usage: bilens COMMAND [OPTIONS]\n")
    screen.print(ABOUT, soft_wrap=False)
    for heading, names in GROUPS.items():
        screen.print(f"\n{heading}", style="bold")
        table = Table.grid(padding=(0, 2))
        for name in names:
            table.add_row(f"  {name}", line_of(name))
        screen.print(table)
    screen.print("\nOptions of a command: bilens COMMAND --help", soft_wrap=False)
    sys.exit(0 if args else 2)


def line_of(name: str) -> str:
    """Return the first line of a command's help."""
    if name == "train":
        return TRAIN.partition("\n")[0]
    (command,) = commands_of(name).values()
    return command.about.partition("\n")[0]

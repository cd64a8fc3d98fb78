"""Commands are typed functions; their arguments are read from words by tyro."""

import ast
import inspect
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import tyro

from bilens.errors import BilensError
from bilens.question_files import written_names
from bilens.settings import check_values, checks_of

NO_DEFAULTS: Mapping[str, Any] = {}


Call = partial[dict[str, Any] | None]
"""A command with the values of its options."""


@dataclass(frozen=True)
class Command:
    """A function whose parameters are options.

    Attributes:
        run: the function.
        about: its help.
        parameters: its parameters with types, defaults and perhaps lines of help; other lines are
            those of Args in `about`.
        check: raises for values that are wrong for every model; called before torch is imported.
    """

    run: Callable[..., dict[str, Any] | None]
    about: str
    parameters: Sequence[inspect.Parameter]
    check: Callable[[Mapping[str, Any]], object] | None = None

    @classmethod
    def of(
        cls, function: Callable[..., Any], defaults: Mapping[str, Any] = NO_DEFAULTS
    ) -> "Command":
        """Return the command of a function, with some other defaults."""
        parameters = [
            p.replace(default=defaults.get(p.name, p.default))
            for p in inspect.signature(function).parameters.values()
        ]
        return cls(function, inspect.getdoc(function) or "", parameters)

    @property
    def lists(self) -> list[str]:
        """Parameters of several values after one option, of which a second would replace them."""
        return [p.name for p in self.parameters if is_list(p.annotation)]

    @property
    def options(self) -> Iterator[str]:
        """Names of all options, without those that stand by themselves; fields of settings too."""
        for parameter in self.parameters:
            if is_dataclass(parameter.annotation):
                yield from (field.name for field in fields(parameter.annotation))
            elif tyro.conf.Positional not in get_args(parameter.annotation):
                yield parameter.name

    @property
    def parser(self) -> Callable[..., Call]:
        """A function of the same parameters for tyro, which runs what it has read."""

        def call(**settings: Any) -> Call:
            try:
                check_values(settings, checks_of({p.name: p.annotation for p in self.parameters}))
                if self.check is not None:
                    self.check(settings)
            except BilensError as error:
                raise UsageError(self._typed(error, settings)) from None
            return partial(self._run, **settings)

        call.__signature__ = inspect.Signature(list(self.parameters))  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in self.parameters}
        # A description that begins with code loses the indentation of its first line.
        lead = r"\1For example:\n\n    bilens"
        call.__doc__ = re.sub(r"\A(.*\n\n) +bilens", lead, self.about)
        return call

    def _run(self, **settings: Any) -> dict[str, Any] | None:
        try:
            return self.run(**settings)
        except BilensError as error:
            raise BilensError(self._typed(error, settings)) from error

    def _typed(self, error: BilensError, settings: Mapping[str, Any]) -> str:
        return as_typed(str(error), {name: settings.get(name) for name in self.options})


VALUE = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\([^()]*\)|\[[^][]*\]|[^\s,;:()]*[^\s,;:().]"""
ARGUMENT = re.compile(
    rf"(?<![\w./-])(?P<name>[a-z]\w*)=(?P<value>{VALUE})"
    r"|(?<![\w./-])[a-z]+_\w+\b(?![./(])"
    r"|^[a-z]+(?= (?:has|holds|is|names|needs?) )|(?:(?<=give )|(?<=leave )|(?<=beside ))[a-z]+\b"
)
"""An argument in a message: with its value, a text, a tuple, a list or a word, or its name alone.

Alone, a name is told from a word of the sentence by its underscore, or by what stands beside it.
"""


SHARED = {
    "text": ("prompt", "against", "answer"),
    "token": ("token", "minus", "answer"),
    "k": ("k", "undo"),
}
"""By an argument of functions that several options reach: these, told apart by their values."""


OF_A_QUESTION = ("prompt", "token", "minus", "against")
"""Options that ask a single question."""


def flag_of(name: str) -> str:
    """Return an option as it is typed: --data-dir for data_dir."""
    return f"--{name.replace('_', '-')}"


def as_typed(message: str, settings: Mapping[str, Any]) -> str:
    """Return a message with its arguments as options that are typed: --heads for heads=True.

    `settings` are the values of the options by name, as far as they are known.
    """
    return ARGUMENT.sub(partial(_argument_as_typed, settings), message)


def _argument_as_typed(settings: Mapping[str, Any], match: re.Match[str]) -> str:
    """Return an argument in a message as the option that it is, if it is one that was typed."""
    name, text = match["name"] or match[0], match["value"]
    try:
        value = ast.literal_eval(text or "True")
    except (ValueError, SyntaxError):  # a word, or a long text that was cut
        value = text
    content = value if text else ""
    options = [x for x in SHARED.get(name, (name,)) if str(content) in str(settings.get(x) or "")]
    (option,) = [*options, name][:1]
    # What stands in the lines of a file of questions was not typed as an option.
    is_of_a_line = option in OF_A_QUESTION and not settings.get(option)
    if option not in settings or (settings.get("questions") and is_of_a_line):
        return match[0]
    return _with_value(flag_of(option), value)


def _with_value(flag: str, value: Any) -> str:
    """Return an option with its value as they are typed."""
    if value is True:
        return flag
    if not isinstance(value, tuple | list):
        return f"{flag}={shlex.quote(str(value))}"
    if value and all(isinstance(part, str) for part in value):
        return f"{flag}={shlex.quote(written_names(value))}"
    return " ".join([flag, *map(str, value)])


def refusal_behind(error: BaseException | None) -> BilensError | None:
    """Return the error of settings that check themselves, which tyro has wrapped in its own."""
    while error is not None and not isinstance(error, BilensError):
        error = error.__context__
    return error


APPENDED = get_args(tyro.conf.UseAppendAction[tuple[Path, ...]])[1]
"""Mark of an option that may be given several times."""


def is_list(kind: Any) -> bool:
    """Return True for the type of an option whose values all stand after it, perhaps none."""
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        return APPENDED not in parts[1:] and is_list(parts[0])
    return get_origin(kind) is tuple or any(map(is_list, parts))


class UsageError(BilensError):
    """A value of an option that its command does not take."""


def read_words(
    commands: Mapping[str, Command], prog: str, words: Sequence[str], description: str = ""
) -> Call:
    """Return the call that words name: of the one command, or of one of several by its name.

    `description` is the help of several commands together.
    """
    settings: dict[str, Any] = {"prog": prog, "config": (tyro.conf.OmitArgPrefixes,)}
    for name in {name for command in commands.values() for name in command.lists}:
        flag = flag_of(name)
        if sum(word.partition("=")[0] == flag for word in words) > 1:
            raise UsageError(
                f"{flag} stands twice, expected all of its values after one: {flag} A B"
            )
    settings |= {"args": words, "registry": NUMBERS}
    try:
        if len(commands) == 1:
            (command,) = commands.values()
            return tyro.cli(command.parser, **settings)
        app = tyro.extras.SubcommandApp()
        for name, command in commands.items():
            app.command(name=name, help=command.about.partition("\n")[0])(command.parser)
        return app.cli(description=description, **settings)
    except SystemExit as ended:
        if refusal := refusal_behind(ended):
            names = {name: None for command in commands.values() for name in command.options}
            raise UsageError(as_typed(str(refusal), names)) from None
        raise


NUMBERS = tyro.constructors.ConstructorRegistry()
"""Whole numbers may be written as 1000000, 500K, 1M or 0.5B, and paths are not empty."""


@NUMBERS.primitive_rule
def _number_or_path(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    if info.type not in (int, Path):
        return None
    parse = whole_number if info.type is int else path_of
    return tyro.constructors.PrimitiveConstructorSpec[Any](
        nargs=1,
        metavar=info.type.__name__.upper(),
        instance_from_str=lambda args: parse(args[0]),
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
    # Exact: the float nearest to 4.1 times a million is no whole number.
    value = Fraction(match[1]) * units[match[2]] if match else Fraction(1, 2)
    if value.denominator > 1:
        raise ValueError(f"{text!r}, expected a whole number such as 1000000, 500K, 1M or 0.5B")
    return int(value)

"""Commands are typed functions; their arguments are read from words by tyro."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import tyro

from bilens.errors import BilensError
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
    """

    run: Callable[..., dict[str, Any] | None]
    about: str
    parameters: Sequence[inspect.Parameter]

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
    def parser(self) -> Callable[..., Call]:
        """A function of the same parameters for tyro, which runs what it has read."""

        def call(**settings: Any) -> Call:
            try:
                check_values(settings, checks_of({p.name: p.annotation for p in self.parameters}))
            except BilensError as error:
                raise UsageError(str(error)) from None
            return partial(self.run, **settings)

        call.__signature__ = inspect.Signature(list(self.parameters))  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in self.parameters}
        # A description that begins with code loses the indentation of its first line.
        lead = r"\1For example:\n\n    bilens"
        call.__doc__ = re.sub(r"\A(.*\n\n) +bilens", lead, self.about)
        return call


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
        flag = f"--{name.replace('_', '-')}"
        if sum(word.partition("=")[0] == flag for word in words) > 1:
            raise UsageError(
                f"{flag} stands twice, expected all of its values after one: {flag} A B"
            )
    if len(commands) == 1:
        (command,) = commands.values()
        return tyro.cli(command.parser, args=words, registry=NUMBERS, **settings)
    app = tyro.extras.SubcommandApp()
    for name, command in commands.items():
        app.command(name=name, help=command.about.partition("\n")[0])(command.parser)
    return app.cli(description=description, args=words, registry=NUMBERS, **settings)


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
    # Exact: the float nearest to 4.1 times a million is no whole number.
    value = Fraction(match[1]) * units[match[2]] if match else Fraction(1, 2)
    if value.denominator > 1:
        raise ValueError(f"{text!r}, expected a whole number such as 1000000, 500K, 1M or 0.5B")
    return int(value)

"""The command line: every command is a dataclass, its help is its docstring."""

import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from typing import Any

import tyro

from bilens.cli.terminal import errors
from bilens.errors import BilensError

__all__ = ["COMMANDS", "main", "parse", "whole_number"]

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}

COMMANDS = {
    "train": ("train", "Train", "Train an image classifier or a language model from scratch."),
    "compare": ("compare", "Compare", "Train architectures as far as the same loss."),
    "decompose": ("decompose", "Decompose", "Take a classifier apart; how few parts does it need?"),
    "ngrams": ("language", "NGrams", "The n-grams of a token, from the weights alone."),
    "heads": ("language", "Heads", "What the heads of a model attend to and say, from weights."),
    "contexts": (
        "language",
        "Contexts",
        "Eigenvectors of a token, and texts where they are active.",
    ),
    "flow": ("flow", "FlowCommand", "Where a logit comes from on a text, node by node."),
    "generate": ("language", "Generate", "Let a language model go on with a text."),
    "process": ("process", "Process", "Fold norms and biases of a model into its weights."),
    "anneal": ("anneal", "Anneal", "Train a gated model on while it becomes bilinear."),
    "export": ("anneal", "Export", "Save an annealed model for plain transformers."),
    "linearise": ("linearise", "Linearise", "Make the gates of a model linear, without training."),
    "spectra": ("spectra", "Spectra", "Top eigenpairs of a layer along the logit of every token."),
    "report": ("report", "Report", "Write the report of a trained model as one HTML file."),
    "explore": ("explore", "Explore", "Look into a trained model in the browser."),
    "demo": ("demo", "Demo", "See it work on the bundled digits: train, decompose, report."),
    "reproduce": ("reproduce", "Reproduce", "Reproduce a figure or table of the papers."),
}
"""By name: the module and the class of a command, and what it does in one line."""


def main(args: list[str] | None = None) -> None:
    """Run one command; a mistake of the caller's ends with one message and status 1."""
    try:
        parse(sys.argv[1:] if args is None else args).run()
    except BilensError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        errors.print("stopped; a training goes on from here with --resume", highlight=False)
        sys.exit(130)


def parse(args: list[str]) -> Any:
    """The command that was asked for, with its settings; only its own module is imported.

    Raises:
        BilensError: a setting is out of range.
    """
    if args and args[0] in COMMANDS:
        name, *rest = args
        module, kind, _ = COMMANDS[name]
        command = getattr(import_module(f"bilens.cli.{module}"), kind)
        options: dict[str, Any] = {
            "prog": f"bilens {name}",
            "args": rest,
            "config": (tyro.conf.OmitArgPrefixes,),
            "registry": NUMBERS,
        }
        if hasattr(command, "default_for"):
            options["default"] = command.default_for(rest)
        try:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                return tyro.cli(command, **options)
        except SystemExit as stop:
            # tyro would print a setting's error below the name of a class.
            refused: BaseException | None = stop
            while refused is not None and not isinstance(refused, BilensError):
                refused = refused.__context__
        if refused is not None:
            raise refused
        return tyro.cli(command, **options)
    overview = tyro.extras.SubcommandApp()
    for name, (_, _, text) in COMMANDS.items():
        overview.command(name=name, help=text)(lambda: None)
    # Prints the help, or that there is no such command, and exits.
    return overview.cli(
        prog="bilens", description="Read neural networks from their weights.", args=args
    )


NUMBERS = tyro.constructors.ConstructorRegistry()
"""Whole numbers may be written as 1000000, 500K, 1M or 0.5B."""


@NUMBERS.primitive_rule
def _whole_number(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[int] | None:
    if info.type is not int:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda args: whole_number(args[0]),
        is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def whole_number(text: str) -> int:
    """A number such as 1000000, 500K, 1M or 0.5B.

    Raises:
        ValueError: it is not one.
    """
    found = re.fullmatch(r"(-?\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    value = float(found[1]) * UNITS[found[2]] if found else 0.5
    if found and not found[2] and "." not in text:
        return int(found[1])
    if value % 1:
        raise ValueError(f"{text!r}, expected a whole number such as 1000000, 500K, 1M or 0.5B")
    return int(value)

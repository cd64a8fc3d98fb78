"""The command line: every command is a dataclass, its help is its docstring."""

import sys
from importlib import import_module
from typing import Any

import tyro
from rich.console import Console

from bilens.errors import BilensError

__all__ = ["COMMANDS", "main", "parse"]

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
    command = parse(sys.argv[1:] if args is None else args)
    errors = Console(stderr=True)
    try:
        command.run()
    except BilensError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        errors.print("stopped; a training goes on from here with --resume", highlight=False)
        sys.exit(130)


def parse(args: list[str]) -> Any:
    """The command that was asked for, with its settings; only its own module is imported."""
    config = (tyro.conf.OmitArgPrefixes,)
    if args and args[0] in COMMANDS:
        name, *rest = args
        module, kind, _ = COMMANDS[name]
        command = getattr(import_module(f"bilens.cli.{module}"), kind)
        return tyro.cli(command, prog=f"bilens {name}", args=rest, config=config)
    overview = tyro.extras.SubcommandApp()
    for name, (_, _, text) in COMMANDS.items():
        overview.command(name=name, help=text)(lambda: None)
    # Prints the help, or that there is no such command, and exits.
    return overview.cli(
        prog="bilens", description="Read neural networks from their weights.", args=args
    )

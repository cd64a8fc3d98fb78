"""The command line: every command is a dataclass, its help is its docstring."""

import sys
from typing import Annotated, Any

import tyro
from rich.console import Console

from bilens.cli.anneal import Anneal, Export
from bilens.cli.decompose import Decompose
from bilens.cli.demo import Demo
from bilens.cli.explore import Explore
from bilens.cli.ngrams import Contexts, Generate, NGrams
from bilens.cli.process import Process
from bilens.cli.report import Report
from bilens.cli.reproduce import Reproduce
from bilens.cli.spectra import Spectra
from bilens.cli.train import Train
from bilens.errors import BilensError

__all__ = ["main"]

Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Decompose, tyro.conf.subcommand("decompose")]
    | Annotated[NGrams, tyro.conf.subcommand("ngrams")]
    | Annotated[Contexts, tyro.conf.subcommand("contexts")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Process, tyro.conf.subcommand("process")]
    | Annotated[Anneal, tyro.conf.subcommand("anneal")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Spectra, tyro.conf.subcommand("spectra")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Explore, tyro.conf.subcommand("explore")]
    | Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
)


def main(args: list[str] | None = None) -> None:
    """Run one command; a mistake of the caller's ends with one message and status 1."""
    command: Any = tyro.cli(
        Command,
        prog="bilens",
        description="Read neural networks from their weights.",
        args=args,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    errors = Console(stderr=True)
    try:
        command.run()
    except BilensError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        errors.print("stopped; a training goes on from here with --resume", highlight=False)
        sys.exit(130)

"""`bilens train`: images or language."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from bilens.cli.train_images import TrainImages
from bilens.cli.train_language import TrainLanguage

__all__ = ["Train"]


@dataclass(frozen=True)
class Train:
    """Train a model from scratch and save it.

    Each kind has settings of its own: `bilens train images --help`.

        bilens train images --data digits
        bilens train language --data grammar

    Attributes:
        what: images or language.
    """

    what: (
        Annotated[TrainImages, tyro.conf.subcommand("images")]
        | Annotated[TrainLanguage, tyro.conf.subcommand("language")]
    )

    @staticmethod
    def default_for(args: Sequence[str]) -> Any:
        """The settings of a preset for language models."""
        if args[:1] != ["language"]:
            return tyro.MISSING
        default: Any = TrainLanguage.default_for(args)
        return Train(default)

    def run(self) -> dict[str, Any] | None:
        """Train what was asked for."""
        return self.what.run()

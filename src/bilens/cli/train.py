"""`bilens train`: images or language."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from bilens.cli.train_images import TrainImages
from bilens.cli.train_language import TrainLanguage

__all__ = ["Train"]


@dataclass(frozen=True)
class Train:
    """Train a model from scratch and save it."""

    what: (
        Annotated[TrainImages, tyro.conf.subcommand("images")]
        | Annotated[TrainLanguage, tyro.conf.subcommand("language")]
    )

    def run(self) -> None:
        """Train what was asked for."""
        self.what.run()

"""`bilens demo`: the whole way, on data that comes with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bilens.cli.decompose import Decompose
from bilens.cli.report import Report
from bilens.cli.train_images import Architecture, TrainImages
from bilens.train import ClassifierTraining, is_begun

__all__ = ["Demo"]

TRAINING = ClassifierTraining(epochs=60, batch_size=50, decay=0.95, input_noise=0.5)


@dataclass(frozen=True)
class Demo:
    """See it work: train on the bundled digits, decompose, print, and write report.html.

        bilens demo

    Attributes:
        output: run directory.
    """

    output: Path = Path("runs/demo")

    def run(self) -> dict[str, Any]:
        """Train, decompose and report."""
        architecture = Architecture(d_model=100)
        training = TrainImages(
            output=self.output,
            resume=is_begun(self.output),
            architecture=architecture,
            training=TRAINING,
        )
        commands = (training, Decompose(self.output), Report(str(self.output)))
        return {type(command).__name__.lower(): command.run() for command in commands}

"""`bilens train images`."""

import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from bilens.cli.console import DataDir, choose_device
from bilens.cli.terminal import out
from bilens.data import ImageData, load_images
from bilens.nn import ClassifierConfig
from bilens.settings import Between, check_settings
from bilens.train import ClassifierTraining, train_classifier, train_classifiers

__all__ = ["Architecture", "TrainImages"]

Hidden = Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress]


@dataclass(frozen=True)
class Architecture(ClassifierConfig):
    """The model, but for what the data says. The defaults are Table 2 of Pearce et al. 2024."""

    n_inputs: Hidden = 1
    n_classes: Hidden = 1
    image_shape: tyro.conf.Fixed[tyro.conf.Suppress[tuple[int, int] | None]] = None
    class_names: tyro.conf.Fixed[tyro.conf.Suppress[tuple[str, ...]]] = ()

    def config_for(self, data: ImageData) -> ClassifierConfig:
        """The same model for the images of `data`."""
        told = {
            "n_inputs": data.n_inputs,
            "n_classes": data.n_classes,
            "image_shape": data.shape,
            "class_names": data.class_names,
        }
        return ClassifierConfig(**{**asdict(self), **told})


@dataclass(frozen=True)
class TrainImages:
    """Train an image classifier from scratch and save it.

    The run directory holds the model (config.json and model.safetensors, which bilens.load and
    from_pretrained read), training.json, one line of metrics for each epoch in metrics.jsonl, and
    checkpoints, from the last whole one of which --resume goes on. Ctrl-C stops between two steps
    and loses nothing.

        bilens train images --data mnist
        bilens train images --seeds 5 --n-layers 2 --output runs/five

    Attributes:
        data: digits (bundled, 8x8), mnist, fashion-mnist, hub:owner/name, or a folder: of class
            folders with PNG or JPEG images, or of four IDX files.
        data_dir: folder that holds the IDX files of mnist or fashion-mnist; by default the
            environment variable BILENS_DATA, and without that the Hugging Face hub.
        output: run directory; by default runs/NAME-OF-THE-DATA.
        seeds: train this many models at once, from --seed on, each in a directory of its own below
            output.
        resume: go on from where an earlier training in output was stopped.
        device: cpu, cuda, cuda:1, mps, ...; auto takes a GPU where there is one.
    """

    data: str = "digits"
    data_dir: DataDir = None
    output: Path | None = None
    seeds: Annotated[int, Between(1, 1024)] = 1
    resume: bool = False
    device: str = "auto"
    architecture: Architecture = field(default_factory=Architecture)
    training: ClassifierTraining = field(default_factory=ClassifierTraining)

    def __post_init__(self) -> None:
        check_settings(self)

    def run(self) -> dict[str, Any]:
        """Train one model or several."""
        data = load_images(self.data, self.data_dir).to(choose_device(self.device))
        config, run = self.architecture.config_for(data), self.output or Path("runs") / data.name
        if self.seeds == 1:
            trained = [train_classifier(config, data, self.training, run, resume=self.resume)]
            runs = [run]
        else:
            seeds = range(self.training.seed, self.training.seed + self.seeds)
            trained = train_classifiers(config, data, self.training, seeds, run, resume=self.resume)
            runs = [run / f"seed-{seed}" for seed in seeds]
        accuracies = [history[-1]["test_accuracy"] for _, history in trained]
        for folder, accuracy in zip(runs, accuracies, strict=True):
            out.print(f"{folder}: test accuracy {accuracy:.2%}")
        mean = statistics.mean(accuracies)
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else None
        if spread is not None:
            out.print(
                f"{len(accuracies)} seeds: {mean:.2%} on average, standard deviation {spread:.2%}"
            )
        by_run = dict(zip(map(str, runs), accuracies, strict=True))
        return {"test_accuracy": mean, "standard_deviation": spread, "runs": by_run}

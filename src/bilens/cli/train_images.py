"""`bilens train images`."""

import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path

from bilens.cli.console import DataDir, choose_device
from bilens.cli.terminal import out
from bilens.data import ImageData, load_images
from bilens.errors import BilensError
from bilens.nn import ClassifierConfig, GateName, NormName
from bilens.train import ClassifierTraining, train_classifier

__all__ = ["Architecture", "TrainImages"]


@dataclass(frozen=True)
class Architecture:
    """The model. The defaults are Table 2 of Pearce et al. 2024.

    Attributes:
        layers: number of layers; one layer reads as one tensor.
        d_model: width of the embedding and of every layer.
        d_hidden: hidden units of each layer, projected back to d_model; none: d_model of them, and
            no projection.
        gate: identity makes the layers bilinear; the others are for comparison.
        bias: biases everywhere.
        residual: each layer adds to its input.
        norm: normalise before each layer; such a model is no tensor.
    """

    layers: int = 1
    d_model: int = 300
    d_hidden: int | None = None
    gate: GateName = "identity"
    bias: bool = False
    residual: bool = False
    norm: NormName = "none"

    def config_for(self, data: ImageData) -> ClassifierConfig:
        """The same model for the images of `data`."""
        return ClassifierConfig(
            n_inputs=data.n_inputs,
            n_classes=data.n_classes,
            d_model=self.d_model,
            n_layers=self.layers,
            d_hidden=self.d_hidden,
            gate=self.gate,
            bias=self.bias,
            residual=self.residual,
            norm=self.norm,
            image_shape=data.shape,
            class_names=data.class_names,
        )


@dataclass(frozen=True)
class TrainImages:
    """Train an image classifier from scratch and save it.

    The run directory holds the model (config.json and model.safetensors, which bilens.load and
    from_pretrained read), training.json, one line of metrics for each epoch in metrics.jsonl, and
    the state that --resume goes on from. Ctrl-C stops between two steps and loses nothing.

    Attributes:
        data: digits (bundled, 8x8), mnist, fashion-mnist, or a folder of four IDX files.
        data_dir: folder that holds the IDX files of mnist or fashion-mnist; by default the
            environment variable BILENS_DATA, and without that the Hugging Face hub.
        output: run directory; by default runs/NAME-OF-THE-DATA.
        seeds: train this many models, from --seed on, each in a directory of its own below output.
        resume: go on from where an earlier training in output was stopped.
        device: cpu, cuda, cuda:1, mps, ...; auto takes a GPU where there is one.
    """

    data: str = "digits"
    data_dir: DataDir = None
    output: Path | None = None
    seeds: int = 1
    resume: bool = False
    device: str = "auto"
    architecture: Architecture = field(default_factory=Architecture)
    training: ClassifierTraining = field(default_factory=ClassifierTraining)

    def run(self) -> None:
        """Train one model or several."""
        if self.seeds < 1:
            raise BilensError(f"--seeds={self.seeds}, expected at least 1")
        data = load_images(self.data, self.data_dir).to(choose_device(self.device))
        base = self.output or Path("runs") / data.name
        accuracies = []
        for number in range(self.seeds):
            training = replace(self.training, seed=self.training.seed + number)
            run = base / f"seed-{training.seed}" if self.seeds > 1 else base
            _, history = train_classifier(
                self.architecture.config_for(data), data, training, run, resume=self.resume
            )
            accuracies.append(history[-1]["test_accuracy"])
            out.print(f"{run}: test accuracy {accuracies[-1]:.2%}", highlight=False)
        if len(accuracies) > 1:
            mean, spread = statistics.mean(accuracies), statistics.stdev(accuracies)
            out.print(
                f"{len(accuracies)} seeds: {mean:.2%} on average, standard deviation {spread:.2%}",
                highlight=False,
            )

"""The command line: every command is a dataclass, its help is its docstring."""

import json
import statistics
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from bilens.data import ImageData, load_images
from bilens.errors import BilensError, CheckpointError
from bilens.files import write_json, write_safetensors
from bilens.models import load
from bilens.nn import ClassifierConfig, GateName, ImageClassifier, NormName
from bilens.read import Basis, ClassifierReading, DeepReading, read_classifier, read_deep
from bilens.report import (
    Order,
    save_figures,
    truncation_table,
    write_classifier_report,
    write_deep_report,
)
from bilens.reproduce import RECIPES, reproduce
from bilens.train import TRAINING_NAME, ClassifierTraining, train_classifier

__all__ = ["main"]

out = Console()
DataDir = Path | None


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
class Train:
    """Train a model from scratch and save it.

    The run directory holds the model (config.json and model.safetensors, which bilens.load and
    from_pretrained read), training.json, one line of metrics for each epoch in metrics.jsonl, and
    the state that --resume goes on from. Ctrl-C stops between two steps and loses nothing.

    Attributes:
        what: what to train: an image classifier.
        data: digits (bundled, 8x8), mnist, fashion-mnist, or a folder of four IDX files.
        data_dir: folder that holds the IDX files of mnist or fashion-mnist; by default the
            environment variable BILENS_DATA, and without that the Hugging Face hub.
        output: run directory; by default runs/NAME-OF-THE-DATA.
        seeds: train this many models, from --seed on, each in a directory of its own below output.
        resume: go on from where an earlier training in output was stopped.
        device: cpu, cuda, cuda:1, mps, ...; auto takes a GPU where there is one.
    """

    what: tyro.conf.Positional[Literal["images"]]
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
        data = load_images(self.data, self.data_dir).to(_device(self.device))
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


@dataclass(frozen=True)
class Decompose:
    """Take a trained classifier apart and print how few eigenvectors, or paths of them, it needs.

    For a model of one layer, writes spectra.safetensors (values, vectors and residuals, batched
    over the classes); for a deeper one, paths.safetensors (classes, indices, eigenvalues,
    effective eigenvalues and vectors of the strongest paths). Both come with decomposition.json.

    Attributes:
        run_dir: directory that `bilens train` wrote.
        data_dir: where the IDX files are; see `bilens train --help`.
        basis: eigenvectors orthonormal behind the embedding, as in the paper, or in pixels; for
            models of one layer.
        paths: how many of the strongest paths to find in a model of several layers.
    """

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    data_dir: DataDir = None
    basis: Basis = "model"
    paths: int = 1000

    def run(self) -> None:
        """Decompose, print and save."""
        model, data = _open_run(self.run_dir, self.data_dir)
        reading = _read(model, data, self.basis, self.paths)
        _save_reading(self.run_dir, reading)
        _print_reading(reading)


@dataclass(frozen=True)
class Report:
    """Write a trained classifier's report: one HTML file that works offline.

    Attributes:
        run_dir: directory that `bilens train` wrote.
        data_dir: where the IDX files are; see `bilens train --help`.
        basis: eigenvectors orthonormal behind the embedding, as in the paper, or in pixels; for
            models of one layer.
        paths: how many of the strongest paths to find in a model of several layers.
        output: the page; by default report.html in the run directory.
        order: the eigenvectors of a class by eigenvalue, or by mean activation over the test set.
        figures: also save every figure in this format into the folder figures beside the page;
            needs Chrome or Chromium.
    """

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    data_dir: DataDir = None
    basis: Basis = "model"
    paths: int = 1000
    output: Path | None = None
    order: Order = "eigenvalue"
    figures: Literal["png", "svg", "pdf"] | None = None

    def run(self) -> None:
        """Read the run and write its page."""
        model, data = _open_run(self.run_dir, self.data_dir)
        reading = _read(model, data, self.basis, self.paths)
        page = self.output or self.run_dir / "report.html"
        title = f"What {self.run_dir.name} computes"
        if isinstance(reading, DeepReading):
            drawn = write_deep_report(page, reading, title=title)
        else:
            drawn = write_classifier_report(page, reading, title=title, order=self.order)
        out.print(f"report: {page}", highlight=False)
        if self.figures:
            save_figures(drawn, page.parent / "figures", self.figures)
            out.print(f"figures: {page.parent / 'figures'}", highlight=False)


@dataclass(frozen=True)
class Demo:
    """See it work: train on the bundled digits, decompose, print, and write report.html.

    Attributes:
        output: run directory.
    """

    output: Path = Path("runs/demo")

    def run(self) -> None:
        """Train, decompose and report."""
        Train(
            what="images",
            output=self.output,
            architecture=Architecture(d_model=100),
            training=DEMO_TRAINING,
        ).run()
        Decompose(self.output).run()
        Report(self.output).run()


@dataclass(frozen=True)
class Reproduce:
    """Reproduce a figure or table of the papers: its numbers as JSON, its figures as a page.

    Trained models are kept below the output folder, so that a second recipe, or a second try, finds
    them; ctrl-C loses nothing.

    Attributes:
        recipe: a figure of Pearce et al. 2024, fig9 being figures 9 and 10; masks: adversarial
            masks from the weights; search: the best paths of deep models; or a part of the MNIST
            case study, Pearce & Dooms 2024: case_digits, case_svd, case_sae, case_pairs.
        scale: small takes minutes on two cores; paper is as large as the source.
        data_dir: where the IDX files are; see `bilens train --help`.
        output: folder for NAME.json, NAME.html and the models.
    """

    recipe: tyro.conf.Positional[Literal[RECIPES]]  # type: ignore[valid-type]
    scale: Literal["small", "paper"] = "small"
    data_dir: DataDir = None
    output: Path = Path("runs/reproduced")

    def run(self) -> None:
        """Run the recipe and print its numbers."""
        record = reproduce(
            self.recipe,
            scale=self.scale,
            output=self.output,
            models=self.output / "models",
            data_dir=self.data_dir,
        )
        out.print_json(data=record)
        out.print(f"page: {self.output / self.recipe}.html", highlight=False)


DEMO_TRAINING = ClassifierTraining(epochs=60, batch_size=50, decay=0.95, input_noise=0.5)

Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Decompose, tyro.conf.subcommand("decompose")]
    | Annotated[Report, tyro.conf.subcommand("report")]
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
        errors.print("stopped; `bilens train` goes on from here with --resume", highlight=False)
        sys.exit(130)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise BilensError(f"--device={name} cannot be used here: {reason}") from error
    return device


def _open_run(run: Path, data_dir: Path | None) -> tuple[ImageClassifier, ImageData]:
    model = load(run)
    if not isinstance(model, ImageClassifier):
        raise CheckpointError(
            f"{run} holds a {model.model_type}; expected the image classifier of a directory that "
            "`bilens train images` wrote"
        )
    path = run / TRAINING_NAME
    try:
        name = json.loads(path.read_text(encoding="utf-8"))["data"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is missing or damaged, so the data that {run} was trained on is unknown; "
            "expected a directory that `bilens train` wrote"
        ) from error
    return model, load_images(name, data_dir)


def _read(
    model: ImageClassifier, data: ImageData, basis: Basis, paths: int
) -> ClassifierReading | DeepReading:
    if len(model.layers) > 1:
        return read_deep(model, data, paths)
    return read_classifier(model, data, basis)


def _save_reading(run: Path, reading: ClassifierReading | DeepReading) -> None:
    if isinstance(reading, DeepReading):
        paths = reading.search.paths
        tensors = {
            "classes": paths.roots,
            "indices": paths.indices,
            "eigenvalues": paths.eigenvalues,
            "effective": paths.effective,
            "vectors": paths.vectors,
        }
        write_safetensors(run / "paths.safetensors", tensors)
    else:
        spectrum = reading.spectrum
        tensors = {
            "values": spectrum.values,
            "vectors": spectrum.vectors,
            "residuals": spectrum.residuals,
        }
        write_safetensors(run / "spectra.safetensors", tensors)
    write_json(run / "decomposition.json", reading.record())


def _print_reading(reading: ClassifierReading | DeepReading) -> None:
    out.print(f"test accuracy of the model: {reading.accuracy:.2%}", highlight=False)
    if isinstance(reading, DeepReading):
        search, unit = reading.search, "paths"
        rows = [(k, found, reading.accuracy - found) for k, found in reading.by_paths]
        out.print(f"nodes decomposed: {search.expanded:,} of {search.total:,}", highlight=False)
    else:
        rows, unit = truncation_table(reading.curve), "eigenvectors per class"
    table = Table(unit, "accuracy", "drop (points)")
    for column in table.columns:
        column.justify = "right"
    for k, accuracy, drop in rows:
        table.add_row(f"{k:,}", f"{accuracy:.2%}", f"{100 * drop:+.2f}")
    out.print(table)

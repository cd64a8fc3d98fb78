"""`bilens decompose`: a trained classifier as eigenvectors, or as paths of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bilens.cli.console import DataDir, Device, RunDir, choose_device
from bilens.cli.terminal import out, show_table
from bilens.data import load_images
from bilens.errors import BilensError
from bilens.files import write_json, write_safetensors
from bilens.models import load
from bilens.nn import ImageClassifier
from bilens.read import (
    Basis,
    BondReading,
    ClassifierReading,
    DeepReading,
    Metric,
    read_bonds,
    read_classifier,
    read_deep,
)
from bilens.read.chain import input_tensors
from bilens.read.deep import PATHS_NAME, save_paths
from bilens.reading import signed
from bilens.report import truncation_table
from bilens.train import TRAINING_NAME, read_training

__all__ = ["CUT_NAME", "Decompose", "read_images"]

CUT_NAME = "cut"
"""The folder in a run with the smallest cut that keeps its accuracy."""


@dataclass(frozen=True)
class Decompose:
    """Take a trained classifier apart and print how few eigenvectors, or paths of them, it needs.

    For a model of one layer, writes spectra.safetensors (values, vectors and residuals, batched
    over the classes); for a deeper one, paths.safetensors (roots, indices, eigenvalues,
    effective eigenvalues and vectors of the strongest paths), which `bilens report` uses. Both
    come with decomposition.json. With --bonds, writes bonds.safetensors (shares, read and write of
    each bond), bonds.json, and the smallest cut that keeps the accuracy as an ordinary run, in the
    folder cut.

        bilens decompose runs/mnist
        bilens decompose runs/two --bonds --json

    Attributes:
        run_dir: directory that `bilens train images` wrote.
        data_dir: where the IDX files are; see `bilens train images --help`.
        basis: eigenvectors orthonormal behind the embedding, as in the paper, or in pixels; for
            models of one layer.
        paths: how many of the strongest paths to find in a model of several layers.
        bonds: find the few directions between the layers instead.
        drop: (bonds) accuracy that the cut may lose, as a share of the images.
        metric: (bonds) directions for the training images, or from weights alone.
    """

    run_dir: RunDir
    data_dir: DataDir = None
    basis: Basis = "model"
    paths: int = 1000
    bonds: bool = False
    drop: float = 0.01
    metric: Metric = "images"
    device: Device = "auto"

    def run(self) -> dict[str, Any]:
        """Decompose, print and save."""
        if self.bonds and self.paths != Decompose.paths:
            raise BilensError(f"--paths={self.paths} has no effect with --bonds; leave out one")
        model = load(self.run_dir, device=choose_device(self.device))
        if not isinstance(model, ImageClassifier):
            raise BilensError(
                f"{self.run_dir} holds no image classifier; for a language model `bilens contexts` "
                "gives the eigenvectors of a token and `bilens ngrams` its n-grams"
            )
        if self.bonds:
            data = load_images(read_training(self.run_dir)["data"], self.data_dir)
            found = read_bonds(model, data, drop=self.drop, metric=self.metric)
            _save_bonds(self.run_dir, found)
            _show_bonds(self.run_dir, found)
            return found.record()
        reading = read_images(model, self.run_dir, self.data_dir, self.basis, self.paths)
        files = _save(self.run_dir, reading)
        _show(reading)
        for file in files:
            out.print(f"written: {file}")
        return reading.record()


def read_images(
    model: ImageClassifier,
    run: Path,
    data_dir: Path | None,
    basis: Basis,
    paths: int,
    name: str | None = None,
) -> ClassifierReading | DeepReading:
    """Read a classifier of any depth on the data called `name`, or what it was trained on."""
    data = load_images(name or read_training(run)["data"], data_dir)
    if len(model.layers) > 1:
        return read_deep(model, data, paths, run / PATHS_NAME)
    return read_classifier(model, data, basis)


def _save(run: Path, reading: ClassifierReading | DeepReading) -> list[Path]:
    if isinstance(reading, DeepReading):
        file = run / PATHS_NAME
        save_paths(file, reading.search, input_tensors(reading.model))
    else:
        file = run / "spectra.safetensors"
        reading.spectrum.save(file)
    write_json(run / "decomposition.json", reading.record())
    return [file, run / "decomposition.json"]


def _save_bonds(run: Path, reading: BondReading) -> None:
    tensors = {
        f"{name}.{number}": getattr(bond, name)
        for number, bond in enumerate(reading.bonds.bonds)
        for name in ("shares", "read", "write")
    }
    write_safetensors(run / "bonds.safetensors", tensors)
    record = reading.record()
    write_json(run / "bonds.json", record)
    cut = run / CUT_NAME
    reading.cut_model().save_files(cut)
    told = ("data", "metric", "drop", "ranks", "certificate")
    write_json(cut / TRAINING_NAME, {"cut_of": run.name} | {name: record[name] for name in told})


def _show_bonds(run: Path, reading: BondReading) -> None:
    out.print(f"test accuracy of the model: {reading.accuracy:.2%}")
    ranks = " + ".join(map(str, reading.cut.ranks))
    rows = [(str(k), accuracy, bound) for k, accuracy, bound in reading.by_rank]
    rows.append((ranks, reading.cut_accuracy, reading.cut.certificate))
    header = ("directions at each bond", "accuracy", "drop (points)", "certificate")
    show_table(
        header,
        [
            (name, f"{found:.2%}", signed(100 * (reading.accuracy - found), ".2f"), f"{bound:.3g}")
            for name, found, bound in rows
        ],
        words=0,
    )
    out.print(f"the smallest cut found, {ranks} directions: {run / CUT_NAME}")


def _show(reading: ClassifierReading | DeepReading) -> None:
    out.print(f"test accuracy of the model: {reading.accuracy:.2%}")
    if isinstance(reading, DeepReading):
        search, unit = reading.search, "paths"
        rows = [(k, found, reading.accuracy - found) for k, found in reading.by_paths]
        out.print(f"nodes decomposed: {search.expanded:,} of {search.total:,}")
    else:
        rows, unit = truncation_table(reading.curve), "eigenvectors per class"
    cells = [(f"{k:,}", f"{accuracy:.2%}", signed(100 * drop, ".2f")) for k, accuracy, drop in rows]
    show_table((unit, "accuracy", "drop (points)"), cells, words=0)

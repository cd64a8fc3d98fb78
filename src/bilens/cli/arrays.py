"""The commands that write arrays: of weights, `bilens decompose`, and rows, `bilens flow-table`."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bilens.analyses import find_analysis
from bilens.cli.console import Device, ModelName, RunDir, choose_device, out
from bilens.cli.readings import show_reading, write_reading
from bilens.errors import BilensError
from bilens.options import Basis, Metric
from bilens.settings import Count, Share


def decompose(
    run_dir: RunDir,
    *,
    data_dir: Path | None = None,
    basis: Basis | None = None,
    paths: Count | None = None,
    bonds: bool = False,
    drop: Share | None = None,
    metric: Metric | None = None,
    device: Device = "auto",
) -> dict[str, Any]:
    """Take a classifier apart, and print how few eigenvectors, paths or directions it needs.

    For a model of one layer, writes spectra.safetensors: values, vectors and residuals, batched
    over the classes. For a deeper one, writes paths.safetensors: roots, indices,
    eigenvalues, effective eigenvalues and vectors of the strongest paths. Both come with
    decomposition.json. With --bonds, writes bonds.safetensors (shares, read and write of each bond)
    and bonds.json. The smallest cut that keeps the accuracy is then an ordinary run, in the folder
    cut.

        bilens decompose runs/mnist
        bilens decompose runs/two --bonds --json

    Args:
        run_dir: directory that `bilens train images` wrote.
        data_dir: folder of the data, if it is not where it was at the training.
        basis: (one layer) eigenvectors orthonormal after the embedding, as in the paper and by
            default, or in pixels.
        paths: (several layers) how many of the strongest paths to find; 1000 by default.
        bonds: find the few directions between the layers instead.
        drop: (bonds) accuracy that the cut may lose, as a share of the images; 0.01 by default.
        metric: (bonds) directions for the training images, as by default, for a Gaussian of their
            mean and covariance, or for standard normal inputs, from the weights only.
    """
    options = {"basis": basis, "paths": paths, "drop": drop, "metric": metric}
    given = {name: value for name, value in options.items() if value is not None}
    _check_effects(given, ("drop", "metric") if bonds else ("basis", "paths"))

    from bilens.inputs import loader
    from bilens.models import load
    from bilens.nn import ImageClassifier
    from bilens.pages.exporters import write_arrays

    model = load(run_dir, device=choose_device(device))
    if not isinstance(model, ImageClassifier):
        raise BilensError(
            f"{run_dir} holds no image classifier; for a language model `bilens contexts` "
            "prints the eigenvectors of a token and `bilens ngrams` its n-grams"
        )
    name = "bonds" if bonds else "paths" if len(model.layers) > 1 else "eigenvectors"
    if not bonds:
        _check_effects(given, ("paths" if name == "paths" else "basis",))
    settings = given | {"data_dir": data_dir} | ({} if paths is None else {"k": paths})
    reading = find_analysis(name).run(model, settings, loader(model, run_dir), source=run_dir)
    show_reading(reading)
    write_arrays(reading, run_dir, model=run_dir.name)
    out.print(f"written: {run_dir}")
    return reading.record()


def flow_table(
    model: ModelName,
    *,
    questions: str,
    output: Path,
    low_memory: bool = False,
    device: Device = "auto",
) -> dict[str, Any] | None:
    """Split the changes of any number of questions over a model's parts, a row for each.

    Writes files of rows, with both numbers of a question and the flow of each head and MLP, and a
    page: the parts of each task and template, and clusters of questions that the same parts answer.
    Started again after a stop it goes on. Under `torchrun` processes share the questions.

        bilens flow-table model.gguf --questions agreement.parquet --output runs/agreement

    Args:
        questions: file with a question in each line, as for `bilens circuit`, or in each row of
            .jsonl or .parquet; the name of a task that comes with bilens, or of a data set of the
            hub.
        output: folder for the rows, in the folder rows, and for table.html and table.json.
        low_memory: leave the weights in their files and read those of a layer when it is worked on.
    """
    from bilens.flows import flow_table as read
    from bilens.models import load
    from bilens.progress import is_first_process

    opened = load(model, device=choose_device(device), low_memory=low_memory)
    table = read(opened, questions, output / "rows")
    if not is_first_process():
        return None
    show_reading(table)
    write_reading(table, output / "table.html", f"bilens flow-table {model} {questions}")
    out.print(f"written: {output}")
    return table.record()


def _check_effects(given: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise if an option was given that is for other models, or for another reading of them."""
    layers = {"basis": "a model of one layer", "paths": "a model of several layers"}
    for name, value in given.items():
        if name not in names:
            needed = f"{layers[name]}, without --bonds" if name in layers else "--bonds"
            raise BilensError(
                f"--{name}={value} has no effect here, expected {needed}; leave it out"
            )

"""The top eigenpairs of a layer along many directions, written as they are found."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import check_count, checked
from bilens.errors import CheckpointError
from bilens.files import file_errors, read_json_object, write_json
from bilens.processes import this_process
from bilens.progress import progress_bar
from bilens.settings import Count, Tolerance
from bilens.tensor import BilinearTensor, Spectrum

SPECTRA_NAME = "spectra.json"


@checked
def write_spectra(
    tensor: BilinearTensor,
    directions: Float[Tensor, "n n_out"],
    folder: Path,
    *,
    names: Sequence[int] | None = None,
    k: int = 8,
    batch_size: Count = 256,
    tolerance: Tolerance = 1e-4,
) -> None:
    """Find the top k eigenpairs along every direction and write them, some directions a file.

    The folder holds spectra.json, with the settings and the names of the directions. Each file
    spectra-NNNNN.safetensors is a `Spectrum` as its `save` writes it. A file is there whole or not
    at all, and one that is there is not made again: stopped work continues. Under `torchrun` each
    process makes its share of the files. Memory holds the factors and the arrays of one batch.

    Args:
        tensor: of the layer, on the device that is to do the work.
        directions: one a row.
        folder: for the files.
        names: number of each direction in the files; by default its row.
        k: how many eigenpairs of each.
        batch_size: directions in a file.
        tolerance: largest residual of a pair; see `QuadraticForm.eigh`.

    Raises:
        CheckpointError: the folder holds the spectra of something else.

    Source: Pearce et al. 2024, section 4.1.
    """
    names = range(len(directions)) if names is None else names
    check_count("k", k, tensor.n_in, "the number of inputs")
    state = this_process()
    settings = {
        "directions": len(directions),
        "k": k,
        "batch_size": batch_size,
        "tolerance": tolerance,
        "constant": tensor.constant,
        "names": list(names),
        # Norms stand for the weights: a folder of another model is recognised without a copy of it.
        "factors": [float(f.double().norm()) for f in (tensor.left, tensor.right, tensor.out)],
        "along": float(directions.double().norm()),
    }
    _check_folder(folder, settings)
    if state.is_main_process:
        write_json(folder / SPECTRA_NAME, settings)
    # Every n-th file: processes that begin together need no other agreement.
    starts = range(0, len(directions), batch_size)[state.process_index :: state.num_processes]
    with progress_bar() as bar:
        task = bar.add_task("spectra", total=len(starts), note="")
        for start in starts:
            path = folder / f"spectra-{start // batch_size:05}.safetensors"
            if not path.is_file():
                batch = directions[start : start + batch_size]
                tensor.interaction(batch).eigh(k, tolerance=tolerance).save(path)
            bar.advance(task)


@checked
def read_spectra(folder: Path) -> tuple[Tensor, Spectrum]:
    """Return the names of the directions and their eigenpairs from files of `write_spectra`.

    Raises:
        CheckpointError: spectra are missing, or still to be made.
    """
    settings = _settings(folder)
    if settings is None:
        raise CheckpointError(f"{folder} holds no {SPECTRA_NAME}; run `bilens token-spectra` first")
    files = -(-settings["directions"] // settings["batch_size"])
    paths = [folder / f"spectra-{number:05}.safetensors" for number in range(files)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} is not whole, {len(missing)} of {files} files are missing, the first "
            f"{missing[0]}; run the same `bilens token-spectra` again to continue"
        )
    names = torch.tensor(settings["names"])
    parts = [Spectrum.load(path) for path in paths]
    columns = [(part.values, part.vectors, part.residuals, part.miss_chance) for part in parts]
    values, vectors, residuals, miss_chance = map(torch.cat, zip(*columns, strict=True))
    return names, Spectrum(values, vectors, residuals, settings["constant"], miss_chance)


def _check_folder(folder: Path, settings: dict[str, Any]) -> None:
    before = _settings(folder)
    if before is None:
        return
    for name, value in settings.items():
        same = before.get(name) == value
        if isinstance(value, (float, list)):
            written = torch.tensor(before.get(name, 0.0), dtype=torch.float64)
            expected = torch.tensor(value, dtype=torch.float64)
            # Sums on another device round otherwise.
            same = written.shape == expected.shape and torch.allclose(written, expected, rtol=1e-6)
        if not same:
            what = "other names" if name == "names" else f"{name}={before.get(name)}, not {value}"
            raise CheckpointError(
                f"{folder} holds spectra with {what}; they are of something else. Choose another "
                "folder."
            )


def _settings(folder: Path) -> dict[str, Any] | None:
    path = folder / SPECTRA_NAME
    with file_errors(path, "read"):
        return read_json_object(path) if path.is_file() else None

"""The top eigenpairs of a layer along many directions, written as they are found."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor

from bilens.errors import BilensError, CheckpointError
from bilens.files import write_json, write_safetensors
from bilens.progress import progress_bar
from bilens.tensor import BilinearTensor, Spectrum

__all__ = ["SPECTRA_NAME", "Share", "read_spectra", "write_spectra"]

SPECTRA_NAME = "spectra.json"


@dataclass(frozen=True)
class Share:
    """Which part of the work a process does: every `of`-th file, from `rank` on."""

    rank: int = 0
    of: int = 1


def write_spectra(
    tensor: BilinearTensor,
    directions: Float[Tensor, "n n_out"],
    folder: Path,
    *,
    names: Sequence[int] | None = None,
    top: int = 8,
    batch: int = 256,
    tolerance: float = 1e-4,
    share: Share | None = None,
) -> None:
    """Find the `top` eigenpairs along every direction and write them, some directions a file.

    The folder holds spectra.json, with the settings, and files spectra-NNNNN.safetensors with
    `directions` (their numbers), `values`, `vectors` and `residuals`. A file is there whole or not
    at all, and one that is there is not made again: stopped work goes on. Memory holds the factors
    and what one batch needs.

    Args:
        tensor: of the layer, on the device that is to do the work.
        directions: output directions, one a row.
        folder: where the files go.
        names: what each direction is called in the files; by default its number.
        top: eigenpairs of each.
        batch: directions in a file.
        tolerance: largest residual of a pair; see `QuadraticForm.eigh`.
        share: the part of this process, where several work at once.

    Raises:
        BilensError: an argument is out of range.
        CheckpointError: the folder holds the spectra of something else.

    Source:
        Pearce et al. 2024, section 4.1.
    """
    names = range(len(directions)) if names is None else names
    if batch < 1 or not 1 <= top <= tensor.n_in:
        raise BilensError(
            f"top={top}, batch={batch}: expected 1 to {tensor.n_in} eigenpairs, and a batch of at "
            "least 1"
        )
    share = share or Share()
    settings = {
        "directions": len(directions),
        "top": top,
        "batch": batch,
        "tolerance": tolerance,
        "constant": tensor.constant,
        "factors": [float(f.double().norm()) for f in (tensor.left, tensor.right, tensor.out)],
        "along": float(directions.double().norm()),
    }
    _check_folder(folder, settings)
    if share.rank == 0:
        write_json(folder / SPECTRA_NAME, settings)
    starts = range(0, len(directions), batch)
    with progress_bar() as bar:
        task = bar.add_task("spectra", total=len(starts[share.rank :: share.of]), note="")
        for start in starts[share.rank :: share.of]:
            path = folder / f"spectra-{start // batch:05}.safetensors"
            if not path.is_file():
                some = directions[start : start + batch].to(tensor.out)
                found = tensor.interaction(some).eigh(top, tolerance=tolerance)
                _write(path, found, torch.tensor(names[start : start + batch]))
            bar.advance(task)


def read_spectra(folder: Path) -> tuple[Tensor, Spectrum]:
    """What `write_spectra` wrote: the names of the directions, and their eigenpairs.

    Raises:
        CheckpointError: there are no spectra, or some are still to be made.
    """
    settings = _settings(folder)
    if settings is None:
        raise CheckpointError(f"{folder} holds no {SPECTRA_NAME}; run `bilens spectra` first")
    files = -(-settings["directions"] // settings["batch"])
    paths = [folder / f"spectra-{number:05}.safetensors" for number in range(files)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} is not whole, {len(missing)} of {files} files are missing, the first "
            f"{missing[0]}; run the same `bilens spectra` again, and it goes on"
        )
    parts = [load_file(path) for path in paths]
    names, values, vectors, residuals = (
        torch.cat([part[name] for part in parts])
        for name in ("directions", "values", "vectors", "residuals")
    )
    return names, Spectrum(values, vectors, residuals, settings["constant"])


def _write(path: Path, found: Spectrum, names: Tensor) -> None:
    tensors = {
        "directions": names,
        "values": found.values,
        "vectors": found.vectors,
        "residuals": found.residuals,
    }
    write_safetensors(path, {name: tensor.cpu() for name, tensor in tensors.items()})


def _check_folder(folder: Path, settings: dict[str, Any]) -> None:
    before = _settings(folder)
    if before is None:
        return
    for name, value in settings.items():
        same = before.get(name) == value
        if isinstance(value, (float, list)):
            found = torch.tensor(before.get(name, 0.0), dtype=torch.float64)
            expected = torch.tensor(value, dtype=torch.float64)
            # Sums on another device round otherwise.
            same = found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-6)
        if not same:
            raise CheckpointError(
                f"{folder} holds spectra with {name}={before.get(name)}, not {value}; they are of "
                "something else. Choose another folder."
            )


def _settings(folder: Path) -> dict[str, Any] | None:
    path = folder / SPECTRA_NAME
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged and cannot be read as JSON: {error}") from error
    return found

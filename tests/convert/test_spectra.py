"""Spectra along many directions: their files, resumed runs, and several processes."""

from types import SimpleNamespace

import pytest
import torch

from bilens.convert import read_spectra, write_spectra
from bilens.errors import CheckpointError
from bilens.tensor import BilinearTensor

N_IN, RANK, N = 12, 30, 23


def layer(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((RANK, N_IN), (RANK, N_IN), (N_IN, RANK))
    parts = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return BilinearTensor(*parts)


def along(seed=1):
    return torch.randn(N, N_IN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def files(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


def check(folder, names=None):
    result, spectrum = read_spectra(folder)
    assert result.tolist() == list(range(N) if names is None else names)
    form, vectors = layer().interaction(along()), spectrum.vectors
    assert torch.allclose(spectrum.values, form.eigh().values[:, :4])
    assert spectrum.residuals.max() < 1e-4
    assert torch.allclose(vectors @ form.dense(), spectrum.values[..., None] * vectors, atol=1e-9)


def test_the_spectra_are_those_of_the_dense_matrices(tmp_path):
    names = [3 * i for i in range(N)]
    write_spectra(layer(), along(), tmp_path, names=names, k=4, batch_size=5)
    check(tmp_path, names)
    assert len(files(tmp_path)) == 5


def test_what_is_there_is_not_made_again(tmp_path):
    write_spectra(layer(), along(), tmp_path, k=4, batch_size=5)
    (tmp_path / "spectra-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 5 files are missing, the first spectra-00002"):
        read_spectra(tmp_path)
    remaining = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    write_spectra(layer(), along(), tmp_path, k=4, batch_size=5)
    check(tmp_path)
    assert all(path.stat().st_mtime_ns == time for path, time in remaining.items())


def test_processes_share_the_files(tmp_path, monkeypatch):
    def write(number):
        state = SimpleNamespace(process_index=number, num_processes=2, is_main_process=not number)
        monkeypatch.setattr("accelerate.PartialState", lambda **_: state)
        write_spectra(layer(), along(), tmp_path, k=4, batch_size=5)

    write(1)
    assert files(tmp_path) == ["spectra-00001.safetensors", "spectra-00003.safetensors"]
    write(0)
    check(tmp_path)

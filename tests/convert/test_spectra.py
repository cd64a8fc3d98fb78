"""Spectra along many directions: their files, resumed runs, and several processes."""

import json
from types import SimpleNamespace

import pytest
import torch

from bilens.convert import read_spectra, write_spectra
from bilens.errors import BilensError, CheckpointError
from bilens.tensor import BilinearTensor

N_IN, RANK, N = 12, 30, 23


def layer(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((RANK, N_IN), (RANK, N_IN), (N_IN, RANK))
    parts = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return BilinearTensor(*parts)


def along(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, N_IN, generator=generator, dtype=torch.float64)


def files(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


def check(folder, names=None):
    result, spectrum = read_spectra(folder)
    full = layer().interaction(along()).eigh()
    assert result.tolist() == list(range(N) if names is None else names)
    assert torch.allclose(spectrum.values, full.values[:, :4])
    assert spectrum.residuals.max() < 1e-4
    q = layer().interaction(along()).dense()
    vectors = spectrum.vectors
    assert torch.allclose(vectors @ q, spectrum.values[..., None] * vectors, atol=1e-9)


def test_the_spectra_are_those_of_the_dense_matrices(tmp_path):
    names = [3 * i for i in range(N)]
    write_spectra(layer(), along(), tmp_path, names=names, k=4, batch_size=5)
    check(tmp_path, names)
    assert len(files(tmp_path)) == 5


def test_what_is_there_is_not_made_again(tmp_path, monkeypatch):
    write_spectra(layer(), along(), tmp_path, k=4, batch_size=5)
    (tmp_path / "spectra-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 5 files are missing, the first spectra-00002"):
        read_spectra(tmp_path)
    remaining = {name: (tmp_path / name).stat().st_mtime_ns for name in files(tmp_path)}
    write_spectra(layer(), along(), tmp_path, k=4, batch_size=5)
    check(tmp_path)
    assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in remaining.items())


def test_processes_share_the_files(tmp_path, monkeypatch):
    def write(number):
        state = SimpleNamespace(process_index=number, num_processes=2, is_main_process=not number)
        monkeypatch.setattr("accelerate.PartialState", lambda **_: state)
        write_spectra(layer(), along(), tmp_path, k=4, batch_size=5)

    write(1)
    assert files(tmp_path) == ["spectra-00001.safetensors", "spectra-00003.safetensors"]
    write(0)
    check(tmp_path)


@pytest.mark.parametrize(
    ("tensor", "directions", "how", "named"),
    [
        (layer(2), along(), {"k": 4}, "factors"),
        (layer(), along(3), {"k": 4}, "along"),
        (layer(), along(), {"k": 3}, "k=4, not 3"),
        (layer(), along()[:7], {"k": 4}, "directions=23, not 7"),
    ],
)
def test_the_spectra_of_something_else_stay(tmp_path, tensor, directions, how, named):
    write_spectra(layer(), along(), tmp_path, k=4, batch_size=5)
    with pytest.raises(CheckpointError, match=f"holds spectra with {named}.* another folder"):
        write_spectra(tensor, directions, tmp_path, batch_size=5, **how)


def test_bad_arguments_and_folders_are_named(tmp_path):
    with pytest.raises(BilensError, match="k=13, expected a whole number, 1 to 12"):
        write_spectra(layer(), along(), tmp_path, k=13)
    with pytest.raises(BilensError, match="batch_size=0, expected a whole number"):
        write_spectra(layer(), along(), tmp_path, batch_size=0)
    with pytest.raises(CheckpointError, match=r"holds no spectra.json; run `bilens spectra` first"):
        read_spectra(tmp_path)
    (tmp_path / "spectra.json").write_text(json.dumps({})[:1])
    with pytest.raises(CheckpointError, match=r"spectra.json is damaged and cannot be read"):
        read_spectra(tmp_path)

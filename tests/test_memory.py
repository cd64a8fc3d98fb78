"""Memory is asked for before it is taken."""

import resource
import sys
from pathlib import Path

import pytest
import torch

from bilens import memory
from bilens.memory import MemoryLimitError, available_memory, check_memory, memory_errors
from bilens.tensor import BilinearTensor


@pytest.mark.skipif(sys.platform != "linux", reason="reads the size of this process from /proc")
def test_eigenvectors_of_many_inputs_under_a_limit():
    """With the address space of this process limited to a gigabyte more than it has."""
    x = torch.zeros(4, 30_000)
    x[:, 0] = 1
    form = BilinearTensor(x, x, torch.eye(4)).interaction(output=0)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    try:
        few = pages * resource.getpagesize() + 10**9
        resource.setrlimit(resource.RLIMIT_AS, (few, limits[1]))
        assert available_memory() <= 10**9
        with pytest.raises(MemoryLimitError, match="of a form on 30,000 inputs need 21.60 GB"):
            form.eigh()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_the_smallest_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   5000 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUPS", ())
    assert available_memory() == 5000 * 1024
    (tmp_path / "max").write_text("4000000")
    (tmp_path / "current").write_text("3000000")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1000000\n")
    monkeypatch.setattr(memory, "CGROUPS", ((tmp_path / "max", tmp_path / "current"),))
    assert available_memory() == 2_000_000
    (tmp_path / "max").write_text("max")
    assert available_memory() == 5000 * 1024
    monkeypatch.setattr(resource, "getrlimit", lambda which: (10**18, 10**18))
    assert available_memory() == 5000 * 1024
    check_memory(5000 * 1024, "It")
    with pytest.raises(MemoryLimitError, match="^It need 0.01 GB of memory on cpu, and 0.01 GB"):
        check_memory(5000 * 1024 + 1, "It")


def test_a_system_that_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "none")
    monkeypatch.setattr(memory, "CGROUPS", ())
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert available_memory() is None
    assert available_memory("meta") is None
    check_memory(10**30, "It")


USED_UP = [
    *(MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("can't start new thread")),
    RuntimeError("[enforce fail at alloc] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ImportError("libtorch.so: failed to map segment from shared object"),
]


@pytest.mark.parametrize("error", USED_UP, ids=str)
def test_memory_that_is_used_up_is_one_line(error):
    message = "not enough memory .*Give the process more"
    with pytest.raises(MemoryLimitError, match=message) as info, memory_errors():
        raise error
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), ImportError("nothing"), OSError(2)])
def test_other_errors_stay(error):
    with pytest.raises(type(error)) as info, memory_errors():
        raise error
    assert info.value is error


def test_an_allocation_of_torch_that_fails_is_one_line():
    with pytest.raises(MemoryLimitError, match="DefaultCPUAllocator"), memory_errors():
        torch.empty(2**60, dtype=torch.uint8)

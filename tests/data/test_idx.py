import contextlib
import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bilens.data.image_sets import read_idx
from bilens.errors import DataError
from bilens.memory import MemoryLimitError

# 2 x 3 bytes after a header of 12.
HEADER = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3])


@pytest.mark.parametrize("shape", [(7,), (2, 3), (5, 4, 3), (0, 4, 4), (65538,)])
@pytest.mark.parametrize("name", ["plain", "packed.gz"])
def test_reads_what_was_written(tmp_path, write_idx, shape, name):
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    result = read_idx(write_idx(tmp_path / name, array))
    assert result.flags.writeable
    np.testing.assert_array_equal(result, array, strict=True)


@pytest.fixture(scope="module")
def shared_path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("idx") / "some-idx"


@given(st.binary(max_size=64), st.sampled_from([b"", b"\x00\x00\x08"]))
def test_no_content_escapes_as_another_error(shared_path, content, start):
    shared_path.write_bytes(start + content)
    with contextlib.suppress(DataError):
        assert read_idx(shared_path).dtype == np.uint8


def test_no_more_is_unpacked_than_the_file_says_that_it_holds(tmp_path, monkeypatch):
    asked = []
    read = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda *args: asked.append(args[1]) or read(*args))
    (tmp_path / "some-idx.gz").write_bytes(gzip.compress(HEADER + bytes(1_000_000)))
    with pytest.raises(DataError, match="some-idx.gz cannot be read as an IDX file of bytes"):
        read_idx(tmp_path / "some-idx.gz")
    assert max(asked) < 1000
    (tmp_path / "some-idx").write_bytes(bytes([0, 0, 8, 3]) + b"\xff" * 12)
    with pytest.raises(MemoryLimitError, match="The .* bytes of .*some-idx need .* of memory"):
        read_idx(tmp_path / "some-idx")

import contextlib
import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bilens.data import images
from bilens.data.images import read_idx
from bilens.errors import DataError

# 2 x 3 bytes after a header of 12.
HEADER = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3])
WHOLE = HEADER + bytes(range(6))


def written(folder: Path, content: bytes) -> Path:
    path = folder / "some-idx"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("shape", [(7,), (2, 3), (5, 4, 3), (0, 4, 4)])
@pytest.mark.parametrize("name", ["plain", "packed.gz"])
def test_reads_what_was_written(tmp_path, write_idx, shape, name):
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    result = read_idx(write_idx(tmp_path / name, array))
    assert result.dtype == np.uint8
    assert result.flags.writeable
    np.testing.assert_array_equal(result, array)


def test_sizes_are_big_endian_and_the_last_axis_is_fastest(tmp_path):
    np.testing.assert_array_equal(read_idx(written(tmp_path, WHOLE)), [[0, 1, 2], [3, 4, 5]])


def test_sizes_have_four_bytes(tmp_path):
    header = bytes([0, 0, 8, 1, 0, 1, 0, 2])
    assert read_idx(written(tmp_path, header + bytes(65538))).shape == (65538,)


def test_gzip_is_known_by_its_content(tmp_path):
    packed = written(tmp_path, gzip.compress(WHOLE, mtime=0))
    assert read_idx(packed).shape == (2, 3)
    plain = tmp_path / "plain.gz"
    plain.write_bytes(WHOLE)
    assert read_idx(plain).shape == (2, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG", " begins with 89504e 47, expected an IDX file of bytes with up to 3 axes, 0"),
        (b"\x00\x00\x0d\x01", " begins with 00000d 01, expected an IDX file of bytes"),
        (b"\x00\x00\x08\x04", " begins with 000008 04, expected an IDX file of bytes"),
        (b"\x00\x00\x08\x00", " begins with 000008 00, expected an IDX file of bytes"),
        (b"", " cannot be read as an IDX file: unpack requires a buffer of 4 bytes. Fetch it"),
        (HEADER[:11], " cannot be read as an IDX file: unpack requires a buffer of 8 bytes. Fetch"),
        (WHOLE[:-1], r" holds 5 bytes, expected 6 of \(2, 3\). Fetch it again."),
        (HEADER, r" holds 0 bytes, expected 6 of \(2, 3\). Fetch it again."),
        (WHOLE + b"\x00", r" holds more bytes, expected 6 of \(2, 3\). Fetch it again."),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_damage_is_named(tmp_path, content, message, packed):
    path = written(tmp_path, gzip.compress(content, mtime=0) if packed else content)
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}{message}"):
        read_idx(path)


def packed_with(change) -> bytes:
    packed = bytearray(gzip.compress(WHOLE, mtime=0))
    change(packed)
    return bytes(packed)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gzip.compress(WHOLE, mtime=0)[:3], "Compressed file ended"),
        (gzip.compress(WHOLE, mtime=0)[:-9], "Compressed file ended"),
        (packed_with(lambda packed: packed.__setitem__(-8, packed[-8] ^ 1)), "CRC check failed"),
        (packed_with(lambda packed: packed.__setitem__(10, packed[10] | 6)), "invalid block type"),
        (gzip.compress(WHOLE, mtime=0) + b"others", "Not a gzipped file"),
    ],
)
def test_damaged_gzip(tmp_path, content, reason):
    path = written(tmp_path, content)
    with pytest.raises(
        DataError, match=f"cannot be read as an IDX file: .*{reason}.*Fetch it agai"
    ):
        read_idx(path)


@pytest.mark.parametrize("sizes", [b"\xff\xff\xff\xff", (2**30 + 1).to_bytes(4, "big")])
def test_more_than_the_limit_is_never_read(tmp_path, sizes):
    path = written(tmp_path, bytes([0, 0, 8, 1]) + sizes)
    size = int.from_bytes(sizes, "big")
    message = f"{path} announces {size:,} bytes, expected at most 1,073,741,824$"
    with pytest.raises(DataError, match=message):
        read_idx(path)


def test_gzip_is_not_unpacked_beyond_what_the_header_says(tmp_path, monkeypatch):
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb") as file:
        file.write(WHOLE)
        for _ in range(64):
            file.write(bytes(2**20))
    read = []
    original = images.gzip.GzipFile.read

    def counted(self, size=-1):
        read.append(size)
        return original(self, size)

    monkeypatch.setattr(images.gzip.GzipFile, "read", counted)
    with pytest.raises(DataError, match="holds more bytes, expected 6 of"):
        read_idx(path)
    assert read == [4, 8, 7]


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match=r"nothing cannot be read as an IDX file: .*No such"):
        read_idx(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"cannot be read as an IDX file: .*directory"):
        read_idx(tmp_path)


@pytest.fixture(scope="module")
def shared_path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("idx") / "some-idx"


@given(
    array=hnp.arrays(np.uint8, hnp.array_shapes(max_dims=3, min_side=0, max_side=5)),
    packed=st.booleans(),
)
def test_any_array_comes_back(shared_path, as_idx, array, packed):
    content = as_idx(array)
    shared_path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    np.testing.assert_array_equal(read_idx(shared_path), array)


@given(
    content=st.one_of(
        st.binary(max_size=64),
        st.binary(max_size=64).map(lambda others: b"\x00\x00\x08" + others),
        st.binary(max_size=64).map(lambda others: b"\x1f\x8b" + others),
        st.binary(max_size=64).map(lambda others: gzip.compress(WHOLE, mtime=0)[:-12] + others),
    )
)
def test_no_content_escapes_as_another_error(shared_path, content):
    shared_path.write_bytes(content)
    with contextlib.suppress(DataError):
        assert read_idx(shared_path).dtype == np.uint8

import contextlib
import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bilens.data.idx import read_idx
from bilens.errors import DataError

# 2 x 3 bytes after a header of 12.
HEADER = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3])
WHOLE = HEADER + bytes(range(6))


def written(folder: Path, content: bytes) -> Path:
    path = folder / "some-idx"
    path.write_bytes(content)
    return path


def damage(path: Path, offset: int, expected: str, found: str) -> str:
    """The pattern of a whole message."""
    return f"^{re.escape(str(path))}: at byte {offset}: expected {expected}, found {found}$"


@pytest.mark.parametrize("shape", [(7,), (2, 3), (5, 4, 3), (1, 1, 1, 1), (0, 4, 4)])
@pytest.mark.parametrize("name", ["plain", "packed.gz"])
def test_reads_what_was_written(tmp_path, write_idx, shape, name):
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    result = read_idx(write_idx(tmp_path / name, array))
    assert result.dtype == np.uint8
    assert result.shape == shape
    np.testing.assert_array_equal(result, array)


def test_sizes_are_big_endian_and_the_last_axis_is_fastest(tmp_path):
    np.testing.assert_array_equal(read_idx(written(tmp_path, WHOLE)), [[0, 1, 2], [3, 4, 5]])


def test_sizes_have_four_bytes(tmp_path):
    header = bytes([0, 0, 8, 1, 0, 1, 0, 2])
    assert read_idx(written(tmp_path, header + bytes(65538))).shape == (65538,)


def test_gzip_is_known_by_its_content(tmp_path):
    packed = written(tmp_path, gzip.compress(WHOLE))
    assert read_idx(packed).shape == (2, 3)
    plain = tmp_path / "plain.gz"
    plain.write_bytes(WHOLE)
    assert read_idx(plain).shape == (2, 3)


def test_result_is_writable(tmp_path):
    result = read_idx(written(tmp_path, WHOLE))
    result[0, 0] = 9
    assert result[0, 0] == 9


@pytest.mark.parametrize(
    ("content", "offset", "expected", "found"),
    [
        (b"\x89PNG", 0, "the bytes 00 00 of an IDX file", "89 50"),
        (b"\x00\x01\x08\x01", 0, "the bytes 00 00 of an IDX file", "00 01"),
        (b"\x05\x00", 0, "the bytes 00 00 of an IDX file", "05 00"),
        (b"", 0, "a header of at least 4 bytes", "the end"),
        (b"\x1f", 1, "a header of at least 4 bytes", "the end"),
        (b"\x00\x00\x08", 3, "a header of at least 4 bytes", "the end"),
        (b"\x00\x00\x0d\x01", 2, r"the type code 0x08 \(unsigned byte\)", "0x0d"),
        (HEADER[:11], 11, "a header of 12 bytes for 2 axes", "the end"),
        (HEADER[:4], 4, "a header of 12 bytes for 2 axes", "the end"),
        (WHOLE[:-1], 17, r"6 bytes of data for shape \(2, 3\)", "the end after 5"),
        (HEADER, 12, r"6 bytes of data for shape \(2, 3\)", "the end after 0"),
        (WHOLE + b"\x00", 18, "the end of the file", "1 more bytes"),
        (WHOLE + b"abc", 18, "the end of the file", "3 more bytes"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_damage_is_named_with_its_place(tmp_path, content, offset, expected, found, packed):
    path = written(tmp_path, gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match=damage(path, offset, expected, found)):
        read_idx(path)


@pytest.mark.parametrize(
    "header",
    [
        bytes([0, 0, 8, 65]) + bytes([0, 0, 0, 1]) * 65 + b"\x00",
        bytes([0, 0, 8, 4]) + bytes(4) + b"\xff" * 12,
    ],
    ids=["65 axes", "empty but too large"],
)
def test_a_shape_that_no_array_can_have(tmp_path, header):
    path = written(tmp_path, header)
    with pytest.raises(DataError, match=damage(path, 3, "axes that fit in an array", "shape .*")):
        read_idx(path)


def test_gzip_cut_short_gives_the_bytes_that_came(tmp_path):
    # Random bytes do not compress, so half of the stream holds about half of them.
    values = np.random.default_rng(2).integers(0, 256, 300_000, dtype=np.uint8)
    content = bytes([0, 0, 8, 1]) + len(values).to_bytes(4, "big") + values.tobytes()
    packed = gzip.compress(content)
    path = written(tmp_path, packed[: len(packed) // 2])
    with pytest.raises(DataError, match=damage(path, r"\d+", "a whole gzip stream", ".+")) as info:
        read_idx(path)
    offset = int(re.search(r"at byte (\d+)", str(info.value))[1])
    assert 0.3 * len(content) < offset < 0.7 * len(content)


@pytest.mark.parametrize("kept", [2, 3, 9])
def test_gzip_cut_in_its_header(tmp_path, kept):
    path = written(tmp_path, gzip.compress(WHOLE)[:kept])
    with pytest.raises(DataError, match=damage(path, 0, "a whole gzip stream", ".+")):
        read_idx(path)


def test_gzip_with_a_wrong_checksum(tmp_path):
    packed = bytearray(gzip.compress(WHOLE))
    packed[-8] ^= 1
    path = written(tmp_path, bytes(packed))
    with pytest.raises(DataError, match=damage(path, 18, "a whole gzip stream", ".*CRC.*")):
        read_idx(path)


def test_gzip_with_a_damaged_block(tmp_path):
    packed = bytearray(gzip.compress(WHOLE))
    packed[10] |= 0b110  # the block type that deflate reserves
    path = written(tmp_path, bytes(packed))
    with pytest.raises(DataError, match=damage(path, 0, "a whole gzip stream", ".+")):
        read_idx(path)


def test_bytes_after_the_gzip_stream(tmp_path):
    path = written(tmp_path, gzip.compress(WHOLE) + b"rest")
    with pytest.raises(DataError, match=damage(path, 18, "a whole gzip stream", ".+")):
        read_idx(path)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match=r"nothing: expected a readable IDX file, found .*No such"):
        read_idx(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"expected a readable IDX file, found .*directory"):
        read_idx(tmp_path)


@pytest.fixture(scope="module")
def shared_path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("idx") / "some-idx"


@given(array=hnp.arrays(np.uint8, hnp.array_shapes(min_side=0, max_side=5)), packed=st.booleans())
def test_any_array_comes_back(shared_path, as_idx, array, packed):
    content = as_idx(array)
    shared_path.write_bytes(gzip.compress(content) if packed else content)
    np.testing.assert_array_equal(read_idx(shared_path), array)


@given(
    content=st.one_of(
        st.binary(max_size=64),
        st.binary(max_size=64).map(lambda rest: b"\x00\x00\x08" + rest),
        st.binary(max_size=64).map(lambda rest: b"\x1f\x8b" + rest),
        st.binary(max_size=64).map(lambda rest: gzip.compress(WHOLE)[:-12] + rest),
    )
)
def test_no_content_escapes_as_another_error(shared_path, content):
    shared_path.write_bytes(content)
    with contextlib.suppress(DataError):
        assert read_idx(shared_path).dtype == np.uint8

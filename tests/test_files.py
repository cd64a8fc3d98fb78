"""Files and folders are whole or not there."""

import os
import socket
from pathlib import Path

import pytest

from bilens import files
from bilens.errors import CheckpointError


def test_a_folder_appears_whole(tmp_path):
    folder = tmp_path / "new" / "folder"
    with files.written_whole(folder) as draft:
        draft.mkdir()
        (draft / "content").write_text("all of it")
        assert not folder.exists()
    assert (folder / "content").read_text() == "all of it"
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


def test_an_error_leaves_no_folder(tmp_path):
    with pytest.raises(RuntimeError, match="stopped"), files.written_whole(tmp_path / "a") as draft:
        draft.mkdir()
        (draft / "content").write_text("half")
        raise RuntimeError("stopped")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_put_in_place(tmp_path):
    path, message = tmp_path / "a", "a could not be written: Not a directory. Check"
    path.write_text("a file")
    with pytest.raises(CheckpointError, match=message), files.written_whole(path) as draft:
        draft.mkdir()
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_appears_whole_and_with_the_permissions_of_its_owner(tmp_path):
    path, before = tmp_path / "new" / "a.json", os.umask(0o027)
    try:
        files.write_json(path, {"b": 1})
    finally:
        os.umask(before)
    assert path.read_text() == '{\n  "b": 1\n}\n'
    assert path.stat().st_mode & 0o777 == 0o640
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("folder", "Is a directory"),
        ("file/a", "Not a directory"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "a name cannot hold a zero byte"),
    ],
)
def test_what_the_system_refuses_is_said_in_one_way(tmp_path, name, reason):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=f"could not be written: {reason}. Check the path"):
        files.write_text(tmp_path / name, "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_devices_pipes_and_sockets_are_refused(tmp_path):
    pipe, link, device = tmp_path / "pipe", tmp_path / "link", Path("/dev/full")
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
    kinds = {pipe: "named pipe", link: "named pipe", device: "device", tmp_path / "s": "socket"}
    for path, kind in kinds.items():
        message = f"^{path} is a {kind}, expected a file, a fo"
        for write in (files.write_text, lambda path, text: files.check_target(path)):
            with pytest.raises(CheckpointError, match=message):
                write(path, "text")
        with pytest.raises(CheckpointError, match=message), files.written_whole(path):
            pass
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert device.is_char_device()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "s"]


@pytest.mark.parametrize("there", [True, False])
def test_the_target_of_a_link_is_written(tmp_path, there):
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    if there:
        target.write_text("before")
    link.symlink_to(Path("folder") / "target")
    files.write_text(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link"]
    folders = tmp_path / "folders"
    folders.symlink_to(Path("folder") / "new")
    with files.written_whole(folders) as draft:
        draft.mkdir()
        (draft / "content").write_text("all of it")
    assert folders.is_symlink()
    assert (tmp_path / "folder" / "new" / "content").read_text() == "all of it"


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff{}", b"[]"])
def test_damaged_json_is_named(content, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.json (is damaged and cannot|holds a list, exp)"):
        files.read_json_object(path)
    if content:
        path.write_bytes(b"{}\n" + content.replace(b"[]", b"]"))
        with pytest.raises(CheckpointError, match="a.json is damaged and cannot be read as JSON"):
            files.read_json(path, lines=True)

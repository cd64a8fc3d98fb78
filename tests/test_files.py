import pytest

from bilens.files import folder_written_whole


def test_a_folder_appears_whole(tmp_path):
    folder = tmp_path / "new" / "folder"
    with folder_written_whole(folder) as draft:
        (draft / "content").write_text("all of it")
        assert not folder.exists()
    assert (folder / "content").read_text() == "all of it"
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


def test_an_error_leaves_no_folder(tmp_path):
    with (
        pytest.raises(RuntimeError, match="stopped"),
        folder_written_whole(tmp_path / "a") as draft,
    ):
        (draft / "content").write_text("half")
        raise RuntimeError("stopped")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_another_process_stays(tmp_path):
    folder = tmp_path / "a"
    with folder_written_whole(folder) as draft:
        (draft / "content").write_text("ours")
        folder.mkdir()
        (folder / "content").write_text("theirs")
    assert (folder / "content").read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_cannot_be_put_in_place(tmp_path):
    (tmp_path / "a").write_text("a file")
    with pytest.raises(NotADirectoryError), folder_written_whole(tmp_path / "a"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["a"]

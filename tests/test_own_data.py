"""A run remembers where its data is and what it was; every command compares."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from bilens.cli import main
from bilens.data import load_images
from bilens.errors import DataError
from bilens.explore import explorer
from bilens.files import read_json, write_json
from tests.command_line import in_json, refusal

BRIEF = ["--d-model", "4", "--epochs", "1", "--weight-decay", "0"]
COMMANDS = [f"{name} run-1" for name in ("eigenvectors", "explain", "report")]
COMMANDS += [f"{name} run-2" for name in ("paths", "bonds", "report")]
OTHER_DATA = "was trained on other data"


def write_pictures(folder, seed=0):
    """Write noise in two class folders."""
    noise = np.random.default_rng(seed)
    for name in ("dark", "light"):
        (folder / name).mkdir(parents=True)
        for number in range(20):
            pixels = noise.integers(0, 128, (6, 6)) + 128 * (name == "light")
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder with the pictures far/photos and runs on them, of one and two layers."""
    folder = tmp_path_factory.mktemp("own")
    write_pictures(folder / "far" / "photos")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "far")
        for depth in ("1", "2"):
            to = ["--n-layers", depth, "--output", str(folder / f"run-{depth}")]
            main(["train", "images", "--data", "photos", *BRIEF, *to])
    return folder


@pytest.fixture
def elsewhere(trained, tmp_path, monkeypatch):
    """Enter another folder, with copies of the runs, in which other pictures have that name."""
    for name in ("run-1", "run-2"):
        shutil.copytree(trained / name, tmp_path / name)
    write_pictures(tmp_path / "photos", seed=1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def moved(trained):
    """Yield the place to which the pictures have moved, and move them back."""
    place = trained / "moved"
    place.mkdir(exist_ok=True)
    (trained / "far" / "photos").rename(place / "photos")
    yield place
    if (place / "photos").exists():
        (place / "photos").rename(trained / "far" / "photos")


@pytest.fixture
def changed(trained):
    """Exchange the names of the classes, and restore them."""
    photos = trained / "far" / "photos"
    names = ("dark", "between"), ("light", "dark"), ("between", "light")
    for old, new in names:
        (photos / old).rename(photos / new)
    yield photos
    for old, new in names:
        (photos / old).rename(photos / new)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_finds_the_pictures_of_the_training(command, capsys):
    assert in_json(capsys, *command.split())


def test_the_record_names_the_place_and_a_digest(trained, elsewhere):
    record, place = recorded("run-1"), str(trained / "far" / "photos")
    assert (record["data"], record["data_dir"], record["data_seed"]) == (place, None, 0)
    assert record["data_digest"] == load_images(place).provenance["data_digest"]
    assert len(record["data_digest"]) == 64
    assert explorer(elsewhere / "run-1").pages.data.name == "photos"


def recorded(run):
    return read_json(Path(run) / "training.json")


@pytest.mark.parametrize("command", COMMANDS)
def test_other_pictures_in_that_place_are_refused(command, elsewhere, changed, capsys):
    message = refusal(capsys, *command.split())
    assert f"{OTHER_DATA} than {changed} holds now" in message
    assert "--data-dir" in message
    run = elsewhere / command.split()[1]
    assert not list(run.glob("*.html"))
    with pytest.raises(DataError, match=f"{OTHER_DATA} than"):
        explorer(run)


@pytest.mark.parametrize("command", COMMANDS)
def test_pictures_that_have_moved_are_named_by_their_folder(
    command, elsewhere, moved, trained, capsys
):
    call = command.split()
    message = refusal(capsys, *call)
    assert f"was trained on {trained / 'far' / 'photos'}, and" in message
    assert "does not exist; name the place of that data by --data-dir" in message
    for place in (moved, moved / "photos"):
        assert in_json(capsys, *call, "--data-dir", place)
    assert "other data than" in refusal(capsys, *call, "--data-dir", elsewhere)


def test_resumed_with_the_same_pictures_or_refused(elsewhere, trained, capsys):
    photos = trained / "far" / "photos"
    call = ["train", "images", *BRIEF, "--epochs", "2", "--resume", "--output", "run-1", "--data"]
    before = (elsewhere / "run-1" / "model.safetensors").read_bytes()
    inverted = elsewhere / "inverted" / "photos"
    for path in photos.glob("*/*.png"):
        (inverted / path.parent.name).mkdir(parents=True, exist_ok=True)
        ImageOps.invert(Image.open(path)).save(inverted / path.parent.name / path.name)
    for other in (elsewhere / "photos", inverted):
        assert OTHER_DATA in refusal(capsys, *call, other)
    assert (elsewhere / "run-1" / "model.safetensors").read_bytes() == before
    main([*call, str(shutil.copytree(photos, elsewhere / "same" / "of another name"))])
    assert (elsewhere / "run-1" / "model.safetensors").read_bytes() != before


def test_a_folder_that_is_called_as_a_data_set_is_that_folder(tmp_path, monkeypatch, capsys):
    write_pictures(tmp_path / "mnist")
    monkeypatch.chdir(tmp_path)
    main(["train", "images", "--data", "./mnist", *BRIEF, "--output", "run"])
    assert recorded("run")["data"] == str(tmp_path / "mnist")
    assert in_json(capsys, "eigenvectors", "run")


def test_a_data_set_of_the_hub_keeps_its_owner(tmp_path, monkeypatch, capsys):
    own, asked = load_images(str(write_pictures(tmp_path / "photos"))), []

    def read(name, repository, classes):
        asked.append(repository)
        return own

    monkeypatch.setattr("bilens.data.image_sets._read_hub", read)
    run = str(tmp_path / "run")
    main(["train", "images", "--data", "hub:owner/name", *BRIEF, "--output", run])
    assert recorded(run)["data"] == "hub:owner/name"
    assert in_json(capsys, "eigenvectors", run)
    assert asked == ["owner/name"] * 2


def test_data_of_your_own_in_python_is_compared_too(tmp_path):
    places = [str(write_pictures(tmp_path / str(seed), seed=seed)) for seed in (0, 1)]
    one, other = (load_images(place).provenance for place in places)
    assert one["data_digest"] != other["data_digest"]
    assert load_images(places[0]).provenance == one
    assert load_images(places[0], seed=1).provenance != one


def test_a_record_of_an_earlier_version_cannot_be_compared(elsewhere, capsys, caplog):
    old = {k: value for k, value in recorded("run-1").items() if not k.startswith("data_")}
    write_json(elsewhere / "run-1" / "training.json", old | {"data": "photos"})
    assert in_json(capsys, "eigenvectors", "run-1")
    assert "kept no digest of its data; photos may be other data" in caplog.text


WORDS = ("cat", "dog", "mat", "hat", "log", "cup", "pen", "box")


def write_stories(path, words):
    path.parent.mkdir(parents=True, exist_ok=True)
    stories = [f"the {a} sat on the {b} and the {b} said no ." for a in words for b in words]
    path.write_text("\n<|endoftext|>\n".join(stories), encoding="utf-8")
    return path


def test_texts_are_found_compared_and_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    stories = write_stories(tmp_path / "far" / "stories.txt", WORDS)
    monkeypatch.chdir(stories.parent)
    command = "train language --d-model 8 --d-hidden 8 --n-heads 2 --n-ctx 8 --vocab-size 90"
    command += f" --batch-size 4 --device cpu --epochs 1 --output {tmp_path / 'run'} --data"
    train = command.split()
    main([*train, "stories.txt"])
    assert recorded(tmp_path / "run")["data"] == str(stories)
    monkeypatch.chdir(tmp_path)
    write_stories(tmp_path / "stories.txt", WORDS[::-1])
    contexts = ["contexts", "run", "--token", " cat"]
    assert in_json(capsys, *contexts)
    main([*train, str(stories), "--resume"])
    assert OTHER_DATA in refusal(capsys, *train, "stories.txt", "--resume")
    (tmp_path / "moved").mkdir()
    stories.rename(tmp_path / "moved" / "stories.txt")
    assert "does not exist; name the place of that data by" in refusal(capsys, *contexts)
    assert in_json(capsys, *contexts, "--data-dir", tmp_path / "moved")
    assert "trained on other data than" in refusal(capsys, *contexts, "--data-dir", tmp_path)
    assert in_json(capsys, *contexts, "--data", tmp_path / "stories.txt")

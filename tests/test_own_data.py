"""A run remembers where its data is and what it was; every command compares."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image, ImageOps

import bilens
from bilens.cli import main
from bilens.errors import DataError
from bilens.explore import explorer
from tests.command_line import in_json, refusal

BRIEF = ["--d-model", "4", "--epochs", "1", "--weight-decay", "0"]
COMMANDS = {
    1: ["decompose", "eigenvectors", "explain", "report"],
    2: ["decompose", "decompose --bonds", "paths", "bonds", "report"],
}
CASES = [(depth, command) for depth, commands in COMMANDS.items() for command in commands]


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
        for depth in COMMANDS:
            to = ["--n-layers", str(depth), "--output", str(folder / f"run-{depth}")]
            main(["train", "images", "--data", "photos", *BRIEF, *to])
    return folder


@pytest.fixture
def elsewhere(trained, tmp_path, monkeypatch):
    """Enter another folder, with copies of the runs, in which other pictures have that name."""
    for depth in COMMANDS:
        shutil.copytree(trained / f"run-{depth}", tmp_path / f"run-{depth}")
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


@pytest.mark.parametrize(("depth", "command"), CASES)
def test_every_command_finds_the_pictures_of_the_training(depth, command, elsewhere, capsys):
    name, *options = command.split()
    assert in_json(capsys, name, elsewhere / f"run-{depth}", *options)


def test_the_record_names_the_place_and_a_digest(trained, elsewhere):
    record = json.loads((elsewhere / "run-1" / "training.json").read_text())
    data = bilens.data.load_images(str(trained / "far" / "photos"))
    assert record["data"] == str(trained / "far" / "photos")
    assert (record["data_dir"], record["data_seed"]) == (None, 0)
    assert record["data_digest"] == data.provenance["data_digest"]
    assert len(record["data_digest"]) == 64
    shown = explorer(elsewhere / "run-1").blocks
    assert "photos" in str(shown.config)


@pytest.mark.parametrize(("depth", "command"), CASES)
def test_other_pictures_in_that_place_are_refused(depth, command, elsewhere, changed, capsys):
    name, *options = command.split()
    message = refusal(capsys, name, elsewhere / f"run-{depth}", *options)
    assert f"was trained on other data than {changed} holds now" in message
    assert "--data-dir" in message
    assert not list((elsewhere / f"run-{depth}").glob("*.html"))
    with pytest.raises(DataError, match="was trained on other data than"):
        explorer(elsewhere / f"run-{depth}")


@pytest.mark.parametrize(("depth", "command"), CASES)
def test_pictures_that_have_moved_are_named_by_their_folder(
    depth, command, elsewhere, moved, trained, capsys
):
    name, *options = command.split()
    call = [name, elsewhere / f"run-{depth}", *options]
    message = refusal(capsys, *call)
    assert f"was trained on {trained / 'far' / 'photos'}, and" in message
    assert "does not exist; name the place of that data by --data-dir" in message
    for place in (moved, moved / "photos"):
        assert in_json(capsys, *call, "--data-dir", place)
    assert "other data than" in refusal(capsys, *call, "--data-dir", elsewhere)


def test_resumed_with_the_same_pictures_or_refused(elsewhere, trained, capsys):
    photos, more = (
        trained / "far" / "photos",
        [*BRIEF[:-4], "--epochs", "2", *BRIEF[-2:], "--resume"],
    )

    def call(run, data):
        return ["train", "images", "--data", str(data), *more, "--output", str(elsewhere / run)]

    before = (elsewhere / "run-1" / "model.safetensors").read_bytes()
    inverted = elsewhere / "inverted" / "photos"
    for path in photos.glob("*/*.png"):
        (inverted / path.parent.name).mkdir(parents=True, exist_ok=True)
        ImageOps.invert(Image.open(path)).save(inverted / path.parent.name / path.name)
    for other in (elsewhere / "photos", inverted):
        assert "was trained on other data" in refusal(capsys, *call("run-1", other))
    assert (elsewhere / "run-1" / "model.safetensors").read_bytes() == before
    shutil.copytree(photos, elsewhere / "same" / "of another name")
    main(call("run-1", elsewhere / "same" / "of another name"))
    assert (elsewhere / "run-1" / "model.safetensors").read_bytes() != before


def test_a_folder_that_is_called_as_a_data_set_is_that_folder(tmp_path, monkeypatch, capsys):
    write_pictures(tmp_path / "mnist")
    monkeypatch.chdir(tmp_path)
    main(["train", "images", "--data", "./mnist", *BRIEF, "--output", "run"])
    assert json.loads((tmp_path / "run" / "training.json").read_text())["data"] == str(
        tmp_path / "mnist"
    )
    assert in_json(capsys, "decompose", "run")


def test_a_data_set_of_the_hub_keeps_its_owner(tmp_path, monkeypatch, capsys):
    own = bilens.data.load_images(str(write_pictures(tmp_path / "photos")))
    asked = []

    def read(name, repository, classes):
        asked.append(repository)
        return own

    monkeypatch.setattr("bilens.data.images._read_hub", read)
    run = str(tmp_path / "run")
    main(["train", "images", "--data", "hub:owner/name", *BRIEF, "--output", run])
    assert json.loads((tmp_path / "run" / "training.json").read_text())["data"] == "hub:owner/name"
    assert in_json(capsys, "decompose", run)
    assert asked == ["owner/name"] * 2


def test_data_of_your_own_in_python_is_compared_too(tmp_path):
    one, other = (
        bilens.data.load_images(str(write_pictures(tmp_path / str(seed), seed=seed)))
        for seed in (0, 1)
    )
    assert one.provenance["data_digest"] != other.provenance["data_digest"]
    again = bilens.data.load_images(str(tmp_path / "0"))
    assert again.provenance == one.provenance
    assert bilens.data.load_images(str(tmp_path / "0"), seed=1).provenance != one.provenance


def test_a_record_of_an_earlier_version_cannot_be_compared(elsewhere, capsys, caplog):
    path = elsewhere / "run-1" / "training.json"
    record = json.loads(path.read_text())
    old = {name: value for name, value in record.items() if not name.startswith("data_")}
    path.write_text(json.dumps(old | {"data": "photos"}))
    assert in_json(capsys, "decompose", elsewhere / "run-1")
    assert "kept no digest of its data; photos may be other data" in caplog.text


STORY = "the {0} sat on the {1} and the {1} said no ."
WORDS = ("cat", "dog", "mat", "hat", "log", "cup", "pen", "box")


def write_stories(path, words):
    path.parent.mkdir(parents=True, exist_ok=True)
    stories = [STORY.format(a, b) for a in words for b in words]
    path.write_text("\n<|endoftext|>\n".join(stories), encoding="utf-8")
    return path


def test_texts_are_found_compared_and_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    stories = write_stories(tmp_path / "far" / "stories.txt", WORDS)
    monkeypatch.chdir(stories.parent)
    sizes = ["--d-model", "8", "--d-hidden", "8", "--n-heads", "2", "--n-ctx", "8"]
    brief = [*sizes, "--vocab-size", "90", "--batch-size", "4", "--device", "cpu"]
    train = ["train", "language", *brief, "--epochs", "1", "--output", str(tmp_path / "run")]
    main([*train, "--data", "stories.txt"])
    record = json.loads((tmp_path / "run" / "training.json").read_text())
    assert record["data"] == str(stories)
    monkeypatch.chdir(tmp_path)
    write_stories(tmp_path / "stories.txt", WORDS[::-1])
    contexts = ["contexts", tmp_path / "run", "--token", "cat"]
    assert in_json(capsys, *contexts)
    main([*train, "--data", str(stories), "--resume"])
    message = refusal(capsys, *train, "--data", "stories.txt", "--resume")
    assert "was trained on other data" in message
    (tmp_path / "moved").mkdir()
    stories.rename(tmp_path / "moved" / "stories.txt")
    assert "does not exist; name the place of that data by" in refusal(capsys, *contexts)
    assert in_json(capsys, *contexts, "--data-dir", tmp_path / "moved")
    assert "trained on other data than" in refusal(capsys, *contexts, "--data-dir", tmp_path)
    assert in_json(capsys, *contexts, "--data", tmp_path / "stories.txt")

"""The folder of a Space: its contents, and that it runs."""

import runpy
from contextlib import closing

import pytest
from huggingface_hub import RepoCard
from safetensors.torch import load_file

from bilens.errors import BilensError
from bilens.explore.app import Explorer, write_space
from tests.command_line import in_json
from tests.explore.test_request_guard import ask


def test_the_folder_runs(image_run, tmp_path, monkeypatch, capsys):
    (image_run / "checkpoints").mkdir(exist_ok=True)
    space, served = tmp_path / "space", []
    assert in_json(capsys, "explore", image_run, "--space", space) == {"space": str(space)}
    assert not (space / "model" / image_run.name / "checkpoints").exists()
    card = RepoCard.load(space / "README.md")
    assert (card.data.sdk, card.data.app_port) == ("docker", 7860)
    assert (space / "requirements.txt").read_text().startswith("bilens[train,gguf]==")
    assert 'CMD ["python", "app.py"]' in (space / "Dockerfile").read_text()
    launch = Explorer.launch

    def in_the_background(self):
        served.append((self, launch(self, wait=False)))

    monkeypatch.setattr(Explorer, "launch", in_the_background)
    monkeypatch.setenv("SPACE_HOST", "me-digits.hf.space")
    monkeypatch.chdir(space)
    runpy.run_path("app.py")
    ((app, address),) = served
    with closing(app):
        # There it listens at all addresses, and knows its own name.
        assert app._servers[0].server_address[0] == "0.0.0.0"
        assert "digits, read from its weights" in ask(address, Host="me-digits.hf.space")[1]
    assert load_file(space / "model" / image_run.name / "model.safetensors")


def call_of(space):
    return (space / "app.py").read_text().splitlines()[-1]


def test_names_of_the_hub_stay_and_texts_are_copied(tmp_path):
    texts = tmp_path / "stories.txt"
    texts.write_text("once upon a time")
    write_space(tmp_path / "space", "you/name", data=str(texts))
    call = 'explorer("you/name", data="data/stories.txt").launch()'
    assert call_of(tmp_path / "space") == call
    assert (tmp_path / "space" / "data" / "stories.txt").read_text() == "once upon a time"
    with pytest.raises(BilensError, match="space is there already; choose another folder"):
        write_space(tmp_path / "space", "you/name")


@pytest.mark.parametrize("data", ["grammar", "mnist", "digits", "tinystories"])
def test_a_name_is_no_folder_of_this_name(tmp_path, monkeypatch, data):
    """As for the loaders of models and data, which pass over the user's own folders of a name."""
    monkeypatch.chdir(tmp_path)
    for folder in (data, "story"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "private.txt").write_text("mine")
    write_space("space", "story", data=data)
    assert call_of(tmp_path / "space") == f'explorer("story", data="{data}").launch()'
    assert not [*(tmp_path / "space").rglob("private.txt")]
    # What is named as a path is the user's own.
    write_space("other", "story", data=f"./{data}")
    assert call_of(tmp_path / "other") == f'explorer("story", data="data/{data}").launch()'
    assert (tmp_path / "other" / "data" / data / "private.txt").exists()

"""The folder of a Space: its contents, and that it runs."""

import runpy
from contextlib import closing

import pytest
from huggingface_hub import RepoCard
from safetensors.torch import load_file

from bilens.errors import BilensError
from bilens.explore import write_space
from bilens.explore.app import Explorer
from tests.command_line import in_json
from tests.explore.test_request_guard import ask


def test_the_folder_runs(image_run, tmp_path, monkeypatch, capsys):
    (image_run / "checkpoints").mkdir(exist_ok=True)
    space, served = tmp_path / "space", []
    assert in_json(capsys, "explore", image_run, "--space", space) == {"space": str(space)}
    assert not (space / "model" / image_run.name / "checkpoints").exists()
    card = RepoCard.load(space / "README.md")
    assert (card.data.sdk, card.data.app_file) == ("gradio", "app.py")
    assert (space / "requirements.txt").read_text().startswith("bilens[explore]==")
    launch = Explorer.launch

    def in_the_background(self):
        served.append((self, launch(self, wait=False)))

    monkeypatch.setattr(Explorer, "launch", in_the_background)
    monkeypatch.chdir(space)
    runpy.run_path("app.py")
    ((app, address),) = served
    with closing(app):
        assert "digits, read from its weights" in ask(address)[1]
    assert load_file(space / "model" / image_run.name / "model.safetensors")


def test_names_of_the_hub_stay_and_texts_are_copied(tmp_path):
    texts = tmp_path / "stories.txt"
    texts.write_text("once upon a time")
    write_space(tmp_path / "space", "you/name", data=str(texts))
    call = 'explorer("you/name", data="data/stories.txt").launch()'
    assert call in (tmp_path / "space" / "app.py").read_text()
    assert (tmp_path / "space" / "data" / "stories.txt").read_text() == "once upon a time"
    with pytest.raises(BilensError, match="space is there already; choose another folder"):
        write_space(tmp_path / "space", "you/name")

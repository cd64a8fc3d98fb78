"""The explorer of a model as a folder that Hugging Face runs as a Space."""

import json
import shutil
from pathlib import Path

from huggingface_hub import SpaceCardData

from bilens.errors import BilensError
from bilens.files import folder_written_whole
from bilens.lazy_imports import gradio as gr
from bilens.version import __version__

LEFT_OUT = shutil.ignore_patterns("checkpoints", "cut", "figures", "*.html", ".*")
"""Files of a run that the explorer does not need."""


def write_space(folder: str | Path, source: str | Path, *, data: str | None = None) -> None:
    """Write a folder with app.py, requirements.txt, README.md and the model.

    `python app.py` in it serves the explorer, here or in a Space.

    Args:
        folder: where to; made here.
        source: run directory or file of a model, which is copied; or the name of a repository on
            the hub, which the Space will fetch.
        data: name of the data, or texts, which are copied; by default the data of
            the training.

    Raises:
        BilensError: the folder is there already, or Gradio is not installed.
        CheckpointError: the system refuses.
    """
    folder, model = Path(folder), Path(source)
    if folder.exists():
        raise BilensError(f"{folder} is there already; choose another folder for the Space")
    card = SpaceCardData(
        title=f"{model.stem}, read from its weights",
        sdk="gradio",
        sdk_version=gr.__version__,
        app_file="app.py",
        tags=["bilens"],
    )
    with folder_written_whole(folder) as draft:
        source = _copied(model, draft, "model")
        options = "" if data is None else f", data={json.dumps(_copied(Path(data), draft, 'data'))}"
        files = {
            "app.py": "from bilens.explore import explorer\n\n"
            f"explorer({json.dumps(source)}{options}).launch()\n",
            "requirements.txt": f"bilens[explore]=={__version__}\n",
            "README.md": f"---\n{card.to_yaml()}\n---\n\nMade by `bilens explore --space`.\n",
        }
        for name, text in files.items():
            (draft / name).write_text(text, encoding="utf-8")


def _copied(path: Path, folder: Path, kind: str) -> str:
    """Return its place in the folder; a name on the hub, or of data that bilens knows, stays."""
    if not path.exists():
        return str(path)
    (folder / kind).mkdir()
    place = f"{kind}/{path.name}"
    if path.is_dir():
        shutil.copytree(path, folder / place, ignore=LEFT_OUT)
    else:
        shutil.copy(path, folder / place)
    return place

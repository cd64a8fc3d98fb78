"""What comes with bilens besides its code: a small model of English stories, and tasks."""

from difflib import get_close_matches
from pathlib import Path

from bilens.errors import BilensError

STORY = Path(__file__).parent / "story"
"""A language model of 3.7 million weights, in eight bits, trained on TinyStories."""
TASKS = Path(__file__).parent / "tasks"
"""Folder of the files of questions, named by their tasks."""


def find_model(source: str | Path) -> str | Path:
    """Return the folder of the model that comes with bilens for "story", or else the source.

    A model in a folder of that name is the user's own.

    Raises:
        BilensError: it is nearly this name, and nothing here, before the hub is asked for it.
    """
    name = str(source)
    if name == STORY.name:
        return source if (Path(source) / "config.json").is_file() else STORY
    # An owner's repository may have the name, and nobody else's can.
    is_near = "/" not in name and get_close_matches(name.lower(), [STORY.name], cutoff=0.7)
    if is_near and not Path(source).exists():
        raise BilensError(
            f"{source} is no model here. Did you mean story, the model that comes with bilens?"
        )
    return source


def task_names() -> list[str]:
    """Return the names of the tasks that come with bilens."""
    return sorted(path.stem for path in TASKS.glob("*.tsv"))

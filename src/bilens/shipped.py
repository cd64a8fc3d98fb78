"""What comes with bilens besides its code: a small model of English stories, and tasks."""

from pathlib import Path

STORY = Path(__file__).parent / "story"
"""A language model of 3.7 million weights, in eight bits, trained on TinyStories."""
TASKS = Path(__file__).parent / "tasks"
"""Folder of the files of questions, named by their tasks."""


def find_model(source: str | Path) -> str | Path:
    """Return the folder of the model that comes with bilens for "story", or else the source.

    A model in a folder of that name is the user's own.
    """
    is_name = str(source) == STORY.name and not (Path(source) / "config.json").is_file()
    return STORY if is_name else source


def task_names() -> list[str]:
    """Return the names of the tasks that come with bilens."""
    return sorted(path.stem for path in TASKS.glob("*.tsv"))

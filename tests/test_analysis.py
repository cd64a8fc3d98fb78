"""Analyses are registered by name, with their model and their settings."""

from typing import Literal

import pytest

from bilens.analysis import Analysis, Reading, analysis, find_analysis, load_file
from bilens.errors import BilensError

FILE = '''
from bilens.analysis import Reading, analysis, find_analysis

ngrams = find_analysis("ngrams")


@analysis("answers")
def read_answers(model: object, k: int = 3) -> Reading:
    """Return an answer."""
    return Reading()
'''


class Answer(Reading):
    """An answer."""


def read_answer(
    model: list, depth: int, kind: Literal["a", "b"] = "a", *, k: int | None = None
) -> Answer:
    """Return the answer.

    It has a second paragraph.

    Args:
        model: Not an option.
        depth: First line
            and a second one.
        k: How many; an
            unusual: number.

    Raises:
        BilensError: never.
    """
    return Answer()


def test_an_analysis_says_what_it_reads_and_what_can_be_set():
    entry = Analysis("answer", read_answer)
    assert entry.on is list
    assert entry.fits([])
    assert not entry.fits({})
    assert list(entry.parameters) == ["depth", "kind", "k"]
    assert entry.hints["k"] == int | None
    assert entry.about == "Return the answer.\n\nIt has a second paragraph."
    assert entry.parameters["depth"].help == "First line and a second one."
    assert entry.parameters["k"].help == "How many; an unusual: number."


def test_a_name_has_one_function():
    assert analysis("the-answer")(read_answer) is read_answer
    assert analysis("the-answer")(read_answer) is read_answer
    assert find_analysis("the-answer").read is read_answer
    with pytest.raises(BilensError, match="name='ngrams' is an analysis of bilens; choose another"):
        analysis("ngrams")(read_answer)
    with pytest.raises(BilensError, match="name='An answer': expected lowercase"):
        analysis("An answer")
    with pytest.raises(BilensError, match="'nothing' is not a registered analysis; expected one o"):
        find_analysis("nothing")


def test_files_register_analyses(tmp_path):
    path = tmp_path / "answers.py"
    path.write_text(FILE)
    for _ in range(2):
        (entry,) = load_file(path)
        assert entry.name == "answers"
        assert list(entry.parameters) == ["k"]
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(BilensError, match=r"empty\.py registers no analysis"):
        load_file(tmp_path / "empty.py")
    with pytest.raises(BilensError, match="is not a Python file"):
        load_file(tmp_path / "missing.py")

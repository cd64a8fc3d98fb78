"""Analyses are registered by name, with their model and their settings."""

from typing import Any, Literal

import pandas as pd
import pytest

from bilens.analyses import built_in, find_analysis, load_file
from bilens.analysis import Analysis, Reading, analysis
from bilens.cli.readings import analysis_command, write_reading
from bilens.errors import BilensError
from bilens.explore.model_pages import ModelPages
from bilens.figures.sheet import save_figures
from bilens.files import file_names
from bilens.pages import new_figure
from bilens.pages.page import report
from bilens.sections import Fact, Picture, Section, Table
from tests.models import digits, small_model

FILE = '''from bilens.analyses import find_analysis
from bilens.analysis import Reading, analysis
ngrams = find_analysis("ngrams")
@analysis("answers")
def read_answers(model: object, k: int = 3) -> Reading:
    """Return an answer."""
    return Reading()
'''


def read_answer(
    model: list, depth: int, kind: Literal["a", "b"] = "a", *, k: int | None = None
) -> Reading:
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
    return Reading()


def test_an_analysis_says_what_it_reads_and_what_can_be_set():
    entry = Analysis("answer", read_answer)
    assert entry.on is list
    assert entry.fits([])
    assert not entry.fits({})
    kinds = [("depth", int), ("kind", Literal["a", "b"]), ("k", int | None)]
    assert [(option.name, option.type) for option in entry.options] == kinds
    assert entry.about == "Return the answer.\n\nIt has a second paragraph."
    depth, _, k = (option.help for option in entry.options)
    assert (depth, k) == ("First line and a second one.", "How many; an unusual: number.")


def test_a_name_has_one_function():
    for _ in range(2):
        assert analysis("the-answer")(read_answer) is read_answer
    assert find_analysis("the-answer").read is read_answer
    with pytest.raises(BilensError, match="name='ngrams' is an analysis of bilens; choose another"):
        analysis("ngrams")(read_answer)
    with pytest.raises(BilensError, match="name='An answer': expected lowercase"):
        analysis("An answer")
    with pytest.raises(BilensError, match="'nothing' is not a registered analysis; expected one o"):
        find_analysis("nothing")


def test_files_register_analyses(tmp_path):
    path, empty = tmp_path / "answers.py", tmp_path / "empty.py"
    path.write_text(FILE)
    for _ in range(2):
        (entry,) = load_file(path)
        assert (entry.name, [option.name for option in entry.options]) == ("answers", ["k"])
    with pytest.raises(BilensError, match="is not a Python file"):
        load_file(empty)
    empty.write_text("")
    with pytest.raises(BilensError, match=r"empty\.py registers no analysis"):
        load_file(empty)


TAKEN_BY_COMMANDS = {
    option.name.replace("-", "_")
    for entry in built_in().values()
    for option in analysis_command(entry).parameters
    if option.name not in {own.name for own in entry.options}
} - {"model", "figure", "width", "viewer", "save_graph", "directions", "arrays"}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("", "unread: its function has no parameter, expected the model as its first"),
        ("model", "unread: parameter model is no single one with a type, expected one such as"),
        ("model: object, k=3", "unread: parameter k=3 is no single one with a type"),
        ("model: object, *rest: int", r"unread: parameter \*rest: int is no single one"),
        ("model: object, **rest: int", r"unread: parameter \*\*rest: int is no single one"),
        *(
            (f"model: object, {name}: str = ''", f"unread: parameter {name}: str = '' has the name")
            for name in sorted({*TAKEN_BY_COMMANDS, "data", "data_dir", "json", "help", "version"})
        ),
    ],
)
def test_parameters_that_cannot_be_options_are_refused(parameters, message, tmp_path):
    path = tmp_path / "unread.py"
    function = f"def read({parameters}) -> Reading:\n    return Reading()\n"
    path.write_text(FILE.partition("ngrams =")[0] + f'@analysis("unread")\n{function}')
    with pytest.raises(BilensError, match=message):
        load_file(path)


def test_what_is_no_reading_is_refused():
    def read_number(model: Any) -> Any:
        return 3

    with pytest.raises(BilensError, match="number returned int, expected a subclass of Reading"):
        Analysis("number", read_number).run(object(), {}, lambda *_: None)


def test_files_of_one_name_in_two_folders_are_two(tmp_path):
    paths = [tmp_path / folder / "answers.py" for folder in ("first", "second")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(FILE.replace('"answers"', f'"{path.parent.name}"'))
    for path in (*paths, *paths):
        assert [entry.name for entry in load_file(path)] == [path.parent.name]


@pytest.mark.parametrize("add", [["flow", "flow"], ["eigenvectors"]])
def test_a_page_has_each_reading_once(add, tmp_path):
    with pytest.raises(BilensError, match=f"add='{add[0]}': the page has it already"):
        report(small_model(), tmp_path / "page.html", data="digits", add=add)
    with pytest.raises(BilensError, match=f"add='{add[0]}'"):
        ModelPages(small_model(), digits(), [find_analysis(name) for name in add], {})


CAPTIONS = ['after "/"', "before ../../../x", "a b", "a-b", "A b", "a b", "/", "", "..", "a\\b"]
CAPTIONS += ["x" * 300, "▁" * 300, "\ud800", "a:b", "nul\0", "ten"]


class Captions(Reading):
    """Tables and pictures whose captions are tokens of a model, some of them twice."""

    def facts(self) -> list[Fact]:
        return [("ten", 10), ("a b", 1)]

    def sections(self) -> list[Section]:
        rows = []
        for number, caption in enumerate(CAPTIONS):
            figure, _ = new_figure(title=str(number))
            table = Table(pd.DataFrame({"number": [number]}), caption)
            rows.append([table, Picture(caption, lambda figure=figure: figure)])
        return [Section("title", "", rows)]


def test_captions_name_tables_figures_and_files_and_none_is_lost(tmp_path):
    reading, numbers = Captions(), list(range(len(CAPTIONS)))
    assert [frame.number[0] for frame in reading.tables().values()] == numbers
    figures = reading.figures()
    assert [int(figure.alt) for figure in figures.values()] == numbers
    _, _, *tables = reading.record().values()
    assert [row["number"] for (row,) in tables] == numbers
    out = tmp_path / "deep" / "out"
    write_reading(reading, out)
    save_figures(figures, out, "svg")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parent for path in files} == {out}
    # Some systems tell names apart by their letters only, not by their case.
    assert len({path.name.lower() for path in files}) == 2 * len(CAPTIONS) + 1
    written = [pd.read_csv(path).number[0] for path in files if path.suffix == ".csv"]
    assert sorted(written) == numbers
    names = file_names(["after girl", 'after "/"', "", "..", "Parts", "parts"])
    assert names == ["after-girl", "after-%22%2F%22", "unnamed", "unnamed-2", "Parts", "parts-2"]

"""Files of questions are read as they are meant, or refused in one line with its number."""

import csv
import random
import re
from collections import Counter
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path

import pytest

from bilens.analyses import language
from bilens.errors import BilensError
from bilens.question_files import COLUMNS, QuestionLine, read_lines, read_pair_lines
from bilens.shipped import TASKS, task_names
from tests.command_line import ROOT, refusal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "q.tsv"


ROWS = [
    ("The keys", (" are",), (" is",), "The key", "number", "short"),
    ('"Yes," she said; "and', (" he", ","), (" she",), '"No," she said; "and', "quotes", 'so "x"'),
    # Only new lines end a line.
    ("a\u2028b\x0cc\x0bd\x85e", ("f",), (), "a\u2028b\x0cc\x0bd\x1ce", "", ""),
    ("# no comment", (",",), (" she", '"'), "#no comment", "é", ""),
]
WRITTEN = {(" he", ","): ' he,","', (" she", '"'): ' she,""""'}


def in_columns(names, separator, end, quoting):
    """Return the rows as a spreadsheet writes them, without a header."""
    table = StringIO()
    writer = csv.writer(table, delimiter=separator, lineterminator=end, quoting=quoting)
    for row in ROWS:
        fields = dict(zip(COLUMNS, row, strict=True))
        for name in ("token", "minus"):
            fields[name] = WRITTEN.get(fields[name]) or "".join(fields[name])
        cells = [fields[name] for name in names]
        # What begins with # is a comment without quotes.
        if quoting == csv.QUOTE_MINIMAL and cells[0].startswith("#"):
            table.write(separator.join('"' + cell.replace('"', '""') + '"' for cell in cells) + end)
        else:
            writer.writerow(cells)
    return table.getvalue()


def rows_of(path):
    return [tuple(getattr(line, name) for name in COLUMNS) for line in read_lines(path)]


ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1")


@pytest.mark.parametrize(("encoding", "end"), [*product(ENCODINGS, ("\n", "\r\n", "\r"))], ids=repr)
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("separator", ["none", "\t", ",", ";"])
def test_all_ways_to_write_a_file_are_one(path, encoding, end, quoting, separator):
    names, header = list(COLUMNS), ""
    if separator != "none":
        random.Random(f"{encoding}{end}").shuffle(names)
        quote = '"' if quoting == csv.QUOTE_ALL else ""
        header = separator.join(f"{quote}{name.title()}{quote}" for name in names) + end
    content = in_columns(names, separator.replace("none", "\t"), end, quoting)
    comments = f'# a comment, "with\ta quote{end}{end}'
    text = comments + header + content + "\t\t\t\t\t" * (separator in ("none", "\t")) + end
    path.write_bytes(text.encode(encoding, errors="replace"))
    if encoding.startswith("utf-8"):
        assert rows_of(path) == ROWS
        return
    refused(path, r", line \d+ holds .*UTF-8")


def refused(path, message):
    """Check that a file is refused in one line."""
    with pytest.raises(BilensError, match=rf"q\.tsv{message}") as error:
        read_lines(path)
    assert "\n" not in str(error.value)


AB = ("a", (" b",), (), "", "", "")


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ("a\t b\t\nc\t d\t e,f\tg\n", [AB, ("c", (" d",), (" e", "f"), "g", "", "")]),
        ("token,text\n b,a\n", [AB]),
        # A column for people, and a header in other words.
        ("text\t#first\ttoken\t# of a person\na\t1.5\t b\tgood\n", [AB]),
        # A first column for people, and spaces in front of quotes.
        ("#first\ttext\ttoken\n3.1\ta\t b\n", [AB]),
        ("# text and token\n\n#first,text,token\n1,a, b\n", [AB]),
        ('"text", "token", "minus"\n"a", " b", ""\n"a",   " b",""\n', [AB, AB]),
        (
            'text;token;against\n"a; ""b""";   "c";"d; ""e"\n',
            [('a; "b"', ("c",), (), 'd; "e', "", "")],
        ),
        ("Satz\tWort\tAnderes\n", [("Satz", ("Wort",), ("Anderes",), "", "", "")]),
    ],
)
def test_columns_may_be_left_out_or_skipped(path, content, rows):
    path.write_text(content)
    assert rows_of(path) == rows


def test_a_field_in_quotes_may_hold_lines(path):
    path.write_text('"a\n# b\n"\tc\td\n\nx\ty\n')
    refused(path, ", line 5 has 2 columns")
    path.write_bytes(b'"a\r\n# b\n"\tc\td\r\n')
    assert read_lines(path) == [QuestionLine(f"{path}, line 1", "a\r\n# b\n", ("c",), ("d",))]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, "holds no line") for content in ("", "# only\n\n", "text\ttoken\n")),
        ("a\tb\n", "line 1 has 2 columns; expected, separated by tabs, the text"),
        ("a\tb\tc\td\te\tf\tg\n", "line 1 has 7 columns; expected"),
        (
            "#\n\na b c d\n",
            "line 3: expected columns with tabs between them, and not spaces: the text, the",
        ),
        (
            "text token minus against\na b c d\n",
            "line 1: expected columns with tabs between them, and",
        ),
        ("a,b,c,d\n", "line 1: expected a header such as text,token,minus,against above"),
        (
            "Sentence;Answer;Foil\n",
            "line 1: expected a header such as text,token,minus,against above",
        ),
        *((row, "line 1: expected JSON in a .jsonl file") for row in ("[\n", ' {"a": 1}\n')),
        ("text\ttoken\tminus\nx\ty\n", "line 2 has 2 columns, expected 3, as the header has"),
        ("text\ttoken\tminus\tother\n", "line 1 is a header with .* 'other'; expected text and"),
        ("text\tminus\n", "line 1 is a header with the columns 'text', 'minus'; expected"),
        ("text\ttoken\ttext\n", "line 1 is a header .* at most once"),
        ("a\tb\tc\n\t b\t\n", "line 2 has an empty text"),
        ("a\t\tc\n", "line 1 has an empty token"),
        ("a\tb\tc,,d\n", r"line 1: 'c,,d' has an empty name"),
        ("a\tb\tc,b\n", "line 1 subtracts its token 'b' from itself"),
        ("a\tb,d\tc,d\n", "line 1 subtracts its token 'd' from itself"),
        ("a\tb,,d\tc\n", "line 1: 'b,,d' has an empty name"),
        ('a\tb\tc\n"a\tb\tc\nd\te\tf\n', "line 2 cannot be read: .* double quote"),
        ('text,token\n"a\n", "b"\n', "line 2 cannot be read: a space stands in front of quotes"),
        ('"a" b\tb\tc\n', "line 1 cannot be read: .* each of its own twice"),
    ],
)
def test_what_is_no_question_is_refused_with_its_line(path, content, message):
    path.write_text(content)
    refused(path, f",? {message}")


def test_files_that_were_joined_have_marks_within(path):
    path.write_text("a\tb\tc\n\ufeffd\te\tf\n\ufeff# a comment\n", encoding="utf-8-sig")
    assert [row[0] for row in rows_of(path)] == ["a", "d"]


@pytest.mark.parametrize(
    ("line", "message"),
    [("a\tb\tc", "line 2 has no second text"), ("a\tb\tc\ta", "line 2 has the same text twice")],
)
def test_pairs_have_two_texts(path, line, message):
    path.write_text(f"a\tb\tc\td\n{line}\n")
    assert len(read_lines(path)) == 2
    with pytest.raises(BilensError, match=message):
        read_pair_lines(path)


GOOD = "t3 t2 t3 t4\tt5\tt6\tt3 t7 t3 t4\n"
FAULTS = [
    ("t3 t4\tx5\tt6\tt3 t7", "token='x5', expected a single token"),
    ("t3 t4\tt5\tt6,x6\tt3 t7", "token='x6', expected a single token"),
]


@pytest.mark.parametrize(("line", "message"), FAULTS)
def test_what_does_not_fit_the_model_is_said_with_its_line(view, path, line, message):
    # In the last task, which is searched after minutes.
    path.write_text(f"{GOOD}# two tasks\n{line}\ttwo\n")
    for read in (language.circuit, language.task_directions):
        with pytest.raises(BilensError, match=rf"q\.tsv, line 3: {message}"):
            read(view, questions=str(path))


@pytest.mark.parametrize("command", ["circuit", "task-directions"])
def test_a_file_is_checked_before_there_is_a_model(path, capsys, command):
    path.write_text(f"{GOOD}a b c d\n")
    message = refusal(capsys, command, "no-such-model", "--questions", path)
    assert "q.tsv, line 2: expected columns with tabs" in message
    assert message.count("error") == 1


def test_the_example_of_the_docs_is_a_file(path):
    page = (ROOT / "docs" / "howto" / "circuit.md").read_text()
    path.write_text(re.search(r"```text\n(.*?)```", page, re.DOTALL)[1])
    of_first = ((" are",), (" is",), "The key to the cabinet", "number", "of two nouns")
    of_second = ((" are",), (" is", " was"), "The key, which was red,", "number", "relative")
    assert rows_of(path) == [
        ("The keys to the cabinet", *of_first),
        ("The keys, which were red,", *of_second),
    ]


def test_a_task_that_comes_with_bilens_is_known_by_its_name(tmp_path, monkeypatch):
    by_name, by_path = (
        [replace(line, place="") for line in read_lines(source)]
        for source in ("agreement", TASKS / "agreement.tsv")
    )
    assert by_name == by_path
    assert read_lines("agreement")[0].place == "agreement, line 2"
    message = r"agreements is no file .*\(agreement, capitals, comp.* mean agreement"
    with pytest.raises(BilensError, match=message):
        read_lines("agreements")
    monkeypatch.chdir(tmp_path)
    Path("agreement").write_text("a\t b\t c\td\n")
    assert rows_of("agreement") == [("a", (" b",), (" c",), "d", "", "")]


@pytest.mark.parametrize("task", task_names())
def test_a_task_has_three_templates_of_24_different_questions(task):
    lines = read_pair_lines(task)
    assert {line.task for line in lines} == {task}
    assert [*Counter(line.template for line in lines).values()] == [24, 24, 24]
    assert len({(line.text, line.against) for line in lines}) == len(lines)
    assert all(line.minus for line in lines)
    assert not any(line.text.endswith(" ") for line in lines)
    names = [name for line in lines for name in (*line.token, *line.minus)]
    assert task == "greater" or all(name.startswith(" ") for name in names)


def test_thirteen_tasks_come_with_bilens():
    assert len(task_names()) == 13

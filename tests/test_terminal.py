"""The output of commands never controls the terminal; what is logged, and where it goes."""

import io
import logging
import os
import sys
import time
from functools import partial
from types import ModuleType

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table as RichTable
from rich.text import Text

import bilens.cli
from bilens.analysis import Reading
from bilens.cli.commands import as_typed
from bilens.cli.console import PlainConsole, printable, show_table
from bilens.cli.readings import show_reading
from bilens.errors import BilensError
from bilens.progress import logger, progress_bar
from bilens.sections import ContextLine, ContextList, Section, Table
from tests.command_line import python

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\rback\u202eturned\ud800"
UNCLEAN = {"\x07", "\x9b", "\r", "\u202e", "\ud800"}
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b31m\rback\u202eturned\ud800"


def printed(thing, **settings) -> str:
    file = io.StringIO()
    PlainConsole(file=file, width=200, **settings).print(thing)
    return file.getvalue()


def test_control_characters_are_written_out():
    assert printable(EVIL) == SHOWN
    assert printable("a\tb\nΩ 🙂 é") == "a\tb\nΩ 🙂 é"


@given(st.text(alphabet=st.characters(exclude_characters="\n\t")))
def test_a_clean_text_stays(text):
    assert all(c == " " or ord(c) > 31 for c in printable(text))
    assert printable(printable(text)) == printable(text)


@pytest.mark.parametrize("colour", [False, True])
def test_whatever_is_printed_is_clean(colour):
    table = RichTable(title=EVIL)
    table.add_column(EVIL)
    table.add_row(Text(EVIL, style="bold"))
    settings = {"force_terminal": colour, "color_system": "truecolor" if colour else None}
    for thing in (EVIL, Text(EVIL, style="red"), table):
        text = printed(thing, **settings)
        assert not [part for part in ("\x1b]", "\x1b[2J", *UNCLEAN) if part in text]
        assert "back" in text
    assert ("\x1b[1m" in printed(table, **settings)) is colour


def test_no_color_takes_colours_away(monkeypatch):
    text, settings = Text("a", style="red"), {"force_terminal": True, "color_system": "truecolor"}
    assert printed(text, **settings) != "a\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(text, **settings) == "a\n"


def test_a_table_that_is_too_narrow_cuts_no_word(monkeypatch):
    rows = [("head.11.12@13", "+1.2345678"), ("mlp.1", "+2.0")]
    for width in (24, 40):
        text = io.StringIO()
        narrow = PlainConsole(file=text, force_terminal=True, width=width)
        monkeypatch.setattr(bilens.cli.console, "out", narrow)
        show_table(("part", "measured effect"), rows)
        shown = text.getvalue()
        assert all(word in shown for word in ("head.11.12@13", "measured", "+1.2345678"))
        assert ("┃" in shown) is (width == 40)


def test_tables_of_tokens_are_clean(capsys):
    # Neither pandas nor a tokenizer holds half of a pair.
    token = EVIL.removesuffix("\ud800")

    class Tokens(Reading):
        def facts(self):
            return [(token, token)]

        def tables(self):
            return {token: pd.DataFrame({"token": [token], "value": [1.0]})}

        def texts(self):
            return [ContextList(token, [ContextLine(1.0, [(token, 1.0)], 0)])]

    show_reading(Tokens())
    shown = capsys.readouterr().out
    assert "back" in shown
    assert not {"\x1b", *UNCLEAN} & {*shown}


def test_each_answer_has_a_line(capsys):
    class Answers(Reading):
        def facts(self):
            return [("a", "is 1."), ("b", "is 2."), ("note", "c"), ("seeds", 3)]

        def sections(self):
            return []

    show_reading(Answers())
    assert capsys.readouterr().out == "note c, seeds 3\na is 1.\nb is 2.\n"


def test_rows_of_each_kind_are_shown_of_what_is_folded(capsys):
    class Kinds(Reading):
        def sections(self):
            of = {"use": [*["asked"] * 9, "used"], "number": range(10)}
            return [Section("", "", [[Table(of, by=by)]], folded=True) for by in ("", "use")]

    show_reading(Kinds())
    first, second = capsys.readouterr().out.split("5 of 10 rows;")
    assert "used" not in first
    assert [line.split() for line in second.splitlines()[2:5]] == [
        ["asked", "0"],
        ["asked", "1"],
        ["used", "9"],
    ]
    assert "3 of 10 rows;" in second


def test_messages_of_errors_are_clean(monkeypatch, capsys):
    def run() -> None:
        raise BilensError(f"the nearest are {EVIL}")

    monkeypatch.setattr(bilens.cli, "parse", lambda args: partial(run))
    with pytest.raises(SystemExit):
        bilens.cli.main([])
    message = capsys.readouterr().err
    # Rich itself drops bells and carriage returns.
    assert "error: the nearest are " + SHOWN.replace(r"\x07", "").replace(r"\r", "") in message


SAY = "from bilens.progress import logger; logger.info('a line'); logger.warning('a warning')"
CONFIGURED = f"import logging; logging.basicConfig(format='mine %(message)s'); {SAY}"


def said(code, **settings):
    return python("-c", code, env={**os.environ, **settings}, check=False).stderr


@pytest.mark.parametrize(
    ("code", "settings", "expected"),
    [
        (SAY, {}, "a line\na warning\n"),
        (SAY, {"BILENS_VERBOSITY": "warning"}, "a warning\n"),
        (SAY, {"BILENS_VERBOSITY": "error"}, ""),
        (SAY, {"RANK": "1"}, ""),
        # Once, by the program's own handler.
        (CONFIGURED, {}, "mine a line\nmine a warning\n"),
    ],
)
def test_the_level_is_that_of_the_environment(code, settings, expected):
    assert said(code, **settings) == expected


def test_an_unknown_level_is_refused():
    expected = "BILENS_VERBOSITY=loud, expected one of debug, info, warning, error, critical\n"
    assert said(SAY, BILENS_VERBOSITY="loud").endswith(expected)


def test_a_server_can_hide_lines_of_long_work(caplog, monkeypatch):
    monkeypatch.setattr("bilens.progress.FIRST", 1e-9)
    for level, count in ((logging.INFO, 1), (logging.WARNING, 0)):
        caplog.set_level(level, logger.name)
        caplog.clear()
        with progress_bar("texts", total=4) as bar:
            bar.update()
        assert len(caplog.messages) == count
        assert all(text.startswith("texts: 1 of 4") for text in caplog.messages)


def test_lines_count_each_item_once(caplog, monkeypatch):
    monkeypatch.setattr("bilens.progress.FIRST", 1e-9)
    monkeypatch.setattr("bilens.progress.PACE", 0.04)
    caplog.set_level(logging.INFO, logger.name)
    for _ in progress_bar("steps", range(12)):
        time.sleep(0.015)
    counts = [int(text.split()[1]) for text in caplog.messages]
    assert len(counts) > 2
    assert counts == sorted(set(counts))
    assert counts[-1] <= 12


@pytest.mark.parametrize("where", ["terminal", "notebook", "notebook without widgets", "log"])
def test_long_work_shows_how_far_it_is_everywhere(where, monkeypatch, capsys):
    monkeypatch.setattr("bilens.progress.FIRST", 1e-9)
    if "notebook" in where:
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
        widgets = None if "without" in where else "found"
        monkeypatch.setattr("bilens.progress.find_spec", lambda name: widgets)
        notebook = ModuleType("tqdm.notebook")
        notebook.tqdm = lambda *args, desc, **settings: [desc]
        monkeypatch.setitem(sys.modules, "tqdm.notebook", notebook)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: where == "terminal", raising=False)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    steps = []
    for step in progress_bar("steps", range(3)):
        time.sleep(0.06)  # tqdm draws ten times a second
        steps.append(step)
    if where == "notebook":
        assert steps == ["steps"]
        return
    assert steps == [0, 1, 2]
    shown = capsys.readouterr().err
    assert "steps: 1 of 3, about 0 s left" in shown if where != "terminal" else "/3 [" in shown


def test_arguments_in_messages_are_options_as_they_are_typed():
    values = {"heads": True, "k": 5, "level": "stages", "n_ctx": None, "layers": (1, 2)}
    texts = {"prompt": "the boy", "token": "a", "minus": "b,c", "against": ""}
    said = {
        "heads=True is of parts; add level='parts'": "--heads is of parts; add --level=parts",
        "k=5, expected some of layers=(1, 2).": "--k=5, expected some of --layers 1 2.",
        "end at n_ctx=8; leave k out": "end at --n-ctx=8; leave --k out",
        "token='c', expected a single token": "--minus=c, expected a single token",
        "text='the boy' of file.tsv": "--prompt='the boy' of file.tsv",
        "text='of a file', words as keys=key": "text='of a file', words as keys=key",
        "against has 3 tokens, minus=('b', 'c')": "--against has 3 tokens, --minus=b,c",
        "a level of heads, k and n_ctx": "a level of heads, k and --n-ctx",
    }
    assert {message: as_typed(message, values | texts) for message in said} == said

"""The output of commands never controls the terminal."""

import io
from functools import partial

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

import bilens.cli
from bilens.analysis import Reading
from bilens.cli.console import PlainConsole, printable
from bilens.cli.readings import show_reading
from bilens.errors import BilensError
from bilens.sections import ContextLine, ContextList

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\rback\u202eturned\ud800"
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
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(Text(EVIL, style="bold"))
    settings = {"force_terminal": colour, "color_system": "truecolor" if colour else None}
    for thing in (EVIL, Text(EVIL, style="red"), table):
        text = printed(thing, **settings)
        assert "\x1b]" not in text
        assert "\x1b[2J" not in text
        assert not {"\x07", "\x9b", "\r", "\u202e", "\ud800"} & set(text)
        assert "back" in text
    assert ("\x1b[1m" in printed(table, **settings)) is colour


def test_no_color_takes_colours_away(monkeypatch):
    settings = {"force_terminal": True, "color_system": "truecolor"}
    assert printed(Text("a", style="red"), **settings) != "a\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(Text("a", style="red"), **settings) == "a\n"


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
    assert not {"\x1b", "\x07", "\x9b", "\r", "\u202e"} & set(shown)


def test_each_answer_has_a_line(capsys):
    class Answers(Reading):
        def facts(self):
            return [("a", "is 1."), ("b", "is 2."), ("note", "c"), ("seeds", 3)]

        def sections(self):
            return []

    show_reading(Answers())
    assert capsys.readouterr().out == "a is 1.\nb is 2.\nnote c, 3 seeds\n"


def test_messages_of_errors_are_clean(monkeypatch, capsys):
    def run() -> None:
        raise BilensError(f"the nearest are {EVIL}")

    monkeypatch.setattr(bilens.cli, "parse", lambda args: partial(run))
    with pytest.raises(SystemExit):
        bilens.cli.main([])
    message = capsys.readouterr().err
    # Rich itself drops bells and carriage returns.
    assert "error: the nearest are " + SHOWN.replace(r"\x07", "").replace(r"\r", "") in message

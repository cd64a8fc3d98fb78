import unicodedata
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bilens.data import clean


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("“It’s late…” — she said", '"It\'s late..." - she said'),
        ("â€œIt isâ€\x9d â€“ he saidâ€¦ itâ€™s", '"It is" - he said... it\'s'),
        ("â€œcutâ€ off", '"cut" off'),
        ("Café Ångström naïve", "Cafe Angstrom naive"),
        ("ﬁne ﬀ ①", "fine ff 1"),
        ("1½ it´s", "11/2 it's"),
        ("Æsop, œuvre, Søren, Łódź, groß", "AEsop, oeuvre, Soren, Lodz, gross"),
        ("a ☃ snowman 雪 ", "a snowman"),
        (" two \t\n\n lines\xa0here\u200b\x07x\x00 ", "two lines here x"),
        ("", ""),
    ],
)
def test_cleaning(text, expected):
    assert clean(text) == expected


@given(st.text())
def test_what_is_clean_is_ascii_on_one_line_and_stays(text):
    once = clean(text)
    assert all(" " <= letter <= "~" for letter in once)
    assert once == " ".join(once.split(" ")).strip()
    assert clean(once) == once


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126)))
def test_cleaning_keeps_ascii(text):
    assert clean(text) == text


def test_cleaning_in_pieces_leaves_no_seam():
    text = "naïve “café” ½ " * 500
    assert clean(text) == " ".join(clean("naïve “café” ½ ") for _ in range(500))


def test_a_run_of_accents_is_never_sorted_whole(monkeypatch):
    """Python sorts one in time that grows with its square."""
    lengths = []

    def normalize(form, text):
        lengths.append(len(text))
        return unicodedata.normalize(form, text)

    monkeypatch.setattr("bilens.data.texts.unicodedata", SimpleNamespace(normalize=normalize))
    assert clean("e" + "\u0316\u0301" * 5_000) == "e"
    assert max(lengths) <= 1000

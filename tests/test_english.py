from pathlib import Path

import pytest
from tools.english import ROOT, blocks, check, main, measure_files, plain, rooms

LONG = " ".join(["word"] * 26)


def written(directory: Path, text: str, name: str = "module.py") -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def texts(directory: Path, source: str, name: str = "module.py") -> list[str]:
    return [finding.text for finding in check([written(directory, source, name)], directory)]


@pytest.mark.parametrize("opening", ["What", "Whether", "Of", "Those", "As", "Some", "Who"])
def test_a_docstring_begins_with_a_noun_or_a_verb(tmp_path: Path, opening: str) -> None:
    source = (
        f'class A:\n    """{opening} a layer."""\n\n    x: int\n    """{opening} the width."""\n'
    )
    findings = texts(tmp_path, source)
    assert findings.count(f'a docstring begins with "{opening}"') == 2


def test_a_function_begins_with_an_imperative_and_a_property_need_not(tmp_path: Path) -> None:
    source = (
        'def f():\n    """The width."""\n\n\ndef g():\n    """Return the width."""\n\n\n'
        'class A:\n    """A layer."""\n\n'
        '    @property\n    def w(self):\n        """The width."""\n'
    )
    (finding,) = check([written(tmp_path, source)], tmp_path)
    assert (finding.path, finding.line) == ("module.py", 2)
    assert "imperative" in finding.text


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "def f(found): ...",
        "def _found(): ...",
        "for found in (): ...",
        "[found for found in ()]",
        "self.found = 1",
        "import os as found",
        "with open() as found: ...",
        "lambda found: 0",
        "match 0:\n    case found:\n        pass",
        "try: ...\nexcept ValueError as found: ...",
    ],
)
def test_names_say_what_they_hold(tmp_path: Path, source: str) -> None:
    assert any("says nothing" in text for text in texts(tmp_path, source))


def test_reading_a_name_of_others_is_no_finding(tmp_path: Path) -> None:
    assert texts(tmp_path, "spectrum = other.found\ncall(found=1)\n") == []


def test_sentences_of_docstrings_have_25_words(tmp_path: Path) -> None:
    source = f'"""{LONG.capitalize()}."""\n'
    assert any("26 words" in text for text in texts(tmp_path, source))
    source = f'"""{LONG[:-5].capitalize()}. {LONG[:-5].capitalize()}."""\n'
    assert texts(tmp_path, source) == []
    assert any("semicolons" in text for text in texts(tmp_path, '"""A b; c d; e f."""\n'))


def test_code_formulas_and_tables_are_no_prose() -> None:
    text = (
        "First\nparagraph.\n\n    y = a long formula\n\n```\ncode\n```\n| a | table |\n"
        "- One item\n  goes over two lines.\n- Another.\n\n"
        "Args:\n    x: The input\n        of a layer.\n"
        "    y: The output.\n\nAfter it.\n"
    )
    assert list(blocks(text)) == [
        "First paragraph.",
        "One item goes over two lines.",
        "Another.",
        "The input of a layer.",
        "The output.",
        "After it.",
    ]
    assert plain("See `a b` and [a page](b.md) for $x y$.") == "See Code and a page for Code."


def test_a_word_has_its_budget(tmp_path: Path) -> None:
    page = "The layer reads what it needs. " + "Plain words. " * 600
    assert texts(tmp_path, page, "page.md") == []
    findings = texts(tmp_path, "What is and what is not and what was. Go on.\n", "page.md")
    assert '"what" 3 times, 1 allowed' in findings
    assert '"go on" 1 times, 0 allowed' in findings


def test_messages_are_prose(tmp_path: Path) -> None:
    source = 'raise ValueError(f"{a} stands behind {b}, and what stands behind it stands")\n'
    assert '"stand" 3 times, 1 allowed' in texts(tmp_path, source)


def test_lines_of_comments_and_imports_are_counted(tmp_path: Path) -> None:
    source = 'import os\nfrom a import (\n    b,\n)\n\n__all__ = ["c"]\n# Why.\nx = 1  # beside\n'
    measure = measure_files([written(tmp_path, source)], tmp_path)
    assert (measure.files, measure.lines, measure.imports, measure.comments) == (1, 8, 5, 1)


def test_the_table_has_every_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directories = {path.parent.name for path in (ROOT / "src/bilens").glob("*/__init__.py")}
    assert directories <= set(rooms())
    # `make check` reads the other rooms.
    two = {name: rooms()[name] for name in ("data", "README.md")}
    monkeypatch.setattr("tools.english.rooms", lambda: two)
    monkeypatch.setattr("tools.english.check", lambda paths: [])
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["room", *two]


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a file or directory"):
        check([tmp_path / "absent"])

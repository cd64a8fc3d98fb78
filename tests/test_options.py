"""Options and controls of every reading come from its function's signature."""

from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bilens
from bilens.analyses import built_in, find_analysis, load_file
from bilens.analysis import REQUIRED, Analysis, Reading
from bilens.cli import COMMANDS
from bilens.data import ImageData
from bilens.errors import BilensError
from bilens.explore import explorer
from bilens.options import token_list
from bilens.pages.page import report
from bilens.question_files import written_names
from tests.command_line import refusal
from tests.models import digits, grammar_view, small_corpus, small_model

FUTURE = """from __future__ import annotations
from bilens.analysis import Reading, analysis
@analysis("future")
def read(model: int, k: int | None = None) -> Reading:
    reading = Reading()
    reading.facts = lambda: [("k", k)]
    return reading
"""


def nothing(settings, images, optional):
    """Load no data."""


@pytest.mark.parametrize("name", built_in())
def test_readings_of_bilens_say_what_their_options_are(name):
    entry = find_analysis(name)
    assert entry.about
    assert entry.fits(None) is False
    assert all(option.help for option in entry.options), name
    assert name in COMMANDS


def test_plain_settings_become_arguments(view):
    settings = {"token": "t3", "minus": "t4,t5", "layer": 1, "k": 3, "among": 10, "unknown": 1}
    reading = find_analysis("ngrams").run(view, settings, nothing)
    assert str(reading.direction) == "t3 minus t4, t5"
    assert (reading.layer, len(reading.preceding["token"])) == (1, 3)
    assert {*reading.heads[0]["virtual"]} <= {f"t{number}" for number in range(10)}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        *(("", ()), ("b,c", ("b", "c")), (" is, was", (" is", " was"))),
        # A single letter or sign is itself, also behind a space.
        *((letter, (letter,)) for letter in (",", " ,", '"', "\n", " ")),
        *(('",", is,"."', (",", " is", ".")), ('"a, b"', ("a, b",)), ('""""', ('"',))),
        *(('"say ""no"""', ('say "no"',)), ('don"t,.\n', ('don"t', ".\n"))),
    ],
)
def test_names_of_tokens_are_read_from_a_text(text, names):
    assert token_list(text) == names


@given(st.lists(st.text(alphabet='ab ,"\n', min_size=1)))
def test_names_that_are_written_are_read_again(names):
    assert token_list(written_names(names)) == tuple(names)


def test_texts_and_images_that_are_loaded_are_taken():
    eigenvectors, contexts = map(find_analysis, ("eigenvectors", "contexts"))
    reading = eigenvectors.run(small_model(), {"order": "activation"}, lambda *_: digits())
    assert (reading.order, reading.data.name) == ("activation", "digits")
    settings = {"token": "lily", "k": 2}
    reading = contexts.run(grammar_view(n_ctx=8), settings, lambda *_: small_corpus())
    assert len(reading.contexts[0]) == 2


def test_a_model_of_another_kind_is_named(view):
    with pytest.raises(BilensError, match="runs/a holds ResidualModel, and `bilens bonds` reads"):
        find_analysis("bonds").run(view, {}, nothing, source="runs/a")
    with pytest.raises(BilensError, match="ngrams needs token: "):
        find_analysis("ngrams").run(view, {}, nothing)


def test_an_unknown_type_of_model_reads_as_its_name():
    def read(model: list) -> Reading:
        return Reading()

    with pytest.raises(BilensError, match=r"`bilens lists` reads list"):
        Analysis("lists", read).run({}, {}, nothing)


@dataclass(frozen=True)
class Given(Reading):
    """The values that a function was called with."""

    values: tuple[object, ...]


def test_names_of_parameters_mean_nothing():
    def read(model: object, layer: float, text: str = "a", among: int = 3, minus: int = 1):
        return Given((layer, text, among, minus))

    entry = Analysis("own", read)
    kinds = [(option.name, option.type, option.default) for option in entry.options]
    layer, text = ("layer", float, REQUIRED), ("text", str, "a")
    assert kinds == [layer, text, ("among", int, 3), ("minus", int, 1)]
    assert entry.run(0, {"layer": 0.5, "minus": 2}, nothing).values == (0.5, "a", 3, 2)


def test_texts_and_images_are_options_by_name_in_quotes_or_not():
    def read(model: object, corpus: "bilens.data.Corpus", data: ImageData | None = None):
        return Given((corpus, data))

    entry = Analysis("own", read)
    assert [option.name for option in entry.options] == ["data", "data_dir"] * 2
    asked = entry.run(0, {"data": "mine"}, lambda *given: given)
    assert asked.values == (({"data": "mine"}, False, False), ({"data": "mine"}, True, True))


def test_types_may_all_be_texts(tmp_path):
    (tmp_path / "own.py").write_text(FUTURE)
    (entry,) = load_file(tmp_path / "own.py")
    assert [(o.name, o.type, o.default) for o in entry.options] == [("k", int | None, None)]
    assert entry.run(3, {"k": 2}, nothing).facts() == [("k", 2)]


def test_texts_that_do_not_exist_are_refused_before_the_model_is_opened(tmp_path, capsys):
    file, page = tmp_path / "model.gguf", tmp_path / "page.html"
    for open_file in (explorer, partial(report, path=page)):
        with pytest.raises(BilensError, match=r"'no\.txt'"):
            open_file(file, data="no.txt")
    for command, *options in (["report"], ["contexts", "--token", "a"]):
        assert "--data=no.txt, expected" in refusal(
            capsys, command, file, *options, "--data", "no.txt"
        )

"""Options and controls of every reading come from its function's signature."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bilens.analysis import BUILT_IN, Analysis, Reading, declared_analysis, find_analysis, module_of
from bilens.errors import BilensError
from bilens.explore import explorer
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.options import REQUIRED, Layer, fields_of, listed, token_list
from bilens.report.page import report
from bilens.residual import ResidualModel
from tests.command_line import refusal
from tests.language import random_model, small_corpus, toy_tokenizer
from tests.models import digits


def nothing(kind, settings, optional):
    """Load no data."""
    return


@pytest.mark.parametrize("name", BUILT_IN)
def test_readings_of_bilens_are_where_the_table_says_and_as_the_source_says(name):
    declared, entry = declared_analysis(name), find_analysis(name)
    assert entry.read.__module__ == module_of(name)
    assert issubclass(entry.hints["return"], Reading)
    assert entry.about
    assert all(option.help for option in entry.options), name
    # Commands take what they offer from the source, without an import of the function.
    assert declared.read is not entry.read
    assert declared.options == entry.options
    assert declared.about == entry.about


def test_plain_settings_become_arguments():
    model = ResidualModel(random_model(n_layers=2), toy_tokenizer())
    settings = {"token": "t3", "minus": "t4,t5", "layer": 1, "k": 3, "among": 10, "unknown": 1}
    reading = find_analysis("ngrams").run(model, settings, nothing)
    assert str(reading.direction) == "t3 minus t4, t5"
    assert (reading.layer, len(reading.preceding)) == (1, 3)
    tokens = {f"t{number}" for number in range(10)}
    assert set(reading.heads[0]["virtual"]) <= tokens


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("b,c", ("b", "c")),
        (" is, was", (" is", " was")),
        # A single letter or sign is itself, also behind a space.
        (",", (",",)),
        (" ,", (" ,",)),
        ('"', ('"',)),
        ("\n", ("\n",)),
        (" ", (" ",)),
        ('",", is,"."', (",", " is", ".")),
        ('"a, b"', ("a, b",)),
        ('""""', ('"',)),
        ('"say ""no"""', ('say "no"',)),
        ('don"t,.\n', ('don"t', ".\n")),
    ],
)
def test_names_of_tokens_are_read_from_a_text(text, names):
    assert token_list(text) == names


@pytest.mark.parametrize("text", ["b,,c", ",,", ", , .", "b,", ",b", '"b', '"b"c', '"",b', '".'])
def test_an_empty_name_or_an_open_quote_is_refused(text):
    with pytest.raises(
        BilensError, match=r"an empty name or an open quote; expected names .* \",\""
    ):
        token_list(text)


@given(st.lists(st.text(alphabet='ab ,"\n', min_size=1)))
def test_names_that_are_written_are_read_again(names):
    assert token_list(listed(names)) == tuple(names)


def test_texts_and_images_that_are_loaded_are_taken():
    config = ClassifierConfig(64, 10, 12, 1, image_shape=(8, 8))
    classifier = ImageClassifier(config).requires_grad_(False)
    data = digits()
    reading = find_analysis("eigenvectors").run(
        classifier, {"order": "activation"}, lambda kind, settings, optional: data
    )
    assert reading.order == "activation"
    assert reading.data.name == data.name
    corpus = small_corpus()
    model = random_model(vocab_size=len(corpus.tokenizer), n_ctx=8, d_model=16)
    view = ResidualModel(model, corpus.tokenizer)
    settings = {"token": "lily", "k": 2}
    reading = find_analysis("contexts").run(view, settings, lambda *_: corpus)
    assert len(reading.contexts[0]) == 2


def test_a_model_of_another_kind_is_named():
    model = ResidualModel(random_model(), toy_tokenizer())
    with pytest.raises(BilensError, match="runs/a holds ResidualModel, and `bilens bonds` reads"):
        find_analysis("bonds").run(model, {}, nothing, source="runs/a")
    with pytest.raises(BilensError, match="ngrams needs token: "):
        find_analysis("ngrams").run(model, {}, nothing)


def test_an_unknown_type_of_model_reads_as_its_name():
    def read(model: list) -> Reading:
        return Reading()

    with pytest.raises(BilensError, match=r"`bilens lists` reads list"):
        Analysis("lists", read).run({}, {}, nothing)


def test_names_of_parameters_mean_nothing():
    def read(model: object, layer: float, text: str = "a", among: int = 3, minus: int = 1):
        return layer, text, among, minus

    entry = Analysis("own", read)
    kinds = {option.name: (option.type, option.default) for option in entry.options}
    assert kinds == {
        "layer": (float, REQUIRED),
        "text": (str, "a"),
        "among": (int, 3),
        "minus": (int, 1),
    }
    assert entry.run(0, {"layer": 0.5, "minus": 2}, nothing) == (0.5, "a", 3, 2)


def test_a_type_carries_its_option_and_a_dataclass_has_those_of_its_fields():
    @dataclass(frozen=True)
    class Place:
        """A place.

        Attributes:
            block: Number of the block
            column: Number of the column.
        """

        block: Layer
        column: int

    def read(model: object, place: Place | None = None):
        return place

    entry, model = Analysis("own", read), SimpleNamespace(n_layers=1)
    assert [(o.name, o.type, o.default) for o in entry.options] == [
        ("block", int | None, None),
        ("column", int | None, None),
    ]
    assert (
        entry.options[0].help == "Number of the block, from 0; models of one layer do not need it."
    )
    assert entry.run(model, {"column": 2}, nothing) == Place(0, 2)
    assert entry.run(model, {"column": None}, nothing) is None
    with pytest.raises(BilensError, match="block=7 needs column too"):
        entry.run(model, {"block": 7}, nothing)
    assert [field.default for field in fields_of(Place)] == [REQUIRED, REQUIRED]


@pytest.mark.parametrize(("data", "message"), [(None, "does not say what"), ("no.txt", "'no.txt'")])
def test_texts_that_do_not_exist_are_refused_before_the_model_is_opened(
    tmp_path, capsys, data, message
):
    file, page = tmp_path / "model.gguf", tmp_path / "page.html"
    with pytest.raises(BilensError, match=message):
        explorer(file, data=data)
    with pytest.raises(BilensError, match=message):
        report(file, page, data=data)
    named = [] if data is None else ["--data", data]
    commands = [["report"], ["contexts", "--token", "a"]]
    for command, *options in commands[: 1 + len(named)]:
        assert message in refusal(capsys, command, file, *options, *named)

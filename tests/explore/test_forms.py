"""What is typed into boxes: values as commands have them, or a reason that names the box."""

from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bilens.analyses import built_in
from bilens.analysis import Analysis, Reading
from bilens.errors import BilensError
from bilens.explore.forms import OF_THE_HOST, Form
from bilens.settings import Between


def read_all(
    model: object,
    *,
    word: str,
    kind: Literal["one", "two"] = "one",
    size: Annotated[int, Between(1, 9)] = 3,
    share: float = 0.5,
    layer: int | None = None,
    deep: bool = False,
    thorough: bool = True,
    data: str = "",
    questions: str = "",
    names: tuple[str, ...] = (),
) -> Reading:
    """Read."""
    raise NotImplementedError


FORM = Form(Analysis("all", read_all), {"word": "swim", "size": "4"})
NAMES = ["word", "kind", "size", "share", "layer", "deep", "thorough"]


def test_boxes_begin_with_starts_and_defaults():
    assert [*FORM.texts().values()] == ["swim", "one", "4", "0.5", "", "", "on"]
    assert [*FORM.values(FORM.texts()).values()] == ["swim", "one", 4, 0.5, False, True]
    shown = [[box.option.name for box in boxes] for boxes in (FORM.shown, FORM.folded)]
    assert shown == [["layer"], ["word", "kind", "size", "share", "deep", "thorough"]]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("word", " a,b ", " a,b "),
        ("kind", "two", "two"),
        ("size", "9", 9),
        ("layer", "-1", -1),
        ("share", "1e-3", 1e-3),
        ("deep", "on", True),
        ("thorough", "", False),
    ],
)
def test_a_text_is_a_value(name, text, value):
    found = FORM.values(FORM.texts([(name, text), ("__sign", "x"), ("unknown", "y")]))[name]
    assert (found, type(found)) == (value, type(value))


def test_an_empty_box_is_the_default():
    values = FORM.values(FORM.texts([(name, "") for name in NAMES]))
    assert values == {"deep": False, "thorough": False}


WRONG = {
    "kind": ("three", "ONE"),
    "size": ("x", "1.5", "0", "10", "1_0", "inf", "9" * 5000, "\0", "①"),
    "share": ("x", "nan", "inf", "-inf", "1e999", "0x1"),
    "layer": ("[]", "1 2"),
}


@pytest.mark.parametrize(("name", "text"), [(n, text) for n, row in WRONG.items() for text in row])
def test_what_is_no_value_is_refused_by_the_name_of_the_box(name, text):
    with pytest.raises(BilensError, match=f"^{name}=.*, expected ") as error:
        FORM.values(FORM.texts([(name, text)]))
    assert len(str(error.value)) < 300


@given(st.sampled_from(NAMES), st.text())
def test_any_text_is_a_value_or_refused(name, text):
    texts, reason = FORM.texts([(name, text)]), ""
    try:
        assert type(FORM.values(texts).get(name)) in (str, int, float, bool, type(None))
    except BilensError as error:
        reason = str(error)
    assert not reason or reason.startswith(f"{name}=")


def test_no_box_names_a_file_of_the_machine():
    for entry in built_in().values():
        assert not {*OF_THE_HOST} & Form(entry).boxes.keys()

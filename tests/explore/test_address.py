"""States and their addresses."""

from dataclasses import dataclass
from urllib.parse import parse_qsl

from hypothesis import given
from hypothesis import strategies as st

from bilens.explore.screen import LONGEST, read_address, write_address


@dataclass(frozen=True)
class State:
    word: str = "swim"
    minus: tuple[str, ...] = ("run", "a&b=c")
    saved: int = 10


def there_and_back(state: State) -> State:
    query, left_out = write_address(state, State())
    assert left_out == []
    return read_address(State(), parse_qsl(query, keep_blank_values=True))


@given(st.text(), st.lists(st.text(min_size=1), max_size=4), st.integers(0, 10**9 - 1))
def test_an_address_stands_for_its_state(word, minus, saved):
    state = State(word, tuple(minus), saved)
    assert there_and_back(state) == state


def test_the_first_state_has_an_empty_address():
    assert write_address(State(), State()) == ("", [])
    assert there_and_back(State(minus=())) == State(minus=())


def test_what_others_add_is_left_alone():
    assert read_address(State(), [("__sign", "x"), ("saved", "3")]) == State(saved=3)


def test_an_address_is_never_long():
    """The longest parts are left out, as few as suffice."""
    drawing = State(word="x" * 300_000, minus=("y" * 3000,), saved=3)
    query, left_out = write_address(drawing, State())
    assert len(query) <= LONGEST
    assert left_out == ["word"]
    assert read_address(State(), parse_qsl(query)) == State(minus=drawing.minus, saved=3)
    query, left_out = write_address(State(word="x" * 2500, minus=("y" * 3000,)), State())
    assert left_out == ["minus"]

"""States and their addresses."""

from dataclasses import dataclass
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bilens.errors import BilensError
from bilens.explore.address import read_address, write_address


@dataclass(frozen=True)
class State:
    word: str = "swim"
    minus: tuple[str, ...] = ("run", "a&b=c")
    kept: int = 10


def there_and_back(state: State) -> State:
    query = write_address(state, State())
    return read_address(State(), parse_qsl(query, keep_blank_values=True))


@given(st.text(), st.lists(st.text(min_size=1), max_size=4), st.integers(0, 10**9 - 1))
def test_an_address_stands_for_its_state(word, minus, kept):
    state = State(word, tuple(minus), kept)
    assert there_and_back(state) == state


def test_the_first_state_has_an_empty_address():
    assert write_address(State(), State()) == ""
    assert there_and_back(State(minus=())) == State(minus=())


def test_what_others_add_is_left_alone():
    assert read_address(State(), [("__sign", "x"), ("kept", "3")]) == State(kept=3)


@pytest.mark.parametrize("number", ["", "x", "-1", "1e3", "٣", "1" * 5000])
def test_what_is_no_number_is_refused(number):
    with pytest.raises(BilensError, match="The address says kept=.*expected a whole number"):
        read_address(State(), [("kept", number)])

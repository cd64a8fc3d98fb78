"""Settings are held to their annotations, wherever they come from."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import numpy as np
import pytest

from bilens.errors import BilensError
from bilens.settings import Between, Share, Size, check_settings, read_settings


@dataclass(frozen=True)
class Some:
    """Settings of every kind."""

    d_model: Size = 8
    d_hidden: Size | None = None
    rate: Annotated[float, Between(0, above=True)] = 0.1
    share: Share = 0.5
    scale: float | None = None
    bias: bool = False
    gate: Literal["identity", "relu"] = "identity"
    names: tuple[str, ...] = ()
    shape: tuple[int, int] | None = None
    about: str = ""

    def __post_init__(self) -> None:
        check_settings(self)


def test_what_fits_passes():
    Some(d_hidden=3, rate=1, scale=-2.0, names=("a", "b"), shape=(2, 3), gate="relu", bias=True)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("d_model", 0, "a whole number, at least 1 and at most 1,048,576"),
        ("d_model", 10**12, "a whole number, at least 1"),
        ("d_model", 1e30, "a whole number"),
        ("d_model", True, "a whole number"),
        ("d_model", None, "a whole number"),
        ("d_hidden", -1, "a whole number, at least 1 and at most 1,048,576 or none"),
        ("rate", 0, "a finite number, above 0"),
        ("rate", float("nan"), "a finite number, above 0"),
        ("rate", float("inf"), "a finite number, above 0"),
        ("rate", "0.1", "a finite number, above 0"),
        ("share", 1.5, "a finite number, at least 0 and at most 1"),
        ("scale", float("inf"), "a finite number or none"),
        ("scale", False, "a finite number or none"),
        ("bias", 1, "true or false"),
        ("gate", "tanh", "one of identity, relu"),
        ("gate", None, "one of identity, relu"),
        ("scale", 10**400, "a finite number or none"),
        ("d_model", np.int64(0), "a whole number, at least 1"),
        ("names", "ab", "a list, each text"),
        ("names", {"a"}, "a list, each text"),
        ("names", ["a", None], "a list, each text"),
        ("names", ("a", 1), "a list, each text"),
        ("shape", (2,), "2 values, each a whole number or none"),
        ("shape", (2, 3.0), "2 values, each a whole number or none"),
        ("about", None, "text"),
    ],
)
def test_what_does_not_fit_is_named(name, value, expected):
    with pytest.raises(BilensError) as error:
        Some(**{name: value})
    assert str(error.value).startswith(f"{name}={value!r}, expected {expected}")


def test_settings_are_plain_values_that_can_be_hashed_and_written():
    settings = Some(d_model=np.int64(3), share=np.float32(0.5), bias=np.bool_(True), names=["a"])
    assert settings == Some(d_model=3, share=0.5, bias=True, names=("a",))
    assert hash(settings)
    assert json.dumps(asdict(settings))


def test_settings_of_a_file():
    given = {name: getattr(Some(), name) for name in Some.__dataclass_fields__}
    listed = given | {"names": ["a"], "shape": [2, 3]}
    reading = read_settings(Some, listed, "config.json")
    assert (reading.names, reading.shape) == (("a",), (2, 3))
    with pytest.raises(BilensError, match=r"config.json: unknown settings: width. It was written"):
        read_settings(Some, given | {"width": 1}, "config.json")
    with pytest.raises(BilensError, match="config.json: missing settings: d_model"):
        read_settings(Some, {k: v for k, v in given.items() if k != "d_model"}, "config.json")
    with pytest.raises(
        BilensError, match="config.json cannot be used: shape=.*, expected 2 values"
    ):
        read_settings(Some, given | {"shape": [8]}, "config.json")

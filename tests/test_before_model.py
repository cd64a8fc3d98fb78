"""What no model and no data make right is refused before either is loaded."""

from itertools import combinations
from typing import Any

import pytest

from bilens.analyses import built_in, find_analysis
from bilens.analysis import REQUIRED
from bilens.data import Corpus, ImageData
from bilens.errors import BilensError

STARTS = {"prompt": "t3 t4", "token": "t5", "questions": "agreement", "tuned": "other"}
TRIED: dict[str, tuple[Any, ...]] = {
    "token": ("", "t5", "t6,t7", '"t6'),
    "minus": ("t5", '"t6'),
    "against": ("t3 t6", '"t3|t6'),
    "replace": ("t3=t6", "t3", "t9=t6"),
    "mean": (True,),
    "answer": ("t6",),
    "generate": (2,),
    "shown": (3,),
    "ablate": (3,),
    "target": ("probability",),
    "questions": ("", "agreement"),
    "prompt": ("", "t3 t4"),
    "level": ("parts",),
    "keep": (0.5,),
    "size": (2,),
    "heads": (True,),
    "controls": (True,),
    "image": ("none.png",),
    "images": (3,),
    "data": ("texts.txt",),
}


class TouchedError(Exception):
    """A model or data were used."""


def untouched(kind: type) -> Any:
    """Return an object of a class that may not be used."""

    def use(*args: object, **options: object) -> None:
        raise TouchedError

    def touch(self: object, name: str) -> Any:
        if name == "__class__":
            return kind
        # Whether it has a method decides whether it is of a protocol.
        return use if callable(getattr(kind, name, None)) else use()

    return object.__new__(type("Untouched", (kind,), {"__getattribute__": touch}))


def refusal_of(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except BilensError as error:
        return str(error)
    except TouchedError:
        pass
    return ""


@pytest.mark.parametrize("name", built_in())
def test_what_no_model_makes_right_is_refused_without_one(name):
    entry = find_analysis(name)
    model = untouched(entry.on)

    def load(settings: Any, images: bool, optional: bool) -> Any:
        if optional and not settings.get("data"):
            return None
        return untouched(ImageData if images else Corpus)

    def read(settings: dict[str, Any]) -> None:
        values = {}
        for parameter in entry.parameters:
            if "Corpus" in str(parameter.annotation) or "ImageData" in str(parameter.annotation):
                is_optional = parameter.default is None
                values[parameter.name] = load(settings, "Image" in str(parameter), is_optional)
            else:
                values[parameter.name] = settings.get(parameter.name, parameter.default)
        entry.read(model, **values)

    names = [option.name for option in entry.options]
    needed = {option.name for option in entry.options if option.default is REQUIRED}
    start = {name: STARTS[name] for name in needed | {"prompt", "token"} & {*names}}
    # Files of questions are read before a model is loaded.
    tried = [name for name in names if name != "questions" or name not in needed]
    changes = [(name, value) for name in tried for value in TRIED.get(name, ())]
    for pair in [(), *combinations(changes, 1), *combinations(changes, 2)]:
        settings = start | dict(pair)
        if not refusal_of(entry.check, settings):
            assert not refusal_of(read, settings), settings

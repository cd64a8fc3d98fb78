"""No wrong argument of a public function ends in a raw traceback.

The arguments are made from the annotations, so a new function is attacked without a line here.
"""

import random
import signal
from collections.abc import Callable
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

import pytest

from bilens.errors import BilensError
from tests import attack

REASONS = {
    "ImageClassifier.forward": "a torch module, which each step of training runs unchecked",
    "Bonds.ranks_scoring": "calls what the caller gives, whose result it cannot know before",
}
"""Functions that raise errors of other classes, and why."""
SECONDS = 30
"""Time of a single attack; none takes a second."""
SHARE = 0.1
"""Part of the attacks that the suite makes by day."""


@contextmanager
def limit(seconds: int):
    """Stop whatever takes longer, so that a hang has a name."""

    def stop(*_):
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """Return the name of the error that a call should not have raised, or nothing."""
    try:
        with limit(SECONDS):
            result = function(**arguments)
            if isinstance(result, GeneratorType):
                next(result, None)
    except BilensError:
        pass
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return ""


def attacked(names: list[str], folder, share: float) -> tuple[int, list[str]]:
    """Return the number of attacks, and those that ended in a raw error."""
    functions, number, raw = attack.functions(), 0, []
    for name in names:
        try:
            cases = list(attack.attacks(functions[name], folder))
        except (LookupError, NameError, ValueError):
            # It takes the result of another reading, of which there is no sample.
            continue
        selected = random.Random(name).sample(cases, max(1, round(share * len(cases))))
        number += len(selected)
        for title, arguments in selected:
            if error := outcome(functions[name], arguments):
                raw.append(f"{name}, {title}: {error}")
    return number, raw


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share", [SHARE, pytest.param(1.0, marks=pytest.mark.slow)])
def test_wrong_arguments_are_named(share, unchecked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    number, raw = attacked([n for n in attack.functions() if n not in REASONS], tmp_path, share)
    assert number > 10_000 * share
    assert not raw, "\n".join(raw)

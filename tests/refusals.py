"""Calls that are refused: each room has tables of them in its `test_refusals.py`."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest

from bilens.errors import BilensError


def refused(
    calls: dict[str, Any],
    error: type[Exception] = BilensError,
    given: Callable[[], Any] | None = None,
) -> Any:
    """Return the test of a table of calls, one or a list of them for a pattern of their message.

    Args:
        calls: Their parameters are fixtures.
        error: The class of the errors.
        given: Makes what each call takes instead of fixtures.
    """
    rows = []
    for words, found in calls.items():
        for call in found if isinstance(found, list) else [found]:
            rows.append(pytest.param(call, words, id=words.replace("\\", "")))

    @pytest.mark.parametrize(("call", "words"), rows)
    def test(request, call, words):
        parameters = signature(call).parameters.values()
        wanted = [x for x in parameters if x.default is x.empty and x.kind is not x.VAR_KEYWORD]
        args = [given()] if given else [request.getfixturevalue(x.name) for x in wanted]
        with pytest.raises(error, match=words):
            call(*args)

    return test

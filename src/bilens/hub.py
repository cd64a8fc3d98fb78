"""The Hugging Face hub, asked once whether it answers; its own libraries ask six times."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from huggingface_hub import constants, errors, get_session

HTTPError = errors.HTTPError  # type: ignore[attr-defined]  # of its http client

PATIENCE = 3.0
"""Seconds until a hub that does not answer counts as out of reach."""


@contextmanager
def hub_asked_once() -> Iterator[None]:
    """Within, Hugging Face's libraries use only what they have kept if the hub does not answer now.

    Without this each of them asks six times, over 23 seconds, and prints every failure.
    """
    offline = not constants.HF_HUB_OFFLINE and not _answers()
    # datasets keeps a copy of the setting of its own.
    places = [constants, *(m for m in [sys.modules.get("datasets.config")] if m)]
    before = {place: place.HF_HUB_OFFLINE for place in places}
    try:
        if offline:
            _set(dict.fromkeys(places, True))
        yield
    finally:
        _set(before)


def _set(settings: dict[ModuleType, bool]) -> None:
    for place, offline in settings.items():
        place.HF_HUB_OFFLINE = offline  # type: ignore[attr-defined]


def _answers() -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except HTTPError:
        return False
    return True

"""What bilens did to a model, written into its configuration."""

from collections.abc import Sequence
from typing import Any

__all__ = ["read_record", "write_record"]

KEY = "bilens_processing"


def read_record(config: Any) -> dict[str, list[str]]:
    """The steps that were applied to a model, and the maps that were given a bias."""
    found = getattr(config, KEY, None) or {}
    return {name: list(found.get(name, ())) for name in ("steps", "added_biases")}


def write_record(config: Any, steps: Sequence[str], added_biases: Sequence[str]) -> None:
    """Add to what the configuration says."""
    record = read_record(config)
    for name, new in (("steps", steps), ("added_biases", added_biases)):
        record[name] += [entry for entry in new if entry not in record[name]]
    setattr(config, KEY, record)

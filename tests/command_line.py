"""Commands as scripts run them."""

import json
from typing import Any

from bilens.cli import main


def in_json(capsys: Any, *args: str) -> Any:
    """Return the single object that a command prints with --json."""
    capsys.readouterr()
    main([*map(str, args), "--json"])
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1
    return json.loads(shown)

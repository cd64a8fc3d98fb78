"""Commands as scripts run them."""

import json
from typing import Any

from bilens.cli import main


def in_json(capsys: Any, *args: str) -> Any:
    """What a command prints with --json, which is one object and nothing else."""
    capsys.readouterr()
    main([*map(str, args), "--json"])
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1
    return json.loads(shown)

"""The analyses of bilens, which are commands, parts of reports and panels of the explorer.

Each is a typed function, whose parameters after the model are its options. Its body imports what
computes, so that the help of a command does not wait for torch.
"""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from importlib import util
from pathlib import Path

from bilens.analyses import images, language  # noqa: F401  they register theirs
from bilens.analysis import REGISTERED, Analysis
from bilens.errors import BilensError


def built_in() -> dict[str, Analysis]:
    """Return the analyses of bilens by name."""
    return {name: entry for name, entry in REGISTERED.items() if entry.is_built_in}


def find_analysis(name: str) -> Analysis:
    """Return the analysis with a name, of bilens or of an imported module."""
    if name not in REGISTERED:
        names = ", ".join(sorted(REGISTERED))
        raise BilensError(f"{name!r} is not a registered analysis; expected one of {names}")
    return REGISTERED[name]


def find_analyses(name: str) -> list[Analysis]:
    """Return the analysis with a name, or those of a Python file if the name ends in .py."""
    return load_file(name) if name.endswith(".py") else [find_analysis(name)]


def check_once(entries: Sequence[Analysis]) -> None:
    """Raise if a page would have two analyses of one name."""
    counts = Counter(entry.name for entry in entries)
    for name, count in counts.items():
        if count > 1:
            raise BilensError(f"add={name!r}: the page has it already, expected each reading once")


def load_file(path: str | Path) -> list[Analysis]:
    """Import a Python file, and return the analyses that it registers."""
    path = Path(path).resolve()
    # Under a name of its own, so that a file cannot shadow a module, or a file of another folder.
    name = f"bilens_file_{path.stem}_{sha256(os.fsencode(path)).hexdigest()[:16]}"
    spec = util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BilensError(f"{path} is not a Python file")
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    # The file's imports may register analyses too.
    entries = [entry for entry in REGISTERED.values() if entry.read.__module__ == spec.name]
    if not entries:
        raise BilensError(
            f"{path} registers no analysis; decorate its function with @analysis(...)"
        )
    return entries

"""Files of results: numbers as numbers, written by the program that measured them.

`results/NAME.json` has a title, the command, commit, date, machine, seconds, settings and seeds of
the run, and rows. A row is one claim with its value, its interval, and its baselines of the same
run. Texts have no numbers but those of the settings, so that every number has a name. Recipes and
benchmarks write these files with `Recording`, pages and tests read them. A file that is older than
this form has a note on why it was not measured again, and its seconds are unknown.
"""

import json
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from bilens.errors import BilensError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
CODE = ("src", "experiments", "benchmarks")
"""Folders whose files a measurement may depend on."""
NUMBER = re.compile(r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?!\w)")
"""A number in a text; those in names, as in SmolLM2, are none."""
FIGURE = re.compile(r"\b(?:[Ff]igure|[Tt]able)s? \d+(?:(?:, | and | to )\d+)*")
"""References of a title to figures and tables, whose numbers are not measured."""
ROUNDING = 1e-5
"""How far a share may be from 0 to 1 in single precision."""


@dataclass(frozen=True)
class Row:
    """One claim and its number.

    Attributes:
        claim: what was measured, in words.
        value: the number; None if there is none, as for directions that are never enough.
        low: lower end of the 95 % interval, or of the range if the file's settings say so.
        high: upper end.
        n: samples that the interval is over: seeds, questions or turns.
        unit: unit of all numbers of the row; "" for shares and counts.
        baselines: numbers of simple alternatives in the same run, by name.
        source: the source's number.
        held: whether the source's claim held; None if there is none.
    """

    claim: str
    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    unit: str = ""
    baselines: Mapping[str, float | None] = field(default_factory=dict)
    source: float | None = None
    held: bool | None = None

    @classmethod
    def of(cls, claim: str, values: Sequence[float], *, scale: float = 1, **others: Any) -> "Row":
        """Return the row of the mean of several samples, times `scale`, with its 95 % interval."""
        scaled = [scale * value for value in values]
        numbers = interval(scaled)
        low, high = numbers.get("low"), numbers.get("high")
        return cls(claim, numbers["mean"], low, high, len(scaled), **others)

    @classmethod
    def of_shares(
        cls, claim: str, values: Sequence[float], *, scale: float = 1, **others: Any
    ) -> "Row":
        """Return the row of the mean of several shares, with a 95 % interval of possible shares.

        The interval is Student's of arcsin √share, which is 0 at no share and π/2 at a whole one.

        Raises:
            BilensError: a value is not from 0 to 1, but for rounding.
        """
        if outside := [value for value in values if not -ROUNDING <= value <= 1 + ROUNDING]:
            raise BilensError(f"{claim!r}: expected shares from 0 to 1, got {outside[0]}")
        shares = [min(max(value, 0), 1) for value in values]
        mean = sum(shares) / len(shares)
        if len(shares) < 2:
            return cls(claim, scale * mean, n=1, **others)
        angles = interval([math.asin(math.sqrt(share)) for share in shares])
        # The mean of the angles is not quite the angle of the mean.
        low = min(mean, math.sin(max(angles["low"], 0)) ** 2)
        high = max(mean, math.sin(min(angles["high"], math.pi / 2)) ** 2)
        return cls(claim, scale * mean, scale * low, scale * high, len(shares), **others)

    @classmethod
    def of_range(cls, claim: str, values: Sequence[float], **others: Any) -> "Row":
        """Return the row of the median of several samples, with the least and the largest.

        One sample has no range.
        """
        if len(values) == 1:
            return cls(claim, float(values[0]), n=1, **others)
        sample = torch.tensor(values, dtype=torch.float64)
        low, middle, high = (float(of(sample)) for of in (torch.min, torch.median, torch.max))
        return cls(claim, middle, low, high, len(values), **others)

    @classmethod
    def of_share(cls, claim: str, values: Sequence[bool], **others: Any) -> "Row":
        """Return the row of how often something is true, with Wilson's 95 % interval."""
        of_all = stats.binomtest(sum(values), len(values))
        low, high = of_all.proportion_ci(method="wilson")
        return cls(claim, of_all.statistic, low, high, len(values), **others)


class Recording:
    """Commit, time and machine of a run, from its beginning, and the file that it writes.

    Raises:
        BilensError: the code has changes that no commit has, so that its numbers had no commit.
    """

    def __init__(self, folder: Path = RESULTS) -> None:
        if changed := _git("status", "--porcelain", "--untracked-files=no", "--", *CODE):
            raise BilensError(
                f"{changed.splitlines()[0].split()[-1]} has changes that are not committed, and a "
                "file of results names the commit that measured it: commit them first."
            )
        self.folder, self.start = folder, time.perf_counter()
        self.commit = commit()

    def write(
        self,
        name: str,
        *,
        title: str,
        command: str,
        rows: Iterable[Row],
        settings: Mapping[str, Any],
        seeds: Iterable[int] = (),
        details: Any = None,
    ) -> dict[str, Any]:
        """Write NAME.json and return it; `details` are what only a page of its own shows."""
        result = {
            "title": title,
            "command": command,
            "commit": self.commit,
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "seconds": round(time.perf_counter() - self.start),
            "settings": dict(settings),
            "seeds": list(seeds),
            "rows": [_rounded(asdict(row)) for row in rows],
            **({} if details is None else {"details": details}),
        }
        check(result)
        write_json(self.folder / f"{name}.json", result)
        return result


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON, whole or not at all."""
    draft = path.with_suffix(".unfinished")
    text = json.dumps(content, indent=2, default=lambda number: number.item())
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(path)


def machine() -> str:
    """Return the machine of this process, in words."""
    cards = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    threads = torch.get_num_threads()
    return ", ".join(
        [
            f"{platform.machine()}, {os.cpu_count()} cores, {threads} thread{'s' * (threads > 1)}",
            cards[0] if cards else "no GPU",
            f"torch {torch.__version__.partition('+')[0]}",
        ]
    )


def check(result: Mapping[str, Any]) -> None:
    """Raise BilensError if a text has a number that is no setting, or a number is a text."""
    settings = values_of(json.dumps(result["settings"]))
    if found := values_of(FIGURE.sub("", result["title"])) - settings:
        raise BilensError(f"title={result['title']!r} has the number {min(found):g}: name it")
    if not result["rows"]:
        raise BilensError(f"{result['title']}: expected at least one row")
    for row in result["rows"]:
        for text in (row["claim"], row["unit"], *row["baselines"], result.get("note", "")):
            if found := values_of(text) - settings:
                raise BilensError(
                    f"{text!r} of {result['title']!r} has the number {min(found):g}, which is no "
                    "setting: give it a row, a baseline or a setting of its own"
                )
        if row["held"] not in (True, False, None) or isinstance(row["held"], float):
            raise BilensError(
                f"{row['claim']!r}: held={row['held']!r}, expected true, false or nothing"
            )
        kinds = {"low": float, "high": float, "n": int, "value": float, "source": float}
        numbers = {key: row[key] for key in kinds} | dict(row["baselines"])
        for key, number in numbers.items():
            if isinstance(number, bool) or not isinstance(number, int | float | None):
                raise BilensError(f"{row['claim']!r}: {key}={number!r}, expected a number")
            if number is not None and not math.isfinite(number):
                raise BilensError(f"{row['claim']!r}: {key}={number}, expected a finite number")


def load_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the content of each file of results, by its name without ending."""
    return {
        path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))
    }


def numbers_of(text: str) -> set[str]:
    """Return the numbers of a text, as they are written but without commas of thousands."""
    return {number.strip(",").replace(",", "") for number in NUMBER.findall(text)}


def values_of(text: str) -> set[float]:
    """Return the values of the numbers of a text."""
    return {float(number) for number in numbers_of(text)}


def intervals(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the interval of each number of some rows, one row for each seed."""
    return {key: interval([row[key] for row in rows]) for key in rows[0]}


def interval(values: Sequence[float], level: float = 0.95) -> dict[str, float]:
    """Return mean, standard deviation and the confidence interval of the mean (Student's t)."""
    sample = torch.tensor(values, dtype=torch.float64)
    mean = float(sample.mean())
    if len(sample) < 2:
        return {"mean": mean, "n": 1}
    deviation = float(sample.std())
    half = float(stats.t.ppf((1 + level) / 2, len(sample) - 1)) * deviation / len(sample) ** 0.5
    return {
        "mean": mean,
        "std": deviation,
        "low": mean - half,
        "high": mean + half,
        "n": len(sample),
    }


def _rounded(value: Any) -> Any:
    """Return the value with its fractions at five significant digits: more than any spread has."""
    if isinstance(value, Mapping):
        return {key: _rounded(part) for key, part in value.items()}
    # Zero has no sign in a table.
    return float(f"{value:.5g}") + 0.0 if isinstance(value, float) else value


def commit() -> str:
    """Return the commit of this clone, in eight letters; "none" where there is no clone."""
    try:
        return _git("rev-parse", "--short=8", "HEAD").strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def _git(*words: str) -> str:
    return subprocess.check_output(["git", "-C", str(ROOT), *words], text=True)

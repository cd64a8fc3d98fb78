"""BLiMP: pairs of an acceptable and an unacceptable sentence, by paradigm."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilens.errors import DataError
from bilens.residual import ResidualModel


@dataclass(frozen=True)
class Pair:
    """Two sentences that differ in one word.

    Attributes:
        paradigm: what they differ in.
        term: the phenomenon that it belongs to.
        good: the acceptable sentence.
        bad: the other one.
    """

    paradigm: str
    term: str
    good: str
    bad: str


def load_pairs(folder: Path, n: int) -> list[Pair]:
    """Return the first n pairs of each paradigm.

    Args:
        folder: holds PARADIGM.jsonl.gz for each of them.
        n: pairs of each paradigm.

    Raises:
        DataError: there are none.
    """
    pairs = []
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for _, line in zip(range(n), lines, strict=False):
                row: dict[str, Any] = json.loads(line)
                good, bad = row["sentence_good"], row["sentence_bad"]
                pairs.append(Pair(path.name.split(".")[0], row["linguistics_term"], good, bad))
    if not pairs:
        raise DataError(
            f"{folder} holds no files of BLiMP, PARADIGM.jsonl.gz; fetch them from "
            "alexwarstadt/blimp and compress each with gzip"
        )
    return pairs


@torch.no_grad()
def preferred(model: ResidualModel, pairs: Sequence[Pair], batch_size: int = 32) -> list[bool]:
    """Whether the acceptable sentence of each pair has the larger log-probability.

    The first token is given, and its own probability is left out.
    """
    sentences = [text for pair in pairs for text in (pair.good, pair.bad)]
    ids = [model.tokenizer(text)["input_ids"] for text in sentences]  # type: ignore[misc]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    scores = [0.0] * len(ids)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        longest = max(len(ids[i]) for i in batch)
        # What is filled up stands behind a sentence, where nothing of it is seen.
        filled = torch.tensor([ids[i] + [0] * (longest - len(ids[i])) for i in batch])
        for i, score in zip(batch, _log_probabilities(model, filled), strict=True):
            scores[i] = float(score[: len(ids[i]) - 1].sum())
    return [good > bad for good, bad in zip(scores[::2], scores[1::2], strict=True)]


def _log_probabilities(model: ResidualModel, ids: Tensor) -> Tensor:
    log_probabilities = model.logits(ids)[:, :-1].log_softmax(-1)
    following = ids[:, 1:, None].to(log_probabilities.device)
    return log_probabilities.gather(-1, following)[..., 0]

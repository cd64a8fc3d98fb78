"""BLiMP: pairs of an acceptable and an unacceptable sentence, by paradigm."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bilens.errors import DataError
from bilens.residual import ResidualModel
from experiments.later_layers import starting_at, stream_before


@dataclass(frozen=True)
class Pair:
    """An acceptable and an unacceptable sentence of a paradigm, which belongs to a phenomenon."""

    paradigm: str
    term: str
    good: str
    bad: str


def load_pairs(folder: Path, n: int) -> list[Pair]:
    """Return the first n pairs of each paradigm, from PARADIGM.jsonl.gz in the folder.

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


class Preferences:
    """The sentences of pairs, with the stream of a model before one of its layers.

    So an edit of later layers costs these layers only. Call it with a model that is edited from
    the layer on.
    """

    def __init__(
        self, model: ResidualModel, pairs: Sequence[Pair], layer: int = 0, batch_size: int = 64
    ) -> None:
        self.layer, self.n_pairs = layer, len(pairs)
        ids = [
            [model.tokenizer(text)["input_ids"] for text in (pair.good, pair.bad)]  # type: ignore[misc]
            for pair in pairs
        ]
        # Tokens that both sentences begin with have the same probabilities. The first is given.
        starts = [
            max(1, next((i for i, (a, b) in enumerate(zip(*two, strict=False)) if a != b), 1))
            for two in ids
        ]
        self.sentences = [
            (row, start) for two, start in zip(ids, starts, strict=True) for row in two
        ]
        # Sentences of one length that differ from one place on need few logits.
        order = sorted(
            range(len(self.sentences)),
            key=lambda i: (len(self.sentences[i][0]), self.sentences[i][1]),
        )
        self.batches = []
        for start in range(0, len(order), batch_size):
            numbers = order[start : start + batch_size]
            rows = [self.sentences[i][0] for i in numbers]
            longest = len(rows[-1])
            # Padding comes after a sentence, which does not attend to it.
            padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
            self.batches.append((numbers, padded, stream_before(model, layer, padded)))

    @torch.no_grad()
    def __call__(self, model: ResidualModel) -> list[bool]:
        """Return True for each pair whose acceptable sentence has the larger log-probability."""
        scores = torch.zeros(2 * self.n_pairs)
        for numbers, ids, stream in self.batches:
            ends = [(self.sentences[i][1], len(self.sentences[i][0])) for i in numbers]
            first, length = torch.tensor(ends).T
            places = torch.arange(int(first.min()), ids.shape[1])
            with starting_at(model, self.layer, stream):
                n_kept = len(places) + 1
                logits = model.model(ids, use_cache=False, logits_to_keep=n_kept).logits
            chances = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, places, None])[..., 0]
            counted = (places >= first[:, None]) & (places < length[:, None])
            scores[numbers] = torch.where(counted, chances, 0.0).sum(1).to(scores)
        good, bad = scores.unflatten(0, (-1, 2)).T
        return [bool(better) for better in good > bad]

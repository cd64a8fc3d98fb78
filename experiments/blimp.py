"""BLiMP: pairs of an acceptable and an unacceptable sentence, by paradigm."""

import gzip
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilens.errors import DataError
from bilens.transformer import ResidualModel

TERM = "subject_verb_agreement"


@dataclass(frozen=True)
class Pair:
    """An acceptable and an unacceptable sentence of a paradigm, which belongs to a phenomenon."""

    paradigm: str
    term: str
    good: str
    bad: str


def load_pairs(folder: Path, others: int, agreement: int) -> list[Pair]:
    """Return the first pairs of each paradigm, of agreement and of the others.

    The folder has PARADIGM.jsonl.gz for each.

    Raises:
        DataError: there are none.
    """
    pairs: list[Pair] = []
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                row: dict[str, Any] = json.loads(line)
                term = row["linguistics_term"]
                if number == (agreement if term == TERM else others):
                    break
                texts = row["sentence_good"], row["sentence_bad"]
                pairs.append(Pair(path.name.split(".")[0], term, *texts))
    if not pairs:
        raise DataError(
            f"{folder} holds no files of BLiMP, PARADIGM.jsonl.gz; fetch them from "
            "alexwarstadt/blimp and compress each with gzip"
        )
    return pairs


class Preferences:
    """The sentences of pairs, with what a model gives its layers from one of them on.

    So an edit of later layers costs these layers only. Call it with a model that is edited from
    the layer on.
    """

    def __init__(
        self, model: ResidualModel, pairs: Sequence[Pair], layer: int = 0, batch_size: int = 64
    ) -> None:
        self.layer, self.n_pairs = layer, len(pairs)
        sentences: list[tuple[list[int], int]] = []
        for pair in pairs:
            both = [model.tokenizer(text)["input_ids"] for text in (pair.good, pair.bad)]  # type: ignore[misc]
            differ = (i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b)
            # Tokens that both begin with have the same probabilities. The first is given.
            start = max(1, next(differ, 1))
            sentences += [(ids, start) for ids in both]
        # Sentences of one length that differ from one place on need few logits.
        order = sorted(range(len(sentences)), key=lambda i: (len(sentences[i][0]), sentences[i][1]))
        self.batches = []
        for begin in range(0, len(order), batch_size):
            numbers = order[begin : begin + batch_size]
            rows, starts = zip(*(sentences[i] for i in numbers), strict=True)
            # Padding comes after a sentence, which does not attend to it.
            ids = torch.tensor([row + [0] * (len(rows[-1]) - len(row)) for row in rows])
            ends = torch.tensor(starts), torch.tensor([len(row) for row in rows])
            self.batches.append((numbers, ids, ends, *self._calls(model, ids)))

    @torch.no_grad()
    def _calls(self, model: ResidualModel, ids: Tensor) -> tuple[Tensor, list[tuple[Any, Any]]]:
        """Return the stream before the first layer that may be edited, and what later ones take."""
        streams: list[Tensor] = []
        calls: list[tuple[Any, Any]] = []

        def keep(_: Any, args: Any, kwargs: Any) -> None:
            streams.append(args[0])
            calls.append((args[1:], kwargs))

        layers = [model.layer(number).module for number in range(self.layer, model.n_layers)]
        with ExitStack() as hooks:
            for module in layers:
                hooks.enter_context(module.register_forward_pre_hook(keep, with_kwargs=True))
            model.model(ids, use_cache=False, logits_to_keep=1)
        return streams[0], calls

    @torch.no_grad()
    def __call__(self, model: ResidualModel) -> list[bool]:
        """Return True for each pair whose acceptable sentence has the larger log-probability."""
        scores = torch.zeros(2 * self.n_pairs)
        for numbers, ids, (first, length), x, calls in self.batches:
            for number, (args, kwargs) in enumerate(calls, self.layer):
                y = model.layer(number).module(x, *args, **kwargs)
                x = y[0] if isinstance(y, tuple) else y  # noqa: PLW2901
            places = torch.arange(int(first.min()), ids.shape[1])
            logits = model.modules.unembed.module(model.modules.module_input(x[:, places - 1]))
            chances = logits.log_softmax(-1).gather(-1, ids[:, places, None])[..., 0]
            counted = (places >= first[:, None]) & (places < length[:, None])
            scores[numbers] = torch.where(counted, chances, 0.0).sum(1).to(scores)
        good, bad = scores.unflatten(0, (-1, 2)).T
        return [bool(better) for better in good > bad]

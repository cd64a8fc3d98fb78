"""Texts that a model draws from itself, to learn from."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from bilens.progress import progress_bar
from bilens.train.settings import TensoriseTraining


def interleaved(texts: list[Int[Tensor, "_ time"]]) -> Int[Tensor, "n_texts time"]:
    """Return texts of several kinds in turn, as many of each as the shortest list has."""
    least = min(map(len, texts))
    return torch.stack([rows[:least] for rows in texts], 1).flatten(0, 1)


class OwnText(Dataset[dict[str, Tensor]]):
    """Texts drawn from a model at temperature 1, each from one random first token.

    Every other text begins with the beginning-of-text token if the model has one. Texts are drawn
    in parts as they are read, so none is stored and none repeats. They follow from the seed, the
    stage and their numbers, so a resumed training reads the same.

    Args:
        model: model to draw from.
        training: settings, with the length of a text and the number that is drawn at once.
        n_texts: number of texts.
        stage: number of the stage, from 0 to 2; each has its own texts.
        texts: given texts to mix in, at most a share `training.data_share`.
    """

    in_order = True

    def __init__(
        self,
        model: Any,
        training: TensoriseTraining,
        n_texts: int,
        stage: int,
        texts: Int[Tensor, "n_given time"] | None = None,
    ) -> None:
        self.model, self.training, self.n_texts, self.stage = model, training, n_texts, stage
        n_given = 0 if texts is None else min(len(texts), int(n_texts * training.data_share))
        self.given, self.share = texts, n_given / n_texts
        self._part, self._rows = -1, torch.empty(0)

    def __len__(self) -> int:
        return self.n_texts

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        before, given = int(number * self.share), int((number + 1) * self.share)
        if self.given is not None and given > before:
            return {"input_ids": self.given[before].cpu()}
        return {"input_ids": self._drawn(number - before)}

    def all(self) -> Int[Tensor, "n_texts time"]:
        """Return all texts, on the device of the model."""
        device = next(self.model.parameters()).device
        with progress_bar() as bar:
            numbers = bar.track(range(self.n_texts), description="own text")
            return torch.stack([self[number]["input_ids"] for number in numbers]).to(device)

    @torch.no_grad()
    def _drawn(self, number: int) -> Int[Tensor, " time"]:
        model, size = self.model, self.training.sample_batch
        part, row = divmod(number, size)
        if part != self._part:
            device = next(model.parameters()).device
            seed = (3 * self.training.seed + self.stage << 24) + part
            generator = torch.Generator(device).manual_seed(seed % 2**63)
            n = min(size, self.n_texts - part * size)
            ids = torch.randint(model.config.vocab_size, (n, 1), device=device, generator=generator)
            if model.config.bos_token_id is not None:
                ids[::2] = model.config.bos_token_id
            columns, cache = [ids], None
            for _ in range(self.training.length - 1):
                output = model(columns[-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = output.past_key_values
                probabilities = output.logits[:, -1].float().softmax(-1)
                columns.append(probabilities.multinomial(1, generator=generator))
            self._part, self._rows = part, torch.cat(columns, 1).cpu()
        return self._rows[row]

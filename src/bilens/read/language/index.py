"""Texts kept with what an MLP reads at each place, so that a direction is looked up at once."""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.data.batches import batched
from bilens.errors import BilensError
from bilens.nn.language import LanguageModel
from bilens.progress import progress_bar
from bilens.read.language.contexts import Context
from bilens.read.language.stream import block_inputs
from bilens.tensor import Spectrum

__all__ = ["ContextIndex"]


class ContextIndex:
    """What `top_contexts` finds, for one direction after the other.

    The model runs once; a direction then costs a product. What it reads, `d_model` numbers at each
    place of each text, stays in memory.

    Args:
        model: what runs.
        texts: token ids, all of one length.
        layer: the block whose MLP reads.
        batch_size: texts at a time.

    Attributes:
        ids: the texts.
        inputs: what the MLP reads at each place, behind its norm.

    Raises:
        BilensError: there are no texts, or there is no such block.
    """

    ids: Int[Tensor, "texts time"]
    inputs: Float[Tensor, "texts time d_model"]

    def __init__(
        self,
        model: LanguageModel,
        texts: Iterable[Int[Tensor, " time"]],
        *,
        layer: int = 0,
        batch_size: int = 32,
    ) -> None:
        ids, inputs = [], []
        with progress_bar() as bar:
            task = bar.add_task("texts", total=None, note="")
            for batch in batched(texts, batch_size):
                ids.append(torch.stack(batch).to(model.device))
                inputs.append(block_inputs(model, ids[-1], layer))
                bar.advance(task, len(batch))
        if not ids:
            raise BilensError("texts is empty; expected token ids, one row for each text")
        self.ids, self.inputs = torch.cat(ids), torch.cat(inputs)

    @torch.no_grad()
    def top_contexts(self, spectrum: Spectrum, k: int = 8) -> list[list[Context]]:
        """The k contexts of largest |activation| for every eigenvector, as `top_contexts` has them.

        Raises:
            BilensError: the spectrum is a batch, or k is not positive.
        """
        if spectrum.batch_shape:
            raise BilensError("top_contexts() reads a single form: index the spectrum's batch")
        if k < 1:
            raise BilensError(f"k={k}, expected at least 1")
        active = spectrum.activations(self.inputs)
        places = active.abs().argmax(1)
        strongest = active.gather(1, places[:, None])[:, 0]
        return [
            self._different(strongest[:, number], places[:, number], k)
            for number in range(spectrum.k)
        ]

    def _different(
        self, activations: Float[Tensor, " texts"], places: Int[Tensor, " texts"], k: int
    ) -> list[Context]:
        """The strongest contexts, no two with the same tokens up to their place."""
        found: dict[tuple[int, ...], Context] = {}
        for row in activations.abs().argsort(descending=True, stable=True).tolist():
            place = int(places[row])
            text = tuple(self.ids[row, : place + 1].tolist())
            found.setdefault(text, Context(self.ids[row].cpu(), place, float(activations[row])))
            if len(found) == k:
                break
        return list(found.values())

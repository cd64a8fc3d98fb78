"""Where in a corpus eigenvectors are most active, found in one pass over texts of any number."""

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from itertools import islice

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from jaxtyping import Float, Int
from torch import Tensor

from bilens.data.batches import batched
from bilens.errors import BilensError
from bilens.nn.language import LanguageModel
from bilens.progress import progress_bar
from bilens.read.language.stream import block_inputs, read_stream
from bilens.tensor import Spectrum

__all__ = ["Context", "Contribution", "contribution", "top_contexts"]


@dataclass(frozen=True, eq=False)
class Context:
    """A place in a text at which an eigenvector is active.

    Attributes:
        ids: the whole text.
        position: the token whose prediction is at stake; what comes later cannot matter.
        activation: lambda (v . y)^2 there.
    """

    ids: Int[Tensor, " time"]
    position: int
    activation: float


@dataclass(frozen=True, eq=False)
class Contribution:
    """An activation lambda (v . y)^2 split by where y came from: lambda (v . y) (v . part).

    Attributes:
        direct: through the residual stream, from the token itself.
        heads: through each head, from each token up to it.
        constant: of no token: biases.
    """

    direct: float
    heads: Float[Tensor, "heads time"]
    constant: float

    def tokens(self) -> Float[Tensor, " time"]:
        """What each token contributes, over all paths."""
        share = self.heads.sum(0)
        share[-1] += self.direct
        return share

    def total(self) -> float:
        """The activation."""
        return float(self.tokens().sum()) + self.constant


@torch.no_grad()
def top_contexts(
    model: LanguageModel,
    spectrum: Spectrum,
    texts: Iterable[Int[Tensor, " time"]],
    *,
    k: int = 8,
    layer: int = 0,
    batch_size: int = 32,
) -> list[list[Context]]:
    """The k contexts of largest |activation| for every eigenvector.

    At most one comes from each text, and no two have the same tokens up to their place. Texts pass
    in batches and only the best so far are kept. Under `torchrun` each process takes
    its share of the texts, and all of them return the best of all.

    Args:
        model: the model that the spectrum is of.
        spectrum: of a single form of block `layer`.
        texts: token ids, all of one length.
        k: contexts for each eigenvector.
        layer: the block.
        batch_size: texts at a time.

    Returns:
        One list for each eigenvector, the strongest context first.

    Raises:
        BilensError: there are no texts, or the spectrum is a batch.

    Source:
        Pearce et al. 2024, figure 7 and appendix G.
    """
    if spectrum.batch_shape:
        raise BilensError("top_contexts() reads a single form: index the spectrum's batch")
    if k < 1:
        raise BilensError(f"k={k}, expected at least 1")
    state = PartialState()
    best = [_Best(k) for _ in range(spectrum.k)]
    with progress_bar() as bar:
        task = bar.add_task("contexts", total=_length(texts), note="")
        own = islice(texts, state.process_index, None, state.num_processes)
        for batch in batched(own, batch_size):
            ids = torch.stack(batch).to(model.device)
            active = spectrum.activations(block_inputs(model, ids, layer))
            places = active.abs().argmax(1)
            strongest = active.gather(1, places[:, None])[:, 0]
            for number, some in enumerate(best):
                some.update(batch, places[:, number].tolist(), strongest[:, number].tolist())
            bar.advance(task, len(batch) * state.num_processes)
    merged = [_Best(k) for _ in range(spectrum.k)]
    for others in gather_object([best]):
        for mine, other in zip(merged, others, strict=True):
            for context in other.contexts():
                mine.add(context)
    if not merged[0].found:
        raise BilensError("texts is empty; expected token ids, one row for each text")
    return [some.contexts() for some in merged]


class _Best:
    """The k strongest contexts of one eigenvector, no two with the same text before them."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.found: dict[tuple[int, ...], Context] = {}

    def update(self, texts: list[Tensor], places: list[int], activations: list[float]) -> None:
        for text, place, activation in zip(texts, places, activations, strict=True):
            if len(self.found) < self.k or abs(activation) > self._least():
                self.add(Context(text.cpu(), place, activation))

    def add(self, context: Context) -> None:
        text = tuple(context.ids[: context.position + 1].tolist())
        self.found.setdefault(text, context)
        if len(self.found) > self.k:
            del self.found[min(self.found, key=lambda text: abs(self.found[text].activation))]

    def contexts(self) -> list[Context]:
        return sorted(self.found.values(), key=lambda context: -abs(context.activation))

    def _least(self) -> float:
        return min(abs(context.activation) for context in self.found.values())


@torch.no_grad()
def contribution(
    model: LanguageModel, spectrum: Spectrum, number: int, context: Context, layer: int = 0
) -> Contribution:
    """What each token of a context contributes to the activation, exactly.

    Args:
        model: the model that the spectrum is of.
        spectrum: of a single form of block `layer`.
        number: which of its eigenvectors.
        context: a place in a text.
        layer: the block.

    Source:
        Pearce et al. 2024, figure 7.
    """
    ids = context.ids.to(model.device)
    stream = read_stream(model, ids, context.position, layer)
    vector = spectrum.vectors[number]
    width = len(stream.direct)
    read, offset = vector[:width], vector[width:].sum()
    scale = spectrum.values[number] * (read @ stream.total() + offset)
    return Contribution(
        direct=float(scale * (read @ stream.direct)),
        heads=scale * (stream.heads @ read),
        constant=float(scale * (read @ stream.constant + offset)),
    )


def _length(texts: Iterable[Tensor]) -> int | None:
    return len(texts) if isinstance(texts, Sized) else None

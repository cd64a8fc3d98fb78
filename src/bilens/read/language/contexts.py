"""Where in a corpus eigenvectors are most active, in one pass over texts or from kept inputs."""

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice

import pandas as pd
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_finite, check_index, check_sum, full_precision
from bilens.data.corpus import batched
from bilens.errors import BilensError
from bilens.progress import progress_bar
from bilens.read.language.names import token_names
from bilens.read.language.stream import read_stream
from bilens.read.language.token_matrices import alone, head_writes
from bilens.residual import ResidualModel
from bilens.settings import Count
from bilens.tensor import Spectrum

__all__ = [
    "Context",
    "ContextIndex",
    "Contribution",
    "contribution",
    "exciting_tokens",
    "top_contexts",
]


@dataclass(frozen=True, eq=False)
class Context:
    """A place in a text at which an eigenvector has an activation lambda (v . n)^2.

    What comes after the position cannot matter.
    """

    ids: Int[Tensor, " time"]
    position: int
    activation: float


@dataclass(frozen=True, eq=False)
class Contribution:
    """An activation lambda (v . n)^2 split by where n came from: lambda (v . n) (v . part).

    Attributes:
        direct: from what was in the stream before the layer.
        heads: through each head, from each token up to it.
        constant: from biases.
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
@full_precision
def top_contexts(
    model: ResidualModel,
    spectrum: Spectrum,
    texts: Iterable[Int[Tensor, " time"]],
    layer: int = 0,
    *,
    k: Count = 8,
    batch_size: int = 32,
) -> list[list[Context]]:
    """The k contexts of largest |activation| for every eigenvector.

    At most one comes from each text, and no two have the same tokens up to their place. Texts pass
    in batches and only the best so far are kept. Under `torchrun` each process takes its share of
    the texts, and all of them return the best of all.

    Args:
        model: the model that the spectrum is of.
        spectrum: of a single form of the layer.
        texts: token ids, all of one length.
        layer: number of the layer.
        k: contexts for each eigenvector, the strongest first.
        batch_size: texts at a time.

    Raises:
        BilensError: there are no texts or no such layer, the spectrum is a batch, or k is not
            positive.

    Source:
        Pearce et al. 2024, figure 7 and appendix G.
    """
    _check(spectrum)
    state = PartialState()
    best = [_Best(k) for _ in range(spectrum.k)]
    own = islice(texts, state.process_index, None, state.num_processes)
    total = len(texts) if isinstance(texts, Sized) else None
    for ids, inputs in _read(model, own, layer, batch_size, total, state.num_processes):
        _look(best, spectrum, ids, inputs)
    merged = [_Best(k) for _ in range(spectrum.k)]
    for others in gather_object([best]):
        for mine, other in zip(merged, others, strict=True):
            for context in other.contexts():
                mine.add(context)
    if not merged[0].found:
        raise BilensError("texts is empty; expected token ids, one row for each text")
    return [some.contexts() for some in merged]


@full_precision
class ContextIndex:
    """Texts with what an MLP reads at each place, so that a direction is looked up at once.

    The model runs once; a direction then costs a product. `d_model` numbers for each place of each
    text stay in memory. Arguments are those of `top_contexts`.

    Attributes:
        ids: the texts.
        inputs: what the MLP reads at each place, normalised.

    Raises:
        BilensError: there are no texts, or there is no such layer.
    """

    ids: Int[Tensor, "texts time"]
    inputs: Float[Tensor, "texts time d_model"]

    def __init__(
        self,
        model: ResidualModel,
        texts: Iterable[Int[Tensor, " time"]],
        layer: int = 0,
        *,
        batch_size: int = 32,
    ) -> None:
        parts = list(_read(model, texts, layer, batch_size, None, 1))
        if not parts:
            raise BilensError("texts is empty; expected token ids, one row for each text")
        self.ids, self.inputs = (torch.cat(some) for some in zip(*parts, strict=True))

    @torch.no_grad()
    def top_contexts(self, spectrum: Spectrum, k: Count = 8) -> list[list[Context]]:
        """The k contexts of largest |activation| for every eigenvector, as `top_contexts` has them.

        Raises:
            BilensError: the spectrum is a batch, or k is not positive.
        """
        _check(spectrum)
        best = [_Best(k) for _ in range(spectrum.k)]
        _look(best, spectrum, self.ids, self.inputs)
        return [some.contexts() for some in best]


class _Best:
    """The k strongest contexts of one eigenvector, no two with the same text before them."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.found: dict[tuple[int, ...], Context] = {}

    def add(self, context: Context) -> None:
        text = tuple(context.ids[: context.position + 1].tolist())
        self.found.setdefault(text, context)
        if len(self.found) > self.k:
            del self.found[min(self.found, key=lambda text: abs(self.found[text].activation))]

    def contexts(self) -> list[Context]:
        return sorted(self.found.values(), key=lambda context: -abs(context.activation))

    def least(self) -> float:
        """What a context has to exceed."""
        full = len(self.found) == self.k
        return min(abs(context.activation) for context in self.found.values()) if full else -1.0


def _look(best: list[_Best], spectrum: Spectrum, ids: Tensor, inputs: Tensor) -> None:
    """Add the place in each text at which an eigenvector is most active to the best so far."""
    active = spectrum.activations(inputs)
    places = active.abs().argmax(1)
    strongest = active.gather(1, places[:, None])[:, 0]
    for number, some in enumerate(best):
        # The first of equal texts stays, so the strongest come first.
        for row in strongest[:, number].abs().argsort(descending=True, stable=True).tolist():
            activation = float(strongest[row, number])
            if abs(activation) <= some.least():
                break
            some.add(Context(ids[row].cpu(), int(places[row, number]), activation))


@torch.no_grad()
@full_precision
def contribution(
    model: ResidualModel, spectrum: Spectrum, number: int, context: Context, layer: int = 0
) -> Contribution:
    """What each token of a context contributes to the activation of an eigenvector, exactly.

    The spectrum is that of a single form of the layer, and `number` that of its eigenvector.

    Source:
        Pearce et al. 2024, figure 7.
    """
    _check(spectrum, number)
    stream = read_stream(model, context.ids.to(model.device), context.position, layer)
    vector = spectrum.vectors[number].to(stream.direct)
    total, width = stream.total(), len(stream.direct)
    read, offset = vector[:width], vector[width:].sum()
    scale = spectrum.values[number] * (read @ total + offset)
    contribution = Contribution(
        direct=float(scale * (read @ stream.direct)),
        heads=scale * (stream.heads @ read),
        constant=float(scale * (read @ stream.constant + offset)),
    )
    check_sum(
        "The activation, split by source,",
        contribution.total(),
        spectrum.activations(total)[number],
        size=float(scale.abs() * (read.abs() @ (stream.direct.abs() + stream.constant.abs()))),
        dtype=model.parts.embed.module.weight.dtype,
    )
    return contribution


@torch.no_grad()
@full_precision
def exciting_tokens(
    model: ResidualModel,
    spectrum: Spectrum,
    number: int,
    layer: int = 0,
    *,
    head: int | None = None,
    k: Count = 10,
    position: int | None = None,
) -> pd.DataFrame:
    """The tokens that excite an eigenvector most: alone, or what a head makes of them.

    Norms divide by the size of the token alone, as in `bilens.read.language.token_matrices`, where
    `layer` and `position` are explained. With a head the token is looked at from later, without
    one it is the token itself.

    Returns:
        Columns token, overlap (v . x) and activation, lambda (v . x)^2, of largest |activation|.

    Raises:
        BilensError: there is no such eigenvector, head, layer or position, or k is not positive.
    """
    _check(spectrum, number)
    e = model.embedded(torch.arange(model.vocab_size, device=model.device), position)
    x, reader = alone(model, e, layer), model.layer(layer).mlp
    n = reader.normalised(x)
    if head is not None:
        n = head_writes(model, layer, head, e) * reader.scale(x)[:, None]
    overlap = n @ spectrum.vectors[number][: n.shape[1]].to(n)
    activation = spectrum.values[number] * overlap.square()
    best = activation.abs().topk(min(k, len(activation))).indices
    return pd.DataFrame(
        {
            "token": token_names(model, best),
            "overlap": overlap[best].tolist(),
            "activation": activation[best].tolist(),
        }
    )


def _check(spectrum: Spectrum, number: int = 0) -> None:
    if spectrum.batch_shape:
        raise BilensError(
            f"spectrum is a batch of shape {tuple(spectrum.batch_shape)}, expected that of one "
            "form: index it"
        )
    check_finite(spectrum=spectrum.values)
    check_index("number", number, spectrum.k, "an eigenvector")


def _read(
    model: ResidualModel,
    texts: Iterable[Tensor],
    layer: int,
    batch_size: int,
    total: int | None,
    processes: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The texts in batches, with what the MLP of a layer reads of them."""
    with progress_bar() as bar:
        task = bar.add_task("texts", total=total, note="")
        for batch in batched(texts, batch_size):
            lengths = sorted({tuple(text.shape) for text in batch})
            if len(lengths) > 1:
                raise BilensError(f"texts have shapes {lengths}, expected as many tokens in each")
            ids = torch.stack(batch).to(model.device)
            yield ids, model.mlp_inputs(ids, layer)
            bar.advance(task, len(batch) * processes)

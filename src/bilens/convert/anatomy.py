"""A transformer as what reads its residual stream and what writes to it, whatever its family."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

__all__ = ["Anatomy", "Map", "Norm", "Reading", "Table", "Values", "working_dtype"]


def working_dtype(stored: torch.dtype) -> torch.dtype:
    """What weights of a storage dtype are computed in: float64 for itself, else float32."""
    return torch.float64 if stored == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class Map:
    """A linear map x -> W x + b: an `nn.Linear`, or GPT-2's Conv1D, which keeps W transposed.

    Attributes:
        name: of the module in the model.
        module: it.
    """

    name: str
    module: nn.Module

    @property
    def n_out(self) -> int:
        """Number of outputs."""
        return _weight(self.module).shape[1 if isinstance(self.module, Conv1D) else 0]

    def weight(self) -> Float[Tensor, "n_out n_in"]:
        """W, for computing: in float32 or float64."""
        stored = _weight(self.module).detach()
        stored = stored.T if isinstance(self.module, Conv1D) else stored
        return stored.to(working_dtype(stored.dtype))

    def bias(self) -> Float[Tensor, " n_out"] | None:
        """The bias b, for computing; None where the module has none."""
        stored = self.module.bias
        if stored is None:
            return None
        assert isinstance(stored, Tensor)
        return stored.detach().to(working_dtype(stored.dtype))

    def set_weight(self, weight: Float[Tensor, "n_out n_in"]) -> None:
        """Put a new W in the place of the old, in the storage dtype."""
        weight = weight.T.contiguous() if isinstance(self.module, Conv1D) else weight
        _put(_weight(self.module), weight)

    def set_bias(self, bias: Float[Tensor, " n_out"]) -> None:
        """Put a new b in the place of the old, or where there was none."""
        weight = _weight(self.module)
        if self.module.bias is None:
            self.module.bias = nn.Parameter(bias.to(weight.dtype), weight.requires_grad)
        else:
            _put(self.module.bias, bias)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Table:
    """An embedding, whose rows are added to the residual stream.

    Attributes:
        name: of the module in the model.
        module: it.
    """

    name: str
    module: nn.Embedding

    def weight(self) -> Float[Tensor, "n_rows d_model"]:
        """The rows, for computing: in float32 or float64."""
        stored = self.module.weight.detach()
        return stored.to(working_dtype(stored.dtype))

    def set_weight(self, weight: Float[Tensor, "n_rows d_model"]) -> None:
        """Put new rows in the place of the old, in the storage dtype."""
        _put(_weight(self.module), weight)


@dataclass(frozen=True, eq=False)
class Norm:
    """g * x / |x| + b, after x has lost its mean where the norm is a LayerNorm.

    Attributes:
        name: of the module in the model.
        module: it.
        centres: whether the mean is taken away: LayerNorm does, RMSNorm does not.
        offset: what the module adds to its weight to have the gain g; 1 in Gemma.
    """

    name: str
    module: nn.Module
    centres: bool
    offset: float = 0.0

    def gain(self) -> Float[Tensor, " d_model"]:
        """The gain g."""
        stored = _weight(self.module).detach()
        return self.offset + stored.to(working_dtype(stored.dtype))

    def bias(self) -> Float[Tensor, " d_model"] | None:
        """The bias b; None where the norm has none."""
        stored = getattr(self.module, "bias", None)
        return None if stored is None else stored.detach().to(working_dtype(stored.dtype))

    def is_plain(self) -> bool:
        """Whether it centres and scales, and does nothing else."""
        bias = self.bias()
        return bool((self.gain() == 1).all()) and (bias is None or not bias.any())

    def make_plain(self) -> None:
        """Set the gain to 1 and the bias to 0."""
        weight = _weight(self.module)
        _put(weight, torch.full_like(weight, 1 - self.offset))
        if getattr(self.module, "bias", None) is not None:
            _put(self.module.bias, torch.zeros_like(self.module.bias))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Reading:
    """What reads the residual stream through one norm.

    Attributes:
        norm: between the stream and the maps; None for nothing.
        maps: all that read its output.
        apart: why the norm cannot be folded into the maps; None where it can.
    """

    norm: Norm | None
    maps: Sequence[Map]
    apart: str | None = None


@dataclass(frozen=True, eq=False)
class Values:
    """The way of an attention layer's values.

    Attributes:
        reads: the map that makes them, alone or with queries and keys.
        rows: which of its outputs they are, head after head.
        writes: the map of the heads' mixed values to the stream.
        d_head: width of a head.
        shared: how many heads take each value.
    """

    reads: Map
    rows: Int[Tensor, " values"]
    writes: Map
    d_head: int
    shared: int = 1


@dataclass(frozen=True, eq=False)
class Anatomy:
    """What weight processing has to know of a model.

    Attributes:
        readings: every norm that stands before linear maps, with those maps.
        writes: the maps that add to the stream.
        tables: the embeddings that add to the stream.
        unembed: the map to the logits.
        values: of each attention layer.
        inner: other modules with weights, which stay what they are.
        softcap: whether the logits go through a function before the softmax.
        partly: why biases of values do not arrive whole behind attention; None where they do.
    """

    readings: Sequence[Reading]
    writes: Sequence[Map]
    tables: Sequence[Table]
    unembed: Map
    values: Sequence[Values]
    inner: Sequence[nn.Module] = field(default_factory=tuple)
    softcap: bool = False
    partly: str | None = None

    def modules(self) -> list[nn.Module]:
        """Every module that is described."""
        norms = [reading.norm.module for reading in self.readings if reading.norm]
        reads = [part.module for reading in self.readings for part in reading.maps]
        writes = [part.module for part in self.writes]
        return [
            *norms,
            *reads,
            *writes,
            *(table.module for table in self.tables),
            self.unembed.module,
            *self.inner,
        ]


def _weight(module: nn.Module) -> nn.Parameter:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return weight


def _put(parameter: nn.Parameter, value: Tensor) -> None:
    # A new tensor behind the same parameter: whoever shares the old one keeps it as it was.
    parameter.data = value.to(parameter.dtype)

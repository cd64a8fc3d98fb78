"""The pieces of a transformer that touch its residual stream: linear maps, embeddings, norms."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from bilens.errors import BilensError
from bilens.transformer.running import device_of, wide_passes


def working_dtype(stored: torch.dtype) -> torch.dtype:
    """Return the type in which weights are computed: float64 if stored so, else float32."""
    return torch.float64 if stored == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class LinearMap(ABC):
    """A linear map x -> W x + b, or some outputs of one."""

    name: str
    module: nn.Module
    # The map's outputs, if several maps are fused into one module; None for all.
    rows: Int[Tensor, " n_out"] | None = None

    @property
    @abstractmethod
    def stored(self) -> nn.Parameter:
        """Parameter that holds W."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Number of all outputs of the module, and of inputs."""

    @abstractmethod
    def as_matrix(self, stored: Tensor) -> Float[Tensor, "n_out n_in"]:
        """Return what the parameter holds as the matrix of all outputs."""

    @abstractmethod
    def as_stored(self, weight: Float[Tensor, "n_out n_in"]) -> Tensor:
        """Return the matrix of all outputs as the parameter holds it."""

    @abstractmethod
    def set_bias(self, bias: Float[Tensor, " n_out"]) -> None:
        """Replace b, or add one to a module without a bias.

        Raises:
            BilensError: the module has no place for biases.
        """

    @abstractmethod
    def __call__(self, x: Float[Tensor, "*batch n_in"]) -> Float[Tensor, "*batch n_out"]:
        """Return the outputs of the map for inputs x."""

    @property
    def fused(self) -> Self:
        """The map with all its outputs."""
        return replace(self, rows=None)

    @property
    def n_out(self) -> int:
        """Number of outputs."""
        return self.sizes[0] if self.rows is None else len(self.rows)

    @property
    def n_in(self) -> int:
        """Number of inputs."""
        return self.sizes[1]

    @property
    def device(self) -> torch.device:
        """Device on which the map runs."""
        return device_of(self.stored)

    def weight(self) -> Float[Tensor, "n_out n_in"]:
        """Return W in float32 or float64."""
        weight = self.select(self.as_matrix(self.stored.detach()))
        return weight.to(self.device, working_dtype(weight.dtype))

    def bias(self) -> Float[Tensor, " n_out"] | None:
        """Return the bias b in float32 or float64; None without one."""
        parameter = getattr(self.module, "bias", None)
        if parameter is None:
            return None
        assert isinstance(parameter, Tensor)
        return self.select(parameter.detach()).to(working_dtype(parameter.dtype))

    def select(self, outputs: Tensor, axis: int = 0) -> Tensor:
        """Return the map's outputs among those of the module, along an axis."""
        if self.rows is None:
            return outputs
        return outputs.index_select(axis, self.rows.to(outputs.device))

    def set_weight(self, weight: Float[Tensor, "n_out n_in"]) -> None:
        """Replace W, in the storage type."""
        if self.rows is not None:
            # The other rows of the module stay as they are.
            weight = self.fused.weight().index_copy(0, self.rows.to(weight.device), weight)
        _put(self.stored, self.as_stored(weight))


class ModuleMap(LinearMap):
    """The map that a module is: an `nn.Linear`, or GPT-2's Conv1D, which holds W transposed."""

    @property
    def stored(self) -> nn.Parameter:
        return _weight(self.module)

    @property
    def sizes(self) -> tuple[int, int]:
        n_out, n_in = self.as_matrix(self.stored).shape
        return n_out, n_in

    def as_matrix(self, stored: Tensor) -> Float[Tensor, "n_out n_in"]:
        return stored.T if isinstance(self.module, Conv1D) else stored

    def as_stored(self, weight: Float[Tensor, "n_out n_in"]) -> Tensor:
        return weight.T.contiguous() if isinstance(self.module, Conv1D) else weight

    def set_bias(self, bias: Float[Tensor, " n_out"]) -> None:
        # Other maps of a fused module keep their biases, or get zeros.
        weight, old = self.stored, self.fused.bias()
        if self.rows is not None:
            old_or_none = bias.new_zeros(self.fused.n_out) if old is None else old
            bias = old_or_none.index_copy(0, self.rows.to(bias.device), bias)
        if old is None:
            self.module.bias = nn.Parameter(bias.to(weight.dtype), weight.requires_grad)
        else:
            _put(self.module.bias, bias)  # type: ignore[arg-type]

    def __call__(self, x: Float[Tensor, "*batch n_in"]) -> Float[Tensor, "*batch n_out"]:
        with wide_passes(self.module):
            outputs: Tensor = self.module(x)
        return self.select(outputs, -1)


@dataclass(frozen=True, eq=False)
class ExpertMap(LinearMap):
    """A map of all experts of a layer, stored as one parameter (experts, n_out, n_in).

    Experts are groups of hidden units, one after the other. A map into the hidden units has the
    outputs of all experts, and a map out of them has the inputs of all.
    """

    parameter: str = ""  # its name in the module
    joins: bool = False  # True for the map out of the hidden units, whose outputs all experts share

    @property
    def stored(self) -> nn.Parameter:
        parameter = getattr(self.module, self.parameter)
        assert isinstance(parameter, nn.Parameter)
        return parameter

    @property
    def sizes(self) -> tuple[int, int]:
        n_experts, n_out, n_in = self.stored.shape
        return (n_out, n_experts * n_in) if self.joins else (n_experts * n_out, n_in)

    def as_matrix(self, stored: Tensor) -> Float[Tensor, "n_out n_in"]:
        return stored.movedim(0, 1).flatten(1) if self.joins else stored.flatten(0, 1)

    def as_stored(self, weight: Float[Tensor, "n_out n_in"]) -> Tensor:
        n_experts, n_out, n_in = self.stored.shape
        if not self.joins:
            return weight.unflatten(0, (n_experts, n_out))
        return weight.unflatten(1, (n_experts, n_in)).movedim(1, 0).contiguous()

    def set_bias(self, bias: Float[Tensor, " n_out"]) -> None:
        raise BilensError(f"{self.name} has no biases, expected a norm without one before it")

    def __call__(self, x: Float[Tensor, "*batch n_in"]) -> Float[Tensor, "*batch n_out"]:
        return x @ self.weight().to(x).mT


@dataclass(frozen=True, eq=False)
class Embedding:
    """A table whose rows are multiplied by `scale` and added to the residual stream."""

    name: str
    module: nn.Embedding
    factor: float = 1.0  # of the model, unless the module multiplies its rows itself

    @property
    def scale(self) -> float:
        """Factor of the rows, as the module has it: Gemma's is rounded to the type of its rows."""
        return float(getattr(self.module, "embed_scale", self.factor))

    def weight(self) -> Float[Tensor, "n_rows d_model"]:
        """Return the stored rows in float32 or float64, without the scale."""
        parameter = self.module.weight
        return parameter.detach().to(device_of(parameter), working_dtype(parameter.dtype))

    def rows(self, numbers: Int[Tensor, " n"]) -> Float[Tensor, "n d_model"]:
        """Return the vectors that the model adds to the stream for these rows."""
        # Rows first: a whole table in float32 may be gigabytes.
        table = self.module.weight
        rows = table.detach()[numbers.to(table.device)]
        return self.scale * rows.to(device_of(table), working_dtype(table.dtype))

    def set_weight(self, weight: Float[Tensor, "n_rows d_model"]) -> None:
        """Replace the rows, in the storage type."""
        _put(_weight(self.module), weight)


@dataclass(frozen=True, eq=False)
class Norm(ABC):
    """A norm g * n + b with n = f(c) c, a factor f, and c = x, or x minus its mean.

    n is the normalised stream, the basis of all directions. The gain g and the bias b are folded
    into the maps after the norm.
    """

    name: str
    module: nn.Module
    centres: bool  # the mean is subtracted, as in LayerNorm and not in RMSNorm
    offset: float  # number that is added to the module's weight to give the gain g; 1 in Gemma
    eps: float  # number that is added to the mean square

    @abstractmethod
    def gain(self) -> Float[Tensor, " d_model"]:
        """Return the gain g; a single number if all are the same."""

    @abstractmethod
    def scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        """Return f, the factor of c."""

    @abstractmethod
    def make_plain(self) -> None:
        """Set the gain to 1 and the bias to 0."""

    def bias(self) -> Float[Tensor, " d_model"] | None:
        """Return the bias b; None without one."""
        parameter = getattr(self.module, "bias", None)
        return None if parameter is None else parameter.detach().to(working_dtype(parameter.dtype))

    def centred(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return c: x, or x minus its mean."""
        return x - x.mean(-1, keepdim=True) if self.centres else x

    def normalised(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return n, the output of the norm before its gain."""
        return self.centred(x) * self.scale(x)[..., None]

    def applied(self, n: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return g n + b, the output of the norm, from the normalised n."""
        y, bias = self.centred(n) * self.gain().to(n), self.bias()
        return y if bias is None else y + bias.to(n)

    def folded(
        self, weight: Float[Tensor, "n_out d_model"], bias: Float[Tensor, " n_out"] | None
    ) -> tuple[Float[Tensor, "n_out d_model"], Float[Tensor, " n_out"] | None]:
        """Fold gain and bias into a map W, e after the norm: W g and e + W b, which read n.

        After centring n has no mean, so the mean of each row of W has no effect and is subtracted.

        Source: Elhage et al. 2021, "Handling Layer Normalization".
        """
        before = self.bias()
        if before is not None and before.any():
            shift = weight @ before
            bias = shift if bias is None else bias + shift
        # `centred` acts on the last axis, so on each row of W.
        return self.centred(weight * self.gain()), bias

    def folded_after(self, out: Float[Tensor, "d_model *n"]) -> Float[Tensor, "d_model *n"]:
        """Fold the gain into an output map D before the norm: g D; the scale is left out.

        Such norms are between an output and the stream, as in Gemma 2. D may be a bias.
        """
        # The norm subtracts the mean of its input D h, which is linear in D's columns.
        return (self.centred(out.T) * self.gain()).T

    def is_plain(self) -> bool:
        """Return True if gain and bias do nothing."""
        bias = self.bias()
        return bool((self.gain() == 1).all()) and (bias is None or not bias.any())


class InputNorm(Norm):
    """A norm whose factor is 1 / sqrt(mean(c^2) + eps), as RMSNorm and LayerNorm."""

    def gain(self) -> Float[Tensor, " d_model"]:
        weight = _weight(self.module).detach()
        return self.offset + weight.to(working_dtype(weight.dtype))

    def scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        return (self.centred(x).square().mean(-1) + self.eps).rsqrt()

    def make_plain(self) -> None:
        weight = _weight(self.module)
        _put(weight, torch.full_like(weight, 1 - self.offset))
        if getattr(self.module, "bias", None) is not None:
            _put(self.module.bias, torch.zeros_like(self.module.bias))  # type: ignore[arg-type]


class ConstantNorm(Norm):
    """The norm s x with a trained number s, as of a `bilens.nn.layers.ScalarNorm`: n = x."""

    def gain(self) -> Float[Tensor, " 1"]:
        scale: Tensor = self.module.scale  # type: ignore[assignment]
        return scale.to(working_dtype(scale.dtype))

    def scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        return torch.ones_like(x[..., 0])

    def make_plain(self) -> None:
        self.module.reset_parameters()  # type: ignore[operator]


def _weight(module: nn.Module) -> nn.Parameter:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return weight


def _put(parameter: nn.Parameter, value: Tensor) -> None:
    # A new tensor in the same parameter: models that share the old tensor keep it unchanged.
    parameter.data = value.to(parameter.dtype)

"""The pieces of a transformer that touch its residual stream: linear maps, embeddings, norms."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

__all__ = ["ConstantNorm", "Embedding", "LinearMap", "Norm", "working_dtype"]


def working_dtype(stored: torch.dtype) -> torch.dtype:
    """What weights of a storage dtype are computed in: float64 for itself, else float32."""
    return torch.float64 if stored == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A linear map x -> W x + b: an `nn.Linear`, GPT-2's Conv1D, or some rows of one.

    `rows` are its outputs, where several maps are fused into one module; None for all.
    """

    name: str
    module: nn.Module
    rows: Int[Tensor, " n_out"] | None = None

    @property
    def whole(self) -> "LinearMap":
        """The map with all its outputs."""
        return replace(self, rows=None)

    @property
    def n_out(self) -> int:
        """Number of outputs."""
        if self.rows is not None:
            return len(self.rows)
        return _weight(self.module).shape[1 if self._transposed else 0]

    def weight(self) -> Float[Tensor, "n_out n_in"]:
        """W, for computing: in float32 or float64."""
        stored = _weight(self.module).detach()
        stored = stored.T if self._transposed else stored
        return self.chosen(stored).to(working_dtype(stored.dtype))

    def bias(self) -> Float[Tensor, " n_out"] | None:
        """The bias b, for computing; None where the module has none."""
        stored = self.module.bias
        if stored is None:
            return None
        assert isinstance(stored, Tensor)
        return self.chosen(stored.detach()).to(working_dtype(stored.dtype))

    def chosen(self, outputs: Float[Tensor, "n_all *rest"]) -> Float[Tensor, "n_out *rest"]:
        """These rows of what belongs to all outputs of the module."""
        return outputs if self.rows is None else outputs[self.rows.to(outputs.device)]

    def set_weight(self, weight: Float[Tensor, "n_out n_in"]) -> None:
        """Put a new W in place of the old, in the storage dtype."""
        if self.rows is not None:
            weight = self.whole.weight().index_copy(0, self.rows.to(weight.device), weight)
        _put(_weight(self.module), weight.T.contiguous() if self._transposed else weight)

    def set_bias(self, bias: Float[Tensor, " n_out"]) -> None:
        """Put a new b in place of the old, or where there was none."""
        weight, old = _weight(self.module), self.whole.bias()
        if self.rows is not None:
            old_or_none = bias.new_zeros(self.whole.n_out) if old is None else old
            bias = old_or_none.index_copy(0, self.rows.to(bias.device), bias)
        if old is None:
            self.module.bias = nn.Parameter(bias.to(weight.dtype), weight.requires_grad)
        else:
            _put(self.module.bias, bias)  # type: ignore[arg-type]

    @property
    def _transposed(self) -> bool:
        return isinstance(self.module, Conv1D)


@dataclass(frozen=True, eq=False)
class Embedding:
    """A table whose rows the model multiplies by `scale` and adds to the residual stream."""

    name: str
    module: nn.Embedding
    scale: float = 1.0

    def weight(self) -> Float[Tensor, "n_rows d_model"]:
        """The rows as they are stored, for computing: in float32 or float64."""
        stored = self.module.weight.detach()
        return stored.to(working_dtype(stored.dtype))

    def rows(self, numbers: Int[Tensor, " n"]) -> Float[Tensor, "n d_model"]:
        """Return the vectors that the model adds to the stream for these rows."""
        stored = self.module.weight.detach()[numbers]
        return self.scale * stored.to(working_dtype(stored.dtype))

    def set_weight(self, weight: Float[Tensor, "n_rows d_model"]) -> None:
        """Put new rows in place of the old, in the storage dtype."""
        _put(_weight(self.module), weight)


@dataclass(frozen=True, eq=False)
class Norm:
    """g * n + b with n = c / sqrt(mean(c^2) + eps), and c = x, or x without its mean.

    n is the normalised stream, in which all directions of bilens live; g and b belong to the maps
    that read behind the norm.

    Attributes:
        centres: whether the mean is taken away: LayerNorm does, RMSNorm does not.
        offset: what the module adds to its weight to have the gain g; 1 in Gemma.
    """

    name: str
    module: nn.Module
    centres: bool
    offset: float
    eps: float

    def gain(self) -> Float[Tensor, " d_model"]:
        """The gain g; of one number where all are the same."""
        stored = _weight(self.module).detach()
        return self.offset + stored.to(working_dtype(stored.dtype))

    def bias(self) -> Float[Tensor, " d_model"] | None:
        """The bias b; None where the norm has none."""
        stored = getattr(self.module, "bias", None)
        return None if stored is None else stored.detach().to(working_dtype(stored.dtype))

    def centred(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """c: x, or x without its mean."""
        return x - x.mean(-1, keepdim=True) if self.centres else x

    def scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        """1 / sqrt(mean(c^2) + eps), by which the norm multiplies c."""
        return (self.centred(x).square().mean(-1) + self.eps).rsqrt()

    def normalised(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """n, what the norm makes of x before its gain."""
        return self.centred(x) * self.scale(x)[..., None]

    def applied(self, n: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """G n + b: what the norm hands on, of what it has normalised."""
        y, bias = self.centred(n) * self.gain(), self.bias()
        return y if bias is None else y + bias

    def folded(
        self, weight: Float[Tensor, "n_out d_model"], bias: Float[Tensor, " n_out"] | None
    ) -> tuple[Float[Tensor, "n_out d_model"], Float[Tensor, " n_out"] | None]:
        """W and e of a map that reads behind the norm, as a map that reads n: W g and e + W b.

        n has no mean behind a LayerNorm, so that the mean of each row of W meets nothing, and is
        taken away.

        Source:
            Elhage et al. 2021, "Handling Layer Normalization".
        """
        before = self.bias()
        if before is not None and before.any():
            added = weight @ before
            bias = added if bias is None else bias + added
        return self.centred(weight * self.gain()), bias

    def folded_behind(self, out: Float[Tensor, "d_model *n"]) -> Float[Tensor, "d_model *n"]:
        """What writes before the norm, as what writes behind it, but for the norm's scale: g D.

        For norms between an output and the stream, as in Gemma 2; D may be a bias too.
        """
        return (self.centred(out.T) * self.gain()).T

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


class ConstantNorm(Norm):
    """s x with a number s that training has found, as of a `bilens.nn.norm.ScalarNorm`: n = x."""

    def gain(self) -> Float[Tensor, " 1"]:
        """S."""
        found: Tensor = self.module.scale  # type: ignore[assignment]
        return found.to(working_dtype(found.dtype))

    def scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        """1, whatever x is."""
        return torch.ones_like(x[..., 0])

    def make_plain(self) -> None:
        """Set s to 1."""
        self.module.reset_parameters()  # type: ignore[operator]


def _weight(module: nn.Module) -> nn.Parameter:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return weight


def _put(parameter: nn.Parameter, value: Tensor) -> None:
    # A new tensor behind the same parameter: whoever shares the old one keeps it as it was.
    parameter.data = value.to(parameter.dtype)

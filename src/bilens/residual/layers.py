"""The parts of a transformer, layer by layer, of any family."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from bilens.errors import BilensError
from bilens.residual.parts import Embedding, LinearMap, Norm, working_dtype


class Moment(int):
    """A state of the residual stream, numbered in the order of the forward pass.

    A component that reads at a moment sees everything written up to it. A layer has three: it mixes
    the embedding in (in a few architectures), its heads write, its MLP writes.
    """

    @classmethod
    def embedding(cls) -> "Moment":
        """Return the moment after the embedding."""
        return cls(0)

    @classmethod
    def input(cls, layer: int) -> "Moment":
        """Return the moment at which the heads of a layer read."""
        return cls(3 * layer + 1)

    @classmethod
    def attention(cls, layer: int) -> "Moment":
        """Return the moment after the heads of a layer have written."""
        return cls(3 * layer + 2)

    @classmethod
    def mlp(cls, layer: int) -> "Moment":
        """Return the moment after the MLP of a layer has written."""
        return cls(3 * layer + 3)

    @classmethod
    def count(cls, n_layers: int) -> int:
        """Return the number of moments of a model."""
        return 3 * n_layers + 1


class NormedInput:
    """A component that reads the stream, through a norm or directly."""

    module: nn.Module
    norm: Norm | None

    @property
    def norm_or_module(self) -> nn.Module:
        """First module that the stream goes into."""
        return self.module if self.norm is None else self.norm.module

    def centred(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return x, minus its mean if the norm subtracts it."""
        return x if self.norm is None else self.norm.centred(x)

    def scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        """Return the scale of the norm; 1 without one."""
        return torch.ones_like(x[..., 0]) if self.norm is None else self.norm.scale(x)

    def normalised(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return n, the output of the norm before its gain."""
        return x if self.norm is None else self.norm.normalised(x)


@dataclass(frozen=True, eq=False)
class Heads(NormedInput):
    """The attention of a layer.

    Attributes:
        module: the attention.
        norm: between the stream and the heads; None without one.
        pairs: the maps of queries and keys, two pairs if two patterns are multiplied or subtracted.
        value: the map of values.
        out: the map of the mixed values to the stream.
        n_heads: number of heads of queries.
        n_kv_heads: number of heads of keys and values, which consecutive heads share.
        out_norm: between the output and the stream; None without one.
        inner: norms of queries and keys.
        v_first_share: share of the first layer's values in these; None if they are not mixed.
    """

    module: nn.Module
    norm: Norm | None
    pairs: tuple[tuple[LinearMap, LinearMap], ...]
    value: LinearMap
    out: LinearMap
    n_heads: int
    n_kv_heads: int
    out_norm: Norm | None = None
    inner: tuple[Norm, ...] = ()
    v_first_share: nn.Parameter | None = None

    @property
    def d_head(self) -> int:
        """Width of a head's values."""
        return self.value.n_out // self.n_kv_heads

    @property
    def sharing(self) -> int:
        """Number of heads that share keys and values."""
        return self.n_heads // self.n_kv_heads

    @property
    def reads(self) -> tuple[LinearMap, ...]:
        """All maps that read the stream."""
        return (*(part for pair in self.pairs for part in pair), self.value)


@dataclass(frozen=True, eq=False)
class MLP(NormedInput):
    """An MLP D(up(x) * act(gate(x))), or D act(up(x)) without a gate.

    `activation` is the attribute of the module. `norm` is between the stream and the maps,
    `out_norm` between the output and the stream. Each is None for an MLP without it.
    """

    name: str
    module: nn.Module
    up: LinearMap
    gate: LinearMap | None
    down: LinearMap
    activation: str
    norm: Norm | None = None
    out_norm: Norm | None = None

    @property
    def reads(self) -> tuple[LinearMap, ...]:
        """All maps that read the stream, the one under the activation first."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    def act(self, z: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """Return the activation of each hidden unit."""
        return self.activation_function()(z)

    @torch.no_grad()
    def act_of_zero(self) -> Float[Tensor, " hidden"] | None:
        """Return act(0) of each hidden unit; None if all are 0, as in most activations."""
        weight: Any = self.reads[0].module.weight
        values = self.act(weight.new_zeros(1, self.reads[0].n_out))[0]
        return values.to(working_dtype(values.dtype)) if values.any() else None

    def activation_function(self) -> Any:
        """Return the activation, a function or a module."""
        return getattr(self.module, self.activation)

    def output(self, x: Float[Tensor, "rows d_model"]) -> Float[Tensor, "rows d_model"]:
        """Return the output of the MLP on its inputs, computed from its parts."""
        acted, *other = (part.select(part.module(x).mT).mT for part in self.reads)
        return self.down.module(self.act(acted) * (other[0] if other else 1))

    @torch.no_grad()
    def check(self) -> None:
        """Compare the module with its parts on random numbers.

        Raises:
            BilensError: it computes something else.
        """
        weight: Any = self.up.module.weight
        generator = torch.Generator().manual_seed(0)
        width = weight.shape[0 if isinstance(self.up.module, Conv1D) else 1]
        x = torch.randn(4, width, generator=generator).to(weight)
        rounding = 100 * torch.finfo(weight.dtype).eps
        try:
            expected, output = self.module(x), self.output(x)
            same = torch.allclose(expected, output, rtol=rounding, atol=rounding, equal_nan=True)
        except RuntimeError:  # the maps do not even fit together
            same = False
        if not same:
            form = "up(x)" if self.gate is None else "up(x) * activation(gate(x))"
            raise BilensError(
                f"{self.name} has the parts of an MLP but computes something else than "
                f"down({form}), so it can be neither read nor made bilinear"
            )

    def scale_gate(self, factor: float) -> None:
        """Multiply the gate's weights and biases by a factor."""
        assert self.gate is not None
        bias = self.gate.bias()
        self.gate.set_weight(factor * self.gate.weight())
        if bias is not None:
            self.gate.set_bias(factor * bias)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer: y = x + heads(x), then y + mlp(y). In parallel layers both read x.

    A layer with `residual_mix` a, b reads a x + b x_0 instead of x, x_0 being the embedding.
    `numbers` are parameters that are not weights of a map or norm.
    """

    name: str
    module: nn.Module
    heads: Heads
    mlp: MLP
    residual_mix: nn.Parameter | None = None
    numbers: tuple[nn.Parameter, ...] = ()


@dataclass(frozen=True, eq=False)
class FoldGroup:
    """All linear maps after the same norm, or without a norm. Fused maps are one map.

    `obstacle` is why the norm cannot be folded into the maps; None if it can.
    """

    norm: Norm | None
    maps: Sequence[LinearMap]
    obstacle: str | None = None


@dataclass(frozen=True, eq=False)
class Parts(NormedInput):
    """A transformer as the modules that read its residual stream or write to it.

    The attributes are those of `Family`, looked up in a model.
    """

    layers: Sequence[Layer]
    embed: Embedding
    positions: Embedding | None
    hidden_positions: Embedding | None
    norm: Norm | None
    unembed: LinearMap
    parallel: bool = False
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    partial_values: str | None = None
    attention: str = "softmax"
    queries_keys: Callable[[Any, Tensor, int], list[tuple[Tensor, Tensor]]] | None = None

    @property
    def module(self) -> nn.Module:  # type: ignore[override]
        """Unembedding, which reads the stream after the last layer."""
        return self.unembed.module

    @property
    def tables(self) -> list[Embedding]:
        """Embeddings that are added to the stream."""
        return [table for table in (self.embed, self.positions) if table is not None]

    @property
    def n_positions(self) -> int | None:
        """Number of positions that have a vector; None if only distances count."""
        table = self.positions or self.hidden_positions
        return None if table is None else table.module.num_embeddings

    def embedding(self, ids: Int[Tensor, " time"]) -> dict[Literal["token", "position"], Tensor]:
        """Return the vectors (time, d_model) that embed a text: of tokens, and of positions."""
        vectors: dict[Literal["token", "position"], Tensor] = {"token": self.embed.rows(ids)}
        if self.positions is not None:
            places = torch.arange(len(ids), device=ids.device)
            vectors["position"] = self.positions.rows(places)
        return vectors

    def embedding_factors(self) -> dict[Moment, float]:
        """Return the factor of the embedding at each moment that writes it to the stream."""
        factors = {Moment.embedding(): 1.0}
        for number, layer in enumerate(self.layers):
            if layer.residual_mix is not None:
                factors[Moment.input(number)] = float(layer.residual_mix[1])
        return factors

    def mixing(self) -> Float64[Tensor, "moments moments"]:
        """Return the factor of a vector written at a moment (column) when it is read (row).

        It is 0 where the read comes first.
        """
        count = Moment.count(len(self.layers))
        mixing = torch.ones(count, count, dtype=torch.float64).tril()
        for number, layer in enumerate(self.layers):
            if layer.residual_mix is not None:
                entry = Moment.input(number)
                mixing[entry:, :entry] *= float(layer.residual_mix[0])
        return mixing

    def embedding_share(self, moment: Moment) -> float:
        """Return the factor of the embedding in the stream at a moment."""
        row = self.mixing()[moment].tolist()
        return sum(row[written] * factor for written, factor in self.embedding_factors().items())

    def final_share(self, moment: Moment) -> float:
        """Return the factor of a vector written at a moment in the stream after the last layer."""
        return float(self.mixing()[-1, moment])

    def mlp_moment(self, layer: int) -> Moment:
        """Return the moment at which the MLP of a layer reads the stream."""
        return Moment.input(layer) if self.parallel else Moment.attention(layer)

    @property
    def writes(self) -> list[LinearMap]:
        """Maps whose outputs are added to the stream."""
        return [part for layer in self.layers for part in (layer.heads.out, layer.mlp.down)]

    def fold_groups(self) -> list[FoldGroup]:
        """Return the maps that read the stream, in the order of the model, grouped by norm."""
        groups: list[FoldGroup] = []
        hidden = None
        if self.hidden_positions is not None:
            hidden = "positions are added between the norm and queries and keys"
        for layer in self.layers:
            heads, mlp = layer.heads, layer.mlp
            if heads.norm and mlp.norm and heads.norm.module is mlp.norm.module:
                groups.append(FoldGroup(heads.norm, _fused((*heads.reads, *mlp.reads)), hidden))
            else:
                groups.append(FoldGroup(heads.norm, _fused(heads.reads), hidden))
                groups.append(FoldGroup(mlp.norm, _fused(mlp.reads)))
        return [*groups, FoldGroup(self.norm, [self.unembed])]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter whose role in the model is known."""
        tables = [*self.tables, *([self.hidden_positions] if self.hidden_positions else [])]
        groups = self.fold_groups()
        parts = [part for layer in self.layers for part in (layer.heads, layer.mlp)]
        modules: list[nn.Module] = [
            *(group.norm.module for group in groups if group.norm is not None),
            *(part.module for group in groups for part in group.maps),
            *(part.module for part in self.writes),
            *(table.module for table in tables),
            *(part.out_norm.module for part in parts if part.out_norm is not None),
            *(norm.module for layer in self.layers for norm in layer.heads.inner),
        ]
        for module in modules:
            yield from module.parameters(recurse=False)
        for layer in self.layers:
            mixes = (layer.residual_mix, layer.heads.v_first_share)
            yield from (part for part in (*mixes, *layer.numbers) if part is not None)


def _fused(maps: Sequence[LinearMap]) -> list[LinearMap]:
    """Return each module once, with all its outputs."""
    return list({id(part.module): part.fused for part in maps}.values())

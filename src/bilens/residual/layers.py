"""What a transformer is made of, layer by layer, whatever its family."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from bilens.errors import BilensError
from bilens.residual.moments import Moment
from bilens.residual.parts import Embedding, LinearMap, Norm, working_dtype

__all__ = ["MLP", "Heads", "Layer", "Parts", "Readers"]


class ReadsStream:
    """What reads the stream through a norm, or as it is."""

    module: nn.Module
    norm: Norm | None

    @property
    def norm_or_module(self) -> nn.Module:
        """What the stream is handed to first."""
        return self.module if self.norm is None else self.norm.module

    def centred(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """x, without its mean where the norm takes that away."""
        return x if self.norm is None else self.norm.centred(x)

    def scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        """What the norm multiplies by; 1 without one."""
        return torch.ones_like(x[..., 0]) if self.norm is None else self.norm.scale(x)

    def normalised(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """n, what the norm makes of x before its gain."""
        return x if self.norm is None else self.norm.normalised(x)


@dataclass(frozen=True, eq=False)
class Heads(ReadsStream):
    """The attention of a layer.

    Attributes:
        norm: between the stream and what the heads read; None where there is none.
        pairs: the maps of queries and keys, two pairs where two patterns are multiplied or
            subtracted.
        out: the map of the mixed values to the stream.
        n_kv_heads: number of heads of keys and values, each shared by as many heads.
        out_norm: between the output and the stream; None where there is none.
        inner: norms of queries and keys.
        v_first_share: by which the first layer's values are mixed into these.
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
        """How many heads share keys and values."""
        return self.n_heads // self.n_kv_heads

    @property
    def reads(self) -> tuple[LinearMap, ...]:
        """All maps that read the stream."""
        return (*(part for pair in self.pairs for part in pair), self.value)


@dataclass(frozen=True, eq=False)
class MLP(ReadsStream):
    """D(up(x) * act(gate(x))), or D act(up(x)) where there is no gate.

    `activation` is the attribute of the module. `norm` is between the stream and the maps and
    `out_norm` between the output and the stream, each None where there is none.
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
        """Return act(0) of each hidden unit; None where all are 0, as in most activations."""
        weight: Any = self.reads[0].module.weight
        values = self.act(weight.new_zeros(1, self.reads[0].n_out))[0]
        return values.to(working_dtype(values.dtype)) if values.any() else None

    def activation_function(self) -> Any:
        """The function or module that the activation is."""
        return getattr(self.module, self.activation)

    def computes(self, x: Float[Tensor, "rows d_model"]) -> Float[Tensor, "rows d_model"]:
        """What such an MLP makes of what it reads, out of its parts."""
        acted, *other = (part.chosen(part.module(x).mT).mT for part in self.reads)
        return self.down.module(self.act(acted) * (other[0] if other else 1))

    @torch.no_grad()
    def check(self) -> None:
        """See on random numbers that the module computes what its parts do.

        Raises:
            BilensError: it computes something else.
        """
        weight: Any = self.up.module.weight
        generator = torch.Generator().manual_seed(0)
        width = weight.shape[0 if isinstance(self.up.module, Conv1D) else 1]
        x = torch.randn(4, width, generator=generator).to(weight)
        rounding = 100 * torch.finfo(weight.dtype).eps
        try:
            whole, parts = self.module(x), self.computes(x)
            same = torch.allclose(whole, parts, rtol=rounding, atol=rounding, equal_nan=True)
        except RuntimeError:  # the maps do not even fit together
            same = False
        if not same:
            form = "up(x)" if self.gate is None else "up(x) * activation(gate(x))"
            raise BilensError(
                f"{self.name} has the parts of an MLP but computes something else than "
                f"down({form}), so it can be neither read nor made bilinear"
            )

    def scale_gate(self, factor: float) -> None:
        """Multiply the gate's weights, and its biases where it has some, by a factor."""
        assert self.gate is not None
        bias = self.gate.bias()
        self.gate.set_weight(factor * self.gate.weight())
        if bias is not None:
            self.gate.set_bias(factor * bias)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer: y = x + heads(x), then y + mlp(y); side by side, both read x.

    `residual_mix` are a and b where it reads a x + b x_0 instead of x, and None where it reads x;
    `numbers` are parameters that are not weights of a map or norm.
    """

    name: str
    module: nn.Module
    heads: Heads
    mlp: MLP
    residual_mix: nn.Parameter | None = None
    numbers: tuple[nn.Parameter, ...] = ()


@dataclass(frozen=True, eq=False)
class Readers:
    """All linear maps, fused ones whole, that read the stream behind one norm, or behind none.

    `obstacle` is why the norm cannot be folded into the maps; None where it can.
    """

    norm: Norm | None
    maps: Sequence[LinearMap]
    obstacle: str | None = None


@dataclass(frozen=True, eq=False)
class Parts(ReadsStream):
    """A transformer as what reads its residual stream and what writes to it.

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
        """The unembedding, which reads what the last layer leaves."""
        return self.unembed.module

    @property
    def tables(self) -> list[Embedding]:
        """The embeddings that add to the stream."""
        return [table for table in (self.embed, self.positions) if table is not None]

    @property
    def n_positions(self) -> int | None:
        """Number of positions that have a vector; None where only distances count."""
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

    def mlp_moment(self, layer: int) -> Moment:
        """Return the moment at which the MLP of a layer reads the stream."""
        return Moment.input(layer) if self.parallel else Moment.attention(layer)

    @property
    def writes(self) -> list[LinearMap]:
        """The maps that add to the stream."""
        return [part for layer in self.layers for part in (layer.heads.out, layer.mlp.down)]

    def readers(self) -> list[Readers]:
        """All that reads the stream, in the order of the model, those behind one norm together."""
        found: list[Readers] = []
        hidden = None
        if self.hidden_positions is not None:
            hidden = "positions are added between the norm and queries and keys"
        for layer in self.layers:
            heads, mlp = layer.heads, layer.mlp
            if heads.norm and mlp.norm and heads.norm.module is mlp.norm.module:
                found.append(Readers(heads.norm, _whole((*heads.reads, *mlp.reads)), hidden))
            else:
                found.append(Readers(heads.norm, _whole(heads.reads), hidden))
                found.append(Readers(mlp.norm, _whole(mlp.reads)))
        return [*found, Readers(self.norm, [self.unembed])]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter whose part in the model is known."""
        tables = [*self.tables, *([self.hidden_positions] if self.hidden_positions else [])]
        readers = self.readers()
        parts = [part for layer in self.layers for part in (layer.heads, layer.mlp)]
        modules: list[nn.Module] = [
            *(reader.norm.module for reader in readers if reader.norm is not None),
            *(part.module for reader in readers for part in reader.maps),
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


def _whole(maps: Sequence[LinearMap]) -> list[LinearMap]:
    """Each module once."""
    return list({id(part.module): part.whole for part in maps}.values())

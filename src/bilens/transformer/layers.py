"""The parts of a transformer, layer by layer, of any family."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from bilens.checks import check_finite, check_index, check_numbers, checked, detached
from bilens.errors import BilensError
from bilens.tensor import BilinearTensor
from bilens.transformer.maps import ConstantNorm, Embedding, LinearMap, Norm, working_dtype
from bilens.transformer.running import made_again, wide_passes

BLOCK = 2**19
"""Numbers of a table that are widened at a time."""


def folded_input(part: LinearMap, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a map that reads n, with the norm before it folded in."""
    weight, bias = part.weight(), part.bias()
    return (weight, bias) if norm is None else norm.folded(weight, bias)


def folded_output(part: LinearMap, norm: Norm | None, scale: float) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a map to the stream, with the gain after it and a factor folded in.

    The norm's own scale depends on the text and is left out.
    """
    weight, bias = part.weight(), part.bias()
    if norm is not None:
        weight = norm.folded_after(weight)
        bias = None if bias is None else norm.folded_after(bias)
    return scale * weight, None if bias is None else scale * bias


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
    def reads(self) -> tuple[LinearMap, ...]:
        """All maps that read the stream."""
        raise NotImplementedError

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

    def applied(self, n: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return the input of the maps, the output of the norm, from the normalised n."""
        return n if self.norm is None else self.norm.applied(n)

    def module_input(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return the input of the maps, by the norm itself."""
        y = x.to(working_dtype(self.reads[0].stored.dtype))
        if self.norm is None:
            return y
        with wide_passes(self.norm.module):
            output: Tensor = self.norm.module(y)
        return output


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """Value and output weights of a layer's heads, norms and scales folded in.

    A head that attends to a normalised row n adds its weight in the pattern times (n V + b) O.

    The bias of the output belongs to no head and is added once.
    """

    value: Float[Tensor, "heads d_model d_head"]
    value_bias: Float[Tensor, "heads d_head"]
    out: Float[Tensor, "heads d_head d_model"]
    out_bias: Float[Tensor, " d_model"]


class ValueSource(NamedTuple):
    """Weights of the heads' values that read one normalised stream.

    `layer` is the one whose stream is read.
    """

    layer: int
    value: Float[Tensor, "heads d_model d_head"]
    bias: Float[Tensor, "heads d_head"]

    def values(self, n: Float[Tensor, "rows d_model"]) -> Float[Tensor, "heads rows d_head"]:
        """Return the values of normalised rows, n V + bias."""
        return n @ self.value + self.bias[:, None]


@dataclass(frozen=True, eq=False)
class Heads(NormedInput):
    """The attention of a layer."""

    module: nn.Module
    norm: Norm | None  # between the stream and the heads; None without one
    # The maps of queries and keys, two pairs if two patterns are multiplied or subtracted.
    pairs: tuple[tuple[LinearMap, LinearMap], ...]
    value: LinearMap
    out: LinearMap  # the map of the mixed values to the stream
    n_heads: int  # heads of queries
    n_kv_heads: int  # heads of keys and values, which consecutive heads share
    out_norm: Norm | None = None  # between the output and the stream; None without one
    inner: tuple[Norm, ...] = ()  # norms of queries and keys
    # Share of the first layer's values in these; None if they are not mixed.
    v_first_share: nn.Parameter | None = None
    residual_scale: float = 1.0  # of the output

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
        return (*chain.from_iterable(self.pairs), self.value)

    @detached
    def weights(self) -> HeadWeights:
        """Return the value and output weights of the heads.

        With `value_mix` these are the layer's own values, times their share.
        """
        value, value_bias = self.value_weights()
        out, out_bias = folded_output(self.out, self.out_norm, self.residual_scale)
        return HeadWeights(
            value=value,
            value_bias=value_bias,
            out=out.T.unflatten(0, (self.n_heads, self.d_head)),
            out_bias=out.new_zeros(len(out)) if out_bias is None else out_bias,
        )

    @detached
    def value_weights(
        self,
    ) -> tuple[Float[Tensor, "heads d_model d_head"], Float[Tensor, "heads d_head"]]:
        """Return V and its bias, as in `weights`."""
        value, bias = folded_input(self.value, self.norm)
        bias = value.new_zeros(len(value)) if bias is None else bias
        if self.v_first_share is not None:
            # v + share (v_1 - v): the layer's own values keep 1 - share.
            share = 1 - self.v_first_share.detach().to(value)
            value, bias = share * value, share * bias

        def by_head(values: Tensor) -> Tensor:
            # Keys and values that heads share are repeated, so that head h is row h everywhere.
            split = values.unflatten(0, (self.n_kv_heads, self.d_head))
            return split.repeat_interleave(self.sharing, 0)

        return by_head(value).mT, by_head(bias)


@dataclass(frozen=True, eq=False)
class MLP(NormedInput):
    """An MLP D(up(x) * act(gate(x))), or D act(up(x)) without a gate.

    `activation` is the attribute of the module. `norm` is between the stream and the maps,
    `out_norm` between the output and the stream. Each is None for an MLP without it.
    `residual_scale` is a factor of the output.

    With a `router` the hidden units are those of all experts. Each is multiplied by the weight of
    its expert, a function of the input that is 0 for most experts.
    """

    name: str
    module: nn.Module
    up: LinearMap
    gate: LinearMap | None
    down: LinearMap
    activation: str
    norm: Norm | None = None
    out_norm: Norm | None = None
    residual_scale: float = 1.0
    router: LinearMap | None = None

    @property
    def writer(self) -> nn.Module:
        """Module whose output the stream receives, or the norm after the MLP."""
        return self.down.module if self.router is None else self.module

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
        first = self.reads[0]
        zeros = torch.zeros(1, first.n_out, dtype=first.stored.dtype, device=first.device)
        values = self.act(zeros)[0]
        return values.to(working_dtype(values.dtype)) if values.any() else None

    def activation_function(self) -> Any:
        """Return the activation, a function or a module."""
        return attrgetter(self.activation)(self.module)

    def routing(self, outputs: Sequence[Tensor]) -> Float[Tensor, "rows hidden"]:
        """Return the factor of each hidden unit from the outputs of the router's module."""
        assert self.router is not None
        # Routers of transformers return scores, and weights and numbers of the experts that run.
        _, weights, experts = outputs
        n_experts = self.router.n_out
        # Experts that do not run have no entry, and get 0.
        of_experts = weights.new_zeros(len(weights), n_experts).scatter_(1, experts, weights)
        return of_experts.repeat_interleave(self.up.n_out // n_experts, 1)

    def expert(self, number: int, slope: float = 1.0) -> BilinearTensor:
        """Return the tensor of one expert, before its weight by the router; see `factors`.

        Raises:
            BilensError: the MLP has no experts, or not this one.
        """
        if self.router is None:
            raise BilensError(f"{self.name} has no experts; factors() is the tensor of the MLP")
        n_experts = self.router.n_out
        number = check_index("number", number, n_experts, "an expert of the layer")
        # Hidden units of all experts are in one tensor, one expert after the other.
        tensor, size = self.factors(slope), self.up.n_out // n_experts
        units = slice(number * size, (number + 1) * size)
        return BilinearTensor(tensor.left[units], tensor.right[units], tensor.out[:, units])

    def run(self, y: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return the output of the module from the norm's output y."""
        with wide_passes(self.module):
            outputs: Tensor = self.module(y.reshape(1, -1, y.shape[-1]))
        return outputs.reshape(y.shape[:-1] + outputs.shape[-1:])

    @detached
    def factors(self, slope: float = 1.0) -> BilinearTensor:
        """Return the tensor of the MLP with its activation replaced by act(z) = slope z.

        With the gate ratios of a text as weights of its hidden units the same factors are the
        MLP on a text, exactly. An MLP without a gate is D (up(x) * 1), with the constant
        coordinate. If act(0) is not 0, a second set of hidden units holds up(x) * 1.
        """
        check_finite(slope=torch.tensor(slope))
        left, left_bias = folded_input(self.up, self.norm)
        if self.gate is not None:
            right, right_bias = folded_input(self.gate, self.norm)
        else:
            # The second factor is the constant 1, through the bias.
            right, right_bias = torch.zeros_like(left), left.new_ones(len(left))
        if slope != 1:
            right, right_bias = slope * right, None if right_bias is None else slope * right_bias
        out, out_bias = folded_output(self.down, self.out_norm, self.residual_scale)
        if self.act_of_zero() is not None:
            # The factor that is not under the activation, times 1: of an MLP without a gate 1 * 1.
            zero, ones = torch.zeros_like(left), left.new_ones(len(left))
            plain = self.gate is None
            left_bias = left.new_zeros(len(left)) if left_bias is None else left_bias
            right_bias = right.new_zeros(len(left)) if right_bias is None else right_bias
            left_bias = torch.cat([left_bias, ones if plain else left_bias])
            left = torch.cat([left, zero if plain else left])
            right, right_bias = torch.cat([right, zero]), torch.cat([right_bias, ones])
            out = torch.cat([out, out], 1)
        tensor = BilinearTensor(left, right, out)
        if left_bias is None and right_bias is None and out_bias is None:
            return tensor
        return tensor.with_bias(left_bias, right_bias, out_bias)

    @torch.no_grad()
    def input_weights(self) -> dict[str, Float[Tensor, "hidden d_model"]]:
        """Return the input weights by name: L and R with a gate, `in` without one."""
        names = {"in": self.up} if self.gate is None else {"L": self.up, "R": self.gate}
        return {name: folded_input(part, self.norm)[0] for name, part in names.items()}

    @torch.no_grad()
    def output_weights(self) -> Float[Tensor, "d_model hidden"]:
        """Return the output weights D."""
        return folded_output(self.down, self.out_norm, self.residual_scale)[0]

    @detached
    def stream_output(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return the MLP's addition to streams x, by the modules of the model."""
        y = self.run(self.module_input(x))
        if self.out_norm is not None:
            with wide_passes(self.out_norm.module):
                y = self.out_norm.module(y)
        return self.residual_scale * y.to(x.dtype)

    def output(self, x: Float[Tensor, "rows d_model"]) -> Float[Tensor, "rows d_model"]:
        """Return the output of the MLP on its inputs, computed from its parts."""
        with wide_passes(self.module):
            # Without a gate there is a single map, and the second factor is 1.
            pre, *other = (part(x) for part in self.reads)
            hidden = self.act(pre) * (other[0] if other else 1)
            if self.router is not None:
                hidden = hidden * self.routing(self.router.module(x)).to(x)
            return self.down(hidden)

    @torch.no_grad()
    def check(self) -> None:
        """Raise unless the module computes, on random numbers, what its parts say."""
        generator = torch.Generator().manual_seed(0)
        wide = working_dtype(self.up.stored.dtype)
        x = torch.randn(4, self.up.n_in, generator=generator).to(self.up.device, wide)
        rounding = 100 * torch.finfo(wide).eps
        try:
            expected, output = self.run(x), self.output(x)
            same = torch.allclose(expected, output, rtol=rounding, atol=rounding, equal_nan=True)
        except RuntimeError as error:
            if self.router is not None:
                raise BilensError(
                    f"{self.name} has experts that cannot run in {wide}: {error}. "
                    'model.set_experts_implementation("eager") runs them in any type'
                ) from error
            same = False  # the maps do not even fit together
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
class Modules(NormedInput):
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
    logit_scale: float = 1.0
    softcap: float | None = None
    partial_values: str | None = None
    fixed_heads: str | None = None
    attention: str = "softmax"
    queries_keys: Callable[[Any, Tensor, int], list[tuple[Tensor, Tensor]]] | None = None

    @property
    def module(self) -> nn.Module:  # type: ignore[override]
        """Unembedding, which reads the stream after the last layer."""
        return self.unembed.module

    @property
    def reads(self) -> tuple[LinearMap, ...]:
        """The unembedding."""
        return (self.unembed,)

    @property
    def tables(self) -> list[Embedding]:
        """Embeddings that are added to the stream."""
        return [table for table in (self.embed, self.positions) if table is not None]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights that are returned: float64 if stored so, else float32."""
        return working_dtype(self.embed.module.weight.dtype)

    @property
    def has_norms(self) -> bool:
        """True if the scale before the unembedding depends on the text."""
        return self.norm is not None and not isinstance(self.norm, ConstantNorm)

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

    @checked
    def embedded(
        self, tokens: Int[Tensor, " n"], position: int | None = None
    ) -> Float[Tensor, "n d_model"]:
        """Return the stream before the first layer of tokens at one position, (n, d_model)."""
        check_ids(self.embed.module.num_embeddings, tokens, "tokens")
        x, table = self.embed.rows(tokens), self.positions
        if table is None:
            return x
        if position is None:
            raise BilensError(
                "position=None, and the model has learned positions, which add a vector of their "
                "own to every token; set position to a place in the text"
            )
        what = "the positions that the model has learned"
        check_index("position", position, table.module.num_embeddings, what)
        return x + table.rows(torch.tensor(position, device=x.device))

    @checked
    def logit_weights(
        self, tokens: Sequence[int] | None = None
    ) -> tuple[Float[Tensor, "d_model n"], Float[Tensor, " n"]]:
        """Return W_U and b_U, or only their columns of these tokens."""
        part = self.unembed
        if tokens is not None:
            # Folding the norm into all rows would cost more than the few that are asked for.
            part = replace(part, rows=torch.as_tensor(tokens).long())
        weight, bias = folded_input(part, self.norm)
        # A constant factor of the logits is part of the map, like a gain.
        bias = weight.new_zeros(len(weight)) if bias is None else self.logit_scale * bias
        return self.logit_scale * weight.T, bias

    def logits(self, x: Float[Tensor, "rows d_model"]) -> Float[Tensor, "rows vocab"]:
        """Return the logits of streams after the last layer, after a soft cap, in the type of x."""
        return self.capped(self.uncapped(x))

    def uncapped(self, x: Float[Tensor, "rows d_model"]) -> Float[Tensor, "rows vocab"]:
        """Return the logits before a soft cap.

        A table that is stored in another type is widened block by block, also backward.
        """
        # With the norm before the map: folding it into the rows of all tokens takes longer.
        n, part = self.applied(self.normalised(x)), self.unembed
        weight, bias = part.select(part.as_matrix(part.stored.detach())), part.bias()
        same = weight.dtype == x.dtype and weight.device == x.device
        blocks = []
        for rows in weight.split(len(weight) if same else BLOCK // part.n_in + 1):
            wide = rows.to(x)
            with made_again([(wide, rows)]) if not same else nullcontext():
                blocks.append(n @ wide.T)
        z = torch.cat(blocks, -1) if len(blocks) > 1 else blocks[0]
        return self.logit_scale * (z if bias is None else z + bias.to(x))

    def capped(self, z: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """Return logits after the soft cap, c tanh(z / c), or as they are without one."""
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    @checked
    def value_sources(self, layer: int) -> list[ValueSource]:
        """Return the weights of the heads' values, whose outputs are to be added up.

        The heads read n of their own layer and, with `value_mix`, that of the first one too.
        """
        heads = self.layers[check_index("layer", layer, len(self.layers))].heads
        sources, share = [ValueSource(layer, *heads.value_weights())], heads.v_first_share
        if share is not None:
            first, of_first = self.layers[0].heads, self.layers[0].heads.v_first_share
            assert of_first is not None
            value, bias = first.value_weights()
            # They are multiplied by 1 - the first layer's share; undo that.
            ratio = (share / (1 - of_first)).detach().to(value)
            sources.append(ValueSource(0, ratio * value, ratio * bias))
        return sources

    def embedding_factors(self) -> dict[Moment, float]:
        """Return the factor of the embedding at each moment that writes it to the stream."""
        factors = {Moment.embedding(): 1.0}
        for i, layer in enumerate(self.layers):
            if layer.residual_mix is not None:
                factors[Moment.input(i)] = float(layer.residual_mix[1])
        return factors

    def mixing(self) -> Float64[Tensor, "moments moments"]:
        """Return the factor of a vector written at a moment (column) when it is read (row).

        It is 0 where the read comes first.
        """
        count = Moment.count(len(self.layers))
        # Without mixing a vector stays in the stream unchanged: 1 for every later read.
        mixing = torch.ones(count, count, dtype=torch.float64).tril()
        for i, layer in enumerate(self.layers):
            if layer.residual_mix is not None:
                entry = Moment.input(i)
                # All that was written before this layer is multiplied, for all reads from here on.
                mixing[entry:, :entry] *= float(layer.residual_mix[0])
        return mixing

    def mlp_moment(self, layer: int) -> Moment:
        """Return the moment at which the MLP of a layer reads the stream."""
        return Moment.input(layer) if self.parallel else Moment.attention(layer)

    @property
    def writes(self) -> list[LinearMap]:
        """Maps whose outputs are added to the stream."""
        pairs = [(layer.heads.out, layer.mlp.down) for layer in self.layers]
        return list(chain.from_iterable(pairs))

    def fold_groups(self) -> list[FoldGroup]:
        """Return the maps that read the stream, in the order of the model, grouped by norm."""
        groups: list[FoldGroup] = []
        hidden = None
        if self.hidden_positions is not None:
            hidden = "positions are added between the norm and queries and keys"
        for layer in self.layers:
            heads, mlp = layer.heads, layer.mlp
            routers = () if mlp.router is None else (mlp.router,)
            # Parallel layers may share the norm. Its gain can be folded only into all its readers
            # at once.
            if heads.norm and mlp.norm and heads.norm.module is mlp.norm.module:
                maps = _fused((*heads.reads, *mlp.reads, *routers))
                groups.append(FoldGroup(heads.norm, maps, hidden))
            else:
                groups.append(FoldGroup(heads.norm, _fused(heads.reads), hidden))
                groups.append(FoldGroup(mlp.norm, _fused((*mlp.reads, *routers))))
        return [*groups, FoldGroup(self.norm, [self.unembed])]


def check_ids(size: int, ids: Tensor, name: str = "ids") -> None:
    """Raise unless ids, one at least, are numbers of tokens of a vocabulary of some size."""
    if ids.numel() == 0:
        raise BilensError(f"{name} has shape {tuple(ids.shape)}, expected at least one token")
    check_numbers(name, ids, size, "those of the model's tokens")


def known_parameters(modules: Modules) -> Iterator[nn.Parameter]:
    """Yield every parameter whose role in the model is known."""
    parts: list[LinearMap | Norm | Embedding | None] = [*modules.tables, modules.hidden_positions]
    parts += modules.writes
    for group in modules.fold_groups():
        parts += [group.norm, *group.maps]
    for layer in modules.layers:
        parts += [layer.heads.out_norm, layer.mlp.out_norm, *layer.heads.inner]
        for scalar in (layer.residual_mix, layer.heads.v_first_share, *layer.numbers):
            if scalar is not None:
                yield scalar
    for part in parts:
        if part is not None:
            yield from part.module.parameters(recurse=False)


def _fused(maps: Sequence[LinearMap]) -> list[LinearMap]:
    """Return each module once, with all its outputs."""
    # By parameter: fused maps are of one module, and experts have two parameters in one module.
    return list({id(part.stored): part.fused for part in maps}.values())

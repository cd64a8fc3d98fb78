"""Queries, keys and values of a layer on one text or two, as linear maps of the stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from bilens.errors import BilensError
from bilens.hooks import hooked
from bilens.nn.language.attention import rotate
from bilens.read.linear.secants import NormMap, frozen_norm, norm_secant
from bilens.residual import Moment, ResidualModel, Trace
from bilens.residual.layer_trace import AttentionArguments
from bilens.residual.layers import Heads, folded_input
from bilens.residual.parts import LinearMap, Norm
from bilens.residual.running import attention_call

Pairs = tuple[Int[Tensor, " m"], ...]
"""Numbers of heads, of positions that attend, and of the positions that they attend to."""


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotary positions: coordinate i of a vector y at t becomes cos_ti y_i + sin_ti y_j."""

    # The factor of each coordinate itself; it may have a scale in it.
    cos: Float[Tensor, "time 1 d"]
    sin: Float[Tensor, "time 1 d"]  # the factor of its partner, with its sign
    # j, the other coordinate of the plane in which i turns; i if it does not turn.
    partner: Int[Tensor, " d"]

    @classmethod
    def shown_by(
        cls, rotate: Callable[[Tensor], Sequence[Tensor]], one: Float[Tensor, "time d"]
    ) -> tuple["Rotation", "Rotation"]:
        """Return the rotations of queries and of keys, which turn the same planes.

        They are shown by a function that turns rows of vectors (rows, time, d), as queries and as
        keys; `one` is a row of ones.
        """
        time, d = one.shape
        # Unit vectors, each at some position but the first, where nothing turns, show the partners.
        places = torch.arange(min(1, time - 1), time, device=one.device)
        count = -(-d // len(places))
        unit = torch.arange(count * len(places), device=one.device).reshape(count, -1) % d
        units = one.new_zeros(count, time, d)
        units[:, places] = functional.one_hot(unit, d).to(units)
        shown = torch.stack(tuple(rotate(units)))
        if shown.shape[-1] != d:
            raise BilensError(
                f"positions turn the {d} numbers of a head into {shown.shape[-1]}; expected as "
                "many. Rotary positions need an even number of coordinates"
            )
        turned = shown.abs().sum(0)[:, places]
        turned = turned.scatter(2, unit[..., None], 0)
        largest, other = turned.max(-1)
        partner = torch.arange(d, device=one.device)
        partner[unit[largest > 0]] = other[largest > 0]
        # Ones at one coordinate of each plane return its cosine, and the sine of its partner.
        first = torch.arange(d, device=one.device) <= partner
        ones = torch.stack([first, ~first]).to(one)[:, None].expand(-1, time, -1)
        by_first, by_second = torch.stack(tuple(rotate(ones.contiguous())), 1)[..., None, :]
        cos = torch.where(first, by_first, by_second)
        sin = torch.where(first, by_second, by_first)
        q, k = (cls(*part, partner) for part in zip(cos, sin, strict=True))
        return q, k

    def __getitem__(self, at: Int[Tensor, " m"]) -> "Rotation":
        """Return the rotations at some of the positions."""
        return Rotation(self.cos[at], self.sin[at], self.partner)

    def push(self, y: Float[Tensor, "time k d"]) -> Float[Tensor, "time k d"]:
        """Return vectors of each position, turned."""
        return self.cos * y + self.sin * y[..., self.partner]

    def pull(self, w: Float[Tensor, "time k d"]) -> Float[Tensor, "time k d"]:
        """Return the directions before the rotation that directions after it read: the adjoint."""
        return self.cos * w + (self.sin * w)[..., self.partner]


@dataclass(frozen=True, eq=False)
class Projection:
    """Queries, keys or values: rotation R, inner norm, W and the stream's norm, in turn."""

    moment: Moment  # of the stream
    stream: NormMap  # the norm between the stream and W, with the gain folded into W
    # W of each head; heads that share keys and values have one.
    weight: Float[Tensor, "kv_heads d_head d_model"]
    # The part of the projection that the flow splits: its change, or all of it.
    change: Float[Tensor, "heads time d_head"]
    middle: Float[Tensor, "heads time d_head"]  # the mean of both runs
    # Added after W at each position; None where it does not count.
    bias: Float[Tensor, "#time kv_heads d_head"] | None = None
    # The norm of queries or keys, of each head or of all heads together; None without one.
    inner: NormMap | None = None
    gain: Float[Tensor, "kv_heads d_head"] | None = None  # of the inner norm
    rotation: Rotation | None = None  # R; None without rotary positions
    over_heads: bool = False  # whether the inner norm is over all heads together
    sharing: int = 1  # number of heads that share a W
    # Number of the first head of `change`, `middle` and `constant`; W, bias and norms are those of
    # all heads.
    first: int = 0
    # Last coordinate of each head, which no input changes; None without one.
    constant: Float[Tensor, " heads"] | None = None

    def of_heads(self, heads: slice) -> "Projection":
        """Return the projection of some of the heads, which are counted from the first of them."""
        constant = None if self.constant is None else self.constant[heads]
        change, middle = self.change[heads], self.middle[heads]
        return replace(self, change=change, middle=middle, constant=constant, first=heads.start)

    def pull(
        self, rows: Float[Tensor, "m d_head"], head: Int[Tensor, " m"], at: Int[Tensor, " m"]
    ) -> tuple[Float[Tensor, "m d_model"], Float[Tensor, " m"]]:
        """Return the directions of the stream that rows of heads read, and the biases' share."""
        # From the last operation to the first: constant, rotation, gain, inner norm, W, norm.
        if self.constant is not None:
            without = replace(self, constant=None)
            x, added = without.pull(rows[:, :-1], head, at)
            # Between two texts a constant does not change, and biases are None.
            return x, added if self.bias is None else added + rows[:, -1] * self.constant[head]
        shared = (self.first + head) // self.sharing
        if self.rotation is not None:
            rows = self.rotation[at].pull(rows[:, None])[:, 0]
        if self.gain is not None:
            rows = rows * self.gain[shared]
        if self.inner is not None and self.over_heads:
            return self._pull_whole(rows, shared, at)
        if self.inner is not None:
            rows = self.inner[at, shared].pull(rows)
        x = products_by_head(rows, shared, self.weight)
        return self.stream[at].pull(x), self._constants(rows[:, None], shared[:, None], at)

    def pull_all(
        self, rows: Float[Tensor, "heads time d_head"]
    ) -> tuple[Float[Tensor, "time d_model"], Float[Tensor, ""]]:
        """Return the directions that rows of all heads and positions read, summed over heads."""
        added = rows.new_zeros(())
        if self.constant is not None:
            if self.bias is not None:
                added = (rows[..., -1] * self.constant[:, None]).sum()
            rows = rows[..., :-1]
        # All is linear, so that heads that share keys and values are summed first.
        rows = rows.unflatten(0, (-1, min(self.sharing, len(rows)))).sum(1).transpose(0, 1)
        start = self.first // self.sharing
        shared = slice(start, start + rows.shape[1])
        if self.rotation is not None:
            rows = self.rotation.pull(rows)
        if self.gain is not None:
            rows = rows * self.gain[shared]
        if self.inner is not None and self.over_heads:
            # As in `_pull_whole`.
            all_heads = rows.new_zeros(len(rows), *self.weight.shape[:2])
            all_heads[:, shared] = rows
            rows = self.inner.pull(all_heads.flatten(1)).reshape(all_heads.shape)
            shared = slice(None)
        elif self.inner is not None:
            rows = self.inner[:, shared].pull(rows)
        if self.bias is not None:
            added = added + (rows * self.bias[:, shared]).sum()
        return self.stream.pull(rows.flatten(1) @ self.weight[shared].flatten(0, 1)), added

    def _pull_whole(self, rows: Tensor, head: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same for a norm over all heads, by which each reads the others' outputs."""
        assert self.inner is not None
        # The norm divides by the size of all heads together, so a row of one head reaches them all.
        all_heads = rows.new_zeros(len(rows), *self.weight.shape[:2])
        all_heads[torch.arange(len(rows), device=rows.device), head] = rows
        pulled = self.inner[at].pull(all_heads.flatten(1))
        x = self.stream[at].pull(pulled @ self.weight.flatten(0, 1))
        every = torch.arange(len(self.weight), device=rows.device).expand(len(rows), -1)
        return x, self._constants(pulled.unflatten(1, self.weight.shape[:2]), every, at)

    def _constants(self, rows: Tensor, head: Tensor, at: Tensor) -> Float[Tensor, " m"]:
        if self.bias is None:
            return rows.new_zeros(len(rows))
        position = at if len(self.bias) > 1 else torch.zeros_like(at)
        return (rows * self.bias[position[:, None], head]).sum((1, 2))


def products_by_head(
    rows: Float[Tensor, "m n"], head: Int[Tensor, " m"], weight: Float[Tensor, "heads n n_out"]
) -> Float[Tensor, "m n_out"]:
    """Return the product of each row with the matrix of its head."""
    # In the order of heads, so that each matrix is used once: gathered for each row they would take
    # the memory of all heads' outputs many times. Only the counts are waited for.
    order = head.argsort(stable=True)
    numbers = torch.arange(len(weight), device=head.device)
    counts = (head[:, None] == numbers).sum(0).tolist()
    parts = rows[order].split(counts)
    products = [part @ matrix for part, matrix in zip(parts, weight, strict=True) if len(part)]
    result = rows.new_empty(len(rows), weight.shape[2])
    result[order] = torch.cat([result[:0], *products])
    return result


@dataclass(frozen=True, eq=False)
class Reads:
    """One place where the heads of a layer read the stream: values, queries or keys.

    The flow of head h from s to p through it is A_ps times X . change, with X at p and the change
    at s, or the other way round for queries.
    """

    projection: Projection
    at_source: bool  # whether the change is at s
    weights: Float[Tensor, "heads time time"]  # A
    partner: Float[Tensor, "heads time d_head"]  # X

    @property
    def moment(self) -> Moment:
        """The moment of the stream that is read."""
        return self.projection.moment

    def flows(self) -> Float[Tensor, "heads time time"]:
        """Return the flow of each head and pair of positions."""
        change = self.projection.change
        if self.at_source:
            return self.weights * (self.partner @ change.mT)
        return self.weights * (change @ self.partner.mT)

    def of_pairs(
        self, pairs: Pairs
    ) -> tuple[Int[Tensor, " m"], Float[Tensor, "m d_model"], Float[Tensor, " m"]]:
        """Return positions, directions and constants that pairs of positions of heads read."""
        head, position, source = pairs
        at, other = (source, position) if self.at_source else (position, source)
        rows = self.weights[pairs][:, None] * self.partner[head, other]
        return (at, *self.projection.pull(rows, head, at))

    def total(
        self, among: Bool[Tensor, "heads time time"] | None = None
    ) -> tuple[Float[Tensor, "time d_model"], Float[Tensor, ""]]:
        """Return directions at each position and the constant, summed over all pairs `among`."""
        # Summed over the other end first: one row for each head and position instead of each pair.
        weights = self.weights if among is None else self.weights * among
        rows = (weights.mT if self.at_source else weights) @ self.partner
        return self.projection.pull_all(rows)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The options of a layer's attention on texts of one length.

    The mask has the positions (columns) that each position (rows) attends to. With a soft cap c
    scores are c tanh(z / c), and a sink is a constant score in the softmax's denominator.
    """

    rotations: tuple[Rotation, Rotation] | None
    scale: float
    mask: Bool[Tensor, "time time"]
    softcap: float | None = None
    sink: Float[Tensor, " heads"] | None = None


def attention_call_of(model: ResidualModel, trace: Trace, layer: int) -> AttentionCall:
    """Return the options of a layer's attention on a text.

    In calls of a module of transformers queries and keys before their norms are given, and norms do
    nothing. So the module shows its rotations, for every kind of rotary positions.
    """
    heads, time, options = model.parts.layers[layer].heads, len(trace.ids), dict[str, Any]()
    mask = torch.ones(time, time, dtype=torch.bool, device=model.device).tril()
    d_head = heads.pairs[0][0].n_out // heads.n_heads
    one = torch.ones(time, d_head, dtype=model.parts.dtype, device=model.device)
    if hasattr(heads.module, "queries_keys"):
        places = torch.arange(time, device=model.device)[None]
        _, _, rope = model.model.embed_text(torch.zeros_like(places), places)
        rotations = None
        if rope is not None:
            rotations = Rotation.shown_by(lambda x: [rotate(x[:, None], rope)[:, 0]] * 2, one)
        return AttentionCall(rotations, float(heads.module.scale), mask)  # type: ignore[arg-type]
    if model.parts.queries_keys is not None:
        raise BilensError(
            f"{type(model.model).__name__} was registered with a function of its own for queries "
            "and keys; expected attention on transformers' interface. A flow of one text, without "
            "against, is available"
        )

    def rotated(rows: Tensor) -> list[Tensor]:
        options.update(_options(model, heads, trace.layers[layer].arguments, rows))
        return [options[name][:, 0].to(rows) for name in ("query", "key")]

    shown = Rotation.shown_by(rotated, one)
    # Without a mask attention is causal; a mask of numbers excludes by very negative ones.
    if options["mask"] is not None:
        mask = options["mask"][0, 0, :, :time]
        mask = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    sink = options.get("s_aux", getattr(heads.module, "sinks", None))
    sink = None if sink is None else sink.detach().to(model.parts.dtype)
    return AttentionCall(shown, float(options["scaling"]), mask, options.get("softcap"), sink)


def _options(
    model: ResidualModel,
    heads: Heads,
    arguments: AttentionArguments,
    rows: Float[Tensor, "batch time d_head"],
) -> dict[str, Any]:
    """Return the options of attention if all queries and keys before their norms are rows."""
    rows = rows.to(heads.out.stored.dtype)
    # What the module reads does not matter, as its maps return the rows.
    x = rows[..., :1].expand(*rows.shape[:2], model.d_model)
    maps = {part.module for part in (*heads.pairs[0], heads.value)}
    given = partial(_in_every_head, heads.pairs[0], rows)
    after: list[tuple[nn.Module, Callable[..., Tensor]]] = [(module, given) for module in maps]
    after += [(norm.module, lambda _, args, *__: args[0]) for norm in heads.inner]
    with hooked(after=after):
        options = attention_call(model.model, partial(arguments.call, heads.module, x))
    if options is None:
        raise BilensError(
            f"{type(heads.module).__name__} is not built on the attention interface of "
            "transformers, which a flow between two texts needs. A flow of one text, without "
            "against, is available"
        )
    return options


def _in_every_head(maps: tuple[LinearMap, ...], rows: Tensor, module: nn.Module, *_: Any) -> Tensor:
    """Return an output of a linear map that has the same rows in every head, for any input."""
    # A fused module has the outputs of all its maps; those of values stay 0.
    filled = rows.new_zeros(*rows.shape[:2], LinearMap("", module).n_out)
    for part in maps:
        if part.module is module:
            places = torch.arange(part.n_out) if part.rows is None else part.rows
            filled[..., places] = rows.repeat(1, 1, part.n_out // rows.shape[-1])
    return filled


def projections(
    model: ResidualModel,
    traces: tuple[Trace, Trace | None],
    layer: int,
    rotations: tuple[Rotation, Rotation] | None,
) -> list[tuple[Projection, Projection]]:
    """Return the queries and keys of a layer, one or two pairs, on a text or between two.

    Without a second text its trace is None.
    """
    projector = _Projector(model, traces, layer)
    read = partial(projector.queries_or_keys, rotations)
    return [(read(pair, 0), read(pair, 1)) for pair in range(len(projector.heads.pairs))]


def values(
    model: ResidualModel, traces: tuple[Trace, Trace | None], layer: int
) -> list[Projection]:
    """Return the values of a layer, and with `value_mix` the first layer's share of them."""
    return [
        _Projector(model, traces, source.layer).values(source.value, source.bias)
        for source in model.parts.value_sources(layer)
    ]


class _Projector:
    """Projections of one layer's stream."""

    def __init__(
        self, model: ResidualModel, traces: tuple[Trace, Trace | None], layer: int
    ) -> None:
        self.model, self.moment = model, Moment.input(layer)
        self.heads = model.parts.layers[layer].heads
        runs = [trace.layers[layer] for trace in traces if trace is not None]
        self.n = [run.attn_n for run in runs]
        self.stream = _norm_map(self.heads.norm, [run.attn_input for run in runs])

    def values(self, matrix: Tensor, bias: Tensor) -> Projection:
        """Return values, given V of every head and its bias."""
        runs = [n @ matrix + bias[:, None] for n in self.n]
        return self._projection(matrix.mT, runs, bias=bias[None])

    def queries_or_keys(
        self, rotations: tuple[Rotation, Rotation] | None, number: int, side: Literal[0, 1]
    ) -> Projection:
        """Return queries (side 0) or keys of a pair: W and its bias, the norm, then the rotation.

        The constant of each head is one more coordinate.
        """
        heads, part = self.heads, self.heads.pairs[number][side]
        count = heads.n_kv_heads if side else heads.n_heads
        weight, bias = folded_input(part, heads.norm)
        # Of shape (1, n) or, with positions, (time, n).
        biases = weight.new_zeros(1, len(weight)) if bias is None else bias[None]
        hidden = self.model.parts.hidden_positions
        if hidden is not None:
            # Shortformer's positions are added after the norm, in queries and keys only.
            biases = biases + hidden.weight()[: len(self.n[0])] @ part.weight().T
        flat = [n @ weight.T + biases for n in self.n]
        runs = [y.unflatten(1, (count, -1)) for y in flat]
        norm = heads.inner[side] if heads.inner else None
        # The gain stays apart from the norm's scale: the scale is frozen or a secant, the gain not.
        gain = None if norm is None else norm.gain()
        if getattr(heads.module, "qk_norm", False) and hasattr(heads.module, "queries_keys"):
            # Queries and keys of bilens's own models go through torch's rms_norm, without a gain.
            eps = torch.finfo(weight.dtype).eps
            norm = Norm("", heads.module, centres=False, offset=0.0, eps=eps)
        over_heads = gain is not None and len(gain) == flat[0].shape[1] and count > 1
        inner, given = None, flat if over_heads else runs
        if norm is not None:
            inner = _norm_map(norm, given)
            runs = [norm.normalised(y).reshape(runs[0].shape) for y in given]
        if gain is not None:
            gain = gain.expand(given[0].shape[1:]).reshape(runs[0].shape[1:])
            runs = [y * gain for y in runs]
        rotation = None if rotations is None else rotations[side]
        if rotation is not None:
            runs = [rotation.push(y) for y in runs]
        runs = [y.transpose(0, 1).repeat_interleave(heads.n_heads // count, 0) for y in runs]
        constant = getattr(heads.module, "score_constant", None)
        if constant is not None:
            # c / scale of each head for queries, and 1 for keys. After the rotation, which must not
            # turn it.
            constant = (constant[number].detach() / heads.module.scale).to(runs[0])
            constant = torch.ones_like(constant) if side else constant
            last = constant[:, None, None].expand(*runs[0].shape[:2], 1)
            runs = [torch.cat([y, last], -1) for y in runs]
        return self._projection(
            weight.unflatten(0, (count, -1)),
            runs,
            constant=constant,
            bias=biases.unflatten(1, (count, -1)),
            inner=inner,
            gain=gain,
            rotation=rotation,
            over_heads=over_heads,
        )

    def _projection(
        self, weight: Tensor, runs: list[Tensor], *, bias: Tensor, **options: Any
    ) -> Projection:
        """Return the projection of one run, which is split itself, or of the change between two."""
        # A bias does not change between two texts, and is a part of the flow of one.
        is_single = len(runs) == 1
        return Projection(
            moment=self.moment,
            stream=self.stream,
            weight=weight,
            change=runs[0] if is_single else runs[0] - runs[1],
            middle=runs[0] if is_single else (runs[0] + runs[1]) / 2,
            bias=bias if is_single else None,
            sharing=len(runs[0]) // len(weight),
            **options,
        )


def _norm_map(norm: Norm | None, inputs: list[Tensor]) -> NormMap:
    """Return a norm with its scale frozen on one input, or its secant between two."""
    if len(inputs) == 2:
        return norm_secant(norm, inputs[0], inputs[1])
    (x,) = inputs
    return frozen_norm(norm, torch.ones_like(x[..., 0]) if norm is None else norm.scale(x))

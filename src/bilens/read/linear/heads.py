"""Attention on one text with its patterns frozen, and between two texts with nothing frozen."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bilens.checks import EPS
from bilens.errors import BilensError
from bilens.read.linear.projections import (
    AttentionCall,
    Pairs,
    Projection,
    Reads,
    attention_call_of,
    products_by_head,
    projections,
    values,
)
from bilens.read.linear.secants import (
    NormMap,
    OutputMap,
    mean_square_secant,
    secant_slope,
    softmax_secant,
)
from bilens.residual import ResidualModel, Trace

Role = Literal["values", "queries", "keys"]
BLOCK_BYTES = 32 * 1024**2
"""Heads are taken side by side as long as one pattern of them takes no more than this."""


@dataclass(frozen=True, eq=False)
class RowResponse:
    """The change of mixed values at t by that of the score ts: K_ts (a_t v_s - sum_r b_tr v_r)."""

    response: Float[Tensor, "heads time time"]  # K
    share: Float[Tensor, "heads time"] | None = None  # a; None for 1
    # b, by which the row's other entries respond, since rows are divided by a sum; None if they do
    # not.
    spread: Float[Tensor, "heads time time"] | None = None

    @classmethod
    def of_weights(cls, pattern: Float[Tensor, "heads time time"]) -> "RowResponse":
        """Return the response to weights of a pattern, which is 1."""
        return cls(pattern.new_ones(()).expand_as(pattern))

    def pull(
        self, back: Float[Tensor, "heads time d_head"], middle: Float[Tensor, "heads time d_head"]
    ) -> Float[Tensor, "heads time time"]:
        """Return the direction of each score that directions of mixed values read."""
        # The adjoint of `push`: a score changes its own entry and, by the row's sum, the others.
        along = back @ middle.mT
        others = 0.0 if self.spread is None else (self.spread * along).sum(-1, keepdim=True)
        return self.response * (self._shared(along) - others)

    def push(
        self, scores: Float[Tensor, " m"], middle: Float[Tensor, "heads time d_head"], pairs: Pairs
    ) -> Float[Tensor, "m d_head"]:
        """Return changes of mixed values by changes of some scores."""
        head, position, source = pairs
        rows = middle[head, source]
        if self.share is not None:
            rows = rows * self.share[head, position, None]
        if self.spread is not None:
            rows = rows - (self.spread @ middle)[head, position]
        return (scores * self.response[pairs])[:, None] * rows

    def push_all(
        self, scores: Float[Tensor, "heads time time"], middle: Float[Tensor, "heads time d_head"]
    ) -> Float[Tensor, "heads time d_head"]:
        """Return changes of mixed values at each position by changes of all scores."""
        changes = self.response * scores
        mixed = self._shared(changes) @ middle
        if self.spread is None:
            return mixed
        return mixed - changes.sum(-1, keepdim=True) * (self.spread @ middle)

    def _shared(self, rows: Tensor) -> Tensor:
        return rows if self.share is None else rows * self.share[..., None]


class Mix(NamedTuple):
    """Changes of mixed values: those of scores, when they are asked for, and rows of values.

    The response of values to weights of the pattern itself is 1.
    """

    scores: Callable[[], Float[Tensor, "heads time time"]]
    rows: Float[Tensor, "heads time d_head"]
    response: RowResponse


@dataclass(frozen=True, eq=False)
class HeadBranch:
    """One of the ways through the heads of a layer."""

    role: Role | None  # values, queries or keys; None if they are not told apart
    flows: Float[Tensor, "heads time time"]  # of each head and pair of positions
    reads: list[Reads]  # the places where it reads the stream
    mixes: list[Mix]  # its changes of mixed values

    def mixed(self, pairs: Pairs) -> Float[Tensor, "m d_head"]:
        """Return the mixed values of some heads and pairs of positions."""
        changes = [mix.response.push(mix.scores()[pairs], mix.rows, pairs) for mix in self.mixes]
        return torch.stack(changes).sum(0)

    def mixed_all(self, among: Bool[Tensor, "heads time time"]) -> Float[Tensor, "heads time d"]:
        """Return the mixed values of all pairs that are `among` these, summed at each position."""
        changes = [mix.response.push_all(mix.scores() * among, mix.rows) for mix in self.mixes]
        return torch.stack(changes).sum(0)


class HeadsMap:
    """Some heads of a layer as a linear map: on one text, or between two."""

    first: int  # number of the first of them; everything else counts from there
    out: OutputMap  # the map from all heads' mixed values to the stream
    weight: Float[Tensor, "d_model heads d_head"]  # columns of its weight that are these heads'
    mixing: NormMap  # a norm of each head's mixed values; the identity without one

    def back(self, w: Float[Tensor, "time d_model"]) -> Float[Tensor, "heads time d_head"]:
        """Return the directions of each head's mixed values that directions of the stream read."""
        rows = self.out.pull(w) @ self.weight.flatten(1)
        return self.mixing.pull(rows.unflatten(1, self.weight.shape[1:]).transpose(0, 1))

    def branches(self, back: Float[Tensor, "heads time d_head"]) -> list[HeadBranch]:
        """Return the ways through the heads, whose flows add up to the heads' flow."""
        raise NotImplementedError

    def writes(self, branch: HeadBranch, pairs: Pairs) -> Float[Tensor, "m d_model"]:
        """Return the writes of some heads and pairs of positions."""
        head, position, _ = pairs
        mixed = self.mixing[head, position].push(branch.mixed(pairs))
        rows = products_by_head(mixed, head, self.weight.permute(1, 2, 0))
        return self.out.push(rows, position)

    def written(
        self, branch: HeadBranch, among: Bool[Tensor, "heads time time"]
    ) -> Float[Tensor, "time d_model"]:
        """Return the writes of all pairs that are `among` these, without biases."""
        mixed = self.mixing.push(branch.mixed_all(among))
        rows = mixed.transpose(0, 1).flatten(1) @ self.weight.flatten(1).T
        return self.out.push(rows, torch.arange(len(rows), device=rows.device))


class FrozenHeads(HeadsMap):
    """The attention of a layer on one text, with norms' scales and patterns held fixed.

    With `through_patterns` polynomial patterns vary with the streams that they are made of.
    """

    def __init__(
        self, model: ResidualModel, trace: Trace, layer: int, *, through_patterns: bool = False
    ) -> None:
        heads, of_layer = model.parts.layers[layer].heads, trace.layers[layer]
        self.pattern = of_layer.pattern
        self.out = OutputMap.frozen(
            heads.out, heads.out_norm, of_layer.attn_out_scale, heads.residual_scale
        )
        self.first, self.weight = 0, self.out.weight.unflatten(1, (heads.n_heads, -1))
        self.sources = values(model, (trace, None), layer)
        self.values = torch.stack([part.change for part in self.sources]).sum(0)
        self.mixing = NormMap(torch.ones_like(self.values[..., 0]))
        self.asked = _PolynomialPattern(model, trace, layer) if through_patterns else None

    def branches(self, back: Float[Tensor, "heads time d_head"]) -> list[HeadBranch]:
        """Return the one way through the heads: patterns times values."""
        # A product of n factors that all vary has degree n: each factor carries an nth, as in
        # Euler's theorem on homogeneous functions. Two queries, two keys and a value are five.
        share = 1.0 if self.asked is None else 0.2
        reads = [Reads(part, True, share * self.pattern, back) for part in self.sources]
        along = back @ self.values.mT
        if self.asked is not None:
            reads += self.asked.reads(share * along)
        mix = Mix(lambda: self.pattern, self.values, RowResponse.of_weights(self.pattern))
        return [HeadBranch(None, self.pattern * along, reads, [mix])]

    def last(self) -> tuple[Float[Tensor, "heads time d_model"], Float[Tensor, " d_model"]]:
        """Return the output at the last position of each head from each token, and of biases."""
        bias = torch.stack([part.bias[0] for part in self.sources if part.bias is not None]).sum(0)
        weight = self.weight
        pattern, at = self.pattern[:, -1], torch.tensor(-1, device=bias.device)
        heads = torch.einsum("ht,hte,dhe->htd", pattern, self.values - bias[:, None], weight)
        # The values' bias is multiplied by the row sum of the pattern, which need not be 1.
        constant = torch.einsum("h,he,dhe->d", pattern.sum(-1), bias, weight)
        return self.out.push(heads, at), self.out.push(constant, at) + self.out.bias[-1]


class _PolynomialPattern:
    """Queries and keys of a polynomial pattern, delta_p (q1.k1) (q2.k2), each linear in a stream.

    Both pairs are the same for a score that is squared. `row` is delta, the factor of each row.
    """

    def __init__(self, model: ResidualModel, trace: Trace, layer: int) -> None:
        call = attention_call_of(model, trace, layer)
        pairs = projections(model, (trace, None), layer, call.rotations)
        self.pairs = pairs if len(pairs) == 2 else pairs * 2
        (q1, k1), (q2, k2) = self.pairs
        raw = (q1.change @ k1.change.mT) * (q2.change @ k2.change.mT) * call.mask
        # The factor of a row is found by least squares, which serves every way to scale a row.
        above, below = (raw * trace.layers[layer].pattern).sum(-1), raw.square().sum(-1)
        self.row = torch.where(below > 0, above / below, 0)

    def reads(self, along: Float[Tensor, "heads time time"]) -> list[Reads]:
        """Return the reads of queries and keys, given the flow of a pattern of ones."""
        reads = []
        for this, other in ((0, 1), (1, 0)):
            (q, k), (q_other, k_other) = self.pairs[this], self.pairs[other]
            score = q_other.change @ k_other.change.mT
            # The other score is at its value, since the whole product gives each factor its share.
            weights = (self.row[..., None] * score * along).tril()
            reads += [Reads(q, False, weights, k.change), Reads(k, True, weights, q.change)]
        return reads


@dataclass(frozen=True, eq=False)
class _LayerBetween:
    """The attention of a layer between two texts, of all heads.

    `mixed` are the model's own mixed values in both runs, and `out` the map from these to the
    stream.
    """

    model: ResidualModel
    layer: int
    call: AttentionCall
    pairs: list[tuple[Projection, Projection]]
    sources: list[Projection]
    mixed: tuple[Float[Tensor, "time heads_d_head"], Float[Tensor, "time heads_d_head"]]
    out: OutputMap


def secant_heads(
    model: ResidualModel, traces: tuple[Trace, Trace], layer: int
) -> Iterator["SecantHeads"]:
    """Yield the heads of a layer between two texts in blocks, in their order.

    A block of heads takes some twenty times the memory of its patterns.

    Raises:
        BilensError: the heads mix other values than follow from queries, keys and values.
    """
    heads = model.parts.layers[layer].heads
    call = attention_call_of(model, traces[0], layer)
    mixed = traces[0].layers[layer].mixed, traces[1].layers[layer].mixed
    whole = _LayerBetween(
        model=model,
        layer=layer,
        call=call,
        pairs=projections(model, traces, layer, call.rotations),
        sources=values(model, traces, layer),
        mixed=mixed,
        out=OutputMap.between(heads.out, heads.out_norm, mixed, heads.residual_scale),
    )
    time = len(mixed[0])
    fitting = max(1, BLOCK_BYTES // (time**2 * mixed[0].element_size()))
    # Whole groups of heads that share keys and values, or equal parts of one.
    size = fitting // heads.sharing * heads.sharing
    if not size:
        size = max(n for n in range(1, fitting + 1) if heads.sharing % n == 0)
    for start in range(0, heads.n_heads, size):
        yield SecantHeads(whole, slice(start, min(start + size, heads.n_heads)))


class SecantHeads(HeadsMap):
    """Heads of a layer between two texts, patterns included, with nothing held fixed."""

    def __init__(self, whole: _LayerBetween, block: slice) -> None:
        self.model, self.layer, self.call = whole.model, whole.layer, whole.call
        self.first, self.block, self.out = block.start, block, whole.out
        heads = self.model.parts.layers[self.layer].heads
        self.weight = whole.out.weight.unflatten(1, (heads.n_heads, -1))[:, block]
        self.kind, self.norm = self.model.parts.attention, getattr(heads.module, "norm", "none")
        self.pairs = [(q.of_heads(block), k.of_heads(block)) for q, k in whole.pairs]
        self.sources = [part.of_heads(block) for part in whole.sources]
        self.middle = torch.stack([part.middle for part in self.sources]).sum(0)
        change = torch.stack([part.change for part in self.sources]).sum(0)
        scores = [self._scores(run) for run in (1, -1)]
        patterns, self.responses = self._patterns(scores[0], scores[1])
        self.pattern = (patterns[0] + patterns[1]) / 2
        # middle and half of the change restore the values of both runs.
        mixed = [
            pattern @ (self.middle + sign * change / 2)
            for pattern, sign in zip(patterns, (1, -1), strict=True)
        ]
        self.mixing = NormMap(torch.ones_like(mixed[0][..., 0]))
        # Some heads divide their mixed values by the root mean square: one more secant.
        if self.norm == "rms":
            self.mixing = mean_square_secant(mixed[0], mixed[1], EPS)
            scales = [(y.square().mean(-1, keepdim=True) + EPS).rsqrt() for y in mixed]
            mixed = [y * scale for y, scale in zip(mixed, scales, strict=True)]
        for found, of_model in zip(mixed, whole.mixed, strict=True):
            self._check(found, of_model)

    def branches(self, back: Float[Tensor, "heads time d_head"]) -> list[HeadBranch]:
        """Return the three ways through the heads: values, queries and keys."""
        reads: dict[Role, list[Reads]] = {
            "values": [Reads(part, True, self.pattern, back) for part in self.sources],
            "queries": [],
            "keys": [],
        }
        plain = RowResponse.of_weights(self.pattern)
        mixes: dict[Role, list[Mix]] = {
            "values": [Mix(lambda: self.pattern, part.change, plain) for part in self.sources],
            "queries": [],
            "keys": [],
        }
        for (q, k), response in zip(self.pairs, self.responses, strict=True):
            weights = response.pull(back, self.middle)
            # D(q.k) = k_mean . Dq + q_mean . Dk: the product is shared without a remainder.
            reads["queries"].append(Reads(q, False, weights, k.middle))
            reads["keys"].append(Reads(k, True, weights, q.middle))
            by_query = partial(torch.matmul, q.change, k.middle.mT)
            by_key = partial(torch.matmul, q.middle, k.change.mT)
            mixes["queries"].append(Mix(by_query, self.middle, response))
            mixes["keys"].append(Mix(by_key, self.middle, response))
        branches = []
        for role, parts in reads.items():
            flows = torch.stack([part.flows() for part in parts]).sum(0)
            branches.append(HeadBranch(role, flows, parts, mixes[role]))
        return branches

    def _scores(self, sign: int) -> list[Float[Tensor, "heads time time"]]:
        """Return the scores of the first run (sign 1) or of the second (sign -1)."""
        scores = []
        for pair in self.pairs:
            q, k = (part.middle + sign * part.change / 2 for part in pair)
            scores.append(self.call.scale * (q @ k.mT))
        return scores

    def _patterns(
        self, scores1: list[Tensor], scores0: list[Tensor]
    ) -> tuple[list[Tensor], list[RowResponse]]:
        """Return the patterns of both runs before a norm of the output, and their secants."""
        seen, scale = self.call.mask, self.call.scale
        if self.kind in ("softmax", "differential"):
            halves = [self._softmax(a, b) for a, b in zip(scores1, scores0, strict=True)]
            patterns, response = halves[0]
            if self.kind == "softmax":
                return patterns, [response]
            factor = -float(self.model.parts.layers[self.layer].heads.module.diff_lambda)  # type: ignore[arg-type]
            less, other = halves[1]
            patterns = [a + factor * b for a, b in zip(patterns, less, strict=True)]
            return patterns, [response, RowResponse(factor * other.response, spread=other.spread)]
        # One score is squared, as [0] and [-1] are the same; two scores are multiplied.
        raw = [(scores[0] * scores[-1]).masked_fill(~seen, 0) for scores in (scores1, scores0)]
        middles = [(a + b) / 2 for a, b in zip(scores1, scores0, strict=True)]
        # D z^2 = 2 z_mean Dz, and of a product of two scores each is weighed by the other's mean.
        factors = [2 * middles[0]] if len(middles) == 1 else [middles[1], middles[0]]
        slopes = [(scale * factor).masked_fill(~seen, 0) for factor in factors]
        if self.norm != "sum":
            return raw, [RowResponse(slope) for slope in slopes]
        sums = [part.sum(-1, keepdim=True).clamp_min(EPS) for part in raw]
        # D(y / S) = (1/S)_mean Dy - y_mean DS / (S1 S0), since D(1/S) = -DS / (S1 S0).
        share = (1 / sums[0] + 1 / sums[1]) / 2
        spread = (raw[0] + raw[1]) / 2 / (sums[0] * sums[1])
        patterns = [part / total for part, total in zip(raw, sums, strict=True)]
        return patterns, [RowResponse(slope, share[..., 0], spread) for slope in slopes]

    def _softmax(self, scores1: Tensor, scores0: Tensor) -> tuple[list[Tensor], RowResponse]:
        seen, cap, sink = self.call.mask, self.call.softcap, self.call.sink
        slopes: float | Tensor = self.call.scale
        if sink is not None:
            sink = sink[self.block, None].expand(scores1.shape[:2])
        scores = [scores1, scores0]
        if cap is not None:
            # The chain rule holds for secants as for derivatives: of the cap, times the scale.
            slopes = slopes * secant_slope(lambda z: cap * torch.tanh(z / cap), scores1, scores0)
            scores = [cap * torch.tanh(part / cap) for part in scores]
        patterns, means, total = softmax_secant(scores[0], scores[1], seen, sink)
        # DA_ts = L_ts (Dz_ts - sum_r L_tr Dz_tr / sum L): entry s of the row moves v_s, and all
        # others by the row's mean.
        return patterns, RowResponse(means * slopes, spread=means / total[..., None])

    def _check(self, mixed: Tensor, of_model: Tensor) -> None:
        # A family with another formula would get a flow that adds up to a different model.
        # By how much they may differ, over the largest: models of half precision are coarse.
        by_dtype = {torch.float64: 1e-5, torch.float32: 1e-3}
        close = by_dtype.get(self.model.parts.layers[self.layer].heads.out.stored.dtype, 0.1)
        expected = of_model.unflatten(1, (-1, mixed.shape[2]))[:, self.block].transpose(0, 1)
        gap = float((mixed - expected).abs().max())
        largest = float(of_model.abs().max())
        if not gap <= close * largest:
            raise BilensError(
                f"Attention of layer {self.layer} mixes values up to {largest:.3g} that differ by "
                f"{gap:.3g} from those that follow from its queries, keys and values; expected "
                "softmax attention, or attention of bilens. A flow of one text, without against, "
                "is available"
            )

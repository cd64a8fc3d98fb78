"""Attention on a text: linear with its patterns held fixed, or of degree five with the patterns."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bilens.residual import Moment, ResidualModel, Trace, ValueSource
from bilens.residual.parts import Norm

__all__ = ["FrozenAttention", "Reads", "Source"]

INPUTS = 5
"""Factors of a head without softmax: two queries, two keys and a value, each linear in a stream."""


@dataclass(frozen=True, eq=False)
class Reads:
    """One of the places where the heads of a layer read a stream: values, or queries, or keys.

    What head h adds from s to p is A_ps of `weights` times X . (n M + b), where X stands at p and n
    at s, or the other way round for queries.

    Attributes:
        moment: which stream is read.
        at_source: whether n stands at s.
        weights: A.
        partner: X.
        matrix: M, for all positions or one for each.
        bias: b, likewise.
        norm: of the stream, if there is one.
        scale: what it multiplies by.
    """

    moment: Moment
    at_source: bool
    weights: Float[Tensor, "heads time time"]
    partner: Float[Tensor, "heads time d_head"]
    matrix: Float[Tensor, "times heads d_model d_head"]
    bias: Float[Tensor, "times heads d_head"]
    norm: Norm | None
    scale: Float[Tensor, " time"]

    def each(
        self, head: Int[Tensor, " m"], position: Int[Tensor, " m"], source: Int[Tensor, " m"]
    ) -> tuple[Int[Tensor, " m"], Float[Tensor, "m d_model"], Float[Tensor, " m"]]:
        """Where some pairs of some heads read, in which direction, and what constants add."""
        at, other = (source, position) if self.at_source else (position, source)
        g = self.weights[head, position, source, None] * self.partner[head, other]
        when = at if len(self.matrix) > 1 else torch.zeros_like(at)
        rows = g.new_empty(len(g), self.matrix.shape[2])
        for number in head.unique().tolist():
            mine = head == number
            if len(self.matrix) == 1:
                rows[mine] = g[mine] @ self.matrix[0, number].T
            else:
                matrices = self.matrix[when[mine], number]
                rows[mine] = torch.einsum("me,mde->md", g[mine], matrices)
        return at, self._scaled(rows, at), (g * self.bias[when, head]).sum(-1)

    def total(
        self, among: Bool[Tensor, "heads time time"]
    ) -> tuple[Float[Tensor, "time d_model"], float]:
        """The same, summed at each position over all pairs that are `among` these."""
        kept = self.weights * among
        pairs = "hps,hpe->hse" if self.at_source else "hps,hse->hpe"
        g = torch.einsum(pairs, kept, self.partner)
        if len(self.matrix) == 1:
            rows = torch.einsum("hte,hde->td", g, self.matrix[0])
            added = torch.einsum("hte,he->", g, self.bias[0])
        else:
            rows = torch.einsum("hte,thde->td", g, self.matrix)
            added = torch.einsum("hte,the->", g, self.bias)
        return self._scaled(rows, torch.arange(len(rows), device=rows.device)), float(added)

    def _scaled(self, rows: Tensor, at: Tensor) -> Tensor:
        rows = rows if self.norm is None else self.norm.centred(rows)
        return rows * self.scale[at, None]


@dataclass(frozen=True, eq=False)
class Source:
    """Values that heads read from one stream: of their own layer, or of the first.

    Attributes:
        moment: which stream.
        matrix: V, by the share that it has.
        bias: of it.
        norm: of the stream, if there is one.
        scale: what it multiplies by.
        read: the values.
    """

    moment: Moment
    matrix: Float[Tensor, "heads d_model d_head"]
    bias: Float[Tensor, "heads d_head"]
    norm: Norm | None
    scale: Float[Tensor, " time"]
    read: Float[Tensor, "heads time d_head"]


class FrozenAttention:
    """The attention of a layer on a text, its norms' scales held fixed, and its patterns too.

    Head h writes A^h_ps (n_s V_h + b) O_h from s to p, and biases that belong to no head.

    Args:
        model: the model.
        trace: it on the text.
        layer: number of the layer.
        through_patterns: let polynomial patterns vary with the streams that they are made of.
    """

    def __init__(
        self, model: ResidualModel, trace: Trace, layer: int, *, through_patterns: bool
    ) -> None:
        found, weights = trace.layers[layer], model.heads(layer)
        self.pattern, self.out, self.out_bias = found.pattern, weights.out, weights.out_bias
        self.out_scale = found.attn_out_scale
        self.sources = [_source(model, trace, source) for source in model.value_sources(layer)]
        self.values = torch.stack([part.read for part in self.sources]).sum(0)
        self.asked = _Asked.on(model, trace, layer) if through_patterns else None

    def back(self, w: Float[Tensor, "time d_model"]) -> Float[Tensor, "heads time d_head"]:
        """Directions of what is written, as directions of each head's mixed values."""
        return torch.einsum("hed,pd->hpe", self.out, w * self.out_scale[:, None])

    def flows(self, back: Float[Tensor, "heads time d_head"]) -> Float[Tensor, "heads time time"]:
        """What each head adds along the directions at p from s."""
        return self.pattern * (back @ self.values.mT)

    def reads(self, back: Float[Tensor, "heads time d_head"]) -> list[Reads]:
        """All places where the heads read; what they add is the sum over these."""
        share = 1.0 if self.asked is None else 1 / INPUTS
        found = [
            Reads(
                moment=part.moment,
                at_source=True,
                weights=share * self.pattern,
                partner=back,
                matrix=part.matrix[None],
                bias=part.bias[None],
                norm=part.norm,
                scale=part.scale,
            )
            for part in self.sources
        ]
        if self.asked is not None:
            found += self.asked.reads(share * (back @ self.values.mT), self.sources[0])
        return found

    def writes(
        self, head: Int[Tensor, " m"], position: Int[Tensor, " m"], source: Int[Tensor, " m"]
    ) -> Float[Tensor, "m d_model"]:
        """What some heads write from s to p."""
        mixed = self.pattern[head, position, source, None] * self.values[head, source]
        rows = mixed.new_empty(len(mixed), self.out.shape[2])
        for number in head.unique().tolist():
            mine = head == number
            rows[mine] = mixed[mine] @ self.out[number]
        return rows * self.out_scale[position, None]

    def written(self, among: Bool[Tensor, "heads time time"]) -> Float[Tensor, "time d_model"]:
        """What all pairs that are `among` these write at each position, without biases."""
        mixed = (self.pattern * among) @ self.values
        return torch.einsum("hte,hed->td", mixed, self.out) * self.out_scale[:, None]


def _source(model: ResidualModel, trace: Trace, source: ValueSource) -> Source:
    layer = trace.layers[source.layer]
    return Source(
        moment=Moment.input(source.layer),
        matrix=source.value,
        bias=source.bias,
        norm=model.layer(source.layer).heads.norm,
        scale=layer.attn_scale,
        read=source.values(layer.attn_n),
    )


@dataclass(frozen=True, eq=False)
class _Asked:
    """Queries and keys of a polynomial pattern, delta_p (q1.k1) (q2.k2), each linear in a stream.

    Attributes:
        pairs: queries and keys, twice the same for a score that is squared.
        maps: from [n, 1] to each, for each position, before norms of queries and keys.
        sizes: what those norms multiply by.
        row: delta, what rows are divided by.
    """

    pairs: list[tuple[Tensor, Tensor]]
    maps: list[tuple[Tensor, Tensor]]
    sizes: list[tuple[Tensor, Tensor]]
    row: Float[Tensor, "heads time"]

    @classmethod
    def on(cls, model: ResidualModel, trace: Trace, layer: int) -> "_Asked":
        n, pattern = trace.layers[layer].attn_n, trace.layers[layer].pattern
        each = [model.queries_keys(layer, n[[t]], t) for t in range(len(n))]
        maps = [model.query_key_maps(layer, t) for t in range(len(n))]
        chosen = [0, len(each[0]) - 1]
        pairs, matrices, sizes = [], [], []
        rows = torch.cat([n, torch.ones_like(n[:, :1])], 1)
        for pair in chosen:
            actual = [
                torch.cat([t[pair][side] for t in each], 0).transpose(0, 1) for side in (0, 1)
            ]
            linear = [torch.stack([t[pair][side] for t in maps]) for side in (0, 1)]
            plain = [torch.einsum("td,tdhe->hte", rows, matrix) for matrix in linear]
            pairs.append((actual[0], actual[1]))
            matrices.append((linear[0], linear[1]))
            size = [
                _ratio(a.norm(dim=-1), p.norm(dim=-1)) for a, p in zip(actual, plain, strict=True)
            ]
            sizes.append((size[0], size[1]))
        (q1, k1), (q2, k2) = pairs
        seen = torch.ones(len(n), len(n), dtype=torch.bool, device=n.device).tril()
        raw = (q1 @ k1.mT) * (q2 @ k2.mT) * seen
        row = _ratio((raw * pattern).sum(-1), raw.square().sum(-1))
        return cls(pairs, matrices, sizes, row)

    def reads(self, along: Float[Tensor, "heads time time"], values: Source) -> list[Reads]:
        """Where queries and keys read, given what a pattern of ones would add from s to p."""
        found = []
        for this, other in ((0, 1), (1, 0)):
            q, k = self.pairs[this]
            q_other, k_other = self.pairs[other]
            score = q_other @ k_other.mT
            weights = (self.row[..., None] * score * along).tril()
            for side, partner in ((0, k), (1, q)):
                matrix = self.maps[this][side].transpose(1, 2)
                size = self.sizes[this][side]
                sized = weights * (size[:, None] if side else size[..., None])
                found.append(
                    Reads(
                        moment=values.moment,
                        at_source=side == 1,
                        weights=sized,
                        partner=partner,
                        matrix=matrix[:, :, :-1],
                        bias=matrix[:, :, -1],
                        norm=values.norm,
                        scale=values.scale,
                    )
                )
        return found


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below > 0, above / below, torch.zeros_like(above))

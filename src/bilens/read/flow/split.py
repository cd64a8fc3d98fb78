"""An exact split of a logit, or of its change between two texts, through every layer of a model."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import ROUNDING, check_sum, checked
from bilens.errors import BilensError
from bilens.memory import return_freed
from bilens.read.flow.ablation import named_by_measurement
from bilens.read.flow.directions import TaskDirections
from bilens.read.flow.graph import DRAWN, Flow, FlowBuilder
from bilens.read.flow.nodes import Node, NodeKind
from bilens.read.flow.question import Against, Measured, Other, Question, Target, replaced
from bilens.read.language.names import TokenDirection
from bilens.read.linear.heads import FrozenHeads, HeadBranch, HeadsMap, secant_heads
from bilens.read.linear.mlp import LinearMLP
from bilens.read.linear.projections import Pairs
from bilens.read.linear.secants import frozen_norm, norm_secant
from bilens.residual import Moment, ResidualModel, Trace
from bilens.residual.running import wide_passes
from bilens.settings import Between

KEPT_BYTES = 512 * 1024**2
"""Linear maps of all layers are kept between their two uses if they take no more than this."""
Directions = Literal[0] | Annotated[int, Between(2)] | Literal["all"]
"""Directions of each MLP at each position: 0 for whole MLPs, or at least 2, or all eigenvectors."""

OneText = Annotated[
    str | Int[Tensor, " time"], "one of them; circuit and task_directions take several questions"
]
"""A text, or its tokens' numbers."""


@checked
@torch.no_grad()
def flow(  # noqa: PLR0913  both kinds of flow have one signature
    model: ResidualModel,
    text: OneText,
    token: str | TokenDirection | Float[Tensor, " d_model"],
    position: int = -1,
    *,
    minus: str | Sequence[str] = (),
    against: Against | None = None,
    replace: Mapping[str, str] | None = None,
    target: Target = "logit",
    directions: Directions | TaskDirections = 0,
    threshold: Annotated[float, Between(0, 1, below=True)] = 1e-4,
    through_patterns: bool = False,
    ablate: Annotated[int, Between(0)] = DRAWN,
) -> Flow:
    """Split the change of a logit between two texts, or a logit on one, over a model's parts.

    **Two texts** (`against` or `replace`): nothing is frozen. Let 1 and 0 be the runs, D the
    difference of a quantity and a bar its mean. Every operation is replaced by its secant. That is
    a linear map from the change of its input to the change of its output, without an error:

        product      D(ab) = a_ Db + b_ Da
        activation   D act(g) = [act(g1) - act(g0)] / (g1 - g0) Dg
        norm         D(s c) = s_ Dc + c_ Ds,   Ds = -Dr / [sqrt(r1 r0) (sqrt r1 + sqrt r0)]
        softmax      DA_ts = L_ts (Dz_ts - sum_r L_tr Dz_tr / sum_r L_tr),   L: logarithmic means

    One pass of the adjoints from the logit downwards returns the flow of every node. The flow of a
    head is split into values (the tokens that it moves) and queries and keys (the positions that
    it attends to). The flows of the tokens add up to the change of the logit, exactly.

    **One text**: this is layer-wise relevance propagation with frozen patterns (AttnLRP, RelP).
    Held fixed are norms' scales, attention patterns and the ratios act(g) / g of gates, and every
    product of two factors gives half to each. It sees no effect through a pattern.

    An MLP is a linear map J at each position, of the change of its normalised input z or, on one
    text, of z itself. The flow through it is w . J z, with w the direction that later components
    read. It is one node there, which reads J'w and writes J z. With m `directions` its nodes are m
    Ritz vectors in a Krylov space. Their flows, reads and writes add up exactly.

    - Between two texts they are those of JJ', in a space that holds J z and w, orthonormal in the
      stream. Node u writes (u . J z) u and reads (u . w) J'u. Outputs of nodes are orthogonal, so
      that none holds a part of another's, and what they read is orthogonal too. The stream's metric
      does not depend on how a checkpoint divides a map between a norm's gain and the weights.
    - On one text they are those of Q = sum_r q_r (L_r R_r' + R_r L_r') / 2, whose z'Qz is the flow,
      in a space that holds z and Qz. They are orthonormal in z, before the norm's gain. MLPs
      without a gate have no such form, and JJ' in its place.

    Directions t_i, r_i of a task are nodes likewise: with Dy = J z node i carries
    (w . t_i)(r_i . Dy) and writes t_i (r_i . Dy), and one remainder carries what they leave.

    Args:
        model: any.
        text: the text, or its tokens' numbers.
        token: the token whose logit is split, by name, or a direction u of the last normalised
            stream. A vector has no bias.
        position: the position whose next token is predicted, counted from the end if negative.
        minus: tokens whose mean logit is subtracted.
        against: the second run: a text of as many tokens, its numbers, embeddings at each position
            or one for all positions, or texts. Of several texts the mean embedding is taken.
        replace: words of the text and the words that the second run has instead.
        target: the logit before a soft cap, the log-probability or the probability of the token.
        directions: nodes of an MLP at each position: 0 for the whole MLP, or at least 2 directions,
            the number that predicted effects best. With "all" they are all eigenvectors: left
            singular vectors of J, or eigenvectors of Q. Or those that `task_directions` returns,
            which are the same at all positions and in all texts.
        threshold: share of the absolute flow (over pairs of positions of heads, and over MLPs at
            each position) below which a part belongs to a remainder.
        through_patterns: on one text, split patterns of bilinear and squared attention too. A head
            is a product of five factors then, and each one carries a fifth.
        ablate: number of the strongest nodes whose effect is measured in the running model, and
            which are named by the tokens that it changes.

    Raises:
        BilensError: the flows do not add up to the model's logit.

    Source: Shrikumar et al. 2017 for secants; Golub and Meurant 2010 for Gauss quadrature; for one
        text Achtibat et al. 2024 (arXiv 2402.05602) and Rezaei Jafari et al. 2025 (arXiv
        2508.21258).
    """
    if replace is not None:
        if against is not None:
            raise BilensError("against and replace name the second run, expected one of them")
        against = replaced(text, replace)
    question = Question.of(text, token, minus, against, target=target, position=position)
    adjoints = split(model, question, through_patterns=through_patterns)
    return named_by_measurement(model, adjoints.run(directions, threshold), ablate)


def split(model: ResidualModel, question: Question, *, through_patterns: bool = False) -> "Split":
    """Return the pass of adjoints of a question."""
    if through_patterns and question.has_two_texts:
        raise BilensError(
            "through_patterns=True with a second text, whose flow goes through patterns of every "
            "kind; leave it out"
        )
    if through_patterns and model.parts.attention not in ("bilinear", "squared"):
        raise BilensError(
            f"through_patterns=True, but patterns of {model.parts.attention} attention are not "
            "polynomials of the stream; leave it out to hold them fixed"
        )
    with wide_passes(model.model):
        ids, other = model.ids(question.text, question.position), None
        if question.has_two_texts:
            ids, other = question.both_runs(model)
        return Split(model, model.trace(ids), other, question, through_patterns)


class Split:
    """Adjoints of a number at every moment of the stream, and the parts that it is split over."""

    def __init__(
        self,
        model: ResidualModel,
        trace: Trace,
        other: Other | None,
        question: Question,
        through_patterns: bool,
    ) -> None:
        self.model, self.trace, self.other = model, trace, other
        # A pass of its own: in a batch rounding differs, where nothing changes between the texts.
        self.before = None if other is None else other.trace()
        self.through_patterns = through_patterns
        self.time, norm = len(trace.ids), model.parts.norm
        self.places = torch.arange(self.time, device=model.device)
        self.runs = [trace] if self.before is None else [trace, self.before]
        self.measured = Measured(model, self.runs, question)
        if self.before is None:
            last, self.change = frozen_norm(norm, trace.scale), trace.stream
        else:
            last = norm_secant(norm, trace.stream, self.before.stream)
            self.change = trace.stream - self.before.stream
        # The pass and the split each take all maps: several patterns, and maps of heads with gains.
        # MLPs have copies of their weights with gains on one text, and wide ones of narrow weights.
        mlp, d = model.parts.layers[0].mlp, model.d_model
        copied = other is None or mlp.up.stored.dtype != model.parts.dtype
        numbers = (2 * copied * mlp.up.n_out + 3 * d) * d + 12 * model.n_heads * self.time**2
        self.keeps = model.n_layers * numbers * trace.stream.element_size() <= KEPT_BYTES
        # Not in a cache of bound methods: that is a circle, which memory leaves late.
        self._mlp_maps: dict[int, LinearMLP] = {}
        self._heads_maps: dict[int, list[HeadsMap]] = {}
        self.root = last[self.places[-1:]].pull(self.measured.u[None])[0]
        self.bias = self.measured.bias if self.before is None else 0.0
        self.absolute = 0.0
        # Flows of each head of each layer at each position, by role; one role for one text.
        self.heads: list[dict[str, Tensor]] = []
        self.mlps: list[Tensor] = []  # and of its MLP
        self.above = self._down()

    @property
    def value(self) -> float:
        """The logit, or its change."""
        values = self.measured.values
        return values[0] - values[1] if len(values) == 2 else values[0]

    def run(self, directions: Directions | TaskDirections, threshold: float) -> Flow:
        """Return everything with at least a share `threshold` of the absolute flow as a node."""
        if isinstance(directions, TaskDirections):
            directions.check_fits(self.model)
        n_layers, last = self.model.n_layers, self.time - 1
        self.graph = FlowBuilder(self.model, self.trace)
        node = Node("output", self.value, position=last)
        number = self.graph.add([node], self.root.new_tensor([self.bias]))
        self.graph.read(number, self.places[-1:], Moment.mlp(n_layers - 1), self.root[None])
        # A part without any flow is never split.
        least = max(threshold * self.absolute, torch.finfo(self.root.dtype).tiny)
        for layer in reversed(range(n_layers)):
            self._tidy()
            self._split_mlp(layer, directions, least)
            self._tidy()
            self._split_heads(layer, least)
        self._tidy()
        self._add_leaves()
        self.check()
        return self.graph.flow(
            self.measured.u,
            value=self.value,
            frozen=self._frozen(),
            before=self.before,
            values=self.measured.values,
        )

    def check(self) -> None:
        """Raise unless the flows through every cut between two layers add up to the value.

        The last cut is that of tokens, positions and biases. They do within rounding of the flow,
        and within a hundredth of the value.
        """
        flows = [through for _, rows in self.leaves() for through in self._leaf_flows(rows)]
        through = flows + [node.flow for node in self.graph.nodes if node.kind == "bias"]
        size = sum(map(abs, through)) + sum(map(abs, self.measured.values))
        if self.before is not None:
            # Differences of two runs carry the rounding of what cancels in them.
            size += self.absolute
        cuts = self._cuts()
        # Rounding of one layer reaches the cuts below it, whose terms may be smaller.
        size += max(absolute for _, _, absolute in cuts)
        sums = {f"The flow into layer {number} and all later ones": x for number, x, _ in cuts}
        sums["The flow of tokens, positions and biases"] = float(sum(through))
        # A flow that is far larger than the number may hide it in its rounding. What the number
        # itself is rounded by is relative to |u| |n|.
        n = [self.model.parts.normalised(run.stream[-1]).norm() for run in self.runs]
        least = ROUNDING * float(self.measured.u.norm() * sum(n))
        for name, total in sums.items():
            check_sum(name, total, self.value, size=size, dtype=self.root.dtype)
            if abs(total - self.value) > 0.01 * abs(self.value) + least:
                raise BilensError(
                    f"{name} adds up to {total:.6g}, expected {self.value:.6g}: the flow is "
                    f"{size:.2g} in all, and its terms cancel beyond rounding. Take a text or mean "
                    "embeddings as the second run, not vectors near 0, or dtype=torch.float64"
                )

    def _cuts(self) -> list[tuple[int, float, float]]:
        """Return the flow that enters each layer and all later ones, from the last layer down.

        The nodes there read the stream that the model itself has before the layer, or its change.
        Some of their flow comes from elsewhere: biases, embeddings that are mixed in again, and
        values that the first layer has. Each is the layer, the flow, and the sum of its terms'
        sizes over positions and coordinates.
        """
        graph, mixing, leaves = self.graph, self.model.parts.mixing(), self.leaves()
        ended: dict[int | None, float] = defaultdict(float)
        for node, constant in zip(graph.nodes, torch.cat(graph.constants).tolist(), strict=True):
            ended[node.layer] += constant
        for (layer_of_bias, _), (_, through) in graph.outs.items():
            ended[layer_of_bias] += through
        reads: dict[tuple[int | None, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for number, position, moment, rows in graph.rows["reads"]:
            if len(number):
                place = graph.nodes[int(number[0])].layer, int(moment[0])
                reads[place].append((position, rows))

        def read(layer: int | None, *moments: Moment) -> Tensor:
            total = torch.zeros_like(self.change)
            for position, rows in (part for moment in moments for part in reads[layer, moment]):
                total.index_add_(0, position, rows)
            return total

        layers = range(self.model.n_layers)
        w, left, cuts = read(None, Moment.mlp(layers[-1])), ended[None], []
        late, first = torch.zeros_like(w), self._change_of(0, "attn_input")
        for layer in reversed(layers):
            entry = Moment.input(layer)
            w = w + read(layer, Moment.attention(layer), entry)
            if layer:
                late = late + read(layer, Moment.input(0))
            left += ended[layer]
            left += sum(float((w * rows[entry]).sum()) for _, rows in leaves if entry in rows)
            w = w * float(mixing[entry, entry - 1])
            terms = w * self._change_of(layer, "stream")
            total = float(terms.sum()) + left + float((late * first).sum())
            cuts.append((layer, total, float(terms.abs().sum())))
        return cuts

    def _change_of(self, layer: int, name: str) -> Tensor:
        """Return an array of a layer's trace, or its change between two texts."""
        array: Tensor = getattr(self.trace.layers[layer], name)
        return array if self.before is None else array - getattr(self.before.layers[layer], name)

    def leaves(self) -> list[tuple[NodeKind, dict[Moment, Tensor]]]:
        """Return the leaves of each kind: the moments at which rows are written, and the rows."""
        parts = self.model.parts
        tables: dict[NodeKind, Tensor] = dict(parts.embedding(self.trace.ids).items())
        if self.other is not None:
            # Positions are the same in both runs and have no change.
            tables = {"token": tables["token"] - self.other.tokens}
        leaves: list[tuple[NodeKind, dict[Moment, Tensor]]] = []
        for kind, rows in tables.items():
            factors = parts.embedding_factors().items()
            leaves.append((kind, {moment: factor * rows for moment, factor in factors}))
        return leaves

    def _leaf_flows(self, rows: dict[Moment, Tensor]) -> list[float]:
        entries = [(self.above[moment] * x).sum(-1) for moment, x in rows.items()]
        return torch.stack(entries).sum(0).tolist()

    def _down(self) -> dict[Moment, Tensor]:
        """Return the directions that later components read at each moment, from the top down."""
        w = self.root.new_zeros(self.time, len(self.root))
        w[-1] = self.root
        above: dict[Moment, Tensor] = {}
        parts, mixing = self.model.parts, self.model.parts.mixing()
        # Reads of the first layer's values by later layers, which are added when it is reached.
        late = torch.zeros_like(w)
        for layer in reversed(range(self.model.n_layers)):
            self._tidy()
            written, entry = Moment.attention(layer), Moment.input(layer)
            above[Moment.mlp(layer)] = w
            mlp = self.mlp_map(layer)
            pulled = mlp.pulled(w)
            self.mlps.insert(0, (pulled * mlp.z).sum(-1))
            self.absolute += float(self.mlps[0].abs().sum())
            from_mlp, _ = mlp.read(pulled, self.places)
            del mlp, pulled
            self._tidy()
            above[written] = w + from_mlp if parts.mlp_moment(layer) == written else w
            # The MLP and the heads may read the same stream, in families with parallel layers.
            w = w + from_mlp
            through: dict[str, list[Tensor]] = defaultdict(list)
            for heads in self.heads_maps(layer):
                for branch in heads.branches(heads.back(above[written])):
                    through[branch.role or "values"].append(branch.flows.sum(2))
                    self.absolute += float(branch.flows.abs().sum())
                    for reads in branch.reads:
                        rows, _ = reads.total()
                        # Values may also come from the first layer, whose stream is reached last.
                        if reads.moment == entry:
                            w = w + rows
                        else:
                            late += rows
                # The next block is made without them, which halves its memory.
                del heads, branch, reads
            self.heads.insert(0, {role: torch.cat(flows) for role, flows in through.items()})
            above[entry] = w = w + late if layer == 0 else w
            if (share := float(mixing[entry, entry - 1])) != 1:
                w = w * share
        above[Moment.embedding()] = w
        return above

    def _tidy(self) -> None:
        # Freed arrays stay in the process, and those of MLPs and of heads do not fit into each
        # other's places. Texts whose maps are kept are short.
        if not self.keeps:
            return_freed()

    def mlp_map(self, layer: int) -> LinearMLP:
        """Return the MLP of a layer as a linear map."""
        if layer in self._mlp_maps:
            return self._mlp_maps[layer]
        mlp = LinearMLP.of(self.model, (self.trace, self.before), layer)
        if self.keeps:
            self._mlp_maps[layer] = mlp
        return mlp

    def heads_maps(self, layer: int) -> Iterator[HeadsMap]:
        """Yield the attention of a layer as linear maps, in blocks of heads."""
        if layer not in self._heads_maps:
            heads: Iterator[HeadsMap]
            if self.before is None:
                asked = self.through_patterns
                heads = iter([FrozenHeads(self.model, self.trace, layer, through_patterns=asked)])
            else:
                heads = secant_heads(self.model, (self.trace, self.before), layer)
            if not self.keeps:
                yield from heads
                return
            self._heads_maps[layer] = list(heads)
        yield from self._heads_maps[layer]

    def _split_mlp(self, layer: int, directions: Directions | TaskDirections, least: float) -> None:
        mlp, w = self.mlp_map(layer), self.above[Moment.mlp(layer)]
        self.graph.write_bias(layer, "mlp", w, mlp.out.bias)
        p, output = mlp.pulled(w), mlp.write(mlp.z)
        if directions == 0:
            at = ((w != 0).any(-1) & (mlp.z != 0).any(-1)).nonzero()[:, 0]
            flows = self.mlps[layer].tolist()
            nodes = [Node("mlp", flows[t], layer, "mlp", t, t) for t in at.tolist()]
            self._add_mlp(layer, mlp, nodes, at, p[at], output[at])
            return
        if isinstance(directions, TaskDirections):
            parts = mlp.given(*directions.directions[layer], w, output, least)
        else:
            m = None if directions == "all" else directions
            parts = mlp.directions(w, p, output, m, least)
        at = parts.position
        values = [None] * len(at) if parts.value is None else parts.value.tolist()
        columns = (parts.flow.tolist(), at.tolist(), parts.rank.tolist(), values)
        entries = zip(*columns, strict=True)
        nodes = [Node("direction", f, layer, "mlp", t, t, i + 1, x) for f, t, i, x in entries]
        self._add_mlp(layer, mlp, nodes, at, parts.read, parts.written, parts.vector)
        # The remainder is everything that the directions leave, so that each position adds up.
        # Rounding is none, and neither is what nobody reads.
        flows = (w * output).sum(-1).index_add(0, at, -parts.flow).tolist()
        pulled = p.index_add(0, at, -parts.read)
        left = output.index_add(0, at, -parts.written)
        rounding = 100 * torch.finfo(w.dtype).eps
        large = (pulled.norm(dim=-1) > rounding * p.norm(dim=-1)) & (mlp.z != 0).any(-1)
        large |= (left.norm(dim=-1) > rounding * output.norm(dim=-1)) & (w != 0).any(-1)
        at = large.nonzero()[:, 0]
        nodes = [Node("rest", flows[t], layer, "mlp", t, t) for t in at.tolist()]
        self._add_mlp(layer, mlp, nodes, at, pulled[at], left[at])

    def _add_mlp(
        self,
        layer: int,
        mlp: LinearMLP,
        nodes: list[Node],
        at: Tensor,
        read: Tensor,
        written: Tensor,
        vectors: Tensor | None = None,
    ) -> None:
        rows, constants = mlp.read(read, at)
        number = self.graph.add(nodes, constants, vectors)
        self.graph.read(number, at, self.model.parts.mlp_moment(layer), rows)
        self.graph.write(number, at, Moment.mlp(layer), written)

    def _split_heads(self, layer: int, least: float) -> None:
        graph, written = self.graph, Moment.attention(layer)
        w = self.above[written]
        through, constant, writes = 0.0, 0.0, torch.zeros_like(w)
        left: dict[Moment, Tensor] = {}
        for heads in self.heads_maps(layer):
            if heads.first == 0:
                graph.write_bias(layer, "attention", w, heads.out.bias)
            for branch in heads.branches(heads.back(w)):
                # Pairs below the threshold are summed as one remainder of the layer, in its exact
                # flow.
                strong = branch.flows.abs() >= least
                self._add_heads(layer, heads, branch, strong.nonzero(as_tuple=True))
                among = ~strong
                for reads in branch.reads:
                    rows, added = reads.total(among)
                    left[reads.moment] = left.get(reads.moment, 0) + rows
                    constant += float(added)
                through += float(branch.flows.masked_fill(strong, 0).sum())
                writes = writes + heads.written(branch, among)
            del heads, branch, reads, strong, among
        if not writes.any() and not any(rows.any() for rows in left.values()):
            return
        node = Node("rest", through, layer, "attention")
        remainder = graph.add([node], w.new_tensor([constant])).expand(self.time)
        for moment, rows in left.items():
            graph.read(remainder, self.places, moment, rows)
        graph.write(remainder, self.places, written, writes)

    def _add_heads(self, layer: int, heads: HeadsMap, branch: HeadBranch, pairs: Pairs) -> None:
        """Add nodes of pairs of positions of heads."""
        graph = self.graph
        entries = zip(*(x.tolist() for x in (branch.flows[pairs], *pairs)), strict=True)
        nodes = [
            Node("head", f, layer, "attention", p, s, heads.first + h, role=branch.role)
            for f, h, p, s in entries
        ]
        parts = [reads.of_pairs(pairs) for reads in branch.reads]
        number = graph.add(nodes, torch.stack([added for _, _, added in parts]).sum(0))
        for reads, (at, rows, _) in zip(branch.reads, parts, strict=True):
            graph.read(number, at, reads.moment, rows)
        graph.write(number, pairs[1], Moment.attention(layer), heads.writes(branch, pairs))

    def _add_leaves(self) -> None:
        for kind, rows in self.leaves():
            entries = enumerate(self._leaf_flows(rows))
            nodes = [Node(kind, f, position=p) for p, f in entries]
            number = self.graph.add(nodes, self.root.new_zeros(len(nodes)))
            for moment, x in rows.items():
                self.graph.write(number, self.places, moment, x)
        self.graph.add_biases()

    def _frozen(self) -> tuple[str, ...]:
        if self.before is not None:
            return ()
        layers, config = self.model.parts.layers, self.model.model.config
        normed = any(part.norm is not None for layer in layers for part in (layer.heads, layer.mlp))
        inside = getattr(config, "qk_norm", False) or layers[0].heads.inner
        inside = inside or getattr(config, "attention_norm", "none") != "none"
        ratios = [of_layer.gate_ratio for of_layer in self.trace.layers]
        held = {
            "scales of norms": normed or self.model.parts.has_norms,
            "patterns of attention": not self.through_patterns,
            "norms inside patterns of attention": self.through_patterns and inside,
            "ratios of activations": any((ratio != ratio[0, 0]).any() for ratio in ratios),
        }
        return tuple(name for name, is_so in held.items() if is_so)

"""Nodes removed: from the running model at one position, and from the weights."""

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from bilens.analysis import Reading
from bilens.checks import check_finite, check_index, checked, full_precision
from bilens.errors import BilensError
from bilens.read.flow.graph import Flow
from bilens.read.flow.nodes import Node
from bilens.read.linear.heads import FrozenHeads
from bilens.read.linear.mlp import LinearMLP
from bilens.residual import Moment, ResidualModel
from bilens.residual.layers import MLP, Heads
from bilens.residual.parts import LinearMap, Norm
from bilens.sections import Fact, signed
from bilens.settings import Count, NotNegative


@dataclass(frozen=True, eq=False)
class StreamDirection:
    """A direction of the input of a layer's MLP, at all positions.

    Attributes:
        layer: its number.
        vector: v, of unit length, in the normalised stream, such as a row of `Flow.vectors`; with
            the constant as its last coordinate or without.
    """

    layer: int
    vector: Float[Tensor, " n"]


Part = int | tuple[int, int] | StreamDirection
Change = Callable[[Tensor], None]
"""Changes one row of a batch of inputs or outputs of a module, in place."""
Changes = Sequence[tuple[nn.Module, bool, Change]]
"""The changes of a run: modules, whether their inputs are changed, and the change."""


@dataclass(frozen=True, repr=False)
class Ablation(Reading):
    """The change of a logit when a part of the model is removed or scaled.

    Attributes:
        predicted: the change by the flow through the part.
        actual: the change when the model runs so.
        part: name of the part.
        kind: kind of the part, as nodes have it; edge for an edge.
    """

    predicted: float
    actual: float
    part: str = ""
    kind: str = ""

    def facts(self) -> list[Fact]:
        """Return the predicted and the actual change."""
        part = [("without", self.part)] if self.part else []
        return [*part, ("predicted", signed(self.predicted)), ("actual", signed(self.actual))]

    def frame(self) -> pd.DataFrame:
        """Return one row with the part and both changes."""
        return ablation_frame([self])


def ablation_frame(ablations: Sequence[Ablation]) -> pd.DataFrame:
    """Return the predicted and the actual change of the logit for each part, one row each."""
    columns = {"without": "part", "predicted": "predicted", "actual": "actual"}
    rows = [[getattr(result, name) for name in columns.values()] for result in ablations]
    return pd.DataFrame(rows, columns=list(columns))


@torch.no_grad()
@full_precision
def ablate(
    model: ResidualModel,
    flow: Flow,
    parts: Sequence[Part],
    *,
    scale: NotNegative = 0.0,
    batch_size: Count = 16,
) -> list[Ablation]:
    """Run a model with each of some parts of a flow removed, or its flow scaled.

    The change depends on the part:

    - a head: the entry of its pattern is scaled;
    - a direction of an MLP at its position: its output;
    - a token or position: its vector;
    - an edge from b to a: the part of a's input that b writes, for a only;
    - a `StreamDirection`: the inputs of the MLP's maps along it at all positions.

    Everything else runs as the model does, so that norms, patterns and gates may change.

    Args:
        model: the model of the flow.
        flow: a flow of one text.
        parts: numbers of nodes, pairs of numbers (above, below) for edges, or directions.
        scale: factor of the flow of a node, or of the input along an edge or direction.
        batch_size: parts at once, each a text of its own.

    Raises:
        BilensError: the flow is between two texts, or a node or edge does not exist. Or it is the
            logit, a remainder or a bias.
    """
    if flow.before is not None:
        raise BilensError("flow is a flow between two texts; ablate() expects one of one text")
    runner = _Runner(model, flow, scale)
    planned = [runner.plan(part) for part in parts]
    changes = []
    for start in range(0, len(planned), batch_size):
        changes += runner.run([changed for _, changed in planned[start : start + batch_size]])
    return [
        Ablation(predicted, actual, *_name(flow, part))
        for part, (predicted, _), actual in zip(parts, planned, changes, strict=True)
    ]


@torch.no_grad()
@full_precision
def ablated_together(model: ResidualModel, flow: Flow, numbers: Sequence[int]) -> float:
    """Return the change of the logit of a flow of one text without some nodes, all at once."""
    runner = _Runner(model, flow, 0.0)
    changes = [change for number in numbers for change in runner.node(number)[1]]
    return runner.run([changes])[0]


def _name(flow: Flow, part: Part) -> tuple[str, str]:
    """Return the name of a part, and its kind."""
    if isinstance(part, StreamDirection):
        return f"direction of MLP {part.layer} at all positions", "direction"
    if isinstance(part, tuple):
        above, below = (flow.node(number).name(flow.tokens) for number in part)
        return f"edge from {below} to {above}", "edge"
    node = flow.node(part)
    return node.name(flow.tokens), node.kind


class _Runner:
    """Plans interventions on the text of a flow, and runs them."""

    def __init__(self, model: ResidualModel, flow: Flow, scale: float) -> None:
        self.model, self.flow, self.scale = model, flow, scale
        self.last = model.parts.norm_or_module
        self.heads: dict[int, FrozenHeads] = {}

    def plan(self, part: Part) -> tuple[float, Changes]:
        """Return the predicted change and the changes of a run for a part."""
        if isinstance(part, StreamDirection):
            return self.direction(part)
        return self.edge(*part) if isinstance(part, tuple) else self.node(part)

    def direction(self, part: StreamDirection) -> tuple[float, Changes]:
        """Return the predicted change and the changes of a run for a direction at all positions."""
        mlp = LinearMLP.frozen(self.model, self.flow.trace, part.layer)
        v, less = self._fitted(mlp, part), 1 - self.scale
        added = -less * (mlp.z @ v)
        before, after = (mlp.frozen_units(z) for z in (mlp.z, mlp.z + added[:, None] * v))
        w = self.flow.above(Moment.mlp(part.layer))
        predicted = (mlp.weights(w) * (after - before)).sum()
        return float(predicted), self._reading(part.layer, mlp, v, added)

    def node(self, number: int) -> tuple[float, Changes]:
        """Return the predicted change and the changes of a run for a node."""
        node = self.flow.node(number)
        predicted = (self.scale - 1) * node.flow
        match node.kind:
            case "head":
                return predicted, self._head(node, self.scale * self._value(node))
            case "direction":
                return predicted, self._written(number, self.scale)
            case "token" | "position":
                return predicted, self._scaled(node)
        raise BilensError(
            f"number={number} is {node.kind}, which is not one part of the model to remove; "
            "expected a token, position, head or direction"
        )

    def edge(self, above: int, below: int) -> tuple[float, Changes]:
        """Return the predicted change and the changes of a run for an edge."""
        a, b = self.flow.node(above), self.flow.node(below)
        through = float(self.flow.edges([above, below])[0, 1])
        if b.kind == "bias" or above >= below:
            raise BilensError(
                f"edge=({above}, {below}), expected a node and one below it that is not a bias"
            )
        predicted = (self.scale - 1) * through
        if a.kind == "direction":
            # The direction's output is linear in its input, with everything frozen.
            return predicted, self._written(above, 1 + predicted / a.flow)
        if a.kind == "output":
            less = (1 - self.scale) * self._arriving(below, Moment.mlp(self.model.n_layers - 1))[-1]

            def lessen(x: Tensor) -> None:
                x[-1] -= less.to(x)

            return predicted, [(self.last, True, lessen)]
        if a.kind == "head" and "patterns of attention" in self.flow.frozen:
            value = self._value(a)
            assert a.layer is not None
            for part in self._heads(a.layer).sources:
                n = part.stream.push(self._arriving(below, part.moment))[a.source]
                less = part.weight[a.number] @ n
                value = value - (1 - self.scale) * less
            return predicted, self._head(a, value)
        raise BilensError(
            f"edge=({above}, {below}) ends in a node of kind {a.kind}; expected the logit, a "
            "direction, or a head whose patterns are held fixed"
        )

    def run(self, runs: Sequence[Changes]) -> list[float]:
        """Return the change of the logit in each run."""
        ids = self.flow.ids.expand(len(runs) + 1, -1)
        stream: list[Tensor] = []
        with ExitStack() as stack:
            for row, changes in enumerate(runs, 1):
                for module, before, change in changes:
                    stack.enter_context(_hooked(module, before, row, len(ids), change))
            stack.enter_context(
                self.last.register_forward_pre_hook(lambda _, args: stream.append(args[0][:, -1]))
            )
            self.model.model(ids, use_cache=False)
        x = stream[0].to(self.flow.direction)
        values = self.model.parts.normalised(x) @ self.flow.direction
        return (values[1:] - values[0]).tolist()

    def _heads(self, layer: int) -> FrozenHeads:
        if layer not in self.heads:
            self.heads[layer] = FrozenHeads(
                self.model, self.flow.trace, layer, through_patterns=False
            )
        return self.heads[layer]

    def _value(self, node: Node) -> Tensor:
        assert node.layer is not None
        assert node.number is not None
        return self._heads(node.layer).values[node.number, node.source]

    def _head(self, node: Node, value: Tensor) -> Changes:
        """Let a head take another value from one position to one."""
        assert node.layer is not None
        assert node.number is not None
        number = node.number
        heads, d = self.model.layer(node.layer).heads, len(value)
        weight = self.flow.trace.layers[node.layer].pattern[number, node.position, node.source]
        change = weight * (value - self._value(node))

        def replaced(x: Tensor) -> None:
            x[node.position, number * d : (number + 1) * d] += change.to(x)

        return [(heads.out.module, True, replaced)]

    def _written(self, number: int, scale: float) -> Changes:
        """Scale the output of a direction at its position."""
        node = self.flow.node(number)
        assert node.layer is not None
        mlp = self.model.layer(node.layer).mlp
        rows = (scale - 1) / mlp.residual_scale * self._arriving(number, Moment.mlp(node.layer))

        def add(x: Tensor) -> None:
            x += rows.to(x)

        return [(writer_of(mlp), False, add)]

    def _reading(self, layer: int, frozen: LinearMLP, v: Tensor, added: Tensor) -> Changes:
        """Let the maps of an MLP read so much more of a direction at each position."""
        mlp = self.model.layer(layer).mlp
        if mlp.router is not None:
            raise BilensError(
                f"{mlp.name} has experts, of which no direction can be removed; expected "
                "heads, tokens or positions"
            )
        changes = []
        for part, factor in ((mlp.up, frozen.left), (mlp.gate, frozen.right)):
            if part is not None and factor is not None:
                rows = added[:, None] * (factor[: part.n_out] @ v)
                changes.append((part.module, False, _adding(part, rows)))
        return changes

    def _fitted(self, mlp: LinearMLP, part: StreamDirection) -> Tensor:
        width = self.model.d_model
        if part.vector.shape not in ((width,), (width + 1,)):
            raise BilensError(
                f"direction has shape {tuple(part.vector.shape)} in layer {part.layer}; expected "
                f"({width},) or ({width + 1},), the input of the MLP"
            )
        v = functional.pad(part.vector, (0, width + 1 - len(part.vector))).to(mlp.z)
        if abs(float(v.norm()) - 1) > 1e-3:
            raise BilensError(f"direction has the length {float(v.norm()):.3g}, expected 1")
        return v if mlp.constant else v[:-1]

    def _scaled(self, node: Node) -> Changes:
        parts, position, scale = self.model.parts, node.position, self.scale
        table = parts.embed if node.kind == "token" else parts.positions
        assert table is not None

        def scaled(x: Tensor) -> None:
            x[position] *= scale

        return [(table.module, False, scaled)]

    def _arriving(self, number: int, moment: int) -> Tensor:
        """Return the output of a node in the stream of a moment, at each position."""
        writes = self.flow.writes
        of_node = writes.node == number
        shares = self.flow.mixing[moment, writes.moment[of_node], None]
        x = torch.zeros_like(self.flow.trace.stream)
        return x.index_add(0, writes.position[of_node], shares * writes.vector[of_node])


def writer_of(part: Heads | MLP) -> nn.Module:
    """Return the last module of a part before its output is added to the stream."""
    if part.out_norm is not None:
        return part.out_norm.module
    return part.out.module if isinstance(part, Heads) else part.writer


def _adding(part: LinearMap, added: Tensor) -> Change:
    def add(x: Tensor) -> None:
        rows = slice(None) if part.rows is None else part.rows.to(x.device)
        x[..., rows] += added.to(x)

    return add


def _hooked(module: nn.Module, before: bool, row: int, rows: int, change: Change) -> Any:
    def changed(x: Tensor) -> Tensor:
        # Position vectors may come once for the whole batch.
        x = x.expand(rows, *x.shape[-2:]).clone()
        change(x[row])
        return x

    if before:
        return module.register_forward_pre_hook(lambda _, args: (changed(args[0]), *args[1:]))
    return module.register_forward_hook(lambda _, __, out: changed(out))


@checked
@torch.no_grad()
def edit(
    model: ResidualModel, layer: int, vectors: Float[Tensor, "k n"], *, scale: NotNegative = 0.0
) -> ResidualModel:
    """Return the model with some directions of one MLP's input scaled, or removed.

    With P the projector on the directions and z the normalised stream, the constant included,
    L becomes L (1 - (1 - scale) P), and so does R of a gate. This holds at every position of every
    text. Only the weights of that MLP differ. The result is an ordinary model of its family, and
    `bilens.convert.save_model` writes it. Costs O(k rank n).

    The model stays as it is, and the edited one shares the memory of all other weights with it.
    Vectors are rows in the normalised stream, with the constant as last coordinate, as
    in `Flow.vector`, or without. They need not be orthogonal. Scale 0 removes them.

    Raises:
        BilensError: the layer does not exist, or its MLP has experts or reads after a norm with a
            gain of 0. The vectors do not fit, are zero or not finite, or the scale is negative. Or
            the edit asks for a bias, and the model has none.
    """
    mlp = model.layer(layer).mlp
    if mlp.router is not None:
        raise BilensError(
            f"{mlp.name} has experts, and their router reads the same input; edit "
            "heads, or a model without experts"
        )
    basis = _orthonormal(vectors.to(model.device, model.parts.dtype), model.d_model)
    edited = sharing_weights(model)
    new = edited.layer(layer).mlp
    tensor, units = mlp.factors(), new.up.n_out
    for part, factor in ((new.up, tensor.left[:units]), (new.gate, tensor.right[:units])):
        if part is not None:
            along = (1 - scale) * factor @ basis[:, : factor.shape[1]].T
            _remove(part, new.norm, along, basis)
    return edited


@torch.no_grad()
@checked
def edit_heads(
    model: ResidualModel, layer: int, heads: Sequence[int], *, scale: float = 0.0
) -> ResidualModel:
    """Return the model with the output of some heads of a layer scaled, or removed.

    O_h becomes scale O_h, at every position of every text. A bias of the output stays. Patterns
    and all other weights are unchanged, and the result is an ordinary model of its family.

    Args:
        model: stays as it is; the edited one shares the memory of all other weights with it.
        layer: number of the layer.
        heads: numbers of the heads.
        scale: factor of their output: 0 removes it, -1 reverses it.

    Raises:
        BilensError: the layer or a head does not exist, or the scale is not finite.
    """
    out = model.layer(layer).heads.out
    check_finite(scale=torch.tensor(scale))
    for head in heads:
        check_index("head", head, model.n_heads)
    weight = out.weight().clone()
    weight.unflatten(1, (model.n_heads, -1))[:, list(heads)] *= scale
    edited = sharing_weights(model)
    edited.layer(layer).heads.out.set_weight(weight)
    return edited


@torch.no_grad()
@checked
def edit_head_along(
    model: ResidualModel,
    vectors: Float[Tensor, "k d_head"],
    *,
    layer: int,
    head: int,
    scale: float = -1.0,
    moment: Float[Tensor, "d_head d_head"] | None = None,
) -> ResidualModel:
    """Return the model with some directions of one head's mixed values scaled, or reversed.

    Let z be the head's values, mixed by its pattern, and V the vectors in rows. O_h becomes
    O_h (1 - (1 - scale) V' W) with W = (V M^-1 V')^-1 V M^-1. So z in the span of V is scaled. Of
    all maps that do this, it changes z least over texts with E[z z'] = M. Patterns and all other
    weights are unchanged.

    Args:
        model: stays as it is; the edited one shares the memory of all other weights with it.
        vectors: directions of z, such as its mean change between two kinds of texts.
        layer: number of the layer.
        head: number of the head.
        scale: factor of the directions: 0 removes them, -1 reverses them.
        moment: M; without it the identity, for an orthogonal projection.

    Raises:
        BilensError: the layer or head does not exist, shapes do not fit, or a number is not finite.
            Or the moment is singular, or the vectors are linearly dependent.
    """
    out = model.layer(layer).heads.out
    check_index("head", head, model.n_heads)
    check_finite(scale=torch.tensor(scale), vectors=vectors)
    weight = out.weight().clone()
    block = weight.unflatten(1, (model.n_heads, -1))[:, head]
    d_head = block.shape[1]
    M = torch.eye(d_head) if moment is None else moment
    if vectors.shape[1] != d_head or M.shape != (d_head, d_head):
        raise BilensError(
            f"vectors and moment have shapes {tuple(vectors.shape)} and {tuple(M.shape)}, expected "
            f"(k, {d_head}) and ({d_head}, {d_head}), the size of a head"
        )
    check_finite(moment=M)
    V = vectors.to(weight.device, torch.float64)
    try:
        read = torch.linalg.solve(M.to(V), V.T).T
        read = torch.linalg.solve(V @ read.T, read)
    except RuntimeError as error:
        raise BilensError(
            "moment is singular or vectors are linearly dependent; add a small multiple of the "
            "identity to the moment, or leave out vectors"
        ) from error
    block -= (1 - scale) * (block.double() @ V.T @ read).to(block)
    edited = sharing_weights(model)
    edited.layer(layer).heads.out.set_weight(weight)
    return edited


def sharing_weights(model: ResidualModel) -> ResidualModel:
    """Return a copy of the model whose parameters share their memory until they are set."""
    # The weights were checked when the model was opened, and are not checked again.
    shared: dict[int, Any] = {id(model.tokenizer): model.tokenizer}
    for p in model.model.parameters():
        shared[id(p)] = nn.Parameter(p.data, p.requires_grad)
    return copy.deepcopy(model, shared)


def _orthonormal(vectors: Tensor, width: int) -> Tensor:
    """Return an orthonormal basis of the rows' span, the constant as its last coordinate."""
    if len(vectors) == 0 or vectors.shape[1] not in (width, width + 1):
        raise BilensError(
            f"vectors has shape {tuple(vectors.shape)}, expected rows of {width} numbers, or of "
            f"{width + 1} with the constant"
        )
    check_finite(vectors=vectors)
    if not vectors.any(-1).all():
        raise BilensError("vectors holds a row that is zero and points nowhere; leave it out")
    padded = nn.functional.pad(vectors, (0, width + 1 - vectors.shape[1])).double()
    units = padded / padded.norm(dim=-1, keepdim=True)
    _, sizes, rows = torch.linalg.svd(units, full_matrices=False)
    return rows[sizes > 1e-6].to(vectors)


def _remove(part: LinearMap, norm: Norm | None, along: Tensor, basis: Tensor) -> None:
    """W z - along (basis z) by weights and bias alone; z = [n, 1] and W reads g n + b."""
    read, constant = basis[:, :-1], basis[:, -1]
    bias = None if norm is None else norm.bias()
    if norm is not None:
        gain = norm.gain()
        if not gain.all():
            raise BilensError(
                f"{norm.name} has a gain of 0, so that no map behind it reads what is removed"
            )
        read = read / gain
    added = -along @ constant
    if bias is not None:
        added = added + along @ (read @ bias)
    weight, old = part.weight() - along @ read, part.bias()
    if old is None and added.abs().max() > 1e-6 * weight.abs().max():
        raise BilensError(
            f"{part.name} has no bias, which these vectors ask for: they hold a share of the "
            "constant; leave their last coordinate out"
        )
    part.set_weight(weight)
    if old is not None:
        part.set_bias(old + added)

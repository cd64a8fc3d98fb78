"""Adjoints of a number at every part of a model, layer by layer from the last."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bilens.errors import BilensError
from bilens.flows.modules import Hook, module_hooks
from bilens.flows.rules import Leaf, Rules, make_leaf
from bilens.flows.secants import UnknownOperationError
from bilens.hooks import hooked
from bilens.memory import return_freed
from bilens.progress import progress_bar
from bilens.transformer.experts import ExpertCall
from bilens.transformer.mixing import Mix
from bilens.transformer.places import LayerPlaces, Places
from bilens.transformer.running import first_input, first_output, with_input

Score = Callable[[Float[Tensor, "texts time d_model"]], Float[Tensor, " texts"]]
"""A number of the stream after the last layer, for each text."""


@dataclass(frozen=True, eq=False)
class GraphCut:
    """A place at which the graph of a pass is cut: it ends in `value`, and goes on from `leaf`."""

    value: Tensor
    leaf: Tensor

    @classmethod
    def of(cls, value: Tensor) -> "GraphCut":
        """Cut the graph at an activation."""
        return cls(value, make_leaf(value))


@dataclass(eq=False)
class LayerGraph:
    """The graph of one layer, from the stream before it to that after it, and the adjoints in it.

    Adjoints are those of all texts, and None where nothing is read.
    """

    stream: GraphCut  # before the layer
    heads: GraphCut | None = None  # mixed values of all heads, side by side
    mlp: GraphCut | None = None  # output of the MLP
    cuts: list[GraphCut] = field(default_factory=list)  # both, in the order of the pass
    out: GraphCut | None = None  # output of the layer, where graphs are not kept
    mixes: list[Mix] = field(default_factory=list)
    experts: tuple[ExpertCall, Tensor] | None = None  # the call of the MLP's experts, its output
    leaves: list[Leaf] = field(default_factory=list)
    after: Tensor = field(init=False)  # the stream after the layer, in the graph
    of_heads: Float[Tensor, "texts time width"] | None = None
    of_mlp: Float[Tensor, "texts time d_model"] | None = None
    of_leaves: list[Tensor | None] = field(default_factory=list)
    passes: bool = False  # whether a vector in the stream passes the layer unchanged

    @cached_property
    def mix(self) -> Mix | None:
        """What the heads mixed, if it is all that the attention's last map reads."""
        if (heads := self.heads) is None:
            return None
        # Sources are positions of the text only where there are as many.
        mixes = (mix for mix in self.mixes if mix.values.shape[2] == mix.output.shape[2])
        return next((mix for mix in mixes if mix.is_all_of(heads.leaf)), None)

    @property
    def inside(self) -> list[Tensor]:
        """Where the graph starts inside the layer: at what was cut, and at leaves."""
        return [*(cut.leaf for cut in self.cuts), *(leaf.value for leaf in self.leaves)]

    def of_experts(self, of_mlp: Tensor) -> Tensor:
        """Return the adjoint at the output of the experts, given that at the output of the MLP."""
        assert self.mlp is not None
        assert self.experts is not None
        (w,) = gradients(self.mlp.value, [self.experts[1]], of_mlp)
        return torch.zeros_like(of_mlp) if w is None else w.reshape(of_mlp.shape)

    def take(self, rules: Rules) -> None:
        """Take what the rules have noted since the last call."""
        self.leaves += rules.leaves
        self.mixes += rules.mixes
        self.experts = rules.experts or self.experts
        rules.leaves, rules.mixes, rules.experts = [], [], None


class Adjoints:
    """A pass of a model under rules, and the adjoints of a number, from the last layer down.

    `layers` goes through the model once; afterwards the adjoints before the first layer are there.

    Args:
        places: the places of the model.
        ids: all texts: the first texts of some questions, then as many second texts.
        score: the number.
        positions: number of the last positions that it reads.
        keep: keep the graphs of all layers; else each layer runs again when it is its turn.
        at: the position of each token, if not all texts have as many.
        lacked: number of the first places that one text of each question lacks.

    Attributes:
        numbers: the number of each text.
        logits: the model's own, after the last token.
        embedding: the embeddings of the tokens.
        calls: arguments of each layer.
        changes_stream: whether the model changes the stream between its layers.
    """

    def __init__(
        self,
        places: Places,
        ids: Int[Tensor, "texts time"],
        score: Score,
        *,
        positions: int = 1,
        keep: bool = True,
        at: Int[Tensor, "texts time"] | None = None,
        lacked: int = 0,
    ) -> None:
        self.places, self.ids, self.keep, self.at, self.lacked = places, ids, keep, at, lacked
        self.questions = len(ids) // 2
        self.graphs: list[LayerGraph] = []
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.first_leaves: list[Leaf] = []
        self.known: list[tuple[int, LayerGraph]] = []
        self.changes_stream, self._left = False, None
        self._run(ids, positions)
        with places.context(), torch.enable_grad(), Rules(len(ids)):
            numbers = score(self.last.leaf)
        self.numbers = numbers.detach()
        ones = torch.ones_like(self.numbers[: self.questions])
        (of_last,) = gradients(numbers, [self.last.leaf], torch.cat([ones, -ones]))
        # A number that no stream changes, as along a vector of zeros.
        self.of_last = torch.zeros_like(self.last.leaf) if of_last is None else of_last
        self.of_first: list[Tensor | None] = [None] * len(self.first)

    def change(self, x: Float[Tensor, "texts *shape"]) -> Float[Tensor, "questions *shape"]:
        """Return the change of an activation between the texts."""
        x = x.detach()
        return x[: self.questions] - x[self.questions :]

    def of_question(self, row: int, w: Float[Tensor, "texts *shape"]) -> Tensor:
        """Return adjoints of the texts of one question, 0 for those of others."""
        only = torch.zeros_like(w)
        only[row :: self.questions] = w[row :: self.questions]
        return only

    # The pass.

    def _run(self, ids: Tensor, positions: int) -> None:
        places, rules = self.places, Rules(len(self.ids))

        def embed(_: Any, __: Any, ___: Any, output: Tensor) -> Tensor:
            self.embedding = GraphCut.of(output)
            return self.embedding.leaf.clone()

        def start(_: Any, __: Any, ___: Any, output: Tensor) -> Tensor:
            leaf = make_leaf(output)
            rules.leaves.append(Leaf("token", leaf))
            return leaf.clone()

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._take(rules)
            graph = LayerGraph(GraphCut.of(self._read(first_input(args, kwargs))))
            self.graphs.append(graph)
            self.calls.append((args, kwargs))
            rules.paused = not self.keep
            return with_input(graph.stream.leaf.clone(), args, kwargs)

        def leave(_: nn.Module, __: Any, ___: Any, output: Any) -> Any:
            rules.paused = False
            self._left = first_output(output)
            if self.keep:
                return None
            self.graphs[-1].out = cut = GraphCut.of(self._left)
            self._left = leaf = cut.leaf.clone()
            several = isinstance(output, (tuple, list))
            return type(output)((leaf, *output[1:])) if several else leaf

        def finish(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if len(self.graphs) < len(places.layers):
                return  # an earlier call of the same module
            self._take(rules)
            self.last = GraphCut.of(self._read(first_input(args, kwargs)))
            # The logits are only compared with the score.
            rules.paused = True

        before: list[Hook] = [(layer.module, enter) for layer in places.layers]
        before.append((places.last, finish))
        after: list[Hook] = [(places.embed, embed), *((table, start) for table in places.tables)]
        after += [(layer.module, leave) for layer in places.layers]
        for layer in places.layers if self.keep else ():
            layer_hooks = self._cutting(layer)
            before += layer_hooks[0]
            after += layer_hooks[1]
        own = module_hooks(places.model, lambda: rules)
        hooks = hooked([*before, *own[0]], [*own[1], *after])
        with hooks, places.context(), torch.enable_grad(), rules:
            self.logits = places.forward(ids, positions, self.at).detach()
        if len(self.graphs) != len(places.layers):
            raise BilensError(
                f"The model ran {len(self.graphs)} of {len(places.layers)} layers, expected each "
                "once; a flow needs a model that runs its layers in their order"
            )

    def _read(self, stream: Tensor) -> Tensor:
        """Return a stream that is read; note whether the layer before has left another one."""
        stream_before, self._left = self._left, None
        if stream_before is not None and stream is not stream_before:
            # Only the last positions may go on to the logits.
            self.changes_stream |= not torch.equal(stream, stream_before[:, -stream.shape[1] :])
        return stream

    def _take(self, rules: Rules) -> None:
        if self.graphs:
            self.graphs[-1].take(rules)
        else:
            self.first_leaves += rules.leaves
            rules.leaves, rules.mixes = [], []

    def _cutting(
        self, layer: LayerPlaces, graph: LayerGraph | None = None
    ) -> tuple[list[Hook], list[Hook]]:
        """Return the hooks that cut the graph at a layer's mixed values and its MLP's output."""

        def current() -> LayerGraph:
            return self.graphs[-1] if graph is None else graph

        def cut_heads(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            of_layer = current()
            of_layer.heads, x = _cut(args[0], len(self.ids), of_layer)
            return (x, *args[1:]), kwargs

        def cut_mlp(_: nn.Module, __: Any, ___: Any, output: Any) -> Any:
            of_layer = current()
            value, *others = output if isinstance(output, tuple) else (output,)
            of_layer.mlp, x = _cut(value, len(self.ids), of_layer)
            return (x, *others) if isinstance(output, tuple) else x

        before: list[Hook] = [] if layer.heads is None else [(layer.heads, cut_heads)]
        after: list[Hook] = [] if layer.mlp is None else [(layer.mlp, cut_mlp)]
        return before, after

    def graph(self, layer: int) -> LayerGraph:
        """Return the graph of a layer, which runs again if it was not kept."""
        if self.keep:
            self.graphs[layer].after = self.above(layer).value
            return self.graphs[layer]
        args, kwargs = self.calls[layer]
        graph, rules = LayerGraph(self.graphs[layer].stream), Rules(len(self.ids))
        place = self.places.layers[layer]
        own, cuts = module_hooks(place.module, lambda: rules), self._cutting(place, graph)
        hooks = hooked([*cuts[0], *own[0]], [*own[1], *cuts[1]])
        with hooks, self.places.context(), torch.enable_grad(), rules:
            args, kwargs = with_input(graph.stream.leaf.clone(), args, kwargs)
            graph.after = first_output(place.module(*args, **kwargs))
        graph.take(rules)
        return graph

    def earlier(self, layer: int) -> list[Tensor]:
        """Return what a layer may read: what comes before all layers, and the streams up to it.

        Layers may read more of earlier ones, which follows from what those cut or chose.
        """
        inside = [x.inside for x in self.graphs[:layer]] if self.places.crosses else []
        streams = [x.stream.leaf for x in self.graphs[: layer + 1]]
        return [*self.first, *chain.from_iterable(inside), *streams]

    @property
    def first(self) -> list[Tensor]:
        """The embeddings of the tokens, and those of further tables."""
        return [self.embedding.leaf, *(leaf.value for leaf in self.first_leaves)]

    def above(self, layer: int) -> GraphCut:
        """Return the cut of the stream after a layer."""
        return self.graphs[layer + 1].stream if layer + 1 < len(self.graphs) else self.last

    def arriving(self, layer: int, sums: "Sums") -> Tensor | None:
        """Take the adjoint at a layer's output from sums, by what comes between it and the next."""
        above, out = self.above(layer), self.graphs[layer].out
        w = sums.pop(above.leaf)
        if w is None or out is None:
            return w
        of_out, *of_first = gradients(above.value, [out.leaf, *self.first], w)
        sums.add_all(self.first, of_first)
        return of_out

    # From the last layer down.

    def layers(self) -> Iterator[tuple[int, LayerGraph]]:
        """Yield the number and the adjoints of each layer, the last one first."""
        if self.known:
            yield from self.known
            return
        # Adjoints of streams, and of the embeddings, which layers may read directly.
        sums = Sums()
        sums.add(self.last.leaf, self.of_last)
        numbers = range(len(self.graphs))
        for layer in progress_bar("layers of the flow", reversed(numbers), total=len(numbers)):
            of_layer = self.pull(layer, sums)
            if self.keep:
                self.known.append((layer, of_layer))
            yield layer, of_layer
            if not self.keep:
                # Arrays of heads and of MLPs do not fit into each other's places.
                del of_layer
                return_freed()
        stream = self.graphs[0].stream
        of_stream = sums.get(stream.leaf)
        if of_stream is not None:
            sums.add_all(self.first, gradients(stream.value, self.first, of_stream))
        self.of_first = [sums.get(x) for x in self.first]

    def pull(self, layer: int, pending: "Sums") -> LayerGraph:
        """Pull the adjoint of the stream after a layer down to its parts and the stream before."""
        graph = self.graph(layer)
        earlier = self.earlier(layer)
        inputs = [*earlier, *graph.inside]
        w = self.arriving(layer, pending)
        graph.passes = w is None
        if w is not None:
            direct = gradients(graph.after, inputs, w)
            pending.add_all(inputs, direct)
            of_stream = direct[len(earlier) - 1]
            graph.passes = of_stream is not None and torch.equal(of_stream, w.to(of_stream))
        for cut in reversed(graph.cuts):
            adjoint = pending.get(cut.leaf)
            if adjoint is not None:
                pending.add_all(inputs, gradients(cut.value, inputs, adjoint))
        graph.of_heads = None if graph.heads is None else pending.pop(graph.heads.leaf)
        graph.of_mlp = None if graph.mlp is None else pending.pop(graph.mlp.leaf)
        graph.of_leaves = [pending.pop(leaf.value) for leaf in graph.leaves]
        return graph


class Sums:
    """Sums of adjoints of some tensors."""

    def __init__(self) -> None:
        self.adjoints: dict[int, Tensor] = {}

    def add(self, x: Tensor, adjoint: Tensor | None) -> None:
        """Add an adjoint of a tensor; None where it is not read."""
        if adjoint is not None:
            total = self.adjoints.get(id(x))
            self.adjoints[id(x)] = adjoint if total is None else total + adjoint.to(total)

    def add_all(self, tensors: Sequence[Tensor], adjoints: Sequence[Tensor | None]) -> None:
        """Add adjoints of the first tensors."""
        for x, adjoint in zip(tensors, adjoints, strict=False):
            self.add(x, adjoint)

    def get(self, x: Tensor) -> Tensor | None:
        """Return the adjoint of a tensor; None where it is not read."""
        return self.adjoints.get(id(x))

    def pop(self, x: Tensor) -> Tensor | None:
        """Return the adjoint of a tensor, and forget it."""
        return self.adjoints.pop(id(x), None)


def _cut(x: Tensor, texts: int, layer: LayerGraph) -> tuple[GraphCut, Tensor]:
    """Return a cut with axes of texts and tokens, which may be one axis of the activation."""
    cut = GraphCut.of(x.reshape(texts, -1, x.shape[-1]))
    layer.cuts.append(cut)
    return cut, cut.leaf.clone().reshape(x.shape)


def gradients(value: Tensor, inputs: Sequence[Tensor], adjoint: Tensor) -> list[Tensor | None]:
    """Pull an adjoint back to some inputs; None for those that the value does not read."""
    if not value.requires_grad:
        return [None] * len(inputs)
    try:
        results = torch.autograd.grad(value, inputs, adjoint, retain_graph=True, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UnknownOperationError(f"no adjoint passes the model: {error}") from None
    return list(results)


def start_flows(adjoints: Adjoints, leaf: Tensor, w: Tensor) -> Float[Tensor, " questions"]:
    """Return the flow that starts at a leaf for each question, w . d of what was chosen."""
    # Models fold further axes into that of texts.
    size = len(leaf) // len(adjoints.ids)
    change = adjoints.change(leaf.unflatten(0, (-1, size)))
    w = w.unflatten(0, (-1, size))[: adjoints.questions]
    return (w * change).flatten(1).sum(1)


def lacked_flows(adjoints: Adjoints, leaf: Leaf, w: Tensor) -> Float[Tensor, "questions lacked"]:
    """Return the flow that starts where only one text has tokens: that these are seen at all."""
    if leaf.kind != "seen" or not adjoints.lacked:
        return w.new_zeros(adjoints.questions, adjoints.lacked)
    change = adjoints.change(leaf.value.unflatten(0, (len(adjoints.ids), -1)))
    terms = w.unflatten(0, (len(adjoints.ids), -1))[: adjoints.questions] * change
    return terms[..., : adjoints.lacked].flatten(1, -2).sum(1)


def token_flows(
    adjoints: Adjoints, of_first: Sequence[Tensor | None]
) -> Float[Tensor, "questions time"]:
    """Return the flows of tokens, from before the first layer."""
    flows = adjoints.embedding.leaf.new_zeros(adjoints.questions, adjoints.ids.shape[1])
    starts = [Leaf("token", adjoints.embedding.value), *adjoints.first_leaves]
    for (kind, value), w in zip(starts, of_first, strict=True):
        # Of texts of unlike length a token has another position, too.
        if w is not None and (kind == "token" or adjoints.lacked):
            terms = w[: adjoints.questions] * adjoints.change(value)
            flows += terms.flatten(2).sum(-1).to(flows)
    return flows

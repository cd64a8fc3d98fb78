"""Tangents: changes of parts that are carried forward through a model, by the rules of flows.

A backward pass of secants is linear in its adjoint, and this is its transpose. Both texts run side
by side, and below them in the first axis as many tangents as are asked for: each operation has its
secant for these. Over any cut of a model, what the changes of its parts become adds up to the
change of all logits between the texts.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bilens.flows.adjoints import Adjoints
from bilens.flows.modules import Hook, module_hooks
from bilens.flows.rules import Rules, is_live, make_leaf, mark
from bilens.flows.secants import Rows, UnknownOperationError
from bilens.hooks import hooked
from bilens.transformer.places import LayerPlaces
from bilens.transformer.running import first_output, with_input


class TangentRules(Rules):
    """Rules of a pass of texts and tangents, which needs no graph.

    Constants are those of the texts: a term that is added to both is none of a tangent.
    """

    def __init__(self, rows: Rows) -> None:
        super().__init__(2 + rows.count)
        self.rows = rows

    def start(self, one_hot: Tensor, like: Tensor) -> Tensor:
        """Return what was chosen, which no part has changed."""
        x = self.spread(one_hot, like)
        return self.rows.join(*self.rows.split(x), x)

    def constant(self, x: Any, like: Any) -> Any:
        """Return a constant term of a sum; it is 0 in the rows of tangents."""
        value = torch.as_tensor(x, dtype=like.dtype, device=like.device)
        return torch.where(self._of_texts(like), value, 0.0)

    def affine(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation; constants that it puts are 0 in rows of tangents."""
        zeros = [torch.zeros_like(x) if is_live(x) else x for x in args]
        constant = func(*zeros, **kwargs)
        result = func(*args, **kwargs)
        return result.sub_(torch.where(self._of_texts(result), 0.0, constant))

    def spread(self, x: Tensor, like: Any) -> Tensor:
        """Return what is no activation in the rows of one; tangents have that of the first text."""
        of = self.rows.of(x, like) if isinstance(like, Tensor) else 0
        if not of:
            return x
        rows = x.unflatten(0, (of, -1))
        tangents = rows[:1].expand(self.rows.count, *rows.shape[1:])
        return torch.cat([rows[:2], tangents]).flatten(0, 1)

    def write(self, func: Any, x: Tensor, index: Any, value: Any) -> None:
        """Write numbers into places of an activation; constants are 0 in the rows of tangents."""
        func(x, index, value)
        if not (isinstance(value, Tensor) and value.requires_grad):
            mask = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
            mask[index] = True
            x.masked_fill_(mask & ~self._of_texts(x), 0.0)

    def in_either(self, mask: Tensor) -> Tensor:
        """Return where something holds in either text, for all rows."""
        rows = mask.unflatten(0, (2 + self.rows.count, -1))
        return rows[:2].any(0).expand_as(rows).flatten(0, 1)

    def _of_texts(self, like: Tensor) -> Tensor:
        """Return which rows of an activation are those of texts, with its axes."""
        axis = int(self.rows.places is not None and len(like) == 1)
        size = like.shape[axis]
        in_rows = self.rows.places is None
        texts = 2 * size // (2 + self.rows.count) if in_rows else 2 * self.rows.time
        column = torch.arange(size, device=like.device) < texts
        return column.view(*[1] * axis, size, *[1] * (like.dim() - axis - 1))


class Start(NamedTuple):
    """A change of a part that is carried forward.

    Attributes:
        layer: its layer.
        place: whether it is in the stream before the layer, in the mixed values of heads, or in the
            output of the MLP.
        position: its position.
        change: of the numbers there.
        first: number of the first of them.
    """

    layer: int
    place: str
    position: int
    change: Float[Tensor, " width"]
    first: int = 0

    def put(self, rows: Float[Tensor, "time width"]) -> None:
        """Add the change to a tangent."""
        rows[self.position, self.first : self.first + len(self.change)] += self.change


class Tangents:
    """Passes of tangents through the layers of a model, between the two texts of a question.

    Args:
        adjoints: the pass of the question under rules.
    """

    def __init__(self, adjoints: Adjoints) -> None:
        self.adjoints, self.places = adjoints, adjoints.places
        if adjoints.changes_stream:
            raise UnknownOperationError(
                f"no tangents pass {type(self.places.model).__name__}, which changes the stream "
                "between its layers"
            )

    def carry(
        self, starts: Sequence[Start], until: int | None = None
    ) -> Float[Tensor, "starts time d_model"]:
        """Return the change of the last stream by each change of a part alone.

        With `until` it is that of the stream before this layer.
        """
        order = sorted(range(len(starts)), key=lambda i: starts[i].layer)
        stream = self.adjoints.graphs[0].stream.leaf
        carried = stream.new_zeros(0, *stream.shape[1:])
        rest = [starts[i] for i in order]
        here: list[Start] = []
        with self.places.context():
            for layer in range(rest[0].layer, len(self.places.layers) if until is None else until):
                here += (new := [start for start in rest if start.layer == layer])
                carried = torch.cat([carried, carried.new_zeros(len(new), *stream.shape[1:])])
                carried = self._layer(layer, carried, here)
        return carried[torch.tensor(order, device=carried.device).argsort()]

    def _layer(self, layer: int, tangents: Tensor, starts: Sequence[Start]) -> Tensor:
        """Carry tangents through a layer, in which some start."""
        rows = Rows(len(tangents))
        place, stream = self.places.layers[layer], self.adjoints.graphs[layer].stream
        args, kwargs = _spread(self.adjoints.calls[layer], rows.count)

        @_aside
        def starting(kind: str, x: Tensor) -> Tensor:
            """Add the changes that start at a place to their tangents."""
            here = [i for i, s in enumerate(starts) if (s.layer, s.place) == (layer, kind)]
            if not here:
                return x
            change = x.new_zeros(rows.count + 2, rows.time, x.shape[-1])
            for i in here:
                starts[i].put(change[2 + i])
            return x + change.reshape(x.shape)

        rows.time = tangents.shape[1]
        hooks = _hooks(place, rows, starts, starting)
        mode = TangentRules(rows)
        own = module_hooks(place.module, lambda: mode)
        x = stream.leaf.detach()
        x = torch.cat([x, tangents.to(x)])
        with (
            torch.enable_grad(),
            hooked([*hooks[0], *own[0]], [*own[1], *hooks[1]]),
            rows.run(),
            mode,
        ):
            x = make_leaf(starting("stream", x))
            args, kwargs = with_input(x, args, kwargs)
            if not args:  # whatever calls a layer by name, it takes the stream first
                args = (kwargs.pop("hidden_states"),)
            try:
                y = first_output(place.module(*args, **kwargs))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise UnknownOperationError(
                    f"no tangents pass layer {layer}, {type(place.module).__name__}: {error}"
                ) from None
        return y.detach()[2:]

    def at_answer(self, tangents: Float[Tensor, "starts time d_model"]) -> Float[Tensor, " starts"]:
        """Return the change of the metric by each change of the last stream."""
        w = self.adjoints.of_last[:1]
        return (w * tangents[:, -w.shape[1] :]).flatten(1).sum(1)

    def logits(
        self, tangents: Float[Tensor, "starts time d_model"], length: int
    ) -> tuple[Float[Tensor, "length 2 vocab"], Float[Tensor, "length starts vocab"]]:
        """Return the logits of both texts, and their changes, at the last positions.

        They are those before a soft cap, as flows have them.
        """
        rows, last = Rows(len(tangents)), self.adjoints.last.leaf.detach()
        x = torch.cat([last[:, -length:], tangents[:, -length:]])
        columns = []
        for place in range(length):
            with torch.enable_grad(), rows.run(), TangentRules(rows):
                z = self._logits(make_leaf(x[:, place]))
            columns.append(z.detach())
        z = torch.stack(columns)
        return z[:, :2], z[:, 2:]

    def _logits(self, x: Tensor) -> Tensor:
        if (modules := self.places.modules) is None:
            return self.places.own_logits(x)
        return modules.uncapped(x)

    def of_token(self, position: int, change: Float[Tensor, " d_model"]) -> Start:
        """Return the start of a token: its change in the stream before the first layer."""
        embedding, stream = self.adjoints.embedding, self.adjoints.graphs[0].stream
        half = torch.zeros_like(embedding.leaf[:1])
        half[0, position] = change / 2
        signs = torch.cat([half, -half])
        with torch.enable_grad():
            g = torch.zeros_like(stream.value).requires_grad_()
            (w,) = torch.autograd.grad(
                stream.value, embedding.leaf, g, create_graph=True, retain_graph=True
            )
            ((first, second),) = torch.autograd.grad(w, g, signs)
        return Start(0, "stream", position, (first - second)[position].detach())


def _hooks(
    place: LayerPlaces,
    rows: Rows,
    starts: Sequence[Start],
    starting: Callable[[str, Tensor], Tensor],
) -> tuple[list[Hook], list[Hook]]:
    """Return hooks at which changes start, and by which tangents skip positions before theirs."""

    @_aside
    def start_heads(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (starting("heads", args[0]), *args[1:]), kwargs

    @_aside
    def start_mlp(_: nn.Module, __: Any, ___: Any, output: Any) -> Any:
        y = starting("mlp", first_output(output))
        return (y, *output[1:]) if isinstance(output, tuple) else y

    # Experts take the tokens of all texts as one list.
    mixes = place.mlp if place.experts is not None else None
    modules = [x for x in dict.fromkeys(place.by_position) if x is not mixes]
    before, after = _skipping(modules, rows, starts)
    if place.heads is not None:
        before = [(place.heads, start_heads), *before]
    if place.mlp is not None:
        after = [*after, (place.mlp, start_mlp)]
    return before, after


def _skipping(
    modules: Sequence[nn.Module], rows: Rows, starts: Sequence[Start]
) -> tuple[list[Hook], list[Hook]]:
    """Return hooks by which modules leave out the positions before those where tangents start."""
    at = [(i, p) for i, start in enumerate(starts) for p in range(start.position, rows.time)]
    if len(at) == rows.count * rows.time:
        return [], []
    numbers, places = torch.tensor(at, device=starts[0].change.device).T

    @_aside
    def cut(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else None
        if not (isinstance(x, Tensor) and x.shape[:2] == (2 + rows.count, rows.time)):
            return None
        rows.places = places
        long_text = torch.cat([x[:2].flatten(0, 1), x[2 + numbers, places]])[None]
        return (long_text, *args[1:]), kwargs

    @_aside
    def join(_: nn.Module, __: Any, ___: Any, y: Any) -> Any:
        if rows.places is None:
            return None
        rows.places = None
        tangents = y.new_zeros(rows.count, rows.time, y.shape[-1])
        tangents = tangents.index_put((numbers, places), y[0, 2 * rows.time :])
        return torch.cat([y[0, : 2 * rows.time].unflatten(0, (2, rows.time)), tangents])

    return [(module, cut) for module in modules], [(module, join) for module in modules]


def _spread(value: Any, count: int) -> Any:
    """Return nested arguments without graphs; tangents have those of the first text."""
    if isinstance(value, Tensor):
        x = value.detach()
        if x.dim() > 2 and len(x) == 2:
            return torch.cat([x, x[:1].expand(count, *x.shape[1:])])
        return x
    if isinstance(value, dict):
        return {name: _spread(x, count) for name, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_spread(x, count) for x in value)
    return value


def _aside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of activations, such as a hook, run outside of rules."""

    def run(*inputs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            result = function(*inputs)
            mark(result)
        return result

    return run

"""Runs of a model in which parts are changed: removed, scaled, added to, or exchanged.

A part has one address everywhere: `mlp.8`, `head.26.0`, and at one position `head.26.0@4`.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bilens.errors import BilensError
from bilens.hooks import first_call, hooked
from bilens.residual.layer_trace import first_input
from bilens.residual.model import ResidualModel
from bilens.residual.running import run, wide_passes

EMBEDDING = -1
"""Layer of the sites before the first layer."""

Number = Callable[[Float[Tensor, "batch time d_model"]], Float[Tensor, " batch"]]
"""A number of the stream after the last layer."""
Function = Callable[[Float[Tensor, "time width"]], Float[Tensor, "time width"]]
"""The value of a site in one run, at the last positions or at all, in place of its own."""

OfBatch = Callable[[Float[Tensor, "rows time width"]], Any]
"""The same for runs side by side; a function that returns None only looks."""


class Part(NamedTuple):
    """The address of a part of a model."""

    # Head or mlp; in flows also token, position, and direction of an MLP.
    kind: Literal["head", "mlp", "token", "position", "direction"]
    layer: int | None = None  # number of its layer; None for tokens and positions
    number: int | None = None  # of the head or direction
    position: int | None = None  # the position that it is limited to; None for all

    def __str__(self) -> str:
        numbers = [self.kind, self.layer, self.number]
        at = "" if self.position is None else f"@{self.position}"
        return ".".join(str(x) for x in numbers if x is not None) + at

    @classmethod
    def parse(cls, address: str, model: ResidualModel) -> "Part":
        """Return the head or MLP of an address such as head.26.0@4."""
        found = re.fullmatch(r"(?:head\.(\d+)\.(\d+)|mlp\.(\d+))(?:@(\d+))?", address)
        if found is None:
            raise BilensError(
                f"{address!r} is no address of a part; expected mlp.LAYER, head.LAYER.NUMBER, or "
                "one with a position, such as head.26.0@4"
            )
        layer, head, mlp, position = (None if x is None else int(x) for x in found.groups())
        at = layer if mlp is None else mlp
        assert at is not None
        if at >= model.n_layers or (head or 0) >= model.n_heads:
            raise BilensError(
                f"{address!r} is not in the model, which has {model.n_layers} layers of "
                f"{model.n_heads} heads"
            )
        return cls("head" if mlp is None else "mlp", at, head, position)


class Site(NamedTuple):
    """A place in a forward pass at which numbers can be changed."""

    module: nn.Module
    before: bool  # its input is changed, and not its output
    layer: int  # number of its layer, from which a run has to be computed again


class Change(NamedTuple):
    """What a site becomes in one run."""

    site: Site
    function: Function


def token_site(model: ResidualModel) -> Site:
    """Return the place of the tokens' embeddings, as they are added to the stream."""
    return Site(model.parts.embed.module, False, EMBEDDING)


def mixed_site(model: ResidualModel, layer: int) -> Site:
    """Return the place of the heads' mixed values of a layer, all heads side by side."""
    return Site(model.parts.layers[layer].heads.out.module, True, layer)


def mlp_site(model: ResidualModel, layer: int) -> Site:
    """Return the place of the output of an MLP, before a norm after it."""
    return Site(model.parts.layers[layer].mlp.module, False, layer)


def adding(rows: Float[Tensor, "time width"]) -> Function:
    """Return the function that adds rows."""
    return lambda x: x + rows[-len(x) :].to(x)


def exchanging(
    values: Float[Tensor, "time width"], keep: Float[Tensor, "*time blocks"]
) -> Function:
    """Return the function to the values of another run, of which a share `keep` stays as it is.

    It is that of each of some blocks of equal width, such as heads, at all positions or at each.
    """

    def exchange(x: Tensor) -> Tensor:
        other = values[-len(x) :].to(x)
        share = keep[-len(x) :] if keep.dim() == 2 else keep.expand(len(x), -1)
        share = share.to(x).repeat_interleave(x.shape[1] // share.shape[1], 1)
        return other + share * (x - other)

    return exchange


def exchanged(part: Part, other: "Run") -> Change:
    """Return the change of a head or MLP to its value of another run, at its positions."""
    if part.kind not in ("head", "mlp"):
        raise BilensError(f"{part} cannot be exchanged by its address; expected a head or an MLP")
    model, layer, columns = other.model, part.layer or 0, slice(None)
    if part.kind == "mlp":
        site, values = mlp_site(model, layer), other.outputs[layer]
    else:
        site, values = mixed_site(model, layer), other.mixed[layer]
        width, number = values.shape[1] // model.n_heads, part.number or 0
        columns = slice(number * width, (number + 1) * width)

    def exchange(x: Tensor) -> Tensor:
        x, given = x.clone(), values[-len(x) :].to(x)
        rows = slice(None)
        if part.position is not None:
            # Counted from the end, since the first positions may be left out.
            place = part.position - len(values) + len(x)
            rows = slice(place, place + 1)
        x[rows, columns] = given[rows, columns]
        return x

    return Change(site, exchange)


def mixture(
    other: "Run", keep: Float[Tensor, "layers parts"] | Float[Tensor, "layers time parts"]
) -> list[Change]:
    """Return the changes by which every part keeps a share, and takes the others of another run.

    `keep` is the share of each head of a layer, and of its MLP as the last, at all positions or at
    each. 1 is the part as it is.
    """
    changes = []
    for layer, shares in enumerate(keep):
        heads, mlp = shares[..., :-1], shares[..., -1:]
        values = other.mixed[layer], other.outputs[layer]
        changes += [
            Change(mixed_site(other.model, layer), exchanging(values[0], heads)),
            Change(mlp_site(other.model, layer), exchanging(values[1], mlp)),
        ]
    return changes


def embedded(
    model: ResidualModel, embeddings: Float[Tensor, "*batch time d_model"]
) -> AbstractContextManager[None]:
    """Let the model read given embeddings in place of its tokens' as long as this runs."""
    table = model.parts.embed

    def replace_output(_: nn.Module, args: tuple[Any, ...], __: Any, output: Tensor) -> Tensor:
        # Some families scale inside the embedding and some after it.
        stored = table.weight()[args[0]]
        wide = output.to(stored)
        scaled = (wide - table.scale * stored).norm() <= (wide - stored).norm()
        factor = 1.0 if scaled else 1 / table.scale
        # Logits of a long text are computed again in a run of its last positions.
        rows = embeddings if embeddings.dim() == 1 else embeddings[..., -output.shape[-2] :, :]
        return (factor * rows).expand_as(output).to(output.dtype)

    return hooked(after=[(table.module, replace_output)])


def streams(model: ResidualModel, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time d"]:
    """Return the streams of texts after the last layer."""
    # Logits of all positions would take longer than the layers of a small model.
    last = model.parts.norm_or_module
    args, kwargs = first_call(last, lambda: run(model.model, ids))
    return first_input(last, args, kwargs, None)


@dataclass(frozen=True, eq=False)
class Run:
    """A run of a model on one text, from which changed runs start at their first changed layer."""

    model: ResidualModel
    ids: Int[Tensor, " time"]
    tokens: Float[Tensor, "time d_model"]  # the embeddings of its tokens
    # Input and other arguments of each layer.
    calls: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]]
    # Mixed values of the heads of each layer, all heads side by side.
    mixed: list[Float[Tensor, "time all_heads"]]
    outputs: list[Float[Tensor, "time d_model"]]  # outputs of the MLP of each layer, before a norm
    stream: Float[Tensor, "time d_model"]  # the stream after the last layer
    # Outputs of the maps and MLPs, which take each position by itself.
    by_position: dict[nn.Module, Float[Tensor, "time width"]]

    @classmethod
    def of(
        cls,
        model: ResidualModel,
        ids: Int[Tensor, " time"],
        tokens: Float[Tensor, "time d_model"] | None = None,
    ) -> "Run":
        """Run a model on a text, whose tokens may have other embeddings."""
        tokens = model.parts.embed.rows(ids) if tokens is None else tokens
        calls: dict[nn.Module, tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = {}
        inputs: dict[nn.Module, Tensor] = {}
        outputs: dict[nn.Module, Tensor] = {}

        def keep(module: nn.Module, args: tuple[Tensor, ...], _: Any, y: Tensor) -> None:
            inputs[module], outputs[module] = args[0][0], y[0]

        def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            options = {name: x for name, x in kwargs.items() if name != "hidden_states"}
            calls[module] = first_input(module, args, kwargs, None), args[1:], options

        layers, by_position = model.parts.layers, set[nn.Module]()
        for layer in layers:
            # Queries, keys and values may be one module, whose output is kept once.
            by_position |= {part.module for part in (*layer.heads.reads, layer.heads.out)}
            by_position.add(layer.mlp.module)
        before = [(layer.module, call) for layer in layers]
        hooks = hooked(before, after=[(module, keep) for module in by_position])
        with torch.no_grad(), wide_passes(model.model), embedded(model, tokens), hooks:
            stream = streams(model, ids[None])[0]
        return cls(
            model=model,
            ids=ids,
            tokens=tokens,
            calls=[calls[layer.module] for layer in layers],
            mixed=[inputs[layer.heads.out.module] for layer in layers],
            outputs=[outputs[layer.mlp.module] for layer in layers],
            stream=stream,
            by_position=outputs,
        )

    def again(
        self, sets: Sequence[Sequence[Change]], *, kept: int = 0
    ) -> Float[Tensor, "sets time d_model"]:
        """Return the last stream of a run for each set of changes.

        Runs go side by side in batches, and each joins its batch at its first changed layer. Under
        `torch.enable_grad` the result has gradients by all tensors that the changes hold. At the
        `kept` first positions nothing may be changed, so that maps and MLPs do not run there again.
        """
        n_layers = self.model.n_layers
        first = []
        for of_run in sets:
            first.append(min((change.site.layer for change in of_run), default=n_layers))
        order = sorted(range(len(sets)), key=first.__getitem__)
        # The streams of a batch take about 2 MB; larger ones leave the cache of a processor.
        size = max(1, 2**19 // self.tokens.numel())
        rows: list[Tensor] = [self.stream] * len(sets)
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            sites: dict[Site, list[tuple[int, Function]]] = defaultdict(list)
            for row, number in enumerate(batch):
                for site, function in sets[number]:
                    sites[site].append((row, function))
            changes = {site: _by_row(functions) for site, functions in sites.items()}
            changed = self.batch([first[i] for i in batch], changes, kept=kept)
            for row, number in enumerate(batch):
                rows[number] = changed[row]
        return torch.stack(rows)

    def batch(
        self, first: Sequence[int], changes: Mapping[Site, OfBatch], *, kept: int = 0
    ) -> Float[Tensor, "rows time d_model"]:
        """Return the last streams of runs side by side, with sites changed for all rows at once.

        `first` are the first layers that are computed of each run, in ascending order.
        """
        model, n_layers = self.model, self.model.n_layers
        inside = {site: f for site, f in changes.items() if site.layer < n_layers}
        of_tokens = inside.pop(token_site(model), None)
        outputs = self.by_position if kept else {}
        known = {module: output[:kept] for module, output in outputs.items()}
        with wide_passes(model.model), _cut(known), _changed(len(first), inside):
            if first[0] == EMBEDDING:
                tokens = self.tokens.expand(len(first), -1, -1)
                with embedded(model, tokens if of_tokens is None else of_tokens(tokens)):
                    x = streams(model, self.ids.expand(len(first), -1))
            else:
                x = self.stream[None][:0]
                for number in range(first[0], n_layers):
                    joining = self.calls[number][0].expand(first.count(number), -1, -1)
                    x = self._through(number, torch.cat([x, joining]))
                unchanged = sum(layer >= n_layers for layer in first)
                x = torch.cat([x, self.stream.expand(unchanged, -1, -1)])
        for site, function in changes.items():
            if site.layer >= n_layers:
                x = function(x)
        return x

    def layer(self, number: int, rows: int, changes: Mapping[Site, OfBatch]) -> None:
        """Run one layer on its stream of this text, side by side, with sites changed."""
        with wide_passes(self.model.model), _changed(rows, changes):
            self._through(number, self.calls[number][0].expand(rows, -1, -1))

    def _through(self, number: int, x: Float[Tensor, "rows time d_model"]) -> Tensor:
        _, args, kwargs = self.calls[number]
        output = self.model.parts.layers[number].module(x, *args, **kwargs)
        stream: Tensor = output[0] if isinstance(output, tuple) else output
        return stream


def logit_of(model: ResidualModel, u: Float[Tensor, " d_model"]) -> Number:
    """Return u . n at the last position as a function of the stream, n its normalised value."""
    return lambda x: model.parts.normalised(x[:, -1].to(u)) @ u


def _by_row(functions: Sequence[tuple[int, Function]]) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        for row, function in functions:
            x[row] = function(x[row])
        return x

    return change


def _cut(known: Mapping[nn.Module, Float[Tensor, "kept width"]]) -> AbstractContextManager[None]:
    """Let modules compute only the positions after the first ones, whose outputs are known."""

    def cut(module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
        return (args[0][:, len(known[module]) :].contiguous(), *args[1:]), options

    def join(module: nn.Module, _: Any, __: Any, y: Tensor) -> Tensor:
        return torch.cat([known[module].expand(len(y), -1, -1), y], 1)

    return hooked([(module, cut) for module in known], [(module, join) for module in known])


def _changed(rows: int, changes: Mapping[Site, OfBatch]) -> AbstractContextManager[None]:
    """Let sites within the layers have other numbers in runs side by side."""

    def changed(site: Site, x: Tensor) -> Tensor:
        # Vectors of positions may come once for the whole batch.
        x = x.expand(rows, *x.shape[1:]) if site.layer == EMBEDDING else x
        result = changes[site](x)
        return x if result is None else result

    def change_input(site: Site, _: nn.Module, args: tuple[Any, ...], options: Any) -> Any:
        return (changed(site, args[0]), *args[1:]), options

    def change_output(site: Site, *call: Any) -> Tensor:
        return changed(site, call[-1])

    return hooked(
        [(site.module, partial(change_input, site)) for site in changes if site.before],
        [(site.module, partial(change_output, site)) for site in changes if not site.before],
    )

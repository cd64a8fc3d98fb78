"""Forward passes of a model on texts side by side, and changed passes that start from them."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bilens.errors import BilensError
from bilens.hooks import first_call, hooked
from bilens.residual.changes import EMBEDDING, Change, Function, Site, token_site
from bilens.residual.model import ResidualModel
from bilens.residual.running import run, wide_passes

Number = Callable[[Float[Tensor, "batch time d_model"]], Float[Tensor, " batch"]]
"""A number of the stream after the last layer."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call of a layer, by position and by name, without the stream."""


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass of a model on texts of one length, from which changed passes start.

    Attributes:
        model: the model.
        ids: the texts.
        tokens: the embeddings of their tokens.
        streams: the stream before each layer, and after the last one.
        arguments: of each layer, without the stream.
        by_text: layers and numbers of the arguments' tensors whose first axis has the texts.
        mixed: mixed values of the heads of each layer, all heads side by side.
        outputs: outputs of the MLP of each layer, before a norm.
        by_position: outputs of the maps and MLPs, which take each position by itself.
    """

    model: ResidualModel
    ids: Int[Tensor, "texts time"]
    tokens: Float[Tensor, "texts time d_model"]
    streams: list[Float[Tensor, "texts time d_model"]]
    arguments: list[Arguments]
    by_text: frozenset[tuple[int, int]]
    mixed: list[Float[Tensor, "texts time all_heads"]]
    outputs: list[Float[Tensor, "texts time d_model"]]
    by_position: dict[nn.Module, Float[Tensor, "texts time width"]]

    @classmethod
    def of(
        cls,
        model: ResidualModel,
        ids: Int[Tensor, "texts time"],
        tokens: Float[Tensor, "texts time d_model"] | None = None,
    ) -> "Pass":
        """Run a model on texts of one length, whose tokens may have other embeddings."""
        layers = model.places.layers
        tokens = model.places.rows(ids) if tokens is None else tokens
        inputs: dict[nn.Module, Tensor] = {}
        outputs: dict[nn.Module, Tensor] = {}

        def of_texts(x: Tensor) -> Tensor:
            # Some modules take the tokens of all texts as one list.
            return x.reshape(len(ids), -1, x.shape[-1])

        def keep(module: nn.Module, args: tuple[Tensor, ...], _: Any, y: Any) -> None:
            inputs[module], outputs[module] = of_texts(args[0]), of_texts(_first(y))

        # Queries, keys and values may be one module, whose output is kept once.
        by_position = dict.fromkeys(module for layer in layers for module in layer.by_position)
        parts = {x for layer in layers for x in (layer.heads, layer.mlp) if x is not None}
        with (
            torch.no_grad(),
            wide_passes(model.model),
            embedded(model, tokens),
            hooked(after=[(module, keep) for module in parts | by_position.keys()]),
        ):
            streams, arguments = _recorded(model, ids)
        nothing = tokens[..., :0]
        return cls(
            model=model,
            ids=ids,
            tokens=tokens,
            streams=streams,
            arguments=arguments,
            by_text=_by_text(model, ids, arguments),
            mixed=[inputs[x.heads] if x.heads else nothing for x in layers],
            outputs=[outputs[x.mlp] if x.mlp else nothing for x in layers],
            by_position={module: outputs[module] for module in by_position},
        )

    @property
    def stream(self) -> Float[Tensor, "texts time d_model"]:
        """The stream after the last layer."""
        return self.streams[-1]

    def some(self, texts: Sequence[int]) -> "Pass":
        """Return the pass of some of the texts, which shares memory if they are in a row."""
        first, size = texts[0], len(texts)
        in_a_row = list(texts) == [*range(first, first + size)]
        index: Any = slice(first, first + size) if in_a_row else list(texts)
        total = len(self.ids)

        def chosen(x: Tensor) -> Tensor:
            # Models fold further axes into that of texts.
            return x.unflatten(0, (total, -1))[index].flatten(0, 1)

        arguments = [
            _mapped(chosen, call, self._numbers(layer)) for layer, call in enumerate(self.arguments)
        ]
        return replace(
            self,
            ids=self.ids[index],
            tokens=self.tokens[index],
            streams=[x[index] for x in self.streams],
            arguments=arguments,
            mixed=[x[index] for x in self.mixed],
            outputs=[x[index] for x in self.outputs],
            by_position={module: x[index] for module, x in self.by_position.items()},
        )

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, some of which share it."""
        tensors = [self.ids, self.tokens, *self.streams, *self.mixed, *self.outputs]
        tensors += self.by_position.values()
        for call in self.arguments:
            tensors += _tensors(call)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        return sum(storages.values())

    def changed(
        self, sets: Sequence[Sequence[Change]], *, kept: int = 0
    ) -> Float[Tensor, "sets texts time d_model"]:
        """Return the last streams of all texts with each set of changes.

        Passes go side by side in batches, and each joins its batch at its first changed layer.
        Under `torch.enable_grad` the result has gradients by all tensors that the changes hold. At
        the `kept` first positions nothing may be changed, so that maps and MLPs do not run there
        again.
        """
        n_layers = self.model.n_layers
        first = []
        for changes in sets:
            first.append(min((change.site.layer for change in changes), default=n_layers))
        order = sorted(range(len(sets)), key=first.__getitem__)
        # The streams of a batch take about 2 MB; larger ones leave the cache of a processor.
        size = max(1, 2**19 // self.tokens.numel())
        results: list[Tensor] = [self.stream] * len(sets)
        # What changes embeddings runs as a whole, and nothing that joins later goes with it.
        whole = sum(layer == EMBEDDING for layer in first)
        for of_kind in (order[:whole], order[whole:]):
            for start in range(0, len(of_kind), size):
                batch = of_kind[start : start + size]
                streams = self._batch([sets[i] for i in batch], [first[i] for i in batch], kept)
                for number, stream in zip(batch, streams, strict=True):
                    results[number] = stream
        return torch.stack(results)

    def layer(self, number: int, changes: Sequence[Change], copies: int = 1) -> None:
        """Run one layer on its own stream, in copies side by side, with the same changes of all.

        The functions of the changes get all copies at once, (copies * texts, time, width).
        """
        stream = self.streams[number].repeat(copies, 1, 1)
        sites = _by_site([changes])
        with wide_passes(self.model.model), _changing(sites, [0], len(stream)):
            self._through(number, stream)

    def _batch(
        self, sets: Sequence[Sequence[Change]], first: Sequence[int], kept: int
    ) -> Float[Tensor, "sets texts time d_model"]:
        """Return the last streams of sets of changes, by their first layers in ascending order."""
        n_layers, texts = self.model.n_layers, len(self.ids)
        sites = _by_site(sets)
        steps = {}
        for layer, place in enumerate(self.model.places.layers):
            if (whole := Site(place.module, "step", layer)) in sites:
                steps[layer] = sites.pop(whole)
        of_tokens = sites.pop(token_site(self.model), {})
        outputs = self.by_position if kept else {}
        known = {module: output[:, :kept] for module, output in outputs.items()}
        # The sets that run now: others are not changed yet, or step over a layer.
        running: list[int] = []
        hooks = _changing(sites, running, texts)
        with wide_passes(self.model.model), _cut(known), hooks:
            if first[0] == EMBEDDING:
                running[:] = range(len(sets))
                return self._from_embeddings(len(sets), of_tokens)
            x = self.stream[None][:0]
            for number in range(first[0], n_layers):
                joining = self.streams[number].expand(first.count(number), -1, -1, -1)
                x = torch.cat([x, joining])
                stepping = steps.get(number, {})
                running[:] = [i for i in range(len(x)) if i not in stepping]
                after: dict[int, Tensor] = {}
                if running:
                    rows = x if len(running) == len(x) else x[running]
                    y = self._through(number, rows.flatten(0, 1)).unflatten(0, (-1, texts))
                    after = dict(zip(running, y, strict=True)) if stepping else {}
                    x = x if stepping else y
                if stepping:
                    after |= {i: _applied(f, x[i]) for i, f in stepping.items()}
                    x = torch.stack([after[i] for i in range(len(x))])
        unchanged = sum(layer >= n_layers for layer in first)
        return torch.cat([x, self.stream.expand(unchanged, -1, -1, -1)])

    def _from_embeddings(
        self, sets: int, changes: Mapping[int, Sequence[Function]]
    ) -> Float[Tensor, "sets texts time d_model"]:
        tokens = [_applied(changes.get(number, ()), self.tokens) for number in range(sets)]
        with embedded(self.model, torch.cat(tokens)):
            stream = last_streams(self.model, self.ids.repeat(sets, 1))
        return stream.unflatten(0, (sets, -1))

    def _numbers(self, layer: int) -> set[int]:
        return {number for of_layer, number in self.by_text if of_layer == layer}

    def _through(self, number: int, x: Float[Tensor, "rows time d_model"]) -> Tensor:
        copies = len(x) // len(self.ids)
        call = self.arguments[number]
        if copies > 1:
            call = _mapped(
                lambda y: y.repeat(copies, *[1] * (y.dim() - 1)), call, self._numbers(number)
            )
        args, kwargs = call
        return _first(self.model.places.layers[number].module(x, *args, **kwargs))


def first_change(passes: Sequence[Pass]) -> int:
    """Return the first position at which the embeddings of two passes differ, in any text."""
    differ = (passes[0].tokens != passes[1].tokens).any(-1).any(0)
    return int(differ.int().argmax())


def logit_of(model: ResidualModel, u: Float[Tensor, " d_model"]) -> Number:
    """Return u . n at the last position as a function of the stream, n its normalised value."""
    return lambda x: model.parts.normalised(x[:, -1].to(u)) @ u


def last_streams(
    model: ResidualModel, ids: Int[Tensor, "texts time"]
) -> Float[Tensor, "texts time d_model"]:
    """Return the streams of texts after the last layer."""
    # Logits of all positions would take longer than the layers of a small model.
    return first_input(*first_call(model.places.last, lambda: run(model.model, ids)))


def embedded(
    model: ResidualModel, embeddings: Float[Tensor, "*batch time d_model"]
) -> AbstractContextManager[None]:
    """Let the model read given embeddings in place of its tokens' as long as this runs."""
    parts = model.places.parts

    def replace_output(_: nn.Module, args: tuple[Any, ...], __: Any, output: Tensor) -> Tensor:
        factor = 1.0
        if parts is not None:
            # Some families scale inside the embedding and some after it.
            table = parts.embed
            stored = table.weight()[args[0]]
            wide = output.to(stored)
            scaled = (wide - table.scale * stored).norm() <= (wide - stored).norm()
            factor = 1.0 if scaled else 1 / table.scale
        # Logits of a long text are computed again in a run of its last positions.
        rows = embeddings if embeddings.dim() == 1 else embeddings[..., -output.shape[-2] :, :]
        return (factor * rows).expand_as(output).to(output.dtype)

    return hooked(after=[(model.places.embed, replace_output)])


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the stream that a module is called with."""
    stream: Tensor = args[0] if args else kwargs["hidden_states"]
    return stream


def _first(output: Any) -> Tensor:
    """Return the first of what a module returns."""
    value: Tensor = output[0] if isinstance(output, tuple) else output
    return value


# What is recorded.


def _recorded(
    model: ResidualModel, ids: Int[Tensor, "texts time"]
) -> tuple[list[Tensor], list[Arguments]]:
    """Return the stream before each layer and after the last, and the layers' arguments."""
    streams: list[Tensor] = []
    arguments: list[Arguments] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams.append(first_input(args, kwargs))
        options = {name: x for name, x in kwargs.items() if name != "hidden_states"}
        arguments.append((args[1:], options))

    def keep_output(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
        written.append(_first(output))

    layers = [layer.module for layer in model.places.layers]
    written: list[Tensor] = []
    with hooked([(x, keep) for x in layers], [(x, keep_output) for x in layers]):
        streams.append(last_streams(model, ids))
    for number, (output, stream) in enumerate(zip(written, streams[1:], strict=True)):
        if not torch.equal(output.to(stream.device), stream):
            raise BilensError(
                f"{type(model.model).__name__} changes the stream after layer {number}, expected "
                "that the next layer reads it as it is; flows are available, changed passes are not"
            )
    return streams, arguments


def _by_text(
    model: ResidualModel, ids: Tensor, arguments: Sequence[Arguments]
) -> frozenset[tuple[int, int]]:
    """Return layers and numbers of the arguments' tensors whose first axis has the texts."""
    texts = len(ids)
    candidates = []
    for layer, call in enumerate(arguments):
        for number, x in enumerate(_tensors(call)):
            # Of one text further axes may be folded into the first. In known families an axis of
            # 1 fits any number of texts.
            least = 3 if texts == 1 else 2
            size = 1 if model.places.parts is None and texts == 1 else 2
            if x.dim() >= least and len(x) >= size and len(x) % texts == 0:
                candidates.append((layer, number))
    if not candidates:
        return frozenset()
    # Another number of texts tells that axis from one of as many positions or heads.
    others = ids[:1] if texts > 1 else ids.expand(2, -1)
    with torch.no_grad(), wide_passes(model.model):
        _, reference = _recorded(model, others)
    found = []
    for layer, number in candidates:
        size = len(_tensors(arguments[layer])[number])
        if len(_tensors(reference[layer])[number]) * texts == size * len(others):
            found.append((layer, number))
    return frozenset(found)


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of nested arguments, in their order."""
    found: list[Tensor] = []
    _mapped(found.append, value)
    return found


def _mapped(
    function: Callable[[Tensor], Any],
    value: Any,
    numbers: set[int] | None = None,
    counted: Iterator[int] | None = None,
) -> Any:
    """Return nested arguments with a function of some of their tensors, or of all."""
    counted = count() if counted is None else counted
    if isinstance(value, Tensor):
        number = next(counted)
        return function(value) if numbers is None or number in numbers else value
    if isinstance(value, dict):
        return {name: _mapped(function, x, numbers, counted) for name, x in value.items()}
    # Positions come as a pair of tensors.
    if type(value) in (tuple, list):
        return type(value)([_mapped(function, x, numbers, counted) for x in value])
    return value


# How it is changed.


def _by_site(sets: Sequence[Sequence[Change]]) -> dict[Site, dict[int, list[Function]]]:
    """Return the functions of each site, by the number of their set."""
    sites: dict[Site, dict[int, list[Function]]] = defaultdict(dict)
    for number, changes in enumerate(sets):
        for site, function in changes:
            sites[site].setdefault(number, []).append(function)
    return dict(sites)


def _applied(functions: Sequence[Function], x: Tensor) -> Tensor:
    for function in functions:
        result = function(x)
        x = x if result is None else result
    return x


def _changing(
    sites: Mapping[Site, Mapping[int, Sequence[Function]]], running: Sequence[int], texts: int
) -> AbstractContextManager[None]:
    """Let sites have other numbers in the sets that run, each with its own rows of texts."""

    def changed(site: Site, x: Tensor) -> Tensor:
        functions = sites[site]
        if site.layer == EMBEDDING:
            # Vectors of positions may come once for the whole batch.
            x = x.expand(len(running) * texts, *x.shape[1:])
        if not any(number in functions for number in running):
            return x
        # Some modules take the tokens of all texts as one list.
        rows = x.reshape(len(running), texts, -1, x.shape[-1])
        each = [_applied(functions.get(i, ()), y) for i, y in zip(running, rows, strict=True)]
        return torch.cat(each).reshape(x.shape)

    def change_input(site: Site, _: nn.Module, args: tuple[Any, ...], options: Any) -> Any:
        return (changed(site, args[0]), *args[1:]), options

    def change_output(site: Site, *call: Any) -> Any:
        output = call[-1]
        y = changed(site, _first(output))
        return (y, *output[1:]) if isinstance(output, tuple) else y

    def stepping(site: Site) -> list[bool]:
        return [number in sites[site] for number in running]

    def leave_out(site: Site, _: nn.Module, args: tuple[Any, ...], options: Any) -> Any:
        rows = args[0].unflatten(0, (len(running), texts))
        left = rows[[not steps for steps in stepping(site)]]
        return (left.flatten(0, 1), *args[1:]), options

    def put_in(site: Site, *call: Any) -> Tensor:
        # Without a row the module has its width still.
        computed = iter(call[-1].unflatten(0, (-1, texts)) if len(call[-1]) else ())
        each = []
        for number, steps in zip(running, stepping(site), strict=True):
            if steps:
                each.append(_applied(sites[site][number], call[-1][:0]))
            else:
                each.append(next(computed))
        return torch.cat(each)

    of_kinds: dict[str, list[Site]] = {"input": [], "step": [], "output": []}
    for site in sites:
        of_kinds[site.place].append(site)
    # Inputs are changed before rows are left out, and outputs after they are put in again.
    before = [(site.module, partial(change_input, site)) for site in of_kinds["input"]]
    before += [(site.module, partial(leave_out, site)) for site in of_kinds["step"]]
    after = [(site.module, partial(put_in, site)) for site in of_kinds["step"]]
    after += [(site.module, partial(change_output, site)) for site in of_kinds["output"]]
    return hooked(before, after)


def _cut(
    known: Mapping[nn.Module, Float[Tensor, "texts kept width"]],
) -> AbstractContextManager[None]:
    """Let modules compute only the positions after the first ones, whose outputs are known."""

    def cut(module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
        return (args[0][:, known[module].shape[1] :].contiguous(), *args[1:]), options

    def join(module: nn.Module, _: Any, __: Any, y: Tensor) -> Tensor:
        first = known[module]
        return torch.cat([first.repeat(len(y) // len(first), 1, 1), y], 1)

    return hooked([(module, cut) for module in known], [(module, join) for module in known])

"""Forward passes of a model on texts side by side, and changed passes that start from them."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import count
from types import MappingProxyType
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bilens.analysis import Reading
from bilens.checks import checked
from bilens.data.texts import write_out
from bilens.errors import BilensError
from bilens.hooks import first_call, hooked
from bilens.sections import Columns, Fact, by_column
from bilens.transformer.changes import (
    EMBEDDING,
    Change,
    Function,
    Part,
    Site,
    mixed_site,
    token_site,
)
from bilens.transformer.choices import Choosing, by_text
from bilens.transformer.experts import ExpertCall
from bilens.transformer.mixing import Mix, Mixing
from bilens.transformer.model import ResidualModel, checked_ids
from bilens.transformer.on_text import LayerOnText, layer_on_text, pattern_of_call
from bilens.transformer.running import (
    allowed_change,
    attends_by,
    attention_choice,
    first_input,
    first_output,
    run,
    wide_passes,
)

Number = Callable[[Float[Tensor, "batch time d_model"]], Float[Tensor, " batch"]]
"""A number of the stream after the last layer."""
Hook = tuple[nn.Module, Callable[..., Any]]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call of a layer, by position and by name, without the stream."""


@dataclass(frozen=True, eq=False, repr=False)
class Pass(Reading):
    """A forward pass of a model on texts of one length, from which changed passes start.

    What is not recorded follows from the streams: it is computed again, by one layer alone.

    Attributes:
        model: the model.
        ids: the texts.
        tokens: the embeddings of their tokens.
        streams: the stream before each layer, and after the last one.
        arguments: of each layer, without the stream.
        patterns: whether the model attends eagerly, as patterns need.
    """

    model: ResidualModel
    ids: Int[Tensor, "texts time"]
    tokens: Float[Tensor, "texts time d_model"]
    streams: list[Float[Tensor, "texts time d_model"]]
    arguments: list[Arguments]
    patterns: bool = False

    axes: ClassVar[dict[str, str]] = {"x": "next token", "y": "probability"}

    @classmethod
    @checked
    def of(
        cls,
        model: ResidualModel,
        text: str | Int[Tensor, "*texts time"],
        tokens: Float[Tensor, "*texts time d_model"] | None = None,
        *,
        patterns: bool = False,
        parts: bool = False,
    ) -> "Pass":
        """Run a model on a text, or on texts of one length; in float32 or float64.

        Args:
            model: any.
            text: a text, its token ids, or those of several texts of one length.
            tokens: other embeddings of the tokens.
            patterns: let the model attend eagerly, as its patterns need. The logits are compared
                with those of its own attention.
            parts: record the values of the parts in the same run, where they will be needed.

        Raises:
            BilensError: the model does not know the text, or it changes streams between layers, or
                its eager attention differs from its own.
        """
        if isinstance(text, str) or text.dim() == 1:
            text = model.ids(text)[None]
        ids = checked_ids(model, text)
        tokens = model.places.rows(ids) if tokens is None else tokens
        keeping = _keeping(model, len(ids)) if parts else nullcontext()
        with torch.no_grad(), _attending(model, patterns), embedded(model, tokens), keeping as kept:
            streams, arguments = _recorded(model, ids)
        of_texts = cls(model, ids, tokens, streams, arguments, patterns)
        if kept is not None:
            vars(of_texts)["_values"] = kept()
        if patterns and model not in _CHECKED and ids.shape[1] > 1:
            check_attention(of_texts)
            _CHECKED.add(model)
        return of_texts

    def running(self) -> AbstractContextManager[None]:
        """Return the context in which layers run again as in this pass."""
        return _attending(self.model, self.patterns)

    def facts(self) -> list[Fact]:
        texts, time = self.ids.shape
        size = [("layers", self.model.n_layers), ("width", self.model.d_model)]
        return [("texts", texts), ("tokens", time), *size]

    def columns(self) -> Columns:
        """Return the ten most likely next tokens of each text, with their probabilities."""
        likely = self.next_logits.softmax(-1).topk(min(10, self.model.vocab_size))
        tokenizer, rows = self.model.tokenizer, []
        for text, of_text in enumerate(zip(*likely, strict=True)):
            for value, number in zip(*(x.tolist() for x in of_text), strict=True):
                name = number if tokenizer is None else repr(write_out(tokenizer, [number]))
                rows.append((text, name, value))
        columns = by_column(["text", "next token", "probability"], rows)
        return {n: cells for n, cells in columns.items() if n != "text" or len(self.ids) > 1}

    @property
    def logits(self) -> Float[Tensor, "texts time vocab"]:
        """Logits of the model itself, computed from the last stream at each use."""
        return self._logits(self.stream)

    @property
    def next_logits(self) -> Float[Tensor, "texts vocab"]:
        """Logits of the token after each text, by the model itself."""
        return self._logits(self.stream[:, -1:])[:, 0]

    @torch.no_grad()
    def _logits(self, x: Float[Tensor, "texts time d_model"]) -> Float[Tensor, "texts time vocab"]:
        return self.model.places.own_logits(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    @torch.no_grad()
    def layer(self, number: int) -> LayerOnText:
        """Return the numbers of a layer, which is run again."""
        run = partial(self.run_layer, number)
        return layer_on_text(self.model.layer(number), len(self.ids), run)

    @torch.no_grad()
    def pattern(self, layer: int) -> Float[Tensor, "texts heads time time"]:
        """Return the weight of every earlier position (columns) at every position (rows), by head.

        Raises:
            BilensError: the pass has been made without `patterns`.
        """
        if not self.patterns:
            raise BilensError("the pass has no patterns; make it by Pass.of(..., patterns=True)")
        module, seen = self.model.layer(layer).heads.module, list[Tensor]()

        def keep(*call: Any) -> None:
            seen.append(pattern_of_call(*call))

        with hooked(after=[(module, keep)]):
            self.run_layer(layer)
        return seen[0]

    @torch.no_grad()
    def choices(self, layer: int) -> list[Int[Tensor, "rows *shape"]]:
        """Return what a layer chooses, such as experts: the places, one choice after the other."""
        noted: list[Tensor] = []

        def note(_: int, places: Tensor) -> Tensor:
            noted.append(places)
            return places

        with Choosing(note):
            self.run_layer(layer)
        return noted

    # Values of the parts, which other passes take.

    @torch.no_grad()
    def mix(self, layer: int) -> Mix:
        """Return what the heads of a layer mix, by their patterns; the layer is run again once.

        Raises:
            BilensError: no pattern is found.
        """
        if layer not in self._mixes:
            mixing = Mixing()

            def find(_: nn.Module, args: tuple[Any, ...], __: Any) -> None:
                self._mixes[layer] = mixing.read_by(args[0], layer)

            module = mixed_site(self.model, layer).module
            with hooked(before=[(module, find)]), mixing:
                self.run_layer(layer)
        return self._mixes[layer]

    @torch.no_grad()
    def expert(self, layer: int, number: int) -> Float[Tensor, "texts time d_model"]:
        """Return the term of an expert in what its layer's experts add up; the layer runs once."""
        if layer not in self._experts:

            def find(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._experts[layer] = ExpertCall.of(module, args, kwargs)

            module = self.model.places.layers[layer].experts
            assert module is not None
            with hooked(before=[(module, find)]):
                self.run_layer(layer)
        with self.running():
            return self._experts[layer].term(number).reshape(self.tokens.shape)

    @cached_property
    def _mixes(self) -> dict[int, Mix]:
        return {}

    @cached_property
    def _experts(self) -> dict[int, ExpertCall]:
        return {}

    @property
    def mixed(self) -> list[Float[Tensor, "texts time all_heads"]]:
        """Mixed values of the heads of each layer, all heads side by side."""
        return self._values[0]

    @property
    def outputs(self) -> list[Float[Tensor, "texts time d_model"]]:
        """Outputs of the MLP of each layer, before a norm."""
        return self._values[1]

    @property
    def by_position(self) -> dict[nn.Module, Float[Tensor, "texts time width"]]:
        """Outputs of the maps and MLPs, which take each position by itself."""
        return self._values[2]

    @cached_property
    def _values(self) -> "_Values":
        with torch.no_grad(), self.running(), _keeping(self.model, len(self.ids)) as values:
            for number, stream in enumerate(self.streams[:-1]):
                self._through(number, stream)
        return values()

    @cached_property
    def _by_text(self) -> frozenset[tuple[int, int]]:
        return _by_text(self)

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
            _mapped(chosen, call, _of_layer(self._by_text, layer))
            for layer, call in enumerate(self.arguments)
        ]
        mixed, outputs, by_position = self._values
        values = (
            [x[index] for x in mixed],
            [x[index] for x in outputs],
            {module: x[index] for module, x in by_position.items()},
        )
        streams = [x[index] for x in self.streams]
        return self._with(self.ids[index], self.tokens[index], streams, values, arguments)

    def in_place_of(self, other: "Pass") -> "Pass":
        """Return this pass with as many tokens as another one, whose parts take its values.

        Tokens that are as far from the end stand against each other. In front of a shorter text are
        the values of the other pass itself, which stay as they are.
        """
        time, own = other.ids.shape[1], self.ids.shape[1]
        if time == own:
            return self
        shared = min(time, own)

        def joined(x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([y[:, : time - shared], x[:, own - shared :]], 1)

        (mixed, outputs, by_position), others = self._values, other._values
        values = (
            [joined(*pair) for pair in zip(mixed, others[0], strict=True)],
            [joined(*pair) for pair in zip(outputs, others[1], strict=True)],
            {module: joined(x, others[2][module]) for module, x in by_position.items()},
        )
        streams = [joined(*pair) for pair in zip(self.streams, other.streams, strict=True)]
        ids, tokens = joined(self.ids, other.ids), joined(self.tokens, other.tokens)
        return other._with(ids, tokens, streams, values, other.arguments)

    def _with(
        self,
        ids: Int[Tensor, "texts time"],
        tokens: Float[Tensor, "texts time d_model"],
        streams: list[Float[Tensor, "texts time d_model"]],
        values: "_Values",
        arguments: list[Arguments],
    ) -> "Pass":
        changed = replace(self, ids=ids, tokens=tokens, streams=streams, arguments=arguments)
        vars(changed).update(_values=values, _by_text=self._by_text)
        return changed

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
        self, sets: Sequence[Sequence[Change]], *, kept: int | Sequence[int] = 0
    ) -> Float[Tensor, "sets texts time d_model"]:
        """Return the last streams of all texts with each set of changes.

        Passes go side by side in batches, and each joins its batch at its first changed layer.
        Under `torch.enable_grad` the result has gradients by all tensors that the changes hold. At
        the `kept` first positions, of all sets or of each, nothing may be changed, so that maps and
        MLPs do not run there again.
        """
        kept = [kept] * len(sets) if isinstance(kept, int) else kept
        n_layers = self.model.n_layers
        first = []
        for changes in sets:
            layer = min((site.layer for site, _ in changes), default=n_layers)
            # Keys that later layers read as well have to be those of this run.
            first.append(EMBEDDING if changes and self.model.places.crosses else layer)
        order = sorted(range(len(sets)), key=first.__getitem__)
        # The streams of a batch take about 2 MB; larger ones leave the cache of a processor.
        size = max(1, 2**19 // self.tokens.numel())
        results: list[Tensor] = [self.stream] * len(sets)
        # What changes embeddings runs as a whole, and nothing that joins later goes with it.
        whole = sum(layer == EMBEDDING for layer in first)
        for of_kind in (order[:whole], order[whole:]):
            for start in range(0, len(of_kind), size):
                batch = of_kind[start : start + size]
                streams = self._batch(
                    [sets[i] for i in batch], [first[i] for i in batch], [kept[i] for i in batch]
                )
                for number, stream in zip(batch, streams, strict=True):
                    results[number] = stream
        return torch.stack(results) if results else self.stream.new_empty(0, *self.stream.shape)

    def run_layer(self, number: int, changes: Sequence[Change] = (), copies: int = 1) -> None:
        """Run one layer on its own stream, in copies side by side, with the same changes of all.

        The functions of the changes get all copies at once, (copies * texts, time, width).
        """
        stream = self.streams[number].repeat(copies, 1, 1)
        by_text = self._by_text if copies > 1 else frozenset()
        sites = _by_site([changes])
        with self.running(), _changing(sites, [0], len(stream)):
            self._through(number, stream, by_text)

    def _batch(
        self, sets: Sequence[Sequence[Change]], first: Sequence[int], kept: Sequence[int]
    ) -> Float[Tensor, "sets texts time d_model"]:
        """Return the last streams of sets of changes, by their first layers in ascending order."""
        n_layers, texts = self.model.n_layers, len(self.ids)
        by_text = self._by_text  # found in a pass of its own, without the changes
        sites = _by_site(sets)
        steps = {}
        for layer, place in enumerate(self.model.places.layers):
            if (step := Site(place.module, "step", layer)) in sites:
                steps[layer] = sites.pop(step)
        of_tokens = sites.pop(token_site(self.model), {})
        # The sets that run now: others are not changed yet, or step over a layer.
        running: list[int] = []
        # What is chosen is told by text and position, so that all positions run.
        skips = any(kept) or any(site.place == "rows" for site in sites)
        whole = not skips or any(site.place in ("choice", "experts") for site in sites)
        known = {} if whole else self.by_position
        with self.running(), _changing(sites, running, texts, known, kept):
            if first[0] == EMBEDDING:
                running[:] = range(len(sets))
                return self._from_embeddings(len(sets), of_tokens)
            x = self.stream[None][:0]
            for number in range(first[0], n_layers):
                joining = self.streams[number].expand(first.count(number), -1, -1, -1)
                x = torch.cat([x.to(joining), joining])
                stepping = steps.get(number, {})
                running[:] = [i for i in range(len(x)) if i not in stepping]
                after: dict[int, Tensor] = {}
                if running:
                    rows = x if len(running) == len(x) else x[running]
                    y = self._through(number, rows.flatten(0, 1), by_text)
                    y = y.unflatten(0, (-1, texts))
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

    def _through(
        self,
        number: int,
        x: Float[Tensor, "rows time d_model"],
        by_text: frozenset[tuple[int, int]] = frozenset(),
    ) -> Tensor:
        copies = len(x) // len(self.ids)
        call = self.arguments[number]
        if copies > 1:
            some = _of_layer(by_text, number)
            call = _mapped(lambda y: y.repeat(copies, *[1] * (y.dim() - 1)), call, some)
        args, kwargs = call
        return first_output(self.model.places.layers[number].module(x, *args, **kwargs))


_CHECKED: WeakSet[ResidualModel] = WeakSet()
"""Models whose eager attention is known to be their own."""


@contextmanager
def _attending(model: ResidualModel, eagerly: bool) -> Iterator[None]:
    attention = attends_by(model.model, "eager") if eagerly else nullcontext()
    with wide_passes(model.model), attention:
        yield


@torch.no_grad()
def check_attention(eager: Pass) -> None:
    """Compare the logits of a pass that attends eagerly with those of the model as it is."""
    model, change, size = eager.model, 0.0, 0.0
    if (choice := attention_choice(model.model)) in (None, "eager"):
        return
    with wide_passes(model.model), embedded(model, eager.tokens):
        own = last_streams(model, eager.ids)
    # Logits of a long text take much memory, so that only some positions have them at once.
    rows = (x.flatten(0, 1).split(128) for x in (eager.stream, own))
    for pair in zip(*rows, strict=True):
        ours, theirs = map(model.places.own_logits, pair)
        gap = (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max()
        # A maximum of Python's would lose NaN, which must fail.
        change = float(torch.maximum(gap, gap.new_tensor(change)))
        size = max(size, float(ours.abs().max()))
    # Eager attention computes its softmax in float32, also in models of float64.
    allowed = max(allowed_change(model.model), 2e-3) + 1e-5 * size
    if not change <= allowed:
        raise BilensError(
            f"The eager attention of this {type(model.model).__name__}, which tells its patterns, "
            f"and its own, {choice}, differ by {change:.2g} nats in a log-probability where "
            f"rounding explains {allowed:.2g}. Is it causal? Readings of its texts would not be "
            "those of the model."
        )


_Values = tuple[list[Tensor], list[Tensor], dict[nn.Module, Tensor]]
"""Mixed values and MLP outputs of each layer, and what modules write at each position."""


@contextmanager
def _keeping(model: ResidualModel, texts: int) -> Iterator[Callable[[], _Values]]:
    """Yield what returns the values of the parts in the runs of the layers in this block."""
    layers = model.places.layers
    inputs: dict[nn.Module, Tensor] = {}
    outputs: dict[nn.Module, Tensor] = {}

    def of_texts(x: Tensor) -> Tensor:
        # Some modules take the tokens of all texts as one list.
        return x.reshape(texts, -1, x.shape[-1]).clone()  # which may be changed in place

    def keep_input(module: nn.Module, args: tuple[Tensor, ...], *_: Any) -> None:
        inputs[module] = of_texts(args[0])

    def keep_output(module: nn.Module, _: Any, __: Any, y: Any) -> None:
        outputs[module] = of_texts(first_output(y))

    def values() -> _Values:
        nothing = next(iter([*inputs.values(), *outputs.values()]))[..., :0]
        return (
            [inputs[x.heads] if x.heads else nothing for x in layers],
            [outputs[x.mlp] if x.mlp else nothing for x in layers],
            {module: outputs[module] for module in by_position},
        )

    # Queries, keys and values may be one module, whose output is kept once.
    by_position = dict.fromkeys(module for layer in layers for module in layer.by_position)
    heads = [layer.heads for layer in layers if layer.heads is not None]
    mlps = dict.fromkeys(layer.mlp for layer in layers if layer.mlp is not None)
    before = [(module, keep_input) for module in heads]
    with hooked(before, [(module, keep_output) for module in mlps | by_position]):
        yield values


def first_change(passes: Sequence[Pass]) -> int:
    """Return the first position at which the embeddings of two passes differ, in any text."""
    differ = (passes[0].tokens != passes[1].tokens).any(-1).any(0)
    return int(differ.int().argmax())


def logit_of(model: ResidualModel, u: Float[Tensor, " d_model"]) -> Number:
    """Return u . n at the last position as a function of the stream, n its normalised value."""
    return lambda x: model.modules.normalised(x[:, -1].to(u)) @ u


def last_streams(
    model: ResidualModel, ids: Int[Tensor, "texts time"]
) -> Float[Tensor, "texts time d_model"]:
    """Return the streams of texts after the last layer."""
    # Logits of all positions would take longer than the layers of a small model.
    last, skipped = model.places.last, model.places.skipped
    return first_input(*first_call(last, lambda: run(model.model, ids), skipped=skipped))


def embedded(
    model: ResidualModel, embeddings: Float[Tensor, "*batch time d_model"]
) -> AbstractContextManager[None]:
    """Let the model read given embeddings in place of its tokens' as long as this runs."""
    modules = model.places.modules

    def replace_output(_: nn.Module, args: tuple[Any, ...], __: Any, output: Tensor) -> Tensor:
        if output.shape[-2] != embeddings.shape[-2]:
            return output  # of single tokens that run for their unembedding
        factor = 1.0
        if modules is not None:
            # Some families scale inside the embedding and some after it.
            table = modules.embed
            scaled_rows = table.rows(args[0])
            wide, rows = output.to(scaled_rows), scaled_rows / (table.scale or 1)
            scaled = (wide - scaled_rows).norm() <= (wide - rows).norm()
            factor = 1.0 if scaled or not table.scale else 1 / table.scale
        return (factor * embeddings).expand_as(output).to(output.dtype)

    return hooked(after=[(model.places.embed, replace_output)])


# What is recorded.


def _recorded(
    model: ResidualModel, ids: Int[Tensor, "texts time"]
) -> tuple[list[Tensor], list[Arguments]]:
    """Return the stream before each layer and after the last, and the layers' arguments."""
    streams: list[Tensor] = []
    arguments: list[Arguments] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check(stream := first_input(args, kwargs))
        streams.append(stream.clone())  # layers may change it in place
        options = {name: x for name, x in kwargs.items() if name != "hidden_states"}
        arguments.append((args[1:], options))

    def keep_output(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
        written.append(first_output(output))

    def check(stream: Tensor) -> None:
        """Raise unless a stream is finite, and what the layer before has written."""
        if not stream.isfinite().all():
            before = f"layer {len(written) - 1}" if written else "the embedding"
            raise BilensError(
                f"The stream after {before} is NaN or infinite: the forward pass on this text "
                "overflows. Open the model with dtype=torch.float32, or train again"
            )
        if written and not torch.equal(written[-1].to(stream.device), stream):
            raise BilensError(
                f"{type(model.model).__name__} changes the stream after layer {len(written) - 1}, "
                "expected that the next layer reads it as it is; flows are available, changed "
                "passes are not"
            )

    layers = [layer.module for layer in model.places.layers]
    written: list[Tensor] = []
    with hooked([(x, keep) for x in layers], [(x, keep_output) for x in layers]):
        streams.append(last_streams(model, ids))
    check(streams[-1])
    return streams, arguments


def _by_text(recorded: Pass) -> frozenset[tuple[int, int]]:
    """Return layers and numbers of the arguments' tensors whose first axis has the texts."""
    ids, arguments, texts = recorded.ids, recorded.arguments, len(recorded.ids)
    candidates = []
    for layer, call in enumerate(arguments):
        for number, x in enumerate(_tensors(call)):
            # Of one text further axes may be folded into the first. In known families an axis of
            # 1 fits any number of texts.
            least = 3 if texts == 1 else 2
            size = 1 if recorded.model.places.modules is None and texts == 1 else 2
            if x.dim() >= least and len(x) >= size and len(x) % texts == 0:
                candidates.append((layer, number))
    if not candidates:
        return frozenset()
    # Another number of texts tells that axis from one of as many positions or heads.
    others = ids[:1] if texts > 1 else ids.expand(2, -1)
    with torch.no_grad(), recorded.running():
        _, reference = _recorded(recorded.model, others)
    found = []
    for layer, number in candidates:
        size = len(_tensors(arguments[layer])[number])
        if len(_tensors(reference[layer])[number]) * texts == size * len(others):
            found.append((layer, number))
    return frozenset(found)


def _of_layer(by_text: frozenset[tuple[int, int]], layer: int) -> set[int]:
    return {number for of_layer, number in by_text if of_layer == layer}


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


def _by_site(sets: Sequence[Sequence[Change]]) -> dict[Site, dict[int, list[Any]]]:
    """Return the functions of each site, by the number of their set."""
    sites: dict[Site, dict[int, list[Any]]] = defaultdict(dict)
    for number, changes in enumerate(sets):
        for site, function in changes:
            sites[site].setdefault(number, []).append(function)
    return dict(sites)


def _applied(functions: Sequence[Function], x: Tensor) -> Tensor:
    for function in functions:
        result = function(x)
        x = x if result is None else result
    return x


Hooks = tuple[list[Hook], list[Hook]]
"""Functions before and after modules."""
OfSets = Mapping[int, Sequence[Any]]
"""The functions of a site, by the number of their set."""
Known = Mapping[nn.Module, Float[Tensor, "texts time width"]]
"""What modules that take each position by itself write where nothing is changed."""


@contextmanager
def _changing(
    sites: Mapping[Site, OfSets],
    running: Sequence[int],
    texts: int,
    known: Known = MappingProxyType({}),
    kept: Sequence[int] = (),
) -> Iterator[None]:
    """Let sites have other numbers in the sets that run, each with its own rows of texts."""
    mixing, choosing = Mixing(), Choosing()

    def changed(site: Site, x: Tensor, term: Callable[[int, Part], Tensor] | None = None) -> Tensor:
        """Return x with the changes of each set; `term` is that of a part in a set."""
        functions = sites[site]
        if site.layer == EMBEDDING:
            # Vectors of positions may come once for the whole batch.
            x = x.expand(len(running) * texts, *x.shape[1:])
        if not any(number in functions for number in running):
            return x
        # Some modules take the tokens of all texts as one list.
        rows = x.reshape(len(running), texts, -1, x.shape[-1])
        each = []
        for place, (number, y) in enumerate(zip(running, rows, strict=True)):
            of_set = functions.get(number, ())
            if term is not None:
                own = partial(term, place)
                of_set = [partial(function, term=own) for function in of_set]
            each.append(_applied(of_set, y))
        return torch.cat(each).reshape(x.shape)

    def change_input(site: Site, _: nn.Module, args: tuple[Any, ...], options: Any) -> Any:
        return (changed(site, args[0]), *args[1:]), options

    def change_mix(site: Site, _: nn.Module, args: tuple[Any, ...], options: Any) -> Any:
        mix = mixing.read_by(args[0], site.layer)

        def term(place: int, part: Part) -> Tensor:
            return part.moved(mix)[place * texts : (place + 1) * texts]

        return (changed(site, args[0], term), *args[1:]), options

    def change_experts(
        site: Site, module: nn.Module, args: tuple[Any, ...], options: Any, output: Any
    ) -> Any:
        y, call = first_output(output), ExpertCall.of(module, args, options)
        terms = cache(
            lambda number: call.term(number).reshape(len(running), texts, -1, y.shape[-1])
        )
        z = changed(site, y, lambda place, part: terms(part.number or 0)[place][:, part.rows])
        return (z, *output[1:]) if isinstance(output, tuple) else z

    def change_output(site: Site, *call: Any) -> Any:
        output = call[-1]
        y = changed(site, first_output(output))
        return (y, *output[1:]) if isinstance(output, tuple) else y

    of_kinds: dict[str, list[Site]] = defaultdict(list)
    for site in sites:
        of_kinds[site.place].append(site)
    steps = {site.module: sites[site] for site in of_kinds["step"]}
    leave_out, put_in = _stepping(steps, running, texts)
    live = {site.module: sites[site] for site in of_kinds["rows"]}
    cut, join = _skipping(known, kept, steps, live, running, texts)
    choices = {site.module: sites[site] for site in of_kinds["choice"]}
    enter, leave = _choosing(choosing, choices, running, texts)
    # Inputs are changed before rows are left out, and outputs after they are put in again.
    before: list[Hook] = [(site.module, partial(change_mix, site)) for site in of_kinds["mix"]]
    before += [(site.module, partial(change_input, site)) for site in of_kinds["input"]]
    before += [*leave_out, *cut, *enter]
    after: list[Hook] = [*join, *put_in, *leave]
    after += [(site.module, partial(change_output, site)) for site in of_kinds["output"]]
    after += [(site.module, partial(change_experts, site)) for site in of_kinds["experts"]]
    modes = [mixing] * bool(of_kinds["mix"]) + [choosing] * bool(of_kinds["choice"])
    with hooked(before, after), ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


def _choosing(
    choosing: Choosing, choices: Mapping[nn.Module, OfSets], running: Sequence[int], texts: int
) -> Hooks:
    """Return the hooks by which layers have other choices in the sets that exchange them."""

    def choose(layer: nn.Module, number: int, places: Tensor) -> Tensor:
        rows = by_text(places, len(running), texts)
        each = []
        for i, own in zip(running, rows, strict=True):
            exchanges = [partial(exchange, number=number) for exchange in choices[layer].get(i, ())]
            each.append(_applied(exchanges, own))
        return torch.stack(each).reshape(places.shape)

    def enter(layer: nn.Module, *_: Any) -> None:
        choosing.start(partial(choose, layer))

    def leave(*_: Any) -> None:
        choosing.start(None)

    return [(layer, enter) for layer in choices], [(layer, leave) for layer in choices]


def _stepping(steps: Mapping[nn.Module, OfSets], running: Sequence[int], texts: int) -> Hooks:
    """Return the hooks by which modules do not run in the sets that step over them."""

    def leave_out(module: nn.Module, args: tuple[Any, ...], options: Any) -> Any:
        rows = args[0].unflatten(0, (len(running), texts))
        left = rows[[number not in steps[module] for number in running]]
        return (left.flatten(0, 1), *args[1:]), options

    def put_in(module: nn.Module, *call: Any) -> Tensor:
        # Without a row the module has its width still.
        computed = iter(call[-1].unflatten(0, (-1, texts)) if len(call[-1]) else ())
        each = []
        for number in running:
            functions = steps[module].get(number)
            row = next(computed) if functions is None else _applied(functions, call[-1][:0])
            each.append(row)
        return torch.cat(each)

    return [(module, leave_out) for module in steps], [(module, put_in) for module in steps]


def _skipping(
    known: Known,
    kept: Sequence[int],
    steps: Mapping[nn.Module, OfSets],
    live: Mapping[nn.Module, OfSets],
    running: Sequence[int],
    texts: int,
) -> Hooks:
    """Return the hooks by which modules skip the positions whose output is known, or not needed.

    All other positions are one long text.
    """

    def moving(module: nn.Module) -> tuple[int, ...]:
        """Return the numbers of the sets that do not step over a module."""
        return tuple(number for number in running if number not in steps.get(module, ()))

    @cache  # most modules are run by the same sets
    def after_kept(numbers: tuple[int, ...], time: int) -> Tensor:
        """Return whether each position of some sets may be changed."""
        return torch.arange(time) >= torch.tensor([kept[number] for number in numbers])[:, None]

    def changed_rows(module: nn.Module, numbers: tuple[int, ...], time: int) -> Tensor:
        """Return the places of the positions that run in the long text of some sets."""
        rows = after_kept(numbers, time)
        if module in live:
            needed = [live[module].get(number) for number in numbers]
            everywhere = torch.ones(time, dtype=torch.bool)
            rows = rows & torch.stack([x[0]().cpu() if x else everywhere for x in needed])
        return rows.repeat_interleave(texts, 0).flatten().nonzero().flatten()

    def cut(module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
        x = args[0]
        rows = changed_rows(module, moving(module), x.shape[1]).to(x.device)
        return (x.flatten(0, 1).index_select(0, rows)[None], *args[1:]), options

    def join(module: nn.Module, _: Any, __: Any, y: Tensor) -> Tensor:
        output, numbers = known[module], moving(module)
        rows = changed_rows(module, numbers, output.shape[1]).to(y.device)
        whole = output.repeat(len(numbers), 1, 1)
        return whole.flatten(0, 1).index_copy(0, rows, y[0]).reshape(whole.shape)

    return [(module, cut) for module in known], [(module, join) for module in known]

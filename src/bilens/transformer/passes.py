"""Forward passes of a model on texts side by side, and changed passes that start from them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bilens.analysis import Reading
from bilens.checks import check_sum, checked
from bilens.data.texts import write_out
from bilens.errors import BilensError
from bilens.hooks import first_call, hooked
from bilens.sections import Columns, Fact, by_column
from bilens.transformer.changes import EMBEDDING, Change, Site, mixed_site, token_site
from bilens.transformer.changing import Known, OfSets, applied, by_site, changing
from bilens.transformer.experts import ExpertCall
from bilens.transformer.mixing import Mix, Mixing
from bilens.transformer.model import ResidualModel, checked_ids
from bilens.transformer.on_text import LayerOnText, layer_on_text
from bilens.transformer.running import first_input, first_output, run, wide_passes

Number = Callable[[Float[Tensor, "batch time d_model"]], Float[Tensor, " batch"]]
"""A number of the stream after the last layer."""
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
    """

    model: ResidualModel
    ids: Int[Tensor, "texts time"]
    tokens: Float[Tensor, "texts time d_model"]
    streams: list[Float[Tensor, "texts time d_model"]]

    axes: ClassVar[dict[str, str]] = {"x": "next token", "y": "probability"}

    @classmethod
    @checked
    def of(
        cls,
        model: ResidualModel,
        text: str | Int[Tensor, "*texts time"],
        tokens: Float[Tensor, "*texts time d_model"] | None = None,
        *,
        parts: bool = False,
    ) -> "Pass":
        """Run a model on a text, or on texts of one length; in float32 or float64.

        Args:
            model: any.
            text: a text, its token ids, or those of several texts of one length.
            tokens: other embeddings of the tokens.
            parts: record the values of the parts in the same run, where they will be needed.

        Raises:
            BilensError: the model does not know the text.
        """
        if isinstance(text, str) or text.dim() == 1:
            text = model.ids(text)[None]
        ids = checked_ids(model, text)
        tokens = model.places.rows(ids) if tokens is None else tokens
        keeping = _keeping(model, len(ids)) if parts else nullcontext()
        with torch.no_grad(), wide_passes(model.model), embedded(model, tokens), keeping as kept:
            streams, arguments = _recorded(model, ids)
        of_texts = cls(model, ids, tokens, streams)
        vars(of_texts)["arguments"] = arguments
        if kept is not None:
            vars(of_texts)["_values"] = kept()
        return of_texts

    @cached_property
    def arguments(self) -> list[Arguments]:
        """Arguments of each layer, without the stream; of some texts alone the model runs again."""
        with torch.no_grad(), wide_passes(self.model.model), embedded(self.model, self.tokens):
            return _recorded(self.model, self.ids)[1]

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
            BilensError: no pattern is found, or it does not make the values that the heads mix.
        """
        modules = self.model.places.modules
        heads = None if modules is None else modules.layers[layer].heads
        if heads is not None and hasattr(heads.module, "attention_pattern"):
            # A difference of two softmaxes, and a pattern that is normalised, mix by no product.
            seen = list[Tensor]()

            def keep(module: nn.Module, args: tuple[Any, ...], _: Any) -> None:
                x, pos_embed, rope, _mask, _cache, v_first = args
                seen.append(module.attention_pattern(x, pos_embed, rope, v_first))  # type: ignore[operator]

            with hooked(before=[(heads.module, keep)]):
                self.run_layer(layer)
            return seen[0]
        mix = self.mix(layer)
        pattern = mix.pattern(slice(None))
        size = float((pattern.abs() @ mix.values.abs()).max())
        name = f"The pattern of layer {layer}, times the values,"
        check_sum(name, pattern @ mix.values, mix.output, size=size)
        return pattern

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
        with wide_passes(self.model.model):
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
        with (
            torch.no_grad(),
            wide_passes(self.model.model),
            _keeping(self.model, len(self.ids)) as values,
        ):
            for number in range(self.model.n_layers):
                self.run_layer(number)
        return values()

    @property
    def stream(self) -> Float[Tensor, "texts time d_model"]:
        """The stream after the last layer."""
        return self.streams[-1]

    def some(self, texts: Sequence[int]) -> "Pass":
        """Return the pass of some of the texts, which shares memory if they are in a row."""
        first, size = texts[0], len(texts)
        in_a_row = list(texts) == [*range(first, first + size)]
        index: Any = slice(first, first + size) if in_a_row else list(texts)
        mixed, outputs, by_position = self._values
        values = (
            [x[index] for x in mixed],
            [x[index] for x in outputs],
            {module: x[index] for module, x in by_position.items()},
        )
        streams = [x[index] for x in self.streams]
        return self._with(self.ids[index], self.tokens[index], streams, values)

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
        return other._with(ids, tokens, streams, values)

    def _with(
        self,
        ids: Int[Tensor, "texts time"],
        tokens: Float[Tensor, "texts time d_model"],
        streams: list[Float[Tensor, "texts time d_model"]],
        values: "_Values",
    ) -> "Pass":
        changed = Pass(self.model, ids, tokens, streams)
        vars(changed)["_values"] = values
        return changed

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, some of which share it."""
        tensors = [self.ids, self.tokens, *self.streams, *self.mixed, *self.outputs]
        tensors += self.by_position.values()
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        return sum(storages.values())

    def changed(
        self, sets: Sequence[Sequence[Change]], *, kept: int | Sequence[int] = 0
    ) -> Float[Tensor, "sets texts time d_model"]:
        """Return the last streams of all texts with each set of changes.

        Passes go side by side in batches. Maps and MLPs do not run before the first change of a
        set, nor at the `kept` first positions, of all sets or of each, at which nothing may be
        changed. Under `torch.enable_grad` the result has gradients by all tensors that the changes
        hold.
        """
        kept = [kept] * len(sets) if isinstance(kept, int) else kept
        moments = [min(map(self._moment, (x for x, _ in changes)), default=0) for changes in sets]
        order = sorted((i for i, changes in enumerate(sets) if changes), key=moments.__getitem__)
        # The streams of a batch take about 2 MB; larger ones leave the cache of a processor.
        size = max(1, 2**19 // self.tokens.numel())
        results: list[Tensor] = [self.stream] * len(sets)
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            sites = by_site([sets[i] for i in batch])
            starts = [(moments[i], kept[i]) for i in batch]
            for number, stream in zip(batch, self._batch(sites, starts), strict=True):
                results[number] = stream
        return torch.stack(results) if results else self.stream.new_empty(0, *self.stream.shape)

    def _batch(
        self, sites: dict[Site, OfSets], starts: Sequence[tuple[int, int]]
    ) -> Float[Tensor, "sets texts time d_model"]:
        """Return the last streams of sets, each with its first moment and its kept positions."""
        texts, of_tokens = len(self.ids), sites.pop(token_site(self.model), {})
        rows = [applied(of_tokens.get(i, ()), self.tokens) for i in range(len(starts))]
        known = self._known(sites, starts)
        tokens, ids = embedded(self.model, torch.cat(rows)), self.ids.repeat(len(starts), 1)
        with wide_passes(self.model.model), tokens, changing(sites, known, len(starts), texts):
            return last_streams(self.model, ids).unflatten(0, (len(starts), -1))

    def _moment(self, site: Site) -> int:
        """Return when a site is read in a pass: four moments of each layer, of `_known` two."""
        if site.layer == EMBEDDING:
            return -1
        layer = self.model.places.layers[site.layer]
        return 4 * site.layer + {layer.module: 0, layer.mlp: 3}.get(site.module, 1)

    def _known(
        self, sites: dict[Site, OfSets], starts: Sequence[tuple[int, int]]
    ) -> dict[nn.Module, Known]:
        """Return what modules that take each position by itself need not compute.

        That is what they write here before a set is changed, and what they write elsewhere where
        they are exchanged as a whole.
        """
        positions = torch.arange(self.ids.shape[1])
        # The terms of experts are told by text and position, so that all positions run.
        whole = any(site.place == "experts" for site in sites)
        known = {}
        for number, layer in enumerate(self.model.places.layers):
            for module in layer.by_position:
                is_last = module in (layer.heads, layer.mlp)
                steps = sites.pop(Site(module, "step", number), {})
                live = sites.pop(Site(module, "rows", number), {})
                runs, values = [], []
                for i, (moment, kept) in enumerate(starts):
                    own = self.by_position[module]
                    starts_here = 4 * number + 2 * is_last >= moment and i not in steps
                    here = (positions >= kept) & starts_here
                    for of_set in live.get(i, ()):
                        here &= of_set.cpu()
                    runs.append(here)
                    values.append(steps[i][0] if i in steps else own)
                if not whole:
                    known[module] = torch.stack(runs), values
        return known

    def run_layer(self, number: int) -> None:
        """Run one layer on its own stream."""
        args, kwargs = self.arguments[number]
        with wide_passes(self.model.model):
            module = self.model.places.layers[number].module
            module(self.streams[number].clone(), *args, **kwargs)


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

    def keep_stream(stream: Tensor) -> None:
        if not stream.isfinite().all():
            before = f"layer {len(streams) - 1}" if streams else "the embedding"
            raise BilensError(
                f"The stream after {before} is NaN or infinite: the forward pass on this text "
                "overflows. Open the model with dtype=torch.float32, or train again"
            )
        streams.append(stream)

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep_stream(first_input(args, kwargs).clone())  # layers may change it in place
        options = {name: x for name, x in kwargs.items() if name != "hidden_states"}
        arguments.append((args[1:], options))

    with hooked([(layer.module, keep) for layer in model.places.layers]):
        keep_stream(last_streams(model, ids))
    return streams, arguments

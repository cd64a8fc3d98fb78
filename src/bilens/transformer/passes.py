"""Forward passes of a model on texts side by side, and changed passes that start from them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bilens.analysis import Reading
from bilens.checks import check_sum, checked
from bilens.data.texts import write_out
from bilens.errors import BilensError
from bilens.hooks import first_call, hooked
from bilens.sections import Columns, Fact, by_column
from bilens.transformer.experts import ExpertCall
from bilens.transformer.mixing import Mix, Mixing
from bilens.transformer.model import ResidualModel, checked_ids
from bilens.transformer.on_text import LayerOnText, layer_on_text
from bilens.transformer.running import first_input, first_output, run, wide_passes

Metric = Callable[[Float[Tensor, "batch time d_model"]], Float[Tensor, " batch"]]
"""A function of the stream after the last layer, such as a logit."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call of a layer, by position and by name, without the stream."""


class Values(NamedTuple):
    """Values of the parts of a pass, each of shape (texts, time, width)."""

    inputs: dict[nn.Module, Tensor]  # mixed values of a layer's heads, by the map that reads them
    outputs: dict[nn.Module, Tensor]  # of MLPs, and of modules that take each position by itself

    def map(self, function: Callable[..., Tensor], *others: "Values") -> "Values":
        """Return a function of each value, and of those in its place in others."""
        tables = []
        for i, tensors in enumerate(self):
            of_others = [other[i] for other in others]
            tables.append({m: function(x, *(y[m] for y in of_others)) for m, x in tensors.items()})
        return Values(*tables)


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
        context = _keeping(model, len(ids)) if parts else nullcontext()
        with torch.no_grad(), wide_passes(model.model), embedded(model, tokens), context as values:
            streams, arguments = _recorded(model, ids)
        of_texts = cls(model, ids, tokens, streams)
        vars(of_texts)["arguments"] = arguments
        if values is not None:
            vars(of_texts)["values"] = values
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
            for value, token in zip(*(x.tolist() for x in of_text), strict=True):
                name = token if tokenizer is None else repr(write_out(tokenizer, [token]))
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
            module: Any = heads.module
            (x, pos_embed, rope, _mask, _cache, v_first), _ = self._call(module, layer)
            with wide_passes(self.model.model):
                weights: Tensor = module.attention_pattern(x, pos_embed, rope, v_first)
            return weights
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
            module = self.model.places.layers[layer].heads
            if module is None:
                raise BilensError(f"layer {layer} has no heads, expected one with heads")
            with Mixing() as mixing:
                args, _ = self._call(module, layer)
            self._mixes[layer] = mixing.read_by(args[0], layer)
        return self._mixes[layer]

    @torch.no_grad()
    def expert(self, layer: int, number: int) -> Float[Tensor, "texts time d_model"]:
        """Return the term of an expert in what its layer's experts add up; the layer runs once."""
        if layer not in self._experts:
            module = self.model.places.layers[layer].experts
            assert module is not None
            self._experts[layer] = ExpertCall.of(module, *self._call(module, layer))
        with wide_passes(self.model.model):
            return self._experts[layer].term(number).reshape(self.tokens.shape)

    def _call(self, module: nn.Module, layer: int) -> Arguments:
        """Return the arguments with which a layer calls a module of it."""
        _ = self.arguments  # whose first use runs all layers, and with them the module
        return first_call(module, partial(self.run_layer, layer))

    @cached_property
    def _mixes(self) -> dict[int, Mix]:
        return {}

    @cached_property
    def _experts(self) -> dict[int, ExpertCall]:
        return {}

    @cached_property
    def values(self) -> Values:
        """Values of the parts, computed by each layer alone if they were not recorded."""
        with (
            torch.no_grad(),
            wide_passes(self.model.model),
            _keeping(self.model, len(self.ids)) as values,
        ):
            for i in range(self.model.n_layers):
                self.run_layer(i)
        return values

    @property
    def outputs(self) -> list[Float[Tensor, "texts time d_model"]]:
        """Outputs of the MLP of each layer, before a norm; of width 0 without one."""
        layers, nothing = self.model.places.layers, self.tokens[..., :0]
        return [self.values.outputs[x.mlp] if x.mlp else nothing for x in layers]

    @property
    def stream(self) -> Float[Tensor, "texts time d_model"]:
        """The stream after the last layer."""
        return self.streams[-1]

    def some(self, texts: Sequence[int]) -> "Pass":
        """Return the pass of some of the texts, which shares memory if they are in a row."""
        first, size = texts[0], len(texts)
        in_a_row = list(texts) == [*range(first, first + size)]
        index: Any = slice(first, first + size) if in_a_row else list(texts)
        streams = [x[index] for x in self.streams]
        values = self.values.map(lambda x: x[index])
        return self.with_values(
            values, ids=self.ids[index], tokens=self.tokens[index], streams=streams
        )

    def in_place_of(self, other: "Pass") -> "Pass":
        """Return this pass with as many tokens as another one, whose parts take its values.

        Tokens that are as far from the end stand against each other. In front of a shorter text are
        the values of the other pass itself, which stay as they are.
        """
        time, own = other.ids.shape[1], self.ids.shape[1]
        if time == own:
            return self
        common = min(time, own)

        def joined(x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([y[:, : time - common], x[:, own - common :]], 1)

        values = self.values.map(joined, other.values)
        streams = [joined(*pair) for pair in zip(self.streams, other.streams, strict=True)]
        ids, tokens = joined(self.ids, other.ids), joined(self.tokens, other.tokens)
        return other.with_values(values, ids=ids, tokens=tokens, streams=streams)

    def with_values(self, values: Values, **fields: Any) -> "Pass":
        """Return the pass with other values of its parts, and with other fields."""
        result = replace(self, **fields)
        vars(result)["values"] = values
        return result

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, some of which share it."""
        tensors = [self.ids, self.tokens, *self.streams]
        tensors += (*self.values.inputs.values(), *self.values.outputs.values())
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        return sum(storages.values())

    def run_layer(self, number: int) -> None:
        """Run one layer on its own stream."""
        args, kwargs = self.arguments[number]
        with wide_passes(self.model.model):
            module = self.model.places.layers[number].module
            module(self.streams[number].clone(), *args, **kwargs)


@contextmanager
def _keeping(model: ResidualModel, texts: int) -> Iterator[Values]:
    """Keep the values of the parts in the runs of the layers in this block."""
    values = Values({}, {})

    def of_texts(x: Tensor) -> Tensor:
        # Some modules take the tokens of all texts as one list.
        return x.reshape(texts, -1, x.shape[-1]).clone()  # which may be changed in place

    def keep_input(module: nn.Module, args: tuple[Tensor, ...], *_: Any) -> None:
        values.inputs[module] = of_texts(args[0])

    def keep_output(module: nn.Module, _: Any, __: Any, y: Any) -> None:
        values.outputs[module] = of_texts(first_output(y))

    layers = model.places.layers
    heads = [layer.heads for layer in layers if layer.heads is not None]
    # Queries, keys and values may be one module, whose output is kept once.
    writers = dict.fromkeys(x for layer in layers for x in (*layer.by_position, layer.mlp) if x)
    before = [(module, keep_input) for module in heads]
    with hooked(before, [(module, keep_output) for module in writers]):
        yield values


def first_change(passes: Sequence[Pass]) -> int:
    """Return the first position at which the embeddings of two passes differ, in any text."""
    differ = (passes[0].tokens != passes[1].tokens).any(-1).any(0)
    return int(differ.int().argmax())


def logit_of(model: ResidualModel, u: Float[Tensor, " d_model"]) -> Metric:
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
            is_scaled = (wide - scaled_rows).norm() <= (wide - rows).norm()
            factor = 1.0 if is_scaled or not table.scale else 1 / table.scale
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

"""The places at which a model is cut and changed: embedding, layers, mixed values and MLPs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from bilens.errors import BilensError
from bilens.hooks import hooked
from bilens.transformer.experts import is_experts
from bilens.transformer.layers import Modules
from bilens.transformer.maps import working_dtype
from bilens.transformer.running import (
    device_of,
    first_input,
    first_output,
    run,
    wide_passes,
    with_input,
)


@dataclass(frozen=True, eq=False)
class LayerPlaces:
    """The modules of a layer.

    Attributes:
        module: the layer, whose first input is the stream.
        heads: the module whose input are the mixed values of all heads, side by side.
        mlp: the MLP, before a norm after it; None without one.
        by_position: modules that take each position by itself.
        adds: whether the layer adds functions of mixed values and of the MLP's output to the
            stream, and nothing else.
    """

    module: nn.Module
    heads: nn.Module | None
    mlp: nn.Module | None
    by_position: tuple[nn.Module, ...] = ()
    adds: bool = False

    @property
    def experts(self) -> nn.Module | None:
        """The module of its experts, whose output is their sum; None without any."""
        return next((module for module in self.module.modules() if is_experts(module)), None)


@dataclass(frozen=True, eq=False)
class Places:
    """The modules of a model at which its graph is cut.

    Attributes:
        model: the model itself.
        embed: the embedding of tokens.
        layers: each layer.
        last: the module whose input is the stream after the last layer.
        n_heads: heads side by side in mixed values.
        modules: the maps of its weights; None for a model of a family that is not known.
        tables: further embeddings of the tokens, such as those that all layers read.
        crosses: whether layers read more of earlier ones than the stream, such as their keys.
        skipped: number of earlier calls of `last`, such as those of a norm before the layers.
    """

    model: nn.Module
    embed: nn.Embedding
    layers: tuple[LayerPlaces, ...]
    last: nn.Module
    n_heads: int
    modules: Modules | None = None
    tables: tuple[nn.Embedding, ...] = ()
    crosses: bool = False
    skipped: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers of readings: float64 if the weights are stored so, else float32."""
        return working_dtype(self.embed.weight.dtype)

    @property
    def exist(self) -> Bool[Tensor, "layers heads+1"]:
        """Which heads there are in each layer, and as the last whether it has an MLP."""
        rows = [[x.heads is not None] * self.n_heads + [x.mlp is not None] for x in self.layers]
        return torch.tensor(rows)

    @torch.no_grad()
    def rows(
        self, ids: Int[Tensor, "*batch time"], table: nn.Embedding | None = None
    ) -> Float[Tensor, "*batch time width"]:
        """Return the embeddings of tokens, as they are added to the stream if that is known.

        Those of a further table are its own.
        """
        if self.modules is not None and table is None:
            return self.modules.embed.rows(ids)
        with self.context():
            embeddings: Tensor = (table or self.embed)(ids)
        return embeddings.to(self.dtype)

    def forward(
        self,
        ids: Int[Tensor, "texts time"],
        positions: int = 1,
        places: Int[Tensor, "texts time"] | None = None,
    ) -> Float[Tensor, "texts vocab"]:
        """Run the model on texts, the last `positions` to the logits, and return the last ones.

        With `places`, the position of each token, tokens see none of those before a jump in them.
        """
        takes = signature(self.model.forward).parameters
        if places is not None and "position_ids" not in takes:
            raise BilensError(
                f"{type(self.model).__name__} takes no positions, by which a shorter text is "
                "padded; expected texts of equally many tokens"
            )
        # A number would let layers that read keys of earlier ones leave out all other positions.
        ends = torch.arange(-positions, 0, device=ids.device) if self.crosses else positions
        options = {"logits_to_keep": ends} if "logits_to_keep" in takes else {}
        if places is not None:
            options["position_ids"] = places
        output = run(self.model, ids, **options)
        logits: Tensor = getattr(output, "logits", output)
        return logits[:, -1]

    def context(self) -> AbstractContextManager[None]:
        """Return the context in which the modules run."""
        return wide_passes(self.model)

    def logits(self, x: Float[Tensor, "n d_model"]) -> Float[Tensor, "n vocab"]:
        """Return the logits of streams after the last layer."""
        if (modules := self.modules) is None:
            return self.own_logits(x)
        return modules.logits(x if x.dtype == torch.float64 else x.to(modules.dtype))

    def own_logits(self, x: Float[Tensor, "n d_model"]) -> Float[Tensor, "n vocab"]:
        """Return the logits of streams after the last layer, by the model itself."""

        # Texts of one token each, whose streams are exchanged where only the unembedding follows.
        def exchange(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return with_input(x[:, None], args, kwargs)

        ids = torch.zeros(len(x), 1, dtype=torch.int64, device=x.device)
        with hooked(before=[(self.last, exchange)]), self.context():
            output = run(self.model, ids)
        logits: Tensor = getattr(output, "logits", output)
        return logits.reshape(len(x), -1).to(self.dtype)


def known_places(model: nn.Module, modules: Modules) -> Places:
    """Return the places of a model whose parts are known."""
    layers = []
    for layer in modules.layers:
        heads, mlp = layer.heads, layer.mlp
        maps = dict.fromkeys(part.module for part in (*heads.reads, heads.out))
        layers.append(
            LayerPlaces(
                module=layer.module,
                heads=heads.out.module,
                mlp=mlp.module,
                by_position=(*maps, mlp.module),
                adds=layer.residual_mix is None,
            )
        )
    n_heads = modules.layers[0].heads.n_heads
    last = modules.norm_or_module
    return Places(model, modules.embed.module, tuple(layers), last, n_heads, modules)


# Places of a model whose family is not known, found in a short pass.

MIXING = re.compile(r"att|mix|mamba|ssm|conv|rnn|recurrent|temporal", re.IGNORECASE)
"""Names of a layer's children that mix positions; its MLP is the last other one with maps."""
MLP = re.compile(r"mlp|ffn|feed|moe|expert", re.IGNORECASE)
"""Names of an MLP, which comes before maps of other names."""


TOKENS = [3, 5, 3, 4]
"""The tokens of that pass, the first and the third of them the same."""
NOISE = 0.3
"""Share of the size of a stream by which it is changed, to see what depends on it."""


@dataclass(eq=False)
class _Call:
    """A call of a module in the pass."""

    module: Any
    inputs: list[Tensor]
    outputs: list[Tensor]


def find_places(model: Any) -> Places:
    """Return the places of a causal model of transformers whose parts are not known.

    They are found in the order in which a short pass calls modules, and by names. Sums of flows
    tell whether they are right.

    Raises:
        BilensError: the model has no layers that run in their order, each once, on one stream.
    """
    embed = model.get_input_embeddings()
    if not isinstance(embed, nn.Embedding):
        raise BilensError(
            f"{type(model).__name__} embeds tokens by a {type(embed).__name__}, expected an "
            "nn.Embedding"
        )
    calls = _record(model)
    order = [call.module for call in calls]
    by_module = {call.module: call for call in calls}
    layers = _layers(model, order)
    _check_stream(model, [by_module[layer] for layer in layers])
    last = _reader_of_end(model, layers[-1], calls, by_module)
    places, widths = [], []
    for layer in layers:
        heads, mlp = _parts(layer, order, by_module)
        places.append(LayerPlaces(layer, heads, mlp))
        if heads is not None:
            widths.append(by_module[heads].inputs[0].shape[-1])
    before = calls[: order.index(layers[0])]
    return Places(
        model,
        embed,
        tuple(places),
        last,
        _head_count(model, widths),
        tables=tuple(x.module for x in before if x.module is not embed and _embeds_tokens(x)),
        crosses=_crosses(model, layers),
        skipped=order.count(last) - 1,
    )


def _check_stream(model: Any, calls: Sequence[_Call]) -> None:
    """Raise unless each layer reads and writes one stream of texts, tokens and d_model."""
    for call in calls:
        if not (call.inputs and call.outputs and call.inputs[0].shape == call.outputs[0].shape):
            raise BilensError(f"{type(call.module).__name__} does not read and write one stream")
    if any(call.inputs[0].dim() != 3 for call in calls):
        shape = tuple(calls[0].inputs[0].shape)
        raise BilensError(
            f"The stream of {type(model).__name__} has the shape {shape}, expected texts, tokens "
            "and d_model"
        )


def _reader_of_end(
    model: Any, layer: nn.Module, calls: Sequence[_Call], by_module: Mapping[Any, _Call]
) -> nn.Module:
    """Return the module that reads the output of the last layer."""
    end = by_module[layer].outputs[0]
    after = [x for x in calls if x.inputs and by_module[x.module] is x]
    after = after[after.index(by_module[layer]) + 1 :]
    # A layer that changes its stream in place reads what becomes its output.
    inside = set(layer.modules())
    after = [x for x in after if x.module not in inside]
    order = [call.module for call in calls]
    readers = [x.module for x in after if _same(x.inputs[0], end)]
    # What comes between belongs to the last layer.
    for x in after:
        if order.count(x.module) == 1 and x.inputs[0].shape == end.shape:
            readers.append(x.module)
    if not readers:
        raise BilensError(f"No module of {type(model).__name__} reads the output of its last layer")
    return cast("nn.Module", readers[0])


def _head_count(model: Any, widths: Sequence[int]) -> int:
    """Return the number of heads of every layer, or 1 where it is not known."""
    try:
        n_heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", 1)
    except RuntimeError:  # it has a number for each layer
        return 1
    is_number = isinstance(n_heads, int) and not any(width % n_heads for width in widths)
    return n_heads if is_number else 1


def is_causal_model(model: nn.Module) -> bool:
    """Return whether a model of transformers predicts each token from earlier ones only.

    Raises:
        BilensError: a pass writes into a buffer, which then has its numbers of before again.
    """
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        return False
    ids = _tokens(model, [[3, 4, 5, 6], [3, 4, 5, 7]])
    with torch.no_grad(), wide_passes(model), _unwritten(model):
        try:
            first, second = run(model, ids).logits[:, :-1]
        except (TypeError, ValueError, AttributeError):
            # It asks for more than tokens, such as pictures or another text.
            return False
    return bool(torch.allclose(first, second, rtol=1e-4, atol=1e-4 * float(first.abs().max())))


@contextmanager
def _unwritten(model: nn.Module) -> Iterator[None]:
    """Raise if a pass writes into a buffer of a model, and undo it.

    Raises:
        BilensError: it does: what it computes would depend on what ran before.
    """
    buffers = {name: x for name, x in model.named_buffers() if not (x.is_meta or x.is_inference())}
    before = {name: (x._version, x.clone()) for name, x in buffers.items()}
    try:
        yield
    finally:
        names = [name for name, x in buffers.items() if x._version != before[name][0]]
        for name in names:
            buffers[name].copy_(before[name][1])
    if names:
        raise BilensError(
            f"{type(model).__name__} writes into its buffer {names[0]} when it runs, expected a "
            "model that keeps nothing of a text; let it compute in a tensor of its own"
        )


def _tokens(model: Any, numbers: list[list[int]]) -> Int[Tensor, "texts time"]:
    """Return tokens for a short pass, of a vocabulary of any size."""
    size = getattr(model.get_input_embeddings(), "num_embeddings", max(map(max, numbers)) + 1)
    ids = torch.tensor(numbers, device=device_of(next(model.parameters())))
    return ids % size


@torch.no_grad()
def _short_pass(model: nn.Module) -> None:
    with wide_passes(model):
        run(model, _tokens(model, [TOKENS]))


def _record(model: nn.Module) -> list[_Call]:
    """Return all calls of the short pass, in the order in which they begin."""
    calls: list[_Call] = []
    stack: list[_Call] = []

    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        values = [*args[:1], *[kwargs[name] for name in ("hidden_states",) if name in kwargs]]
        values += [x for x in args[1:] if isinstance(x, Tensor)]
        call = _Call(module, [x for x in values if isinstance(x, Tensor)], [])
        calls.append(call)
        stack.append(call)

    def leave(module: nn.Module, _: Any, __: Any, output: Any) -> None:
        values = output if isinstance(output, (tuple, list)) else (output,)
        stack.pop().outputs = [x for x in values if isinstance(x, Tensor)]

    modules = [x for x in model.modules() if x is not model]
    hooks = hooked([(x, enter) for x in modules], [(x, leave) for x in modules])
    with hooks:
        _short_pass(model)
    return calls


def _crosses(model: Any, layers: Sequence[nn.Module]) -> bool:
    """Return whether a layer depends on earlier ones also if its own stream is held fixed.

    In passes without a gradient, which some models refuse: each layer reads its stream of the first
    pass, and some of them with noise. Of any two layers there is a pass in which the earlier one
    has noise, and the later one has none.
    """
    streams, outputs = list[Tensor](), list[Tensor]()
    generator = torch.Generator().manual_seed(0)

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams.append(first_input(args, kwargs).clone())

    def keep_output(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
        outputs.append(first_output(output).clone())

    with hooked([(x, keep) for x in layers], [(x, keep_output) for x in layers]):
        _short_pass(model)
    others = []
    for x in streams:
        noise = torch.randn(x.shape, generator=generator).to(x)
        others.append(x + NOISE * x.std() * noise)
    numbers = {layer: i for i, layer in enumerate(layers)}
    results: list[bool] = []
    for bit in range((len(layers) - 1).bit_length()):
        for noisy in (0, 1):

            def enter(
                layer: nn.Module,
                args: tuple[Any, ...],
                kwargs: dict[str, Any],
                bit: int = bit,
                noisy: int = noisy,
            ) -> Any:
                i = numbers[layer]
                values = others if i >> bit & 1 == noisy else streams
                return with_input(values[i].clone(), args, kwargs)

            def leave(
                layer: nn.Module, _: Any, __: Any, y: Any, bit: int = bit, noisy: int = noisy
            ) -> None:
                i = numbers[layer]
                if i >> bit & 1 != noisy:
                    own = outputs[i]
                    change = (first_output(y) - own).abs().max()
                    results.append(bool(change > 1e-5 * own.abs().max()))

            with hooked([(x, enter) for x in layers], [(x, leave) for x in layers]):
                _short_pass(model)
    return any(results)


def _layers(model: nn.Module, order: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the longest list of modules that a pass calls in their order, each once."""
    longest: list[nn.Module] = []
    for modules in model.modules():
        if isinstance(modules, nn.ModuleList) and len(modules) > len(longest):
            members = set(modules)
            if [module for module in order if module in members] == [*modules]:
                longest = [*modules]
    if not longest:
        raise BilensError(
            f"{type(model).__name__} has no layers that run in their order, each once"
        )
    return longest


def _parts(
    layer: nn.Module, order: Sequence[nn.Module], calls: dict[nn.Module, _Call]
) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the last map of what mixes positions, and the MLP of a layer."""
    heads, others = None, dict[str, nn.Module]()
    children = [(name, part) for name, part in layer.named_children() if part in calls]
    for name, part in sorted(children, key=lambda child: order.index(child[1])):
        if not any(p.dim() > 1 for p in part.parameters()):
            continue
        maps = sorted((x for x in part.modules() if x in calls and _is_map(x)), key=order.index)
        if MIXING.search(name):
            heads = heads or next(reversed(maps), None)
        else:
            # A second input is the stream, which such modules add.
            adds = len(calls[part].inputs) > 1
            others[name] = [part, *maps][-1 if adds else 0]
    mlps = [part for name, part in others.items() if MLP.search(name)]
    return heads, next(reversed(mlps or [*others.values()]), None)


def _embeds_tokens(call: _Call) -> bool:
    """Return whether a call embeds the tokens of the pass, and not their positions."""
    if not (isinstance(call.module, nn.Embedding) and call.inputs):
        return False
    size = call.module.num_embeddings
    if call.inputs[0].tolist() != [[x % size for x in TOKENS]] or call.outputs[0].dim() != 3:
        return False
    rows = call.outputs[0][0]
    return torch.equal(rows[0], rows[2])


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.data_ptr() == y.data_ptr()


def _is_map(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2

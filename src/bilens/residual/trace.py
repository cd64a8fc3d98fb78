"""Texts in tokens, and a model on a text: streams, scales, queries, patterns and gate ratios."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from bilens.checks import check_text, detached
from bilens.data.texts import clean
from bilens.errors import BilensError
from bilens.residual.layers import MLP, Layer, Parts
from bilens.residual.parts import Norm
from bilens.residual.running import (
    StopForwardError,
    attends_by,
    attention_call,
    recording,
    rotates_by_length,
    run,
)
from bilens.settings import Count, Place

ScoredRows = list[tuple[Tensor, Tensor]]
"""One or two pairs of queries and keys (n, heads, d_head), whose inner products are the scores."""

ROWS = 8192
"""Rows that go through a layer at once."""


@detached
def query_key_maps(view: Any, layer: int, position: Place) -> ScoredRows:
    """Return the maps from normalised rows n at a position to queries and keys, [n, 1] @ map.

    They include rotation, the scores' scale and the gains of norms of queries and keys.

    Args:
        view: a `ResidualModel`.
        layer: number of the layer.
        position: of the rows.

    Returns:
        One or two pairs of (d_model + 1, heads, d_head). The last row is the output of biases
        and of positions that are vectors.
    """
    norm = view.layer(layer).heads.norm
    basis = torch.eye(view.d_model, dtype=view.parts.dtype, device=view.device)
    zero = torch.zeros_like(basis[:1])
    if norm is not None:
        basis = norm.folded(basis, None)[0].T
        bias = norm.bias()
        zero = zero if bias is None else bias[None]
        basis = basis + zero
    # The maps are run, not read: only the modules know their rotation. They are affine in the rows
    # as long as norms of queries and keys only multiply by their gain, so the row of zeros has the
    # constant.
    pairs = _from_stream(view, layer, torch.cat([basis, zero]), position, linear=True)

    def without_bias(rows: Tensor) -> Tensor:
        return torch.cat([rows[:-1] - rows[-1:], rows[-1:]])

    return [(without_bias(q), without_bias(k)) for q, k in pairs]


@detached
def queries_keys(
    view: Any,
    layer: int,
    n: Float[Tensor, "rows d_model"],
    position: Place,
    length: Count | None = None,
) -> ScoredRows:
    """Return queries and keys of normalised rows at one position.

    They include biases, norms of queries and keys, rotation and the scores' scale.

    Args:
        view: a `ResidualModel`.
        layer: number of the layer.
        n: the rows.
        position: of the rows.
        length: number of tokens of the text, by which some models choose the frequencies of rotary
            positions; by default the position is the last one.

    Returns:
        One or two pairs of (rows, heads, d_head), whose inner products are the scores.

    Raises:
        BilensError: the rows do not have the width of the stream.
    """
    if n.shape[-1] != view.d_model:
        raise BilensError(
            f"n has shape {tuple(n.shape)}, expected a last axis of {view.d_model}, the width of "
            "the stream"
        )
    norm = view.layer(layer).heads.norm
    x = n if norm is None else norm.applied(n)
    return _from_stream(view, layer, x, position, length, linear=False)


def _from_stream(
    view: Any, layer: int, x: Tensor, position: int, length: int | None = None, *, linear: bool
) -> ScoredRows:
    """Return queries and keys of a layer for rows (n, d_model) at one position.

    The rows go through the layer's own maps, norms and rotation. The scores' scale is in the
    queries. Keys that heads share are repeated for each of them. With `linear` norms of queries and
    keys multiply by their gain only, so that the result is linear in the rows.
    """
    if len(x) > ROWS:
        batches = x.split(ROWS)
        parts = [_from_stream(view, layer, y, position, length, linear=linear) for y in batches]
        pairs = []
        for of_batches in zip(*parts, strict=True):
            queries, keys = zip(*of_batches, strict=True)
            pairs.append((torch.cat(queries), torch.cat(keys)))
        return pairs
    heads, model = view.parts.layers[layer].heads, view.model
    if view.parts.queries_keys is not None:
        return view.parts.queries_keys(heads.module, x, position)
    # Each row is a text of one token, at the given position.
    rows = x[:, None].to(heads.out.stored.dtype)
    if hasattr(heads.module, "queries_keys"):
        pairs, scale = _of_own_model(model, heads.module, rows, position, linear=linear)
    else:
        with _gains_only(heads.inner if linear else ()):
            arguments = _arguments(model, heads.module, position, length or position + 1)
            call = attention_call(model, lambda: heads.module(hidden_states=rows, **arguments))
        if call is None:
            raise BilensError(
                f"{type(heads.module).__name__} is not built on the attention interface of "
                "transformers, which returns queries and keys; set queries_keys in its Family"
            )
        query, key, scale = call["query"], call["key"], call["scaling"]
        # Row h of the keys is then that of head h, also where heads share keys.
        pairs = [(query, key.repeat_interleave(query.shape[1] // key.shape[1], 1))]
    return [(scale * q[:, :, 0].to(x), k[:, :, 0].to(x)) for q, k in pairs]


def _of_own_model(
    model: Any, module: Any, rows: Tensor, position: int, *, linear: bool
) -> tuple[ScoredRows, float]:
    ids = torch.zeros(1, 1, dtype=torch.int64, device=rows.device)
    _, pos_embed, rope = model.embed_text(ids, torch.full_like(ids, position))
    place = None if pos_embed is None else pos_embed.expand(len(rows), 1, -1)
    return module.queries_keys(rows, place, rope, normed=not linear), module.scale


def _arguments(model: Any, module: nn.Module, position: int, length: int) -> dict[str, Any]:
    """Return the arguments of an attention module at a position of a text, without its input."""
    arguments: dict[str, Any] = {}

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_recorded():
            arguments.update(kwargs)
            raise StopForwardError

    # The last position tells a model the length of the text.
    text = [position] if length == position + 1 else [position, length - 1]
    places = torch.tensor([text], device=next(module.parameters()).device)
    hook = module.register_forward_pre_hook(record, with_kwargs=True)
    with recording() as is_recorded, hook, suppress(StopForwardError):
        run(model, torch.zeros_like(places), position_ids=places)
    known: dict[str, Any] = {"attention_mask": None}
    if "position_embeddings" in arguments:
        turns = arguments["position_embeddings"]
        known["position_embeddings"] = (
            turns if len(text) == 1 else tuple(part[:, :1] for part in turns)
        )
    return known


@contextmanager
def _gains_only(norms: Sequence[Norm]) -> Iterator[None]:
    with recording() as is_recorded, ExitStack() as hooks:
        for norm in norms:
            gain = norm.gain()

            def multiply(_: nn.Module, args: Any, output: Tensor, gain: Tensor = gain) -> Tensor:
                return args[0] * gain if is_recorded() else output

            hooks.enter_context(norm.module.register_forward_hook(multiply))
        yield


def require_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer; raise BilensError if it is None."""
    if tokenizer is None:
        raise BilensError(
            "The model came without a tokenizer, which texts need: pass the numbers of tokens, or "
            "ResidualModel(model, tokenizer)"
        )
    return tokenizer


def trained_on_clean_text(tokenizer: Any) -> bool:
    """Return True for tokenizers of bilens's own models, which learn from cleaned texts."""
    return getattr(tokenizer, "bos_token", None) == "[BOS]"


def max_tokens(config: Any) -> int:
    """Return the length of the longest text that a model accepts, by its configuration."""
    return int(getattr(config, "max_position_embeddings", 2**31 - 1))


def text_ids(text: str, tokenizer: Any, config: Any) -> list[int]:
    """Return the token ids of a text, after the token that the model's texts begin with.

    Raises:
        BilensError: the model has no tokenizer, or the text is empty, too long or has no known
            token.
    """
    tokenizer = require_tokenizer(tokenizer)
    check_text("text", text)
    if trained_on_clean_text(tokenizer):
        # The tokenizer's own rules would also add a token at the end.
        ids = tokenizer(clean(text), add_special_tokens=False)["input_ids"]
        ids = ids if config.bos_token_id is None else [config.bos_token_id, *ids]
    else:
        ids = tokenizer(text)["input_ids"]
    if all(number in tokenizer.all_special_ids for number in ids):
        raise BilensError(
            f"text={text[:80]!r} holds no token that the model knows; expected some text"
        )
    if len(ids) > max_tokens(config):
        raise BilensError(
            f"text has {len(ids)} tokens, expected up to {max_tokens(config)}, the longest text "
            "that the model reads"
        )
    return list(ids)


Recorded = dict[tuple[str, nn.Module], Tensor]
"""Numbers of a forward pass, by their kind and module."""


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """One layer on a text.

    With these numbers held fixed attention is linear and a gated MLP bilinear in its input.

    Attributes:
        stream: before the layer.
        attn_input: input of attention before its norm: the stream, with the embedding mixed in
            in models that do so.
        attn_n: attention's input n, the normalised stream before the norm's gain.
        attn_scale: scale of attention's norm; 1 without one.
        pattern: weight of every earlier position (columns) at every position (rows), by head.
        attn_out_scale: scale of the norm after attention; 1 without one.
        mlp_input: input of the MLP before its norm.
        mlp_n: the MLP's input n, the normalised stream before the norm's gain.
        mlp_scale: scale of the MLP's norm.
        gate_ratio: (act(z) - act(0)) / z of each hidden unit, which makes the MLP bilinear on
            this text. If act(0) is not 0, it follows as the ratio of a second set of units.
        mlp_out_scale: scale of the norm after the MLP; 1 without one.
        routing: factor of each hidden unit by the router of experts, which `gate_ratio` has in it;
            None without experts.
    """

    stream: Float[Tensor, "time d_model"]
    attn_input: Float[Tensor, "time d_model"]
    attn_n: Float[Tensor, "time d_model"]
    attn_scale: Float[Tensor, " time"]
    pattern: Float[Tensor, "heads time time"]
    attn_out_scale: Float[Tensor, " time"]
    mlp_input: Float[Tensor, "time d_model"]
    mlp_n: Float[Tensor, "time d_model"]
    mlp_scale: Float[Tensor, " time"]
    gate_ratio: Float[Tensor, "time units"]
    mlp_out_scale: Float[Tensor, " time"]
    routing: Float[Tensor, "time hidden"] | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """A model on a text.

    Attributes:
        ids: the text.
        layers: the layers on the text.
        stream: after the last layer.
        scale: scale of the last norm; 1 without one.
        logits: of the model itself.
    """

    ids: Int[Tensor, " time"]
    layers: tuple[LayerTrace, ...]
    stream: Float[Tensor, "time d_model"]
    scale: Float[Tensor, " time"]
    logits: Float[Tensor, "time vocab"]


@detached
def traces(model: Any, parts: Parts, texts: Sequence[Int[Tensor, " time"]]) -> list[Trace]:
    """Run a model on texts of any lengths at once; return their traces, in float32 or float64."""
    if rotates_by_length(model) and len(set(map(len, texts))) > 1:
        return [traces(model, parts, [text])[0] for text in texts]
    # Attention is causal: padding at the end changes no position before it.
    ids = pad_sequence(list(texts), batch_first=True)
    seen: Recorded = {}
    # Only eager attention returns its pattern.
    with attends_by(model, "eager"), recording() as is_recorded, ExitStack() as hooks:

        def record(kind: str, module: nn.Module, read: Callable[..., Tensor]) -> None:
            def hook(module: nn.Module, *call: Any) -> None:
                if is_recorded():
                    seen[kind, module] = _wide(read(module, *call))

            hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))

        for layer in parts.layers:
            heads, mlp = layer.heads, layer.mlp
            for module in (layer.module, heads.norm_or_module, mlp.norm_or_module):
                record("input", module, _first_input)
            reads = [part.module for part in mlp.reads]
            for module in (heads.out.module, mlp.writer, *reads):
                record("output", module, lambda *call: call[-1])
            record("pattern", heads.module, _pattern)
            if mlp.router is not None:
                # Recorded, not computed again: a token between two experts may fall to the other
                # one when its input is rounded differently.
                record("routing", mlp.router.module, lambda *call, of=mlp: of.routing(call[-1]))
        # Its input is the stream after the last layer, of any architecture.
        last = parts.norm_or_module
        record("input", last, _first_input)
        output = run(model, ids)
    layers = [_layer(seen, layer) for layer in parts.layers]
    streams, logits = seen["input", last], _wide(getattr(output, "logits", output))
    result = []
    for row, text in enumerate(texts):
        time = len(text)
        of_text = tuple(_of_text(batch, row, time) for batch in layers)
        stream = streams[row, :time]
        result.append(Trace(text, of_text, stream, parts.scale(stream), logits[row, :time]))
    return result


@torch.no_grad()
def mlp_inputs(
    model: Any, mlps: Sequence[MLP], ids: Int[Tensor, "batch time"]
) -> list[Float[Tensor, "batch time d_model"]]:
    """Return the normalised inputs of MLPs, in their order, at every position of texts.

    The forward pass stops at the last of them.
    """
    inputs: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Any, ...]) -> None:
        if is_recorded():
            inputs.append(mlps[len(inputs)].normalised(_wide(args[0])))
            if len(inputs) == len(mlps):
                raise StopForwardError

    with recording() as is_recorded, ExitStack() as hooks, suppress(StopForwardError):
        for mlp in mlps:
            hooks.enter_context(mlp.norm_or_module.register_forward_pre_hook(record))
        run(model, ids)
    return inputs


def _first_input(_: nn.Module, args: Sequence[Tensor], kwargs: Any, __: Any) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _pattern(module: Any, args: Sequence[Any], _: Any, output: Any) -> Tensor:
    if not hasattr(module, "attention_pattern"):
        # Attention of transformers returns its pattern after its output.
        return output[1]
    x, pos_embed, rope, _, _, v_first = args
    return module.attention_pattern(x, pos_embed, rope, v_first)


def _layer(seen: Recorded, layer: Layer) -> LayerTrace:
    """Return the trace of a layer on a batch: each tensor has the texts as its first axis."""
    heads, mlp = layer.heads, layer.mlp
    attn_input, mlp_input = (seen["input", part.norm_or_module] for part in (heads, mlp))
    mlp_n, routing, acted = mlp.normalised(mlp_input), None, mlp.reads[0]
    if mlp.router is None:
        gate_ratio = _ratio(mlp, acted.select(seen["output", acted.module], -1))
    else:
        # Routers take the tokens of all texts as one list.
        routing = seen["routing", mlp.router.module].unflatten(0, (len(mlp_n), -1))
        # Experts run on their own tokens only, inside one module. Here all of them read each token,
        # and the weight 0 of those that did not run removes their hidden units.
        ratio = _ratio(mlp, acted(mlp_n if mlp.norm is None else mlp.norm.applied(mlp_n)))
        gate_ratio = ratio * routing.repeat(1, 1, ratio.shape[-1] // routing.shape[-1]).to(ratio)
    return LayerTrace(
        stream=seen["input", layer.module],
        attn_input=attn_input,
        attn_n=heads.normalised(attn_input),
        attn_scale=heads.scale(attn_input),
        pattern=seen["pattern", heads.module],
        attn_out_scale=_scale(heads.out_norm, seen["output", heads.out.module]),
        mlp_input=mlp_input,
        mlp_n=mlp_n,
        mlp_scale=mlp.scale(mlp_input),
        gate_ratio=gate_ratio,
        mlp_out_scale=_scale(mlp.out_norm, seen["output", mlp.writer]),
        routing=routing,
    )


def _of_text(batch: LayerTrace, row: int, time: int) -> LayerTrace:
    """Return the trace of one text of a batch, without the padding after it."""
    rows = {name: x[row] for name, x in vars(batch).items() if x is not None}
    pattern = rows.pop("pattern")[:, :time, :time]
    return LayerTrace(**{name: x[:time] for name, x in rows.items()}, pattern=pattern)


def _ratio(mlp: MLP, z: Tensor) -> Tensor:
    # At z = 0 the ratio multiplies 0, so that any finite one will do.
    z = torch.where(z == 0, torch.full_like(z, 1e-6), z)
    constant = mlp.act_of_zero()
    if constant is None:
        return mlp.act(z) / z
    # act(z) = ratio z + act(0): the constants are weights of a second set of hidden units, whose
    # second factor is 1. See `ResidualModel.mlp_factors`.
    constant = constant.to(z).expand_as(z)
    return torch.cat([(mlp.act(z) - constant) / z, constant], -1)


def _scale(norm: Norm | None, x: Tensor) -> Tensor:
    return torch.ones_like(x[..., 0]) if norm is None else norm.scale(x)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()

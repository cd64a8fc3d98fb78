"""Texts in tokens, and a model on a text: streams, norm scales, patterns and gate ratios."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from bilens.checks import check_text, detached
from bilens.data.texts import clean
from bilens.errors import BilensError
from bilens.residual.attention import StopForwardError, attends_by, recording
from bilens.residual.layers import MLP, Layer, Parts
from bilens.residual.parts import Norm


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


def prepare_text(text: str, tokenizer: Any) -> str:
    """Clean a text if the model was trained on clean texts, or else return it unchanged."""
    return clean(text) if trained_on_clean_text(tokenizer) else text


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
            for module in (heads.out.module, mlp.writer, *(m.module for m in mlp.reads)):
                record("output", module, lambda *call: call[-1])
            record("pattern", heads.module, _pattern)
            if mlp.router is not None:
                # Recorded, not computed again: a token between two experts may fall to the other
                # one when its input is rounded differently.
                record("routing", mlp.router.module, lambda *call, of=mlp: of.routing(call[-1]))
        # Its input is the stream after the last layer, of any architecture.
        last = parts.norm_or_module
        record("input", last, _first_input)
        output = model(ids, use_cache=False)
    layers = [_layer(seen, layer) for layer in parts.layers]
    streams, logits = seen["input", last], _wide(getattr(output, "logits", output))
    result = []
    for row, (text, time) in enumerate((text, len(text)) for text in texts):
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
        model(ids, use_cache=False)
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

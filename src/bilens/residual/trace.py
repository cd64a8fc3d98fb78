"""Texts in tokens, and a model on a text: streams, norm scales, patterns and gate ratios."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from bilens.checks import check_text, full_precision
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


@torch.no_grad()
@full_precision
def traces(model: Any, parts: Parts, texts: Sequence[Int[Tensor, " time"]]) -> list[Trace]:
    """Run a model on texts of any lengths at once; return their traces, in float32 or float64."""
    # Attention is causal: padding at the end changes no position before it.
    ids = pad_sequence(list(texts), batch_first=True)
    with attends_by(model, "eager"), recording() as is_recorded, ExitStack() as hooks:
        # Only eager attention returns its pattern.
        seen = _Recorder(is_recorded, len(ids))
        for layer in parts.layers:
            heads, mlp = layer.heads, layer.mlp
            for module in (layer.module, heads.norm_or_module, mlp.norm_or_module):
                seen.inputs_of(module, hooks)
            for module in (heads.out.module, mlp.writer, *(m.module for m in mlp.reads)):
                seen.outputs_of(module, hooks)
            seen.pattern_of(heads.module, hooks)
            if mlp.router is not None:
                seen.routing_of(mlp, mlp.router.module, hooks)
        # Its input is the stream after the last layer, of any architecture.
        last = parts.norm_or_module
        seen.inputs_of(last, hooks)
        output = model(ids, use_cache=False)
    streams, logits = seen.inputs[last], getattr(output, "logits", output)
    result = []
    for row, text in enumerate(texts):
        stream = streams[row, : len(text)]
        layers = tuple(_OnText(seen, row, len(text)).layer(layer) for layer in parts.layers)
        scale = parts.scale(stream)
        result.append(Trace(text, layers, stream, scale, _wide(logits[row, : len(text)])))
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


class _Recorder:
    """Inputs and outputs of modules in one forward pass of a batch of texts."""

    def __init__(self, is_recorded: Callable[[], bool], texts: int) -> None:
        self.is_recorded, self.texts = is_recorded, texts
        self.inputs: dict[nn.Module, Tensor] = {}
        self.outputs: dict[nn.Module, Tensor] = {}
        self.patterns: dict[nn.Module, Tensor] = {}
        self.routings: dict[nn.Module, Tensor] = {}

    def inputs_of(self, module: nn.Module, hooks: ExitStack) -> None:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.is_recorded():
                self.inputs[module] = _wide(args[0] if args else kwargs["hidden_states"])

        hooks.enter_context(module.register_forward_pre_hook(record, with_kwargs=True))

    def outputs_of(self, module: nn.Module, hooks: ExitStack) -> None:
        def record(module: nn.Module, _: Any, output: Tensor) -> None:
            if self.is_recorded():
                self.outputs[module] = _wide(output)

        hooks.enter_context(module.register_forward_hook(record))

    def pattern_of(self, module: Any, hooks: ExitStack) -> None:
        ask: Callable[..., Tensor] | None = getattr(module, "attention_pattern", None)

        def record(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if not self.is_recorded():
                return
            # Attention of transformers returns its pattern after its output.
            if ask is None:
                pattern = output[1]
            else:
                x, pos_embed, rope, _, _, v_first = args
                pattern = ask(x, pos_embed, rope, v_first)
            self.patterns[module] = _wide(pattern)

        hooks.enter_context(module.register_forward_hook(record, with_kwargs=True))

    def routing_of(self, mlp: MLP, router: nn.Module, hooks: ExitStack) -> None:
        # Recorded, not computed again: a token between two experts may fall to the other one when
        # its input is rounded differently.
        def record(_: nn.Module, __: Any, outputs: Any) -> None:
            if self.is_recorded():
                # Routers take the tokens of all texts as one list.
                rows = _wide(mlp.routing(outputs))
                self.routings[mlp.module] = rows.unflatten(0, (self.texts, -1))

        hooks.enter_context(router.register_forward_hook(record))


@dataclass(frozen=True)
class _OnText:
    """The records of one text of a batch, without the padding after it."""

    seen: _Recorder
    row: int
    time: int

    def layer(self, layer: Layer) -> LayerTrace:
        heads, mlp, seen = layer.heads, layer.mlp, self.seen
        attn_input = self._select(seen.inputs[heads.norm_or_module])
        mlp_input = self._select(seen.inputs[mlp.norm_or_module])
        mlp_n = mlp.normalised(mlp_input)
        routing = None if mlp.router is None else self._select(seen.routings[mlp.module])
        return LayerTrace(
            stream=self._select(seen.inputs[layer.module]),
            attn_input=attn_input,
            attn_n=heads.normalised(attn_input),
            attn_scale=heads.scale(attn_input),
            pattern=seen.patterns[heads.module][self.row, :, : self.time, : self.time],
            attn_out_scale=_scale(heads.out_norm, self._select(seen.outputs[heads.out.module])),
            mlp_input=mlp_input,
            mlp_n=mlp_n,
            mlp_scale=mlp.scale(mlp_input),
            gate_ratio=self._gate_ratio(mlp, mlp_n, routing),
            routing=routing,
            mlp_out_scale=_scale(mlp.out_norm, self._select(seen.outputs[mlp.writer])),
        )

    def _select(self, batch: Tensor) -> Tensor:
        return batch[self.row, : self.time]

    def _gate_ratio(self, mlp: MLP, n: Tensor, routing: Tensor | None) -> Tensor:
        acted = mlp.reads[0]
        if routing is None:
            return _ratio(mlp, acted.select(self._select(self.seen.outputs[acted.module]).mT).mT)
        # Experts run on their own tokens only, inside one module. Here all of them read each token,
        # and the weight 0 of those that did not run removes their hidden units.
        y = n if mlp.norm is None else mlp.norm.applied(n)
        ratio = _ratio(mlp, acted(y))
        return ratio * routing.to(y).repeat(1, ratio.shape[1] // routing.shape[1])


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

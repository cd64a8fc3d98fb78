"""The numbers of a layer on texts, by which its attention is linear and its MLP bilinear."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bilens.hooks import hooked
from bilens.transformer.layers import MLP, Layer
from bilens.transformer.maps import Norm
from bilens.transformer.running import first_input


@dataclass(frozen=True, eq=False)
class LayerOnText:
    """A layer on texts.

    With these numbers and the pattern held fixed attention is linear and a gated MLP bilinear in
    its input.

    Attributes:
        attn_input: input of attention before its norm: the stream, with the embedding mixed in in
            models that do so.
        attn_n: attention's input n, the normalised stream before the norm's gain.
        attn_out_scale: scale of the norm after attention; 1 without one.
        mixed: values that the heads mix by their patterns, side by side: the input of W_O.
        mlp_input: input of the MLP before its norm.
        mlp_n: the MLP's input n, the normalised stream before the norm's gain.
        mlp_out_scale: scale of the norm after the MLP; 1 without one.
        gate_ratio: (act(z) - act(0)) / z of each hidden unit, which makes the MLP bilinear on this
            text. If act(0) is not 0, it follows as the ratio of a second set of units.
        routing: factor of each hidden unit by the router of experts, which `gate_ratio` has in it;
            None without experts.
    """

    attn_input: Float[Tensor, "texts time d_model"]
    attn_n: Float[Tensor, "texts time d_model"]
    attn_out_scale: Float[Tensor, "texts time"]
    mixed: Float[Tensor, "texts time all_heads"]
    mlp_input: Float[Tensor, "texts time d_model"]
    mlp_n: Float[Tensor, "texts time d_model"]
    mlp_out_scale: Float[Tensor, "texts time"]
    gate_ratio: Float[Tensor, "texts time units"]
    routing: Float[Tensor, "texts time hidden"] | None


def layer_on_text(layer: Layer, texts: int, run: Callable[[], Any]) -> LayerOnText:
    """Return the numbers of a layer in a run of it on some texts."""
    heads, mlp, values = layer.heads, layer.mlp, dict[str, Tensor]()
    hooks: list[tuple[nn.Module, Callable[..., None]]] = []

    def record(name: str, module: nn.Module, value_of: Callable[..., Tensor]) -> None:
        def hook(_: nn.Module, *call: Any) -> None:
            values[name] = widened(value_of(*call))

        hooks.append((module, hook))

    record("attn_input", heads.norm_or_module, _input)
    record("mlp_input", mlp.norm_or_module, _input)
    record("mixed", heads.out.module, _input)
    record("attn_out_scale", heads.out.module, lambda *call: _scale(heads.out_norm, call[-1]))
    record("mlp_out_scale", mlp.writer, lambda *call: _scale(mlp.out_norm, call[-1]))
    if mlp.router is not None:
        record("routing", mlp.router.module, lambda *call: mlp.routing(call[-1]))
    else:
        part = mlp.reads[0]
        record("acted", part.module, lambda *call: part.select(call[-1], -1))
    with hooked(after=hooks):
        run()
    n = mlp.normalised(values["mlp_input"])
    routing = None
    if mlp.router is None:
        ratio = _ratio(mlp, values["acted"])
    else:
        # Routers take the tokens of all texts as one list, and experts run on their own tokens
        # only, inside one module. Here all of them read each token, and the weight 0 of those that
        # did not run removes their hidden units.
        routing = values["routing"].unflatten(0, (texts, -1))
        ratio = _ratio(mlp, mlp.reads[0](mlp.applied(n)))
        ratio = ratio * routing.repeat(1, 1, ratio.shape[-1] // routing.shape[-1]).to(ratio)
    return LayerOnText(
        attn_input=values["attn_input"],
        attn_n=heads.normalised(values["attn_input"]),
        attn_out_scale=values["attn_out_scale"],
        mixed=values["mixed"],
        mlp_input=values["mlp_input"],
        mlp_n=n,
        mlp_out_scale=values["mlp_out_scale"],
        gate_ratio=ratio,
        routing=routing,
    )


def widened(x: Tensor) -> Tensor:
    """Return numbers in float32, or in float64 if they are so."""
    return x if x.dtype == torch.float64 else x.float()


def _input(args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> Tensor:
    return first_input(args, kwargs)


def _scale(norm: Norm | None, output: Tensor) -> Tensor:
    x = widened(output)
    return torch.ones_like(x[..., 0]) if norm is None else norm.scale(x)


def _ratio(mlp: MLP, z: Tensor) -> Tensor:
    # At z = 0 the ratio multiplies 0, so that any finite one will do.
    z = torch.where(z == 0, torch.full_like(z, 1e-6), z)
    constant = mlp.act_of_zero()
    if constant is None:
        return mlp.act(z) / z
    # act(z) = ratio z + act(0): the constants are weights of a second set of hidden units, whose
    # second factor is 1. See `MLP.factors`.
    constant = constant.to(z).expand_as(z)
    return torch.cat([(mlp.act(z) - constant) / z, constant], -1)

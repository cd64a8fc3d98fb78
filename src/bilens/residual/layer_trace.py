"""One layer on a text: what is recorded of it, and the numbers that follow from that."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bilens.hooks import first_call
from bilens.residual.layers import MLP, Layer
from bilens.residual.running import attends_by, attention_choice, wide_passes

Recorded = dict[tuple[str, nn.Module], Tensor]
"""Numbers of a forward pass, by their kind and module."""
FOLLOWING = ("attn_n", "pattern", "mixed", "mlp_n", "gate_ratio")
"""Properties of a `LayerTrace`."""
CACHES = ("cache", "past_key_values", "layer_past")
"""Names of the keys and values of earlier tokens in versions of transformers, the newest first."""


@dataclass(frozen=True, eq=False)
class AttentionArguments:
    """Arguments of a call of an attention module but the first, its input."""

    others: tuple[Any, ...]
    options: Mapping[str, Any]
    by_name: bool

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "AttentionArguments":
        """Return the arguments of a call, without its input and without a cache."""
        dropped = ("hidden_states", *CACHES)
        options = {name: value for name, value in kwargs.items() if name not in dropped}
        return cls(args[1:], options, by_name=not args)

    def call(self, module: nn.Module, x: Float[Tensor, "batch time d_model"]) -> Any:
        """Return the outputs of the module on another input."""
        options = dict(self.options)
        mask = options.get("attention_mask")
        if isinstance(mask, Tensor) and mask.is_floating_point():
            # A mask of 16 bits does not fit to weights that are widened.
            options["attention_mask"] = mask.to(x.dtype)
        if self.by_name:
            return module(hidden_states=x, **options)
        return module(x, *self.others, **options)


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """One layer on a text.

    With these numbers held fixed attention is linear and a gated MLP bilinear in its input. Those
    that are properties follow from the streams. If a text is long, so that they would take more
    memory than all else, they are computed again at each use, by the modules of the model.
    """

    stream: Float[Tensor, "*batch time d_model"]  # before the layer
    # Input of attention before its norm: the stream, with the embedding mixed in in models that do
    # so.
    attn_input: Float[Tensor, "*batch time d_model"]
    attn_scale: Float[Tensor, "*batch time"]  # scale of attention's norm; 1 without one
    attn_out_scale: Float[Tensor, "*batch time"]  # scale of the norm after attention; 1 without one
    mlp_input: Float[Tensor, "*batch time d_model"]  # input of the MLP before its norm
    mlp_scale: Float[Tensor, "*batch time"]  # scale of the MLP's norm
    mlp_out_scale: Float[Tensor, "*batch time"]  # scale of the norm after the MLP; 1 without one
    follows: Callable[[str], Tensor]  # a function from the name of a property to its value
    arguments: AttentionArguments  # of the attention module, for all texts of a batch
    # Factor of each hidden unit by the router of experts, which `gate_ratio` has in it; None
    # without experts.
    routing: Float[Tensor, "*batch time hidden"] | None = None

    @property
    def attn_n(self) -> Float[Tensor, "*batch time d_model"]:
        """Attention's input n, the normalised stream before the norm's gain."""
        return self.follows("attn_n")

    @property
    def pattern(self) -> Float[Tensor, "*batch heads time time"]:
        """Weight of every earlier position (columns) at every position (rows), by head."""
        return self.follows("pattern")

    @property
    def mixed(self) -> Float[Tensor, "*batch time heads_d_head"]:
        """Values that the heads mix by their patterns, side by side: the input of W_O."""
        return self.follows("mixed")

    @property
    def mlp_n(self) -> Float[Tensor, "*batch time d_model"]:
        """The MLP's input n, the normalised stream before the norm's gain."""
        return self.follows("mlp_n")

    @property
    def gate_ratio(self) -> Float[Tensor, "*batch time units"]:
        """(act(z) - act(0)) / z of each hidden unit, which makes the MLP bilinear on this text.

        If act(0) is not 0, it follows as the ratio of a second set of units.
        """
        return self.follows("gate_ratio")

    def of_text(self, row: int, time: int, *, keeps: bool) -> "LayerTrace":
        """Return the trace of one text of a batch, without the padding after it."""
        # Functions that can be stored with a flow: no local ones.
        follows: Callable[[str], Tensor] = partial(_of_only_text, self.follows)
        if keeps:
            kept = {name: self.follows(name)[row, ..., :time, :] for name in FOLLOWING}
            kept["pattern"] = kept["pattern"][..., :time]
            follows = kept.__getitem__
        fields = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        of_row = {name: x[row, :time] for name, x in fields.items()}
        return LayerTrace(**of_row, follows=follows, arguments=self.arguments)


def _of_only_text(of_batch: Callable[[str], Tensor], name: str) -> Tensor:
    return of_batch(name)[0]


def layer_trace(
    model: nn.Module,
    seen: Recorded,
    arguments: Mapping[nn.Module, AttentionArguments],
    layer: Layer,
    *,
    keeps: bool,
) -> LayerTrace:
    """Return the trace of a layer on a batch: each tensor has the texts as its first axis."""
    heads, mlp = layer.heads, layer.mlp
    attn_input, mlp_input = (seen["input", part.norm_or_module] for part in (heads, mlp))
    # Routers take the tokens of all texts as one list.
    routing = None
    if mlp.router is not None:
        routing = seen["routing", mlp.router.module].unflatten(0, (len(mlp_input), -1))
    call = arguments[heads.module]
    again = Again(model, layer, call, attn_input, mlp_input, routing)
    follows: Callable[[str], Tensor] = again
    if keeps:
        kept = {name: again(name) for name in ("attn_n", "mlp_n")}
        kept["pattern"] = seen["pattern", heads.module]
        kept["mixed"] = seen["mixed", heads.out.module]
        acted = seen.get(("acted", mlp.reads[0].module))
        kept["gate_ratio"] = again("gate_ratio") if acted is None else _ratio(mlp, acted)
        follows = kept.__getitem__
    return LayerTrace(
        stream=seen["input", layer.module],
        attn_input=attn_input,
        attn_scale=heads.scale(attn_input),
        attn_out_scale=seen["scale", heads.out.module],
        mlp_input=mlp_input,
        mlp_scale=mlp.scale(mlp_input),
        mlp_out_scale=seen["scale", mlp.writer],
        follows=follows,
        arguments=call,
        routing=routing,
    )


@dataclass(frozen=True, eq=False)
class Again:
    """Numbers of a layer on a batch, computed from its streams by the modules of the model."""

    model: nn.Module
    layer: Layer
    arguments: AttentionArguments
    attn_input: Float[Tensor, "batch time d_model"]
    mlp_input: Float[Tensor, "batch time d_model"]
    routing: Float[Tensor, "batch time hidden"] | None

    @torch.no_grad()
    def __call__(self, name: str) -> Tensor:
        """Return one of the numbers by its name."""
        heads, mlp = self.layer.heads, self.layer.mlp
        match name:
            case "attn_n":
                return heads.normalised(self.attn_input)
            case "mlp_n":
                return mlp.normalised(self.mlp_input)
            case "gate_ratio":
                return self._gate_ratio()
            case "pattern" | "mixed":
                return self._of_attention(name)
        raise AttributeError(name)

    def _gate_ratio(self) -> Tensor:
        mlp = self.layer.mlp
        n = mlp.normalised(self.mlp_input)
        ratio = _ratio(mlp, mlp.reads[0](mlp.applied(n)))
        if self.routing is None:
            return ratio
        # Experts run on their own tokens only, inside one module. Here all of them read each token,
        # and the weight 0 of those that did not run removes their hidden units.
        n_sets = ratio.shape[-1] // self.routing.shape[-1]
        return ratio * self.routing.repeat(1, 1, n_sets).to(ratio)

    def _of_attention(self, kind: Literal["pattern", "mixed"]) -> Tensor:
        heads, arguments = self.layer.heads, self.arguments
        # Eager attention holds several patterns at once, for mixed values without need: the model's
        # own was compared with it.
        fused = kind == "mixed" and attention_choice(self.model) == "sdpa"
        attention = attends_by(self.model, "sdpa" if fused else "eager")
        # Weights that are stored in 16 bits are widened, as the recorded input is.
        with wide_passes(self.model), attention:
            x = self.attn_input if heads.norm is None else heads.norm.module(self.attn_input)
            if kind == "mixed":
                args, _ = first_call(heads.out.module, lambda: arguments.call(heads.module, x))
                return widened(args[0])
            output = arguments.call(heads.module, x)
            return widened(pattern_of_call(heads.module, (x, *arguments.others), {}, output))


def first_input(_: Any, args: tuple[Any, ...], kwargs: Any, __: Any) -> Tensor:
    """Return the stream that a module was called with."""
    return args[0] if args else kwargs["hidden_states"]


def with_input(
    x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with another stream."""
    if args:
        return (x.to(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": x.to(kwargs["hidden_states"])}


def pattern_of_call(module: Any, args: tuple[Any, ...], _: Any, output: Any) -> Tensor:
    """Return the pattern of a call of an attention module."""
    if not hasattr(module, "attention_pattern"):
        # Attention of transformers returns its pattern after its output.
        return output[1]
    x, pos_embed, rope, _, _, v_first = args
    return module.attention_pattern(x, pos_embed, rope, v_first)


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


def widened(x: Tensor) -> Tensor:
    """Return numbers in float32, or in float64 if they are so."""
    return x if x.dtype == torch.float64 else x.float()

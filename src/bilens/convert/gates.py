"""Gated MLPs with another activation: Swish with a shared beta, or the line nearest to their own.

A gated MLP computes D (u * act(g)) with u = up(x) and g = gate(x), and is bilinear if act is
linear. Two ways lead there.

Swish_beta(z) = z sigmoid(beta z) is SiLU at beta = 1, nearly GELU at 1.702, and z/2 at 0. Training
while beta falls to 0 makes a model bilinear (Pearce et al. 2024, section 6.3).

Without training, each hidden unit has a best line a g + b, weighted by u^2, that minimises

    E[(act(g) - a g - b)^2 u^2]

over a text. It follows from five sums. With S_f = E[u^2 f],

    | S_gg  S_g | |a|   | S_g,act |
    | S_g   S_1 | |b| = | S_act   |

Then a goes into the gate's weights and b into its bias, and the MLP is D (u * (a g + b)).

Both leave a record in the model's configuration, and the name of an activation that transformers
does not know. Plain transformers therefore fails to open the model, and its error names bilens.
Otherwise it would compute another function.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, TypeVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from bilens.checks import check_finite, checked
from bilens.errors import BilensError, CheckpointError
from bilens.nn import Gate, GatedLayer
from bilens.nn.settings import LanguageSettings
from bilens.settings import Between, CheckedSettings, read_settings
from bilens.transformer.layers import MLP
from bilens.transformer.maps import ModuleMap
from bilens.transformer.sums import check_unchanged, log_probabilities

LINEAR_NAME = "linear in some layers: bilens.load opens this model"
"""Name of an activation in a configuration; transformers raises KeyError with it."""


@dataclass(frozen=True)
class ProcessingRecord(CheckedSettings):
    """Record of `process`: the steps that were applied, and the maps that were given a bias."""

    key = "bilens_processing"

    steps: tuple[str, ...] = ()
    added_biases: tuple[str, ...] = ()


@dataclass(frozen=True)
class SwishRecord(CheckedSettings):
    """Record of Swish: the activation before it, and its beta."""

    key = "bilens_swish"

    was: str
    beta: Annotated[float, Between(0, 1e6)]


@dataclass(frozen=True)
class LinearRecord(CheckedSettings):
    """Record of linear gates: the activation of the other layers, and the layers with lines."""

    key = "bilens_linear_gates"

    was: str
    layers: tuple[Annotated[int, Between(0, 1023)], ...]


Record = TypeVar("Record", ProcessingRecord, SwishRecord, LinearRecord)


def read_record(config: Any, kind: type[Record]) -> Record | None:
    """Return a record of bilens in a model's configuration; None without one.

    Raises:
        CheckpointError: the record is damaged.
    """
    content = getattr(config, kind.key, None)
    if content is None:
        return None
    source = f"{kind.key} in config.json"
    if not isinstance(content, dict):
        raise CheckpointError(f"{source} is {content!r}, expected a JSON object")
    record = read_settings(kind, content, source)
    activation = getattr(record, "was", "linear")
    if activation not in ACT2FN:
        raise CheckpointError(f"{source} has was={activation!r}, expected a name of an activation")
    return record


def write_record(config: Any, record: ProcessingRecord | SwishRecord | LinearRecord) -> None:
    """Write a record into a model's configuration."""
    # Tuples become lists, as in JSON.
    setattr(config, record.key, json.loads(json.dumps(asdict(record))))


def add_to_processing(config: Any, steps: Sequence[str], added_biases: Sequence[str]) -> None:
    """Add steps, and maps that were given a bias, to the record of `process`."""
    before = read_record(config, ProcessingRecord) or ProcessingRecord()
    write_record(
        config,
        ProcessingRecord(
            tuple(dict.fromkeys([*before.steps, *steps])),
            tuple(dict.fromkeys([*before.added_biases, *added_biases])),
        ),
    )


def gated_mlps(model: Any) -> list[MLP]:
    """Return the gated MLP of every layer of a model of any family."""
    # By structure, not by names of classes: a new family with known parts needs no entry here.
    mlps = [mlp for name, module in model.named_modules() if (mlp := _gated_mlp(name, module))]
    n_layers = model.config.num_hidden_layers
    if len(mlps) != n_layers:
        raise BilensError(
            f"{type(model).__name__} has {n_layers} layers and {len(mlps)} gated MLPs; expected "
            "one in each, up(x) * activation(gate(x)), as in Llama, Mistral, Qwen, Gemma or Phi-3"
        )
    for mlp in mlps:
        mlp.check()
    return mlps


def _gated_mlp(name: str, module: Any) -> MLP | None:
    """Return the parts of a module if it is a gated MLP."""
    parts = {child for child, _ in module.named_children()}

    def linear(attribute: str) -> ModuleMap:
        return ModuleMap(f"{name}.{attribute}", getattr(module, attribute))

    if isinstance(module, GatedLayer):
        return MLP(name, module, linear("left"), linear("right"), linear("out"), "gate")
    if {"gate_proj", "up_proj", "down_proj", "act_fn"} <= parts:
        maps = linear("up_proj"), linear("gate_proj"), linear("down_proj")
        return MLP(name, module, *maps, "act_fn")
    if {"gate_up_proj", "down_proj", "activation_fn"} <= parts:
        # Phi-3 stacks the two maps in one matrix, the gate first.
        pair = linear("gate_up_proj")
        gate, up = (replace(pair, rows=rows) for rows in torch.arange(pair.n_out).chunk(2))
        return MLP(name, module, up, gate, linear("down_proj"), "activation_fn")
    return None


def activation_key(config: Any) -> str:
    """Return the name of the setting for the activation of MLPs."""
    # In this order: Gemma's configurations have hidden_act as well, and ignore it.
    for key in ("hidden_activation", "hidden_act", "mlp"):
        if getattr(config, key, None) is not None:
            return key
    raise BilensError(
        f"The configuration, a {type(config).__name__}, names no activation; expected hidden_act"
    )


class Swish:
    """The Swish of a model: its beta, in the gates of all layers and in the configuration."""

    def __init__(self, config: Any, gate: Gate) -> None:
        self._config, self._gate = config, gate

    @property
    def beta(self) -> float:
        """Beta of every layer."""
        return self._gate.beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._gate.beta = beta
        record = read_record(self._config, SwishRecord)
        assert record is not None
        write_record(self._config, replace(record, beta=float(beta)))


@checked
def give_swish(model: PreTrainedModel) -> Swish:
    """Put Swish in place of the activation in every gated MLP, at the beta nearest to it.

    A model that has Swish already keeps it, and its beta. In a model with linear gates the gates
    are doubled at beta = 0, which computes the same.

    Raises:
        BilensError: the model has no gated MLPs, or its activation is no Swish at any beta.
    """
    mlps, key = gated_mlps(model), activation_key(model.config)
    if find_swish(model.config) is not None:
        return Swish(model.config, mlps[0].activation_function())
    was = getattr(model.config, key)
    # Beta at which Swish is an activation, or nearly.
    gelus = ("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "gelu_accurate")
    betas = {"silu": 1.0, "swish": 1.0, "linear": 0.0} | dict.fromkeys(gelus, 1.702)
    if key == "mlp" or was not in betas:
        raise BilensError(
            f"{key}={was!r} in the model's configuration; expected one that Swish can begin as: "
            f"{', '.join(betas)}"
        )
    gate = Gate("swish", betas[was])
    for mlp in mlps:
        # Swish at beta = 0 is z / 2.
        if was == "linear":
            mlp.scale_gate(2.0)
        setattr(mlp.module, mlp.activation, gate)
    setattr(model.config, key, "swish on its way to a line: bilens.load opens this model")
    # The doubled gates are in the weights: a model that is opened again does not double them.
    write_record(model.config, SwishRecord("silu" if was == "linear" else was, gate.beta))
    return Swish(model.config, gate)


def find_swish(config: Any) -> float | None:
    """Return the beta in a configuration; None if the model has its own activation."""
    record = read_record(config, SwishRecord)
    return None if record is None else record.beta


def restore_activation(config: Any) -> None:
    """Put the activation before Swish or linear gates back into a configuration.

    The record of Swish is removed, since `give_swish` writes it again.
    """
    swish, linear = read_record(config, SwishRecord), read_record(config, LinearRecord)
    if swish is not None:
        setattr(config, activation_key(config), swish.was)
        delattr(config, SwishRecord.key)
    if linear is not None:
        setattr(config, activation_key(config), linear.was)


@checked
def make_bilinear(model: PreTrainedModel) -> None:
    """Fold the 1/2 of Swish at beta = 0 into the gates, which then need no activation.

    The model changes in place. Plain transformers opens it then: `hidden_act: "linear"`.

    Raises:
        BilensError: its beta is not 0, or it still has its own activation.
    """
    key, beta = activation_key(model.config), find_swish(model.config)
    if beta is None:
        raise BilensError(
            f"The model has its own activation, {key}={getattr(model.config, key)!r}, and is in "
            "the form of the hub already: there is nothing to export. `bilens anneal` makes a "
            "gated model bilinear first"
        )
    if beta != 0:
        raise BilensError(
            f"The model is not bilinear yet: beta={beta:.4g}, expected 0. Anneal it to the end "
            "with `bilens anneal --resume`."
        )
    before = log_probabilities(model)
    for mlp in gated_mlps(model):
        mlp.scale_gate(0.5)
        setattr(mlp.module, mlp.activation, ACT2FN["linear"])
    setattr(model.config, key, "linear")
    delattr(model.config, SwishRecord.key)
    check_unchanged(model, before, "Folding the gates", "it has been changed: open it again")


@dataclass(frozen=True, eq=False)
class Line:
    """Slope a and offset b of a g + b in place of act(g), for each hidden unit.

    The error is the share of E[(u act(g))^2] that remains unexplained, of all units together.
    """

    slope: Float[Tensor, " hidden"]
    offset: Float[Tensor, " hidden"]
    error: float


def gate_sums(
    up: Float[Tensor, "rows hidden"],
    gate: Float[Tensor, "rows hidden"],
    acted: Float[Tensor, "rows hidden"],
) -> Float64[Tensor, "six hidden"]:
    """Return the sums over rows of u, g and act(g) that determine lines; those of texts add up.

    To weigh a row more, multiply its u by a number.
    """
    # The error of a hidden unit is u (act(g) - a g - b), so each row counts by u^2.
    weight = up.double().square()
    g, act = gate.double(), acted.double()
    parts = (torch.ones_like(g), g, g * g, act, act * g, act * act)
    return torch.stack([(weight * part).sum(0) for part in parts])


def best_line(sums: Float64[Tensor, "six hidden"]) -> Line:
    """Return the best line of each unit, by the sum of all `gate_sums`."""
    S_1, S_g, S_gg, S_act, S_gact, S_actact = sums
    if not S_1.any():
        raise BilensError("texts hold no token at which the MLP is active; pass other texts")
    check_finite(texts=sums)
    # Units that are never active would divide 0 by 0, and get the line 0 by this. A ridge on
    # the slope, relative to S_gg, keeps the equations solvable if g hardly varies.
    tiny = 1e-100
    S_1, S_gg = S_1 + tiny, S_gg * (1 + 1e-9) + tiny
    # Cramer's rule for the two equations of each unit
    det = S_gg * S_1 - S_g * S_g
    a = (S_gact * S_1 - S_act * S_g) / det
    b = (S_gg * S_act - S_g * S_gact) / det
    # E[(act - a g - b)^2 u^2], expanded into the sums
    error = S_actact - 2 * (a * S_gact + b * S_act)
    error = error + a * a * S_gg + 2 * a * b * S_g + b * b * S_1
    share = float(error.clamp_min(0).sum() / S_actact.sum().clamp_min(tiny))
    return Line(a.float(), b.float(), share)


@torch.no_grad()
def set_line(mlp: MLP, line: Line) -> None:
    """Fold lines into the gate of an MLP, and make its activation the identity.

    act(g) for g = G x + c becomes (a G) x + (a c + b).
    """
    gate = mlp.gate
    assert gate is not None
    weight, bias = gate.weight(), gate.bias()
    slope, offset = (part.to(weight) for part in (line.slope, line.offset))
    gate.set_weight(slope[:, None] * weight)
    gate.set_bias(offset if bias is None else slope * bias + offset)
    drop_activation(mlp)


def drop_activation(mlp: MLP) -> None:
    """Make the activation of an MLP the identity."""
    ours = isinstance(mlp.module, GatedLayer)
    setattr(mlp.module, mlp.activation, Gate() if ours else ACT2FN["linear"])


def linear_layers(config: Any) -> list[int]:
    """Return the numbers of the layers with linear gates, by the record of a model."""
    record = read_record(config, LinearRecord)
    return [] if record is None else list(record.layers)


def mark_linear(model: PreTrainedModel, mlps: Sequence[MLP], layers: Sequence[int]) -> None:
    """Record in a model's configuration which layers are linear, so that it opens as it is.

    If all are, and the architecture has a setting for biases of MLPs, the model becomes an
    ordinary one with `hidden_act: "linear"`, which plain transformers opens.
    """
    config: Any = model.config
    key, has_biases = activation_key(config), hasattr(config, "mlp_bias")
    ours = isinstance(config, LanguageSettings)
    if has_biases:
        config.mlp_bias = "all" if ours else True
        for mlp in mlps:
            for part in (*mlp.reads, mlp.down):
                if part.module.bias is None:
                    part.fused.set_bias(part.fused.weight().new_zeros(part.fused.n_out))
    else:
        # Offsets need biases, which this architecture has no setting for: the record lists them.
        add_to_processing(config, [], [mlps[layer].reads[0].name for layer in layers])
    if has_biases and len(layers) == len(mlps):
        setattr(config, key, "bilinear" if ours else "linear")
    else:
        write_record(config, LinearRecord(getattr(config, key), tuple(layers)))
        setattr(config, key, LINEAR_NAME)


def restore_linear(model: PreTrainedModel) -> None:
    """Make the gates linear again in a model that was opened with one activation for all layers.

    Raises:
        CheckpointError: the record names a layer that the model does not have, or one twice.
    """
    layers = linear_layers(model.config)
    mlps = gated_mlps(model) if layers else []
    if len(set(layers)) != len(layers) or max(layers, default=-1) >= len(mlps):
        raise CheckpointError(
            f"{LinearRecord.key} in config.json names the layers {layers}, expected numbers from 0 "
            f"to {len(mlps) - 1}, each once"
        )
    for layer in layers:
        setattr(mlps[layer].module, mlps[layer].activation, ACT2FN["linear"])
        setattr(model.config, activation_key(model.config), LINEAR_NAME)

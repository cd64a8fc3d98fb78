"""Gates made linear in closed form: the best line for each hidden unit, folded into the weights.

A gated MLP computes D (u * act(g)) with u = up(x) and g = gate(x). For each hidden unit the line
a g + b that is nearest to act(g), weighed by u^2, minimises

    E[(act(g) - a g - b)^2 u^2]

over a text. It needs five sums and no training: with S_f = E[u^2 f],

    | S_gg  S_g | |a|   | S_g,act |
    | S_g   S_1 | |b| = | S_act   |

a goes into the gate's weights and b into its bias, and the MLP is bilinear: D (u * (a g + b)).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from bilens.checks import check_finite
from bilens.convert.config_record import write_record
from bilens.convert.gated import gated_mlps
from bilens.convert.swish import activation_key
from bilens.errors import BilensError
from bilens.residual.layers import MLP

__all__ = [
    "GateSums",
    "Line",
    "linear_layers",
    "mark_linear",
    "restore_linear",
    "set_line",
    "unmark_linear",
]

NAME = "bilens-linear-gates"
"""What the configuration calls the activation where plain transformers cannot open the model: some
layers are linear and others are not, or its MLPs have no biases there. It refuses to load it, where
it would otherwise compute another function."""
KEY = "bilens_linear_gates"
RIDGE = 1e-9
"""Keeps the two equations solvable where g hardly varies, relative to S_gg."""
TINY = 1e-100
"""Units that were never active get the line 0."""


@dataclass(frozen=True, eq=False)
class Line:
    """a g + b, slope and offset, in place of act(g), for each hidden unit.

    The error is the share of E[(u act(g))^2] that is left unexplained, of all units together.
    """

    slope: Float[Tensor, " hidden"]
    offset: Float[Tensor, " hidden"]
    error: float


class GateSums:
    """The sums behind the lines of one MLP, over any number of texts."""

    def __init__(self, hidden: int, device: torch.device) -> None:
        self.sums: Float64[Tensor, "six hidden"] = torch.zeros(
            6, hidden, dtype=torch.float64, device=device
        )

    def add(
        self,
        up: Float[Tensor, "rows hidden"],
        gate: Float[Tensor, "rows hidden"],
        acted: Float[Tensor, "rows hidden"],
    ) -> None:
        """Add some rows of u, g and act(g); u times a number where a row counts for more."""
        weight = up.double().square()
        g, act = gate.double(), acted.double()
        parts = (torch.ones_like(g), g, g * g, act, act * g, act * act)
        self.sums += torch.stack([(weight * part).sum(0) for part in parts])

    def line(self) -> Line:
        """The best line of each unit.

        Raises:
            BilensError: no row was added, or a number was not finite.
        """
        S_1, S_g, S_gg, S_act, S_gact, S_actact = self.sums
        if not S_1.any():
            raise BilensError("texts hold no token at which the MLP is active; give other texts")
        check_finite(texts=self.sums)
        S_1, S_gg = S_1 + TINY, S_gg * (1 + RIDGE) + TINY
        det = S_gg * S_1 - S_g * S_g
        a = (S_gact * S_1 - S_act * S_g) / det
        b = (S_gg * S_act - S_g * S_gact) / det
        left = S_actact - 2 * (a * S_gact + b * S_act)
        left = left + a * a * S_gg + 2 * a * b * S_g + b * b * S_1
        share = float(left.clamp_min(0).sum() / S_actact.sum().clamp_min(TINY))
        return Line(a.float(), b.float(), share)


@torch.no_grad()
def set_line(mlp: MLP, line: Line) -> None:
    """Fold lines into the gate of an MLP, whose activation then does nothing.

    act(g) for g = G x + c becomes (a G) x + (a c + b).
    """
    gate = mlp.gate
    assert gate is not None
    weight, bias = gate.weight(), gate.bias()
    slope, offset = (part.to(weight) for part in (line.slope, line.offset))
    gate.set_weight(slope[:, None] * weight)
    gate.set_bias(offset if bias is None else slope * bias + offset)
    setattr(mlp.module, mlp.activation, ACT2FN["linear"])


def linear_layers(config: Any) -> list[int]:
    """The layers whose gates are linear, of a model that plain transformers does not open."""
    return list((getattr(config, KEY, None) or {}).get("layers", ()))


def mark_linear(model: PreTrainedModel, mlps: Sequence[MLP], layers: Sequence[int]) -> None:
    """Write into a model's configuration which layers are linear, so that it loads as it is.

    A model all of whose layers are, and whose architecture has a setting for biases of MLPs, is an
    ordinary one with `hidden_act: "linear"`, which plain transformers loads.
    """
    config: Any = model.config
    key, has_biases = activation_key(config), hasattr(config, "mlp_bias")
    if has_biases:
        config.mlp_bias = True
        for part in (part for mlp in mlps for part in (*mlp.reads, mlp.down)):
            if part.module.bias is None:
                part.whole.set_bias(part.whole.weight().new_zeros(part.whole.n_out))
    else:
        write_record(config, [], [mlps[layer].reads[0].name for layer in layers])
    if has_biases and len(layers) == len(mlps):
        setattr(config, key, "linear")
    else:
        setattr(config, KEY, {"was": getattr(config, key), "layers": list(layers)})
        setattr(config, key, NAME)


def unmark_linear(config: Any) -> None:
    """Put the activation of the other layers into a configuration that `mark_linear` wrote into."""
    if linear_layers(config):
        setattr(config, activation_key(config), getattr(config, KEY)["was"])


def restore_linear(model: PreTrainedModel) -> None:
    """Make linear again what is linear in a model that was opened with one activation in all."""
    layers = linear_layers(model.config)
    mlps = gated_mlps(model) if layers else []
    for layer in layers:
        setattr(mlps[layer].module, mlps[layer].activation, ACT2FN["linear"])
        setattr(model.config, activation_key(model.config), NAME)

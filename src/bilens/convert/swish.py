"""Swish in place of a gated model's activation, with a beta that all layers share.

Swish_beta(z) = z sigmoid(beta z) is SiLU at beta = 1, nearly GELU at 1.702, and z/2 at 0, where a
gated MLP is bilinear.

Source: Pearce et al. 2024, section 6.3.
"""

from typing import Any

from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from bilens.checks import checked
from bilens.convert.gated import gated_mlps
from bilens.errors import BilensError
from bilens.nn import Gate

__all__ = [
    "START",
    "Swish",
    "activation_key",
    "base_activation",
    "find_swish",
    "give_swish",
    "make_bilinear",
]

NAME = "bilens-swish"
"""What the configuration calls the activation meanwhile: plain transformers refuses to load it,
where it would otherwise compute another function."""

KEY = "bilens_swish"
START = {"silu": 1.0, "swish": 1.0, "linear": 0.0} | dict.fromkeys(
    ("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "gelu_accurate"), 1.702
)
"""The beta at which Swish is an activation, or nearly."""


class Swish:
    """The Swish of a model: its beta, in the gate of all layers and in the configuration."""

    def __init__(self, config: Any, gate: Gate) -> None:
        self._config, self._gate = config, gate

    @property
    def beta(self) -> float:
        """The beta of every layer."""
        return self._gate.beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._gate.beta = beta
        setattr(self._config, KEY, {**getattr(self._config, KEY), "beta": beta})


@checked
def give_swish(model: PreTrainedModel) -> Swish:
    """Put Swish in place of the activation in every gated MLP, at the beta nearest to it.

    A model that has Swish already keeps it, and its beta. One whose gates are linear has twice
    these gates at beta = 0, which is the same.

    Raises:
        BilensError: the model has no gated MLPs, or an activation that is no Swish at any beta.
    """
    mlps, key = gated_mlps(model), activation_key(model.config)
    if find_swish(model.config) is not None:
        return Swish(model.config, mlps[0].activation_function())
    was = getattr(model.config, key)
    if was not in START:
        raise BilensError(
            f"{key}={was!r} in the model's configuration; expected one that Swish can begin as: "
            f"{', '.join(START)}"
        )
    gate = Gate("swish", START[was])
    for mlp in mlps:
        if was == "linear":
            mlp.scale_gate(2.0)
        setattr(mlp.module, mlp.activation, gate)
    setattr(model.config, key, NAME)
    # Whoever opens this again doubles no gates: they are saved as they are now.
    setattr(model.config, KEY, {"was": "silu" if was == "linear" else was, "beta": gate.beta})
    return Swish(model.config, gate)


def find_swish(config: Any) -> float | None:
    """The beta that a configuration tells; None where the model has its own activation."""
    found = getattr(config, KEY, None)
    return None if found is None else float(found["beta"])


def base_activation(config: Any) -> None:
    """Give a configuration back the activation from before Swish."""
    setattr(config, activation_key(config), getattr(config, KEY)["was"])
    delattr(config, KEY)


@checked
def make_bilinear(model: PreTrainedModel) -> None:
    """Fold the 1/2 of Swish at beta = 0 into the gates, which then need no activation.

    The model changes in place, and is one that plain transformers knows: `hidden_act: "linear"`.

    Raises:
        BilensError: its beta is not 0, or it has its own activation still.
    """
    key, beta = activation_key(model.config), find_swish(model.config)
    if beta is None:
        raise BilensError(
            f"The model has its own activation, {key}={getattr(model.config, key)!r}; expected "
            "one that was annealed: `bilens anneal` first"
        )
    if beta != 0:
        raise BilensError(
            f"The model is not bilinear yet: beta={beta:.4g}, expected 0. Anneal it to the end "
            "with `bilens anneal --resume`."
        )
    for mlp in gated_mlps(model):
        mlp.scale_gate(0.5)
        setattr(mlp.module, mlp.activation, ACT2FN["linear"])
    setattr(model.config, key, "linear")
    delattr(model.config, KEY)


def activation_key(config: Any) -> str:
    """The setting of a configuration that names the activation of MLPs.

    Raises:
        BilensError: there is none.
    """
    for key in ("hidden_activation", "hidden_act"):
        if getattr(config, key, None) is not None:
            return key
    raise BilensError(
        f"The configuration, a {type(config).__name__}, names no activation; expected hidden_act"
    )

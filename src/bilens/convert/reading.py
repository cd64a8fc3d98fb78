"""The MLPs of other people's models as tensors, and the directions to read them along."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import LinearActivation

from bilens.checks import check_weights
from bilens.convert.anatomy import Anatomy, Map, Reading
from bilens.convert.families import anatomy
from bilens.convert.gated import GatedMLP, gated_mlps
from bilens.errors import BilensError, NotBilinearError
from bilens.nn import Gate
from bilens.tensor import BilinearTensor

__all__ = ["mlp_tensor", "reading_directions", "unembedding_directions"]


@torch.no_grad()
def mlp_tensor(model: PreTrainedModel, layer: int) -> BilinearTensor:
    """The gated MLP of a layer as a tensor of what its norm hands on, once it has only scaled.

    The norm's gain and bias are folded in, so that the input is x / |x| sqrt(d), behind a LayerNorm
    x without its mean; the model is left alone. Biases become the constant coordinate. In Gemma
    the output goes through a norm of its own before it is added to the stream.

    Args:
        model: of a known family (see `bilens.convert.process`) with bilinear MLPs: annealed to
            beta = 0, exported, or trained so.
        layer: number of the layer.

    Raises:
        BilensError: there is no such layer, the model is no known one, or its MLPs are not gated.
        NotBilinearError: the MLP's activation is no straight line.
        CheckpointError: a weight is NaN or infinite.

    Source:
        Pearce et al. 2024, sections 3.2 and 6.3.
    """
    mlp = _layer(model, layer)
    check_weights(mlp.module, mlp.name)
    slope = _slope(mlp.sigma())
    if slope is None:
        raise NotBilinearError(
            f"{mlp.name} has an activation that is no straight line, {mlp.sigma()}; anneal the "
            "model first, with `bilens anneal`"
        )
    reading = _reading(anatomy(model), mlp.gate)
    left, left_bias = _folded(reading, mlp.up)
    right, right_bias = _folded(reading, mlp.gate)
    out, out_bias = mlp.down.weight(), mlp.down.bias()
    tensor = BilinearTensor(left[mlp.up_rows], slope * right[mlp.gate_rows], out)
    if left_bias is None and right_bias is None and out_bias is None:
        return tensor
    return tensor.with_bias(
        None if left_bias is None else left_bias[mlp.up_rows],
        None if right_bias is None else slope * right_bias[mlp.gate_rows],
        out_bias,
    )


@torch.no_grad()
def unembedding_directions(model: PreTrainedModel) -> Float[Tensor, "vocab d_model"]:
    """What the logit of each token reads, with the last norm folded in.

    Raises:
        BilensError: the model is no known one.
    """
    found = anatomy(model)
    weight, _ = _folded(_reading(found, found.unembed), found.unembed)
    return weight


@torch.no_grad()
def reading_directions(model: PreTrainedModel, layer: int) -> Float[Tensor, "rank d_model"]:
    """What each hidden unit of the MLP of a layer gates with, with its norm folded in.

    Raises:
        BilensError: there is no such layer, or the model is no known one.
    """
    mlp = _layer(model, layer)
    weight, _ = _folded(_reading(anatomy(model), mlp.gate), mlp.gate)
    return weight[mlp.gate_rows]


def _layer(model: PreTrainedModel, layer: int) -> GatedMLP:
    mlps = gated_mlps(model)
    if not 0 <= layer < len(mlps):
        raise BilensError(f"layer={layer}, expected 0 to {len(mlps) - 1}")
    return mlps[layer]


def _reading(model: Anatomy, part: Map) -> Reading:
    return next(
        reading
        for reading in model.readings
        if any(other.module is part.module for other in reading.maps)
    )


def _folded(reading: Reading, part: Map) -> tuple[Tensor, Tensor | None]:
    """The weights of a map and its bias, as they are when the norm before it is folded in."""
    weight, bias, norm = part.weight(), part.bias(), reading.norm
    if norm is None:
        return weight, bias
    before = norm.bias()
    if before is not None and before.any():
        added = weight @ before
        bias = added if bias is None else bias + added
    weight = weight * norm.gain()
    return (weight - weight.mean(1, keepdim=True) if norm.centres else weight), bias


def _slope(sigma: Any) -> float | None:
    if isinstance(sigma, Gate):
        return sigma.slope
    return 1.0 if isinstance(sigma, (LinearActivation, nn.Identity)) else None

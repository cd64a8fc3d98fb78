"""Checks of a view's weights against the modules of the model.

Every exact reading compares its sums with numbers of the model's own forward pass. A difference
beyond rounding is an error.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from bilens.errors import BilensError
from bilens.tensor.factors import with_constant
from bilens.transformer.layers import NormedInput
from bilens.transformer.model import ResidualModel
from bilens.transformer.passes import Pass
from bilens.transformer.running import NARROW, allowed_change, run, wide_passes

ROUNDED = 4
"""Changes by rounding that explain one, each that of noise in the last bit of all weights."""


@torch.no_grad()
def log_probabilities(
    model: PreTrainedModel, noise: torch.Generator | None = None
) -> Float[Tensor, "texts time vocab"]:
    """Return the log-probabilities of the next token on two fixed random texts of 16 tokens.

    They are computed in float32 where weights are in 16 bits; for `noise` see `wide_passes`.
    """
    generator = torch.Generator().manual_seed(0)
    # Any text would do: a changed map changes the output on nearly all of them.
    length = min(16, int(getattr(model.config, "max_position_embeddings", 16)))
    ids = torch.randint(model.config.vocab_size, (2, length), generator=generator)
    with wide_passes(model, noise):
        logits: Tensor = run(model, ids.to(model.device)).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.log_softmax(-1)


def check_unchanged(
    model: PreTrainedModel, before: Float[Tensor, "texts time vocab"], action: str, state: str
) -> float:
    """Return the largest change of a log-probability since `before`, if rounding explains it.

    Else the error names the action, and the state of the model.
    """
    after = log_probabilities(model)
    change = float((after - before).abs().max())
    tolerance = allowed_change(model)
    if any(weight.dtype in NARROW for weight in model.parameters()):
        # Changed weights are rounded when they are stored, perhaps by several steps.
        noise = torch.Generator().manual_seed(0)
        for _ in range(2):
            rounding = (log_probabilities(model, noise) - after).abs().max()
            tolerance = max(tolerance, ROUNDED * float(rounding))
    if not change <= tolerance:
        raise BilensError(
            f"{action} changed a log-probability by {change:.2g} nats, where rounding explains "
            f"{tolerance:.2g}; the model does something that its modules do not show, and {state}."
        )
    return change


def mlp_output(
    view: ResidualModel,
    layer: int,
    n: Float[Tensor, "time d_model"],
    ratio: Float[Tensor, "time units"],
) -> Float[Tensor, "time d_model"]:
    """Return the output of an MLP by its factors, before the scale of a norm after it."""
    tensor = view.layer(layer).mlp.factors()
    z = with_constant(n) if tensor.constant else n
    # A bias after the MLP is one hidden unit more, with the ratio 1.
    ones = torch.ones(len(ratio), tensor.rank - ratio.shape[1]).to(ratio)
    hidden = (z @ tensor.left.T) * (z @ tensor.right.T) * torch.cat([ratio, ones], 1)
    return hidden @ tensor.out.T


def _normalised(reader: NormedInput, x: Tensor, of_model: Tensor) -> Tensor:
    # The scale is the model's own: it is a number that the text decides.
    return reader.centred(x) * reader.scale(of_model)[..., None]


def sum_of_parts(of_text: Pass) -> Float[Tensor, "time vocab"]:
    """Return the logits of a text put together from the parts of the view."""
    view, modules, (ids,) = of_text.model, of_text.model.modules, of_text.ids
    x = torch.stack(list(modules.embedding(ids).values())).sum(0)
    embedded, first_values = x, None
    for i, layer in enumerate(modules.layers):
        on_text = of_text.layer(i)
        if layer.residual_mix is not None:
            x = layer.residual_mix[0] * x + layer.residual_mix[1] * embedded
        heads, before = view.layer(i).heads.weights(), x
        n = _normalised(layer.heads, x, on_text.attn_input[0])
        v = torch.einsum("td,hde->hte", n, heads.value) + heads.value_bias[:, None]
        if (share := layer.heads.v_first_share) is not None:
            first_values = v / (1 - share) if first_values is None else first_values
            v = v + share * first_values
        update = (
            torch.einsum("hts,hse,hed->td", of_text.pattern(i)[0], v, heads.out) + heads.out_bias
        )
        x = x + update * on_text.attn_out_scale[0, :, None]
        n = _normalised(layer.mlp, before if modules.parallel else x, on_text.mlp_input[0])
        update = mlp_output(view, i, n, on_text.gate_ratio[0])
        x = x + update * on_text.mlp_out_scale[0, :, None]
    return modules.capped(_normalised(modules, x, of_text.stream[0]) @ view.W_U + view.b_U)

"""Output directions of a language model: a token, or a token minus the mean of others."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.errors import BilensError
from bilens.nn.language import LanguageModel
from bilens.tensor import BilinearTensor, QuadraticForm

__all__ = ["interaction", "output_direction"]


def output_direction(
    model: LanguageModel, token: int, minus: Sequence[int] = ()
) -> Float[Tensor, " d_model"]:
    """W_U[:, token] - mean of W_U[:, minus], in the residual stream.

    Subtracting other words of the same kind takes away what speaks for all of them, such as
    grammar. Behind a last norm the direction has its gain; its scale is left out.

    Args:
        model: whose unembedding is read.
        token: number of the token.
        minus: numbers of the tokens to subtract; none for the token alone.

    Raises:
        BilensError: a number is not one of the vocabulary.

    Source:
        Pearce et al. 2024, figure 7.
    """
    for name, numbers in (("token", [token]), ("minus", minus)):
        for number in numbers:
            if not 0 <= number < model.config.vocab_size:
                raise BilensError(
                    f"{name}={number}, expected 0 to {model.config.vocab_size - 1}, the number of "
                    "a token"
                )
    direction = model.W_U[:, token]
    if minus:
        direction = direction - model.W_U[:, list(minus)].mean(1)
    gain = getattr(model.norm, "weight", None)
    return direction.detach() if gain is None else (direction * gain).detach()


@torch.no_grad()
def interaction(
    model: LanguageModel, direction: Float[Tensor, "*batch d_model"], layer: int = 0
) -> QuadraticForm:
    """What the MLP of block `layer` adds along a direction, a quadratic form of what it reads.

    Where the MLP has biases, its input has the constant 1 at the end.

    Raises:
        NotBilinearError: the MLP is no tensor.
        BilensError: there is no such block, or the direction does not fit.
    """
    tensor: BilinearTensor = model.mlp(layer).tensor(f"blocks[{layer}].mlp")
    return tensor.interaction(direction)

"""Gram matrices of the tensor's unfoldings, from its factors.

All are formed in float64 whatever the dtype of the factors: a Gram matrix squares the condition
number, so in float32 every singular value below 1/3000 of the largest would be noise.
"""

from jaxtyping import Float64
from torch import Tensor

__all__ = ["hidden_product", "input_gram"]


def hidden_product(
    left_a: Float64[Tensor, "rank_a n_in"],
    right_a: Float64[Tensor, "rank_a n_in"],
    left_b: Float64[Tensor, "rank_b n_in"],
    right_b: Float64[Tensor, "rank_b n_in"],
) -> Float64[Tensor, "rank_a rank_b"]:
    """Frobenius inner products of the symmetric matrices sym(l_g r_g') and sym(l_h r_h').

    K = 1/2 [(L_A L_B') * (R_A R_B') + (L_A R_B') * (R_A L_B')], where * is elementwise.
    """
    straight = (left_a @ left_b.T) * (right_a @ right_b.T)
    crossed = (left_a @ right_b.T) * (right_a @ left_b.T)
    return (straight + crossed) / 2


def input_gram(
    left: Float64[Tensor, "rank n_in"],
    right: Float64[Tensor, "rank n_in"],
    out: Float64[Tensor, "n_out rank"],
) -> Float64[Tensor, "n_in n_in"]:
    """M[i, j] = sum over o, k of B[o, i, k] B[o, j, k].

    M = 1/4 [L'(S*RR')L + L'(S*RL')R + R'(S*LR')L + R'(S*LL')R] with S = D'D.
    """
    S = out.T @ out
    cross = left.T @ (S * (right @ left.T)) @ right
    return (
        left.T @ (S * (right @ right.T)) @ left
        + cross
        + cross.T
        + right.T @ (S * (left @ left.T)) @ right
    ) / 4

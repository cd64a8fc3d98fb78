"""The few directions that a deep model uses between its layers, from its weights.

A model of n layers is a tree of tensors T with 2^n leaves, all of them the input. Between layer l
and the one above there is a bond, used 2^(n-l) times. Cut open at one use, the tree is a matrix: the
subtree below times all the rest, and that matrix has singular values. They come out of two Gram
matrices for each bond, neither of which needs the tree:

    below:  P_0 = M,  P_(l+1) = D 1/2 [(L P L')*(R P R') + (L P R')*(R P L')] D'
    above:  S = D' U_(l+1) D,
            U_l = 1/4 [L'(S*RPR')L + L'(S*RPL')R + R'(S*LPR')L + R'(S*LPL')R]  with P = P_l

The squared singular values are the eigenvalues of P_l U_l. In coordinates K of P = K K' both are
Gram matrices of an ordinary layer, LK and RK for L and R: of its outputs, and of its inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.chain import joined
from bilens.tensor.cut import Cut, check_ranks

__all__ = ["Bond", "Bonds", "bonds"]


@dataclass(frozen=True, eq=False)
class Bond:
    """What one layer reads of what comes from below, in directions that matter less and less.

    z = read h are the coordinates of h, and write z is h again. Under the metric of the leaves they
    have unit size and are uncorrelated, so z_i z_j weighs what its coefficient says.

    Attributes:
        shares: squared singular values of the model unfolded here, over their sum, descending.
        read: V' K^+, one row for each direction.
        write: K V, one column for each direction.
        uses: how often the tree has this bond.
    """

    shares: Float64[Tensor, " k"]
    read: Float64[Tensor, "k n"]
    write: Float64[Tensor, "n k"]
    uses: int

    @property
    def k(self) -> int:
        """Number of directions: all that reach this bond."""
        return len(self.shares)

    def projector(self, k: int) -> Float64[Tensor, "n n"]:
        """The projector on the first k directions, K V_k V_k' K^+.

        Raises:
            BilensError: k is not between 1 and the number of directions.
        """
        if not 1 <= k <= self.k:
            raise BilensError(f"k={k}, expected 1 to {self.k}, the number of directions")
        return self.write[:, :k] @ self.read[:k]

    def lost(self, k: int) -> float:
        """Share of the squared norm that one use of the bond loses when it keeps k directions."""
        return float(self.shares[k:].sum())


@dataclass(frozen=True, eq=False)
class Bonds:
    """All bonds of a model, the one between the input and the first layer first.

    Attributes:
        tensors: the layers in float64, each with a constant output where the next one reads it.
        bonds: one for each layer.
        norm: |T|, of the whole tree; infinite or 0 where float64 does not reach.
        constant: the last input coordinate is the constant 1.
    """

    tensors: tuple[BilinearTensor, ...]
    bonds: tuple[Bond, ...]
    norm: float
    constant: bool

    def certificate(self, ranks: int | Sequence[int]) -> float:
        """What cutting the bonds to `ranks` costs at most, relative to |T|.

        |T - T_cut|^2 <= sum_l 2^(n-l) sum_(i > r_l) lambda_(l, i)

        Each cut is an orthogonal projection of T, and what several in a row lose is at most the sum
        of what each loses alone. For every input of `x' M^+ x` at most s, no output along the
        directions is off by more than certificate |T| s^(2^(n-1)).

        Raises:
            BilensError: as `cut`.
        """
        kept = check_ranks(ranks, [bond.k for bond in self.bonds])
        lost = sum(bond.uses * bond.lost(k) for bond, k in zip(self.bonds, kept, strict=True))
        return float(lost**0.5)

    def ranks_within(self, error: float) -> tuple[int, ...]:
        """The fewest directions over all bonds with a certificate of at most `error`.

        Raises:
            BilensError: the error is negative or NaN.
        """
        if not error >= 0:
            raise BilensError(f"error={error}, expected 0 or more, relative to the model's norm")
        costs = [bond.uses * bond.shares for bond in self.bonds]
        cost, order = torch.cat(costs).sort()
        number = torch.cat([torch.full((len(c),), i) for i, c in enumerate(costs)])[order]
        dropped = number[cost.cumsum(0) <= error**2]
        counts = torch.bincount(dropped, minlength=len(costs)).tolist()
        return tuple(max(1, b.k - count) for b, count in zip(self.bonds, counts, strict=True))

    def cut(self, ranks: int | Sequence[int]) -> Cut:
        """The model that keeps the first directions of each bond.

        Args:
            ranks: how many for each bond, the input's first; one number for all of them, where a
                bond that has fewer directions keeps all it has.

        Raises:
            BilensError: a number is below 1, above what its bond has, or there is not one for each
                bond.
        """
        kept = check_ranks(ranks, [bond.k for bond in self.bonds])
        reads = [bond.read[:k] for bond, k in zip(self.bonds, kept, strict=True)]
        cores = [
            tensor.change_basis(bond.write[:, :k], above)
            for tensor, bond, k, above in zip(
                self.tensors, self.bonds, kept, [*reads[1:], None], strict=True
            )
        ]
        return Cut(
            read=reads[0],
            cores=tuple(cores),
            certificate=self.certificate(kept),
            constant=self.constant,
        )


@torch.no_grad()
def bonds(
    tensors: Sequence[BilinearTensor],
    directions: Float[Tensor, "*batch n_out"],
    metric: Float[Tensor, "n_in n_in"] | None = None,
) -> Bonds:
    """The singular values and directions of a deep model at each of its bonds.

    In float64 whatever the dtype of the tensors. Costs O(rank^2 n + n^3) for each layer; the tree,
    which is exponential in the depth, is never made. Exact for the tree whose layers are symmetric
    and whose leaves are told apart; as a function of one x the model may need fewer directions.

    Args:
        tensors: one for each layer; each reads what the one before gives. Behind an embedding E,
            take E M E' as the metric rather than folding E into the first.
        directions: u, one output direction or a batch of them in the last axis: what counts.
        metric: M, the size of inputs as x'M^+ x: their second moment, mean(x x'), with the constant
            coordinate where the first tensor reads one. By default the identity: weights alone.

    Raises:
        BilensError: the chain is empty or does not fit together, the directions or the metric do
            not fit it, the metric is not symmetric and positive, a number is not finite, or the
            model is zero along the directions.

    Source:
        Dooms et al. 2025, "Compositionality unlocks deep interpretable models", appendix G
        (orthogonalise, diagonalise, truncate), which builds dense cores at O(n^4).
    """
    chain = [
        BilinearTensor(t.left, t.right, t.out).to(torch.float64)
        for t in joined(tensors, directions)
    ]
    P = _checked_metric(metric, chain[0])
    log_scale = torch.zeros((), dtype=torch.float64, device=P.device)
    roots, below = [], []
    for tensor in chain:
        # Squared once a layer, sizes leave the range of float64; only ratios matter.
        trace = P.trace()
        if not trace > 0:
            raise BilensError(_zero(chain, directions))
        log_scale = log_scale + trace.log()
        roots.append(_square_root(P / trace))
        below.append(tensor.change_basis(inputs=roots[-1][0]))
        log_scale, P = 2 * log_scale, below[-1].output_gram()
    u = directions.to(P).reshape(-1, P.shape[0])
    square = ((u @ P) * u).sum()
    if not square > 0:
        raise BilensError(_zero(chain, directions))
    weights, found = u, []
    for i in range(len(chain) - 1, -1, -1):
        size = weights.abs().max()
        H = below[i].change_basis(outputs=weights / size).input_gram()
        values, V = torch.linalg.eigh(H)
        shares, V = values.flip(0).clamp_min(0), V.flip(1)
        shares = shares / shares.sum()
        K, inverse = roots[i]
        found.append(Bond(shares, V.T @ inverse, K @ V, 2 ** (len(chain) - i)))
        weights = shares.sqrt()[:, None] * found[-1].read
    norm = ((square.log() + log_scale) / 2).exp()
    return Bonds(tuple(chain), tuple(reversed(found)), float(norm), tensors[0].constant)


def _square_root(P: Float64[Tensor, "n n"]) -> tuple[Tensor, Tensor]:
    """K with P = K K', one column for each direction that P has, and its pseudoinverse."""
    values, vectors = torch.linalg.eigh(P)
    kept = values > len(P) * torch.finfo(P.dtype).eps * values[-1]
    roots, vectors = values[kept].sqrt(), vectors[:, kept]
    return vectors * roots, (vectors / roots).T


def _checked_metric(
    metric: Float[Tensor, "n_in n_in"] | None, first: BilinearTensor
) -> Float64[Tensor, "n_in n_in"]:
    n = first.n_in
    if metric is None:
        return torch.eye(n, dtype=first.left.dtype, device=first.left.device)
    if metric.shape != (n, n):
        raise BilensError(
            f"metric has shape {tuple(metric.shape)}; expected ({n}, {n}), a row and a column for "
            "each input of the first tensor, the constant among them"
        )
    if not torch.isfinite(metric).all():
        raise BilensError("metric holds NaN or infinite values")
    M = metric.to(first.left)
    largest = float(M.abs().max())
    if largest == 0:
        raise BilensError("metric is zero; expected the second moment of some inputs")
    rounding = 8 * n * torch.finfo(metric.dtype).eps * largest
    if float((M - M.T).abs().max()) > rounding:
        raise BilensError("metric is not symmetric; expected a second moment, x.T @ x / len(x)")
    M = (M + M.T) / 2
    least = float(torch.linalg.eigvalsh(M)[0])
    if least < -rounding:
        raise BilensError(
            f"metric has the eigenvalue {least:.3g}; expected none below 0, as of a second moment, "
            "x.T @ x / len(x)"
        )
    return M


def _zero(chain: Sequence[BilinearTensor], directions: Tensor) -> str:
    return (
        f"The model of {len(chain)} layers is zero along the {directions[..., 0].numel()} "
        "directions, so it has no bonds; choose others, or check its weights"
    )

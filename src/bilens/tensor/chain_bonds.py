"""The few directions that a deep model uses between its layers, from its weights.

A model of n layers is a tree of tensors T with 2^n leaves, all of them the input. The bond below
layer l + 1 occurs 2^(n-l) times. Cut open at one occurrence, the tree is a matrix, the subtree
below times everything else, and it has singular values. They come from two Gram matrices for each
bond, and neither needs the tree:

    below:  P_0 = E M E',  P_(l+1) = D 1/2 [(L P L')*(R P R') + (L P R')*(R P L')] D'
    above:  U_n = W'W,  S = D' U_(l+1) D,  and with P = P_l
            U_l = 1/4 [L'(S*RPR')L + L'(S*RPL')R + R'(S*LPR')L + R'(S*LPL')R]

The squared singular values are the eigenvalues of P_l U_l. With P = K K' both steps are Gram
matrices of the layer of factors LK, RK, D: of its outputs, and of its inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import check_count, check_finite, checked, detached
from bilens.errors import BilensError
from bilens.sections import Columns, Fact, stacked
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.chain import Cut, fewest_hidden, joined
from bilens.tensor.factors import checked_positive, hidden_product, square_root, wrong_shape


@checked
@dataclass(frozen=True, eq=False)
class Bond:
    """The directions between two layers, in descending order of importance.

    z = read h are the coordinates of the vector h at the bond, and h = write z. Over the metric
    they are uncorrelated and of unit size: P is the identity in them, and U is diagonal.

    Attributes:
        shares: squared singular values of the model unfolded at the bond, over their sum.
        read: V'K^+, one row for each direction.
        write: K V, one column for each direction.
        uses: number of occurrences of the bond in the tree.
    """

    shares: Float64[Tensor, " k"]
    read: Float64[Tensor, "k n"]
    write: Float64[Tensor, "n k"]
    uses: int

    @property
    def k(self) -> int:
        """Number of directions."""
        return len(self.shares)

    def projector(self, k: int) -> Float64[Tensor, "n n"]:
        """Return the projector on the first k directions, K V_k V_k' K^+."""
        check_count("k", k, self.k, "the number of directions")
        return self.write[:, :k] @ self.read[:k]


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Bonds(Reading):
    """All bonds of a model, the one between its input and its first layer first.

    `bonds` returns those of the tree, `function_bonds` those of the function on samples.

    Attributes:
        bonds: one for each layer.
        cores: the layers in the coordinates of all directions; a cut has corners of them.
        directions: W, one row for each output direction.
        norm: size of the model along the directions: |T|, the norm of the tree over the leaves'
            metric, or the RMS of the measured outputs.
        constant: the last input coordinate is the constant 1.
        totals: what all shares of a bond add up to, relative to norm^2: the number of its
            occurrences in the tree, or E|A J h|^2 / norm^2 of the function.
        n_samples: number of samples of the function; 0 for the tree.
        errors: of the function, the standard error of each share over batches of samples.
    """

    bonds: tuple[Bond, ...]
    cores: tuple[BilinearTensor, ...]
    directions: Float64[Tensor, "m n_out"]
    norm: float
    constant: bool
    totals: tuple[float, ...]
    n_samples: int = 0
    errors: tuple[Float64[Tensor, " _"], ...] = ()

    axes: ClassVar[dict[str, str]] = {"x": "direction", "y": "share", "color": "bond"}

    def facts(self) -> list[Fact]:
        return [
            ("directions", " + ".join(str(bond.k) for bond in self.bonds)),
            ("norm", float(self.norm)),
            (
                "effective ranks",
                " + ".join(f"{1 / (bond.shares**2).sum():.1f}" for bond in self.bonds),
            ),
        ]

    def columns(self) -> Columns:
        """Return a row for each direction of each bond, with its share and error.

        The error is that of the outputs for a cut before the direction, at this bond only. It is
        relative, and estimated by `costs`. Of a function shares have a standard error.
        """
        tables = []
        for i, (bond, costs) in enumerate(zip(self.bonds, self.costs(), strict=True)):
            error = costs.flip(0).cumsum(0).flip(0).clamp_min(0).sqrt()
            columns = {"bond": [i] * bond.k, "direction": range(1, bond.k + 1)}
            columns |= {"share": bond.shares.tolist(), "error": error.tolist()}
            if self.errors:
                columns["standard_error"] = self.errors[i].tolist()
            tables.append(columns)
        return stacked(tables)

    def costs(self) -> list[Float64[Tensor, " k"]]:
        """Return the relative squared error of a cut without each direction, for each bond.

        Of the tree it is the squared certificate. Of the function it is estimated to first order,
        for gradients that are independent of the vectors at the bond.
        """
        return [total * bond.shares for total, bond in zip(self.totals, self.bonds, strict=True)]

    def certificate(self, ranks: int | Sequence[int]) -> float | None:
        """Return an upper bound on the relative error of the tree, |T - T_cut| / |T|.

        |T - T_cut|^2 <= sum_l 2^(n-l) sum_(i > r_l) lambda_(l, i)

        Each occurrence of a bond that is cut is an orthogonal projection of T. Squared errors of
        successive projections add up at most. The bound is known before the cut is made. It is for
        the tree, whose leaves are independent inputs, and says nothing above 1. For an input with
        x'M^+ x <= s no output along a unit direction is off by more than
        certificate |T| s^(2^(n-1)). Bonds of the function have none.
        """
        sizes = self._checked_ranks(ranks)
        if self.n_samples:
            return None
        losses = [costs[k:].sum() for costs, k in zip(self.costs(), sizes, strict=True)]
        return float(torch.stack(losses).sum().sqrt())

    def ranks_scoring(self, score: Callable[[Cut], float], least: float) -> tuple[int, ...]:
        """Return few directions over all bonds for which a cut still scores `least`.

        Finds the smallest uniform cut that does, by bisection. From four directions more at each
        bond it drops one direction at a time, the one that costs the score least. It stops after 2
        misses in a row for each bond, and returns the smallest cut that scored enough. Raises if
        the model itself does not reach `least`.
        """
        full = tuple(bond.k for bond in self.bonds)
        total = score(self.cut(full))
        if not total >= least:
            raise BilensError(f"least={least}, but with all directions the model scores {total}")
        # Bisection takes the score as monotonic in the cut, which it nearly is.
        too_few, enough = 0, max(full)
        while enough - too_few > 1:
            k = (too_few + enough) // 2
            if score(self.cut(k)) >= least:
                enough = k
            else:
                too_few = k
        # A uniform cut is rarely the smallest: some bonds need more than it has, others fewer.
        # The greedy search starts four directions above the uniform cut.
        best, ranks = self._checked_ranks(enough), self._checked_ranks(enough + 4)
        misses = 0
        while misses < 2 * len(ranks) and any(rank > 1 for rank in ranks):
            large = [i for i, rank in enumerate(ranks) if rank > 1]
            fewer = [(*ranks[:i], ranks[i] - 1, *ranks[i + 1 :]) for i in large]
            scores = [score(self.cut(smaller)) for smaller in fewer]
            ranks = fewer[max(range(len(fewer)), key=scores.__getitem__)]
            # Scores on images are noisy, so a miss may be followed by a smaller cut that is enough.
            misses = 0 if max(scores) >= least else misses + 1
            if not misses and sum(ranks) < sum(best):
                best = ranks
        return best

    def cut(self, ranks: int | Sequence[int]) -> Cut:
        """Return the model on the first directions of each bond.

        Args:
            ranks: number of directions for each bond, the input's first. A single number is for all
                bonds; a bond of fewer directions keeps all of them.
        """
        sizes = self._checked_ranks(ranks)
        above = [*sizes[1:], self.cores[-1].n_out]
        W = self.directions / self.norm
        return Cut(
            read=self.bonds[0].read[: sizes[0]],
            write=self.bonds[0].write[:, : sizes[0]],
            cores=tuple(
                fewest_hidden(BilinearTensor(core.left[:, :k], core.right[:, :k], core.out[:m]))
                for core, k, m in zip(self.cores, sizes, above, strict=True)
            ),
            environments=(
                *(bond.shares[:k].diag() for bond, k in zip(self.bonds, sizes, strict=True)),
                W.T @ W,
            ),
            certificate=self.certificate(sizes),
            constant=self.constant,
        )

    def error(self, ranks: int | Sequence[int]) -> float:
        """Return |T - T_cut| / |T| of the tree itself. Below 1e-6 it is rounding.

        It is the root of a difference of squares: 1e-14 of these is 1e-7 of the result.
        """
        self._check_tree()
        sizes = self._checked_ranks(ranks)
        # At the input P is the identity in these coordinates, and the cut has the first of them.
        product = torch.eye(self.bonds[0].k, sizes[0]).to(self.directions)
        small = product[: sizes[0]]
        for full, cut in zip(self.cores, self.cut(sizes).cores, strict=True):
            product = _gram_with(full, cut, product)
            small = _gram_with(cut, cut, small)
        W = self.directions
        # |T - T_cut|^2 = |T|^2 - 2 <T, T_cut> + |T_cut|^2, each from a Gram matrix of the layers.
        overlap, square = (((W @ P) * W).sum() / self.norm**2 for P in (product, small))
        return float((1 - 2 * overlap + square).clamp_min(0).sqrt())

    def _check_tree(self) -> None:
        if self.n_samples:
            raise BilensError(
                "these are the bonds of a function on samples, and only those of a tree have an "
                "error without any; expected bonds from `bonds`"
            )

    def _checked_ranks(self, ranks: int | Sequence[int]) -> tuple[int, ...]:
        if not isinstance(ranks, Sequence):
            check_count("ranks", ranks)
            return tuple(min(ranks, bond.k) for bond in self.bonds)
        if len(ranks) != len(self.bonds):
            raise BilensError(
                f"ranks has {len(ranks)} numbers, expected {len(self.bonds)}, one for each bond"
            )
        for i, (rank, bond) in enumerate(zip(ranks, self.bonds, strict=True)):
            check_count(f"ranks[{i}]", rank, bond.k, "the number of directions of that bond")
        return tuple(ranks)


@detached
def bonds(
    tensors: Sequence[BilinearTensor],
    directions: Float[Tensor, "*batch n_out"],
    metric: Float[Tensor, "n_in n_in"] | None = None,
    embedding: Float[Tensor, "d_model n_in"] | None = None,
) -> Bonds:
    """Return the singular values and directions of a deep model at each of its bonds.

    In float64. Costs O(rank^2 n + n^3) for each layer; the tree has n_in^(2^layers) entries. Exact
    for the tree, whose leaves are independent. As a function of a single x the model may need fewer
    directions: see `function_bonds`.

    Args:
        tensors: one for each layer; each reads the outputs of the one before.
        directions: W, one output direction or a batch of them in the last axis.
        metric: M, the second moment of inputs, x.T @ x / len(x), with the constant coordinate if
            the model has one. By default the identity, for a result from the weights.
        embedding: E, applied to the input before the first tensor; with a constant coordinate
            `affine(E, bias)`. Folded into the first tensor it has the same result, more slowly.

    Raises:
        BilensError: the model is zero along the directions, or its norm leaves float64.

    Source: Dooms et al. 2025, arXiv 2504.02667, appendix G, with dense cores at O(n^4) a layer.
    """
    layers = joined(tensors, directions)
    if len(layers) > 60:
        raise BilensError(
            f"tensors has {len(layers)} layers, expected at most 60: the tree of more has so many "
            "leaves that they cannot be counted"
        )
    chain = [BilinearTensor(t.left, t.right, t.out).to(torch.float64) for t in layers]
    E = checked_embedding(chain[0], embedding)
    sizes = E.T if metric is None else checked_positive("metric", metric, E.shape[1]).to(E) @ E.T
    # Upwards: the second moment of each vector, from which its coordinates of unit size follow.
    roots, below, scales = [], [], []
    P, scale = E @ sizes, torch.zeros((), dtype=torch.float64, device=E.device)
    for tensor in chain:
        # Sizes are squared with every layer and soon leave float64; their logarithms do not.
        P, scale = _of_trace_1(P, scale)
        roots.append(square_root(P))
        scales.append((scale / 2).exp())
        # In these coordinates P is the identity, so both Gram matrices are of this layer alone.
        below.append(tensor.change_basis(inputs=roots[-1][0]))
        P, scale = below[-1].output_gram(), 2 * scale
    W = directions.to(P).reshape(-1, len(P))
    _, log_square = _of_trace_1(W @ P @ W.T, scale)
    norm = float((log_square / 2).exp())
    # Downwards: the weight that everything above puts on each vector.
    result: list[Bond] = []
    weights = W
    for i in reversed(range(len(chain))):
        # The scale of the weights cancels in the shares, and would leave float64 in deep models.
        H = below[i].change_basis(outputs=weights / weights.abs().max()).input_gram()
        bond = principal_bond(H, *roots[i], 2 ** (len(chain) - i))
        # Rows with U of this bond as Gram matrix: the layer below needs nothing else of the model.
        weights = bond.shares.sqrt()[:, None] * bond.read
        reader, write = bond.read / scales[i], bond.write * scales[i]
        result.insert(0, replace(bond, read=reader, write=write))
    result, cores = in_directions(chain, result, E, sizes)
    if not 0 < norm < torch.inf or not all(torch.isfinite(core.left).all() for core in cores):
        raise BilensError(
            f"The model's norm is {norm:.3g}, outside of the range of float64; scale its weights "
            "or the metric"
        )
    uses = tuple(float(bond.uses) for bond in result)
    return Bonds(tuple(result), cores, W, norm, tensors[0].constant, uses)


def principal_bond(
    H: Float64[Tensor, "k k"], K: Float64[Tensor, "n k"], inverse: Float64[Tensor, "k n"], uses: int
) -> Bond:
    """Return the bond along the eigenvectors of H = K'UK, for the metric P = K K'."""
    values, V = torch.linalg.eigh(H)
    values, V = values.flip(0).clamp_min(0), V.flip(1)
    return Bond(values / values.sum(), V.T @ inverse, K @ V, uses)


def in_directions(
    chain: Sequence[BilinearTensor],
    bonds: Sequence[Bond],
    E: Float64[Tensor, "n n_in"],
    cross: Float64[Tensor, "n_in n"],
) -> tuple[list[Bond], tuple[BilinearTensor, ...]]:
    """Return the bonds, the first one of the inputs, and the layers in all directions.

    `cross` is E[x h'], of the inputs x and the vectors h = E x of the first bond.
    """
    reads = [*(bond.read for bond in bonds[1:]), None]
    # Written in all directions once, so that every cut is a corner of these arrays.
    cores = tuple(
        tensor.change_basis(bond.write, above)
        for tensor, bond, above in zip(chain, bonds, reads, strict=True)
    )
    first, *others = bonds
    # Inputs are read exactly, and reconstructed by least squares: E[x z'], as E[z z'] = 1.
    first = replace(first, read=first.read @ E, write=cross @ first.read.T)
    return [first, *others], cores


def _gram_with(a: BilinearTensor, b: BilinearTensor, P: Tensor) -> Tensor:
    """Return the inner products of the outputs of two layers, from those of their inputs, P."""
    return a.out @ hidden_product(a.left @ P, a.right @ P, b.left, b.right) @ b.out.T


def _of_trace_1(P: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return P over its trace, and the logarithm of the scale plus that of the trace."""
    trace = P.trace()
    if not trace > 0:
        raise BilensError(
            "The model is zero along the directions, so that it has no bonds; choose others, or "
            "check its weights and the metric"
        )
    return P / trace, log_scale + trace.log()


def checked_embedding(first: BilinearTensor, embedding: Tensor | None) -> Float64[Tensor, "n n_in"]:
    """Return the map from inputs to the first tensor in float64, by default the identity."""
    eye = torch.eye(first.n_in, dtype=torch.float64, device=first.left.device)
    E = eye if embedding is None else embedding.to(eye)
    if E.shape[0] != first.n_in:
        expected = f"{first.n_in} rows, one for each input of the first tensor, with the constant"
        raise wrong_shape("embedding", E, expected)
    check_finite(embedding=E)
    return E

"""The few directions that a deep model uses between its layers, as a function of its input.

The tree of `bonds` has independent inputs at its leaves. The model has the same input at all of
them. So let h be the vector at a bond and J the Jacobian of the outputs by h, both of the same
input x, with the expectation over inputs:

    P = E[h h'],   U = E[J'J]

A projection Pi of h on few directions changes the outputs by J (h - Pi h) to first order. If h and
J were independent, the mean square of this change would be tr (1 - Pi)' U (1 - Pi) P. With P = K K'
it is least for the eigenvectors V of K' U K of largest eigenvalue, Pi = K V_k V_k' K^+. Then it is
the sum of the other eigenvalues. This is balanced truncation of the linearised model. J has a
closed form by the chain rule: for a layer D (L h * R h) a gradient g of its outputs becomes

    L' (D'g * R h) + R' (D'g * L h).

The outputs are o = W f, and a change d of them is measured as |A d|, with A from the same sample:

    outputs          A = 1
    relative         A = 1 / |o|
    probabilities    A'A = diag(p) - p p' with p = softmax(o)

The last is the Fisher metric: |A d|^2 / 2 is the KL divergence of the probabilities to second
order. Most of its weight is on inputs near a decision, so few directions keep the accuracy.

Sources:
    Moore 1981, balanced truncation; Constantine 2015, "Active Subspaces".
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from bilens.checks import check_finite, checked, detached
from bilens.errors import BilensError
from bilens.settings import Count
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.chain import joined
from bilens.tensor.chain_bonds import Bond, Bonds, checked_embedding, in_directions, principal_bond
from bilens.tensor.factors import checked_positive, fit_input, square_root

Measure = Literal["outputs", "relative", "probabilities"]
"""Size of a change of the outputs, by the module's table."""


@checked
@dataclass(frozen=True, eq=False)
class Moments:
    """Second moments of a model on samples.

    Attributes:
        vectors: P of each bond, the second moment of the vectors there.
        gradients: U of each bond, the second moment of the gradients of the measured outputs.
        cross: E[x h'] of the inputs and the vectors at the first bond.
        square: mean square of the measured outputs, |A o|^2.
        n_samples: number of samples.
    """

    vectors: tuple[Float64[Tensor, "_ _"], ...]
    gradients: tuple[Float64[Tensor, "_ _"], ...]
    cross: Float64[Tensor, "n_in n"]
    square: float
    n_samples: int


@detached
def function_bonds(
    tensors: Sequence[BilinearTensor],
    directions: Float[Tensor, "*batch n_out"],
    x: Float[Tensor, "samples n"],
    embedding: Float[Tensor, "d_model n_in"] | None = None,
    *,
    measure: Measure = "outputs",
) -> Bonds:
    """Return the principal directions of a deep model at each of its bonds, on samples of x.

    In float64. A sample costs O(m rank n) for each layer, with m output directions.

    Args:
        tensors: one for each layer; each reads the outputs of the one before.
        directions: W, one output direction or a batch of them in the last axis.
        x: inputs, one in each row: images, or `gaussian_samples`.
        embedding: E, applied to the input before the first tensor; see `bonds`.
        measure: "outputs" for the change of W f, "relative" for this over |W f|, "probabilities"
            for the change of softmax(W f), with one row of W for each class.

    Raises:
        BilensError: the model is zero on the samples.
    """
    check_finite(x=x)
    constant = bool(tensors) and tensors[0].constant
    chain = [tensor.to(torch.float64) for tensor in joined(tensors, directions)]
    like = chain[0].left
    E = checked_embedding(chain[0], embedding)
    if len(x) < 2:
        raise BilensError(f"x has shape {tuple(x.shape)}, expected at least 2 samples")
    x, W = fit_input(x, E, constant), directions.to(like).reshape(-1, directions.shape[-1])
    # Ten batches give the spread of shares. Blocks inside them bound the memory.
    split = x.tensor_split(min(10, len(x)))
    batches = [_batch_moments(chain, W, batch, E, measure=measure) for batch in split]
    moments = _mean(batches)
    if not moments.square > 0:
        raise size_error(moments.square)
    result = balanced_bonds(chain, W, moments, E)
    # Batches are compared in the coordinates of all samples: their own would differ by rotations.
    errors = _standard_errors(principal_bonds(moments), batches)
    return replace(result, errors=errors, constant=constant)


@detached
def balanced_bonds(
    chain: Sequence[BilinearTensor],
    W: Float64[Tensor, "m n_out"],
    moments: Moments,
    E: Float64[Tensor, "n n_in"],
) -> Bonds:
    """Return the bonds whose directions are the principal ones of given moments P and U of each.

    The chain is that of the joined layers in float64, W has an output direction in each row, and E
    is the embedding.
    """
    bonds, cores = in_directions(chain, principal_bonds(moments), E, moments.cross)
    return Bonds(
        bonds=tuple(bonds),
        cores=cores,
        directions=W,
        norm=moments.square**0.5,
        constant=chain[0].constant,
        totals=tuple(
            float((P * U).sum()) / moments.square
            for P, U in zip(moments.vectors, moments.gradients, strict=True)
        ),
        errors=tuple(torch.zeros_like(bond.shares) for bond in bonds),
        n_samples=moments.n_samples,
    )


@checked
def gaussian_samples(
    n_samples: Count, mean: Float[Tensor, " n_in"], covariance: Float[Tensor, "n_in n_in"]
) -> Float64[Tensor, "samples n_in"]:
    """Return samples of N(mean, covariance), one in each row, the same each time, in float64."""
    check_finite(mean=mean)
    root, _ = square_root(checked_positive("covariance", covariance, len(mean)))
    generator = torch.Generator(root.device).manual_seed(0)
    y = root.new_empty(n_samples, root.shape[1]).normal_(generator=generator)
    return mean.to(root) + y @ root.T


def _batch_moments(
    chain: Sequence[BilinearTensor], W: Tensor, x: Tensor, E: Tensor, *, measure: Measure
) -> Moments:
    """Return the moments over a batch of samples, in blocks that fit the memory."""
    widest = max(max(tensor.rank, tensor.n_in) for tensor in chain)
    # At most 2^24 numbers in the largest array of a block.
    block = max(1, 2**24 // (len(W) * widest))
    return _mean([_block_moments(chain, W, rows, E, measure) for rows in x.split(block)])


def _block_moments(
    chain: Sequence[BilinearTensor], W: Tensor, x: Tensor, E: Tensor, measure: Measure
) -> Moments:
    n = len(x)
    vectors = [x @ E.T]
    for tensor in chain:
        vectors.append(tensor(vectors[-1]))
    outputs = vectors.pop() @ W.T
    A = _weights(outputs, measure)
    gradient = A @ W
    gradients = []
    for tensor, h in zip(reversed(chain), reversed(vectors), strict=True):
        # One gradient for each output, (samples, outputs, hidden), from the top layer down.
        hidden = gradient @ tensor.out
        left, right = h @ tensor.left.T, h @ tensor.right.T
        gradient = (hidden * right[:, None]) @ tensor.left + (hidden * left[:, None]) @ tensor.right
        # The sum over outputs and samples is one Gram matrix, so J itself is never stored.
        flat = gradient.flatten(0, 1)
        gradients.append(flat.T @ flat / n)
    square = float((A @ outputs[..., None]).square().sum() / n)
    if not square < torch.inf:
        raise size_error(square)
    return Moments(
        vectors=tuple(h.T @ h / n for h in vectors),
        gradients=tuple(reversed(gradients)),
        cross=x.T @ vectors[0] / n,
        square=square,
        n_samples=n,
    )


def size_error(square: float) -> BilensError:
    """Return the error of outputs that are all zero, or so large that their square is infinite."""
    return BilensError(
        f"The model's outputs along the directions have a mean square of {square:.3g} on x; choose "
        "other directions or inputs, or scale its weights"
    )


def _weights(outputs: Tensor, measure: Measure) -> Tensor:
    """Return A of each sample."""
    eye = torch.eye(outputs.shape[-1]).to(outputs).expand(len(outputs), -1, -1)
    if measure == "relative":
        sizes = outputs.norm(dim=-1)[:, None, None]
        # A sample without outputs has no relative change: it counts nothing.
        return torch.where(sizes > 0, eye / sizes, torch.zeros_like(eye))
    if measure == "probabilities":
        p = torch.softmax(outputs, -1)
        # sum_i p_i (d_i - p . d)^2 = d' (diag(p) - p p') d
        return p.sqrt()[:, :, None] * (eye - p[:, None, :])
    return eye


def _mean(parts: Sequence[Moments]) -> Moments:
    """Return the moments over the samples of all parts."""
    n_samples = sum(part.n_samples for part in parts)
    shares = [part.n_samples / n_samples for part in parts]

    def mean(arrays: Iterable[Tensor]) -> Tensor:
        return torch.stack([w * array for w, array in zip(shares, arrays, strict=True)]).sum(0)

    return Moments(
        vectors=tuple(map(mean, zip(*(part.vectors for part in parts), strict=True))),
        gradients=tuple(map(mean, zip(*(part.gradients for part in parts), strict=True))),
        cross=mean(part.cross for part in parts),
        square=sum(w * part.square for w, part in zip(shares, parts, strict=True)),
        n_samples=n_samples,
    )


def principal_bonds(moments: Moments) -> list[Bond]:
    """Return the principal directions of K' U K at each bond, in coordinates of the vectors."""
    bonds = []
    for i, (P, U) in enumerate(zip(moments.vectors, moments.gradients, strict=True)):
        # K has the rank of P: directions that no sample has would be divided by zero.
        K, inverse = square_root(P)
        # The number of times that the tree has this bond, so that frames of both kinds agree.
        uses = 2 ** (len(moments.vectors) - i)
        bonds.append(principal_bond(K.T @ U @ K, K, inverse, uses))
    return bonds


def _standard_errors(bonds: Sequence[Bond], batches: Sequence[Moments]) -> tuple[Tensor, ...]:
    """Return the standard error over batches of each share, for fixed coordinates.

    In these P is the identity and U is diagonal over all samples. To first order the eigenvalue of
    a coordinate on a batch is the product of its entries of P and U there.
    """
    errors = []
    for i, bond in enumerate(bonds):
        shares = []
        for batch in batches:
            # Diagonals only: off-diagonal noise is of second order in the eigenvalue.
            size = ((bond.read @ batch.vectors[i]) * bond.read).sum(1)
            effect = ((batch.gradients[i] @ bond.write) * bond.write).sum(0)
            shares.append(size * effect / (size * effect).sum())
        errors.append(torch.stack(shares).std(0) / len(batches) ** 0.5)
    return tuple(errors)

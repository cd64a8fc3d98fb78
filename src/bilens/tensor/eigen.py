"""Eigenpairs of many quadratic forms that share their factors: dense, and top-k by iteration."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Eigenpairs", "apply_factored", "dense_eigenpairs", "top_eigenpairs"]

WORKING_BYTES = 512 * 1024**2
"""Bytes of working memory that a batch may take; more forms are done in turns."""

PROBES = 6
"""Products spent on looking for an eigenvalue that an iteration passed over."""

SMALL = 128
"""Forms of at most this many inputs are decomposed whole: iteration would save nothing."""


class Eigenpairs(NamedTuple):
    """Eigenvalues, eigenvectors as rows, and |Qv - lambda v| / |lambda_1| of each."""

    values: Float[Tensor, "batch k"]
    vectors: Float[Tensor, "batch k n_in"]
    residuals: Float[Tensor, "batch k"]


def apply_factored(
    left: Float[Tensor, "rank n_in"],
    right: Float[Tensor, "rank n_in"],
    weights: Float[Tensor, "*batch rank"],
    vectors: Float[Tensor, "*batch k n_in"],
) -> Float[Tensor, "*batch k n_in"]:
    """Q v = 1/2 [L'(w * R v) + R'(w * L v)]: four products with L and R serve the whole batch."""
    w = weights[..., None, :]
    return ((w * (vectors @ right.T)) @ left + (w * (vectors @ left.T)) @ right) / 2


def dense_eigenpairs(
    left: Float[Tensor, "rank n_in"],
    right: Float[Tensor, "rank n_in"],
    weights: Float[Tensor, "batch rank"],
    k: int,
) -> Eigenpairs:
    """The k eigenpairs of largest magnitude of each form, from the whole matrix."""
    n = left.shape[1]
    at_once = max(1, WORKING_BYTES // (3 * n * n * left.element_size()))
    parts = []
    for some in torch.split(weights, at_once):
        half = (left * some[..., None]).mT @ right
        Q = (half + half.mT) / 2
        values, columns = torch.linalg.eigh(Q)
        order = values.detach().abs().argsort(dim=-1, descending=True, stable=True)[:, :k]
        values, vectors = values.gather(-1, order), _rows(columns.mT, order)
        with torch.no_grad():
            residuals = _residuals(vectors @ Q, values, vectors)
        parts.append((values, vectors, residuals))
    return Eigenpairs(*(torch.cat(part) for part in zip(*parts, strict=True)))


def top_eigenpairs(
    left: Float[Tensor, "rank n_in"],
    right: Float[Tensor, "rank n_in"],
    weights: Float[Tensor, "batch rank"],
    k: int,
    tolerance: float,
    seed: int,
) -> Eigenpairs:
    """The k eigenpairs of largest magnitude of each form, iterated where that is cheaper.

    A form whose pairs do not reach `tolerance`, or where a probe finds a larger eigenvalue outside
    of them, is decomposed whole.
    """
    n = left.shape[1]
    limit = 16 * k + 128
    if n <= SMALL or 2 * limit > n:
        return dense_eigenpairs(left, right, weights, k)
    generator = torch.Generator(left.device).manual_seed(seed)
    at_once = max(1, WORKING_BYTES // (2 * limit * n * left.element_size()))
    with torch.no_grad():
        parts = []
        for some in torch.split(weights, at_once):
            pairs = _iterate(left, right, some, k, limit, tolerance, generator)
            missed = (pairs.residuals > tolerance).any(-1)
            missed |= _overlooked(left, right, some, pairs, tolerance, generator)
            if missed.any():
                whole = dense_eigenpairs(left, right, some[missed], k)
                for iterated, exact in zip(pairs, whole, strict=True):
                    iterated[missed] = exact
            parts.append(pairs)
        return Eigenpairs(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _iterate(
    left: Float[Tensor, "rank n_in"],
    right: Float[Tensor, "rank n_in"],
    weights: Float[Tensor, "batch rank"],
    k: int,
    limit: int,
    tolerance: float,
    generator: torch.Generator,
) -> Eigenpairs:
    """Lanczos with full reorthogonalisation on every form at once.

    The images Qv are kept beside the basis, so a Ritz pair's residual costs no product, and a form
    that has converged leaves the batch. At `limit` basis vectors the best pairs found so far come
    back for the rest, with the residuals that they have.
    """
    batch, n = weights.shape[0], left.shape[1]
    values, residuals = left.new_empty(batch, k), left.new_empty(batch, k)
    vectors = left.new_empty(batch, k, n)
    waiting = torch.arange(batch, device=left.device)
    basis, images = left.new_empty(batch, limit, n), left.new_empty(batch, limit, n)
    image, scale = _random_like(basis[:, 0], generator), left.new_zeros(batch)
    next_look = 8 * k + 16
    for size in range(1, limit + 1):
        joined = _joining(image, basis[:, : size - 1], scale, generator)
        image = apply_factored(left, right, weights, joined[:, None])[:, 0]
        basis[:, size - 1], images[:, size - 1] = joined, image
        scale = torch.maximum(scale, image.norm(dim=-1))
        if size < next_look and size < limit:
            continue
        found = _ritz_pairs(basis[:, :size], images[:, :size], k)
        done = (found.residuals <= tolerance).all(-1) | (size == limit)
        for whole, part in zip((values, vectors, residuals), found, strict=True):
            whole[waiting[done]] = part[done]
        if done.all():
            break
        if done.any():
            going = ~done
            waiting, weights, scale = waiting[going], weights[going], scale[going]
            image = image[going]
            basis, images = (_shrink(buffer, going, size) for buffer in (basis, images))
        next_look = size * 9 // 8
    return Eigenpairs(values, vectors, residuals)


def _shrink(
    buffer: Float[Tensor, "batch limit n_in"], going: Bool[Tensor, " batch"], size: int
) -> Float[Tensor, "going limit n_in"]:
    """The buffer for some of the forms; what is not filled yet is not copied."""
    kept = buffer[going, :size]
    fresh = buffer.new_empty(len(kept), *buffer.shape[1:])
    fresh[:, :size] = kept
    return fresh


def _overlooked(
    left: Float[Tensor, "rank n_in"],
    right: Float[Tensor, "rank n_in"],
    weights: Float[Tensor, "batch rank"],
    pairs: Eigenpairs,
    tolerance: float,
    generator: torch.Generator,
) -> Bool[Tensor, " batch"]:
    """Whether something larger than the last pair shows up outside of the pairs.

    A single start vector sees one direction of a repeated eigenvalue; a few steps from a fresh one,
    orthogonal to what was found, see the next.
    """
    k = pairs.values.shape[-1]
    basis, images = pairs.vectors, pairs.values[..., None] * pairs.vectors
    scale = pairs.values.abs().amax(-1)
    image = _random_like(basis[:, 0], generator)
    for _ in range(PROBES):
        joined = _joining(image, basis, scale, generator)
        image = apply_factored(left, right, weights, joined[:, None])[:, 0]
        basis = torch.cat([basis, joined[:, None]], 1)
        images = torch.cat([images, image[:, None]], 1)
    largest = _ritz_pairs(basis, images, k).values
    return largest[:, -1].abs() > pairs.values[:, -1].abs() + tolerance * scale


def _ritz_pairs(
    basis: Float[Tensor, "batch size n_in"], images: Float[Tensor, "batch size n_in"], k: int
) -> Eigenpairs:
    """The k best eigenpairs inside the span of the basis, with their relative residuals."""
    projected = basis @ images.mT
    values, columns = torch.linalg.eigh((projected + projected.mT) / 2)
    order = values.abs().argsort(dim=-1, descending=True)[:, :k]
    theta, mix = values.gather(-1, order), _rows(columns.mT, order)
    vectors = mix @ basis
    return Eigenpairs(theta, vectors, _residuals(mix @ images, theta, vectors))


def _joining(
    block: Float[Tensor, "batch n_in"],
    basis: Float[Tensor, "batch size n_in"],
    scale: Float[Tensor, " batch"],
    generator: torch.Generator,
) -> Float[Tensor, "batch n_in"]:
    """Make each vector orthogonal to its basis, and of unit length.

    An image of the last basis vector overlaps with the last two alone, but for rounding: these go
    first, so that one pass over the whole basis is a second pass. A vector that vanishes has met
    an invariant subspace; a random one takes its place and carries on past a form of low rank.
    """
    vector = _reject(_reject(block, basis[:, -2:]), basis)
    length: Tensor = torch.linalg.vector_norm(vector, dim=-1)
    lost = length <= 100 * torch.finfo(vector.dtype).eps * scale
    if lost.any():
        fresh = _reject(_random_like(vector, generator), basis)
        vector = torch.where(lost[:, None], fresh, vector)
        length = torch.linalg.vector_norm(vector, dim=-1)
    return vector / length[:, None]


def _reject(
    vector: Float[Tensor, "batch n_in"], basis: Float[Tensor, "batch size n_in"]
) -> Float[Tensor, "batch n_in"]:
    """What is left of each vector outside the span of its orthonormal basis."""
    shares = basis @ vector[..., None]
    return vector - (shares.mT @ basis)[:, 0]


def _residuals(
    images: Float[Tensor, "batch k n_in"],
    values: Float[Tensor, "batch k"],
    vectors: Float[Tensor, "batch k n_in"],
) -> Float[Tensor, "batch k"]:
    """|Qv - lambda v| / |lambda_1| from the images Qv; a form that is zero has none."""
    error = (images - values[..., None] * vectors).norm(dim=-1)
    top = values.abs().amax(-1, keepdim=True)
    return torch.where(top > 0, error / top, error)


def _rows(
    rows: Float[Tensor, "batch m n"], order: Int[Tensor, "batch k"]
) -> Float[Tensor, "batch k n"]:
    """Pick rows, each form by its own order."""
    return rows.gather(-2, order[..., None].expand(*order.shape, rows.shape[-1]))


def _random_like(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)

"""A chain of tensors made ready to be taken apart, from output directions to the input."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from bilens.checks import check_finite
from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor


@dataclass(frozen=True, eq=False)
class Chain:
    """Tensors of which each reads all that the one before gives, and nothing that it ignores.

    Every eigenvector of a tensor is a direction in the outputs of the tensor before it, so each
    node of the tree has as many branches as its tensor has inputs.

    Attributes:
        tensors: the first reads the input through `basis`, the last gives the directions' space.
        basis: orthonormal rows that span what the model reads of its input.
        directions: u, flattened to one row each.
        constant: the model's last input coordinate is the constant 1.
    """

    tensors: tuple[BilinearTensor, ...]
    basis: Float[Tensor, "n_read n_in"]
    directions: Float[Tensor, "roots n_out"]
    constant: bool

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.tensors)

    @property
    def n_leaves(self) -> int:
        """Number of paths from a direction to an eigenvector of the first layer."""
        return len(self.directions) * math.prod(tensor.n_in for tensor in self.tensors)

    @property
    def n_inner(self) -> int:
        """Number of nodes that have an interaction matrix, the directions among them."""
        nodes, total = len(self.directions), 0
        for tensor in reversed(self.tensors):
            total += nodes
            nodes *= tensor.n_in
        return total


def make_chain(
    tensors: Sequence[BilinearTensor], directions: Float[Tensor, "*batch n_out"]
) -> Chain:
    """Check a chain, give constants an output to come from, and leave out what no layer reads.

    Half precision is read in float32.

    Behind an embedding the first layer reads d_model directions of the pixels, so the pixels are
    left for the span of L and R: outside of it every eigenvalue is zero.

    Raises:
        BilensError: the chain is empty or does not fit together, the directions do not fit its
            last tensor, or a number is not finite.
    """
    chain = joined(tensors, directions)
    for i in range(len(chain) - 1, -1, -1):
        basis = _reading_basis(chain[i])
        chain[i] = chain[i].change_basis(inputs=basis.T)
        if i > 0:
            chain[i - 1] = chain[i - 1].change_basis(outputs=basis)
    roots = directions.to(chain[-1].out).reshape(-1, directions.shape[-1])
    return Chain(tuple(chain), basis, roots, chain[0].constant)


def joined(
    tensors: Sequence[BilinearTensor], directions: Float[Tensor, "*batch n_out"]
) -> list[BilinearTensor]:
    """A checked chain in which each tensor also gives the constant that the next reads."""
    _check(tensors, directions)
    chain = [tensor.to(torch.promote_types(tensor.out.dtype, torch.float32)) for tensor in tensors]
    for i in range(len(chain) - 1, 0, -1):
        if chain[i].n_in == chain[i - 1].n_out + 1:
            chain[i - 1] = chain[i - 1].with_constant_output()
    return chain


def _reading_basis(tensor: BilinearTensor) -> Float[Tensor, "n_read n_in"]:
    """Orthonormal rows outside of whose span every interaction matrix is zero.

    Each hidden unit's weight is shared out evenly between its l and its r, so that what is cut off
    is rounding in the interaction matrices, however the factors are scaled.
    """
    norms = (tensor.left.norm(dim=1), tensor.right.norm(dim=1), tensor.out.norm(dim=0))
    share = torch.stack(norms).sqrt().prod(0)[:, None]
    tiny = torch.finfo(share.dtype).tiny
    rows = torch.cat(
        [
            share * functional.normalize(factor, dim=1, eps=tiny)
            for factor in (tensor.left, tensor.right)
        ]
    )
    basis: Tensor
    _, values, basis = torch.linalg.svd(rows, full_matrices=False)
    floor = torch.finfo(rows.dtype).eps * max(rows.shape) * values[:1]
    kept = max(1, int((values > floor).sum()))
    if kept == tensor.n_in:
        return torch.eye(kept, dtype=rows.dtype, device=rows.device)
    return basis[:kept]


def check_chain(tensors: Sequence[BilinearTensor], name: str) -> None:
    """See that all tensors are finite and that each reads what the one before gives."""
    if not tensors:
        raise BilensError(f"{name} is empty; expected one for each layer, as model.tensors() gives")
    for i, (below, above) in enumerate(pairwise(tensors)):
        fits = {above.n_in, above.n_in - above.constant}
        if below.n_out not in fits:
            wanted = " or ".join(str(n) for n in sorted(fits))
            raise BilensError(
                f"{name}[{i}] has {below.n_out} outputs, but {name}[{i + 1}] reads {wanted}; "
                "expected each tensor to read what the one before gives, as in model.tensors()"
            )
    for i, tensor in enumerate(tensors):
        factors = {"left": tensor.left, "right": tensor.right, "out": tensor.out}
        check_finite(**{f"{name}[{i}].{part}": factor for part, factor in factors.items()})


def _check(tensors: Sequence[BilinearTensor], directions: Tensor) -> None:
    check_chain(tensors, "tensors")
    kinds = {(tensor.out.dtype, tensor.out.device) for tensor in tensors}
    if len(kinds) > 1:
        listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise BilensError(
            f"tensors are of different kinds: {listed}. Move them to one dtype and device first."
        )
    if directions.shape[-1] != tensors[-1].n_out or directions.numel() == 0:
        raise BilensError(
            f"directions has shape {tuple(directions.shape)}; expected at least one, its last axis "
            f"of length {tensors[-1].n_out}, one number for each output of the last tensor"
        )
    check_finite(directions=directions)

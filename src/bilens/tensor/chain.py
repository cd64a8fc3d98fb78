"""Deep models as chains of tensors, and chains prepared for decomposition."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from bilens.checks import check_finite
from bilens.errors import BilensError
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.tracing import chain_factors


@runtime_checkable
class TensorChain(Protocol):
    """A model of bilinear layers, one after another, that can be read as tensors.

    `ImageClassifier` is one. So is any `torch.nn.Module` with these methods.
    """

    def layer_tensors(self) -> Sequence[BilinearTensor]:
        """Return one tensor for each layer; the last returns the logits."""

    def embedding(self) -> Tensor | None:
        """Return the map from inputs to the first tensor's inputs, or None for the identity.

        With biases it includes the constant coordinate, as `affine(weight, bias)` does.
        """

    def __call__(self, x: Tensor, /) -> Tensor:
        """Return the logits of a batch of inputs."""


class TensorStack(nn.Module):
    """A module of your own as a chain of tensors; a `TensorChain`, which every reading accepts.

    Each product of two parts of the input is a layer. Everything between products has to be linear:
    biases, residual connections, convolutions, means, norms with running statistics. A layer's
    inputs are an orthonormal basis of the directions that it and later layers read.

    Args:
        module: the module, of flat inputs or of inputs with `input_shape`. It does not change.
        input_shape: shape of a single input, such as (1, 28, 28); by default the module is called
            on vectors, whose length is found.

    Raises:
        NotBilinearError: the module is no such chain, or its outputs differ from the tensors'.

    Attributes:
        module: the module.
        input_shape: shape of a single input of the module.
    """

    def __init__(self, module: nn.Module, input_shape: Sequence[int] | None = None) -> None:
        super().__init__()
        self.module = module
        self.eval()
        chain, self._embedding, self.input_shape = chain_factors(module, input_shape)
        self._tensors = [BilinearTensor(*factors) for factors in chain]

    def layer_tensors(self) -> list[BilinearTensor]:
        """Return one tensor for each layer; each reads the outputs of the one before."""
        return self._tensors

    def embedding(self) -> Float[Tensor, "n_read n_in"] | None:
        """Return orthonormal rows that span the part of the input that is read; None for all."""
        return self._embedding

    def forward(self, x: Float[Tensor, "*batch n_in"]) -> Float[Tensor, "*batch n_out"]:
        """Return the module's outputs for flat inputs."""
        outputs = self.module(x.reshape(-1, *self.input_shape))
        return outputs.reshape(*x.shape[:-1], -1)


@dataclass(frozen=True, eq=False)
class Chain:
    """Tensors that each read exactly the outputs of the tensor before.

    Every eigenvector of a tensor is a direction in the outputs of the tensor before it. So each
    node of the tree has as many branches as its tensor has inputs.

    Attributes:
        tensors: the first reads the input through `basis`; the last writes the outputs.
        basis: orthonormal rows that span the part of the input that the model reads.
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
        # Leaves are eigenvectors of the first tensor, and have no interaction matrix below them.
        nodes, total = len(self.directions), 0
        for tensor in reversed(self.tensors):
            total += nodes
            nodes *= tensor.n_in
        return total


def make_chain(
    tensors: Sequence[BilinearTensor], directions: Float[Tensor, "*batch n_out"]
) -> Chain:
    """Check a chain, add outputs for constants, and project every bond on the part that is read.

    Half precision is read in float32. After an embedding the first layer reads only d_model
    directions of the pixels, so the span of L and R replaces the pixels. Outside of this span every
    eigenvalue is zero.
    """
    chain = joined(tensors, directions)
    # From the top down, since a layer that is read less has fewer rows to span.
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
    """Return a checked chain, with an output for the constant wherever the next tensor reads it."""
    _check(tensors, directions)
    chain = [tensor.to(torch.promote_types(tensor.out.dtype, torch.float32)) for tensor in tensors]
    # From the top: a layer that passes the constant on has to read it itself.
    for i in range(len(chain) - 1, 0, -1):
        if chain[i].n_in == chain[i - 1].n_out + 1:
            chain[i - 1] = chain[i - 1].with_constant_output()
    return chain


def _reading_basis(tensor: BilinearTensor) -> Float[Tensor, "n_read n_in"]:
    """Return orthonormal rows that span the row space of every interaction matrix.

    Each hidden unit's weight is shared out evenly between its l and its r. So the part that is cut
    off is rounding in the interaction matrices, however the factors are scaled.
    """
    # left, right and out may share one scale in any way; the span should not depend on it.
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
    n_read = max(1, int((values > floor).sum()))
    if n_read == tensor.n_in:
        return torch.eye(n_read, dtype=rows.dtype, device=rows.device)
    return basis[:n_read]


def check_chain(tensors: Sequence[BilinearTensor], name: str) -> None:
    """Raise unless all tensors are finite and each reads the outputs of the one before."""
    if not tensors:
        raise BilensError(
            f"{name} is empty; expected one tensor for each layer, as in model.tensors()"
        )
    for i, (below, above) in enumerate(pairwise(tensors)):
        fits = {above.n_in, above.n_in - above.constant}
        if below.n_out not in fits:
            wanted = " or ".join(str(n) for n in sorted(fits))
            raise BilensError(
                f"{name}[{i}] has {below.n_out} outputs, but {name}[{i + 1}] reads {wanted}; "
                "expected each tensor to read the outputs of the one before, as in model.tensors()"
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

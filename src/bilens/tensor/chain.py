"""Deep models as chains of tensors, and on few coordinates between their layers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from torch.nn import functional

from bilens.checks import check_count, check_finite, checked
from bilens.errors import BilensError
from bilens.hooks import evaluating
from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.factors import fit_input, wrong_shape
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
    """

    def __init__(self, module: nn.Module, input_shape: Sequence[int] | None = None) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
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
        with evaluating(self.module):
            outputs = self.module(x.reshape(-1, *self.input_shape))
        return outputs.reshape(*x.shape[:-1], -1)


def minimal_chain(
    tensors: Sequence[BilinearTensor], directions: Float[Tensor, "*batch n_out"]
) -> tuple[list[BilinearTensor], Float[Tensor, "n_read n_in"]]:
    """Return a checked chain that reads all of every bond, and the basis that its input is in.

    Every eigenvector of a tensor is a direction in the outputs of the tensor before it, so each
    node of the tree has as many branches as its tensor has inputs. Half precision is read in
    float32. After an embedding the first layer reads only d_model directions of the pixels, so the
    span of L and R replaces the pixels. Outside of this span every eigenvalue is zero.

    Returns:
        The tensors, of which the first reads the input through the basis, and the basis as rows.
    """
    chain = joined(tensors, directions)
    # From the top down, since a layer that is read less has fewer rows to span.
    for i in range(len(chain) - 1, -1, -1):
        basis = _reading_basis(chain[i])
        chain[i] = chain[i].change_basis(inputs=basis.T)
        if i > 0:
            chain[i - 1] = chain[i - 1].change_basis(outputs=basis)
    return chain, basis


def count_leaves(chain: Sequence[BilinearTensor], directions: Float[Tensor, "*batch n_out"]) -> int:
    """Return the number of paths from directions to eigenvectors of a `minimal_chain`'s input."""
    return directions[..., 0].numel() * math.prod(tensor.n_in for tensor in chain)


def joined(
    tensors: Sequence[BilinearTensor], directions: Float[Tensor, "*batch n_out"]
) -> list[BilinearTensor]:
    """Return a checked chain, with an output for the constant wherever the next tensor reads it."""
    check_chain(tensors, "tensors")
    kinds = {(tensor.out.dtype, tensor.out.device) for tensor in tensors}
    if len(kinds) > 1:
        text = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise BilensError(
            f"tensors are of different kinds: {text}. Move them to one dtype and device first."
        )
    n_out = tensors[-1].n_out
    if directions.shape[-1] != n_out or directions.numel() == 0:
        expected = f"at least one, its last axis of length {n_out}, that of the last outputs"
        raise wrong_shape("directions", directions, expected)
    check_finite(directions=directions)
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
    norms = (tensor.left.norm(dim=1), tensor.right.norm(dim=1), tensor.out.norm(dim=0))
    share = torch.stack(norms).sqrt().prod(0)[:, None]
    tiny = torch.finfo(share.dtype).tiny
    units = [functional.normalize(f, dim=1, eps=tiny) for f in (tensor.left, tensor.right)]
    rows = torch.cat([share * unit for unit in units])
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
            sizes = " or ".join(str(n) for n in sorted(fits))
            raise BilensError(
                f"{name}[{i}] has {below.n_out} outputs, but {name}[{i + 1}] reads {sizes}; "
                "expected each tensor to read the outputs of the one before, as in model.tensors()"
            )
    for i, tensor in enumerate(tensors):
        factors = {"left": tensor.left, "right": tensor.right, "out": tensor.out}
        check_finite(**{f"{name}[{i}].{part}": factor for part, factor in factors.items()})


@checked
@dataclass(frozen=True, eq=False)
class Products:
    """The terms c z_i z_j of the layers of a cut model, the largest share first.

    Attributes:
        layer: number of the core of each term, the first being 0.
        output: the core's output that the term is added to.
        first: i.
        second: j, at least i.
        coefficient: c; twice the entry of the interaction matrix if i and j differ.
        share: of one use of the term in the squared norm of the model.
    """

    layer: Int[Tensor, " terms"]
    output: Int[Tensor, " terms"]
    first: Int[Tensor, " terms"]
    second: Int[Tensor, " terms"]
    coefficient: Float64[Tensor, " terms"]
    share: Float64[Tensor, " terms"]

    def __len__(self) -> int:
        """Return the number of terms."""
        return len(self.layer)


@checked
@dataclass(frozen=True, eq=False)
class Cut:
    """A model cut to a few directions of each bond.

    z_0 = read x,  z_(l+1) = core_l(z_l),  and the outputs are those of the last core

    Each output of a core is an interaction matrix of r x r numbers, and the outputs of a core are
    the inputs of the next. Any basis of the coordinates makes the same model. `Bonds.cut` returns
    the basis ordered by singular values. Its coordinates are uncorrelated and of unit size.

    Attributes:
        read: one row for each direction of the input.
        write: one column for each coordinate: write z_0 is x on the directions that are read.
        cores: the layers on the coordinates, without a constant: it is one of their directions.
        environments: U at each bond, the input's first, and of the outputs. A change of size e in
            coordinate k is a share U_kk e^2 of the model's squared norm, at each use.
        certificate: upper bound on the relative error of the tree, see `Bonds.certificate`;
            None for directions of another metric.
        constant: the last input coordinate is the constant 1.
    """

    read: Float64[Tensor, "k n_in"]
    write: Float64[Tensor, "n_in k"]
    cores: tuple[BilinearTensor, ...]
    environments: tuple[Float64[Tensor, "_ _"], ...]
    certificate: float | None
    constant: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """Number of directions at each bond, the input's first."""
        return tuple(core.n_in for core in self.cores)

    def tensors(self) -> list[BilinearTensor]:
        """Return the model as an ordinary chain, the first layer first."""
        first = replace(self.cores[0].change_basis(inputs=self.read), constant=self.constant)
        return [first, *self.cores[1:]]

    def coordinates(self, x: Float[Tensor, "*batch n_in"]) -> list[Float64[Tensor, "*batch _"]]:
        """Return the coordinates z at each bond, the input's first, and then the outputs."""
        check_finite(x=x)
        z = [fit_input(x, self.read, self.constant) @ self.read.T]
        for core in self.cores:
            z.append(core(z[-1]))
        return z

    def __call__(self, x: Float[Tensor, "*batch n_in"]) -> Float64[Tensor, "*batch n_out"]:
        """Evaluate the cut model on each row of x, (*batch, n_out)."""
        return self.coordinates(x)[-1]

    def rotate(self, rotations: Sequence[Float[Tensor, "_ _"]]) -> "Cut":
        """Return the same model in coordinates z', z = O z', with one O for each bond in order."""
        shapes = [tuple(rotation.shape) for rotation in rotations]
        if shapes != [(k, k) for k in self.ranks]:
            raise BilensError(
                f"rotations have shapes {shapes}; expected square ones of "
                f"sizes {self.ranks}, one for each bond"
            )
        matrices = [rotation.to(self.read) for rotation in rotations]
        # A basis that is not orthonormal would change environments and shares.
        for i, turn in enumerate(matrices):
            if not torch.allclose(turn.T @ turn, torch.eye(len(turn)).to(turn), atol=1e-8):
                raise BilensError(f"rotations[{i}] is not orthogonal, so the model would change")
        above = [turn.T for turn in matrices[1:]]
        return replace(
            self,
            read=matrices[0].T @ self.read,
            write=self.write @ matrices[0],
            cores=tuple(
                core.change_basis(turn, up)
                for core, turn, up in zip(self.cores, matrices, [*above, None], strict=True)
            ),
            environments=(
                *(turn.T @ U @ turn for turn, U in zip(matrices, self.environments, strict=False)),
                self.environments[-1],
            ),
        )

    def products(self) -> Products:
        """Return every term of every layer: sum_l n_out r (r + 1) / 2 of them."""
        terms = []
        for index, (core, U) in enumerate(zip(self.cores, self.environments[1:], strict=True)):
            i, j = torch.triu_indices(core.n_in, core.n_in, device=U.device)
            entries = core.dense()[:, i, j]
            times = torch.where(i == j, 1.0, 2.0).to(entries)
            # U weighs a change of an output, and entries off the diagonal are there twice.
            shares = U.diagonal()[:, None].clamp_min(0) * times * entries**2
            output = torch.arange(core.n_out, device=U.device)
            o, _ = torch.broadcast_tensors(output[:, None], entries)
            layer = torch.full_like(o, index)
            columns = (layer, o, i.expand_as(o), j.expand_as(o), times * entries, shares)
            terms.append([column.reshape(-1) for column in columns])
        layer, o, i, j, coefficient, share = (torch.cat(c) for c in zip(*terms, strict=True))
        order = share.argsort(descending=True, stable=True)
        return Products(*(c[order] for c in (layer, o, i, j, coefficient, share)))

    def keep_products(self, k: int) -> list[BilinearTensor]:
        """Return the chain that adds up only the k products of largest share."""
        terms = self.products()
        check_count("k", k, len(terms), "the number of products in the cut model")
        chain = []
        for i, core in enumerate(self.cores):
            here = torch.nonzero(terms.layer[:k] == i).flatten()
            out = core.out.new_zeros(core.n_out, core.n_in, core.n_in)
            at = (terms.output[here], terms.first[here], terms.second[here])
            out[at] = terms.coefficient[here]
            chain.append(of_products(out))
        first = replace(chain[0].change_basis(inputs=self.read), constant=self.constant)
        return [first, *chain[1:]]


def fewest_hidden(core: BilinearTensor) -> BilinearTensor:
    """Return the same tensor with a hidden unit for each pair of inputs, if that makes fewer."""
    if core.rank <= core.n_in * (core.n_in + 1) // 2:
        return core
    # A cut has few inputs and may have many hidden units: pairs of inputs are then fewer.
    B = core.dense()
    return of_products(torch.triu(B) + torch.triu(B, 1))


def of_products(coefficients: Float64[Tensor, "n_out k k"]) -> BilinearTensor:
    """Return the tensor of x -> sum_ij c_oij x_i x_j, with a hidden unit for each pair in use."""
    # Hidden units are shared by all outputs. At least one exists, so that the layer is not empty.
    is_used = coefficients.abs().amax(0) > 0
    is_used[0, 0] |= not is_used.any()
    i, j = torch.nonzero(is_used, as_tuple=True)
    eye = torch.eye(len(is_used), dtype=coefficients.dtype, device=coefficients.device)
    return BilinearTensor(eye[i], eye[j], coefficients[:, i, j])


def with_signs(cut: Cut) -> Cut:
    """Return the same model, in which the sign of each coordinate makes it easy to read.

    The strongest product of a coordinate is positive; at the input, the sum of its column of
    `write` is.
    """
    return cut.rotate([signs.diag() for signs in _signs(cut)])


def _signs(cut: Cut) -> Iterator[Float64[Tensor, " _"]]:
    """Yield 1 or -1 for each coordinate of each bond, the input's first."""
    signs = torch.where(cut.write.sum(0) < 0, -1.0, 1.0).to(cut.read)
    for core in cut.cores:
        yield signs
        entries = core.dense() * signs * signs[:, None]
        # An entry off the diagonal counts for two.
        weights = (entries * (2 - torch.eye(core.n_in)).to(entries).sqrt()).flatten(1)
        strongest = weights.gather(1, weights.abs().argmax(1, keepdim=True))[:, 0]
        signs = torch.where(strongest < 0, -1.0, 1.0).to(cut.read)

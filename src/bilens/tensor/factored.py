"""A matrix kept as the product of two thin ones: its SVD, eigenvalues and largest entries."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import mul
from typing import ClassVar

import torch
from jaxtyping import Complex, Float, Float64, Int, Int64
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import check_count, check_finite, check_numbers, checked, detached
from bilens.errors import BilensError
from bilens.sections import Columns, Fact, shape_fact
from bilens.settings import Count
from bilens.tensor.factors import (
    DENSE_LIMIT,
    check_dense_size,
    check_factors,
    check_last_axis,
    in_range,
)


@dataclass(frozen=True, eq=False)
class TopEntries:
    """The most extreme entries M[row, column] of each matrix, the most extreme first."""

    values: Float[Tensor, "*batch k"]
    rows: Int64[Tensor, "*batch k"]
    columns: Int64[Tensor, "*batch k"]


@detached
def top_entries(
    blocks: Iterable[Float[Tensor, "*batch rows columns"]], k: Count, *, largest: bool = True
) -> TopEntries:
    """Return the k largest entries of a matrix that arrives in blocks of rows, from row 0 on.

    Each block is read once and then dropped. Ties are broken arbitrarily. Not differentiable.
    `FactoredMatrix.top_entries` makes the blocks itself.

    Args:
        blocks: rows of the matrix, or of each matrix of a batch, in blocks of any size.
        k: number of entries; all of them if the matrix has fewer.
        largest: the largest entries, otherwise the smallest.
    """
    start, best = 0, None
    for block in blocks:
        entries = _of_block(block if largest else -block, start, k, best)
        best = entries if best is None else _merged(best, entries, k)
        start += block.shape[-2]
    if best is None:
        raise BilensError("blocks is empty, expected at least one block of rows")
    check_finite(blocks=best.values)
    return best if largest else replace(best, values=-best.values)


def _of_block(block: Tensor, start: int, k: int, best: TopEntries | None) -> TopEntries:
    """Return the k largest entries of a block, or the part of them that can still count.

    All are in the k rows of the largest maxima, in rows that exceed the least entry of `best`.
    NaN exceeds every number, so it is never skipped.
    """
    maxima, n_columns = block.amax(-1), block.shape[-1]
    n_rows = min(k, block.shape[-2])
    if best is not None and best.values.shape[-1] == k:
        # Written as "not at most", so that a row with NaN is a candidate as well.
        candidates = ~(maxima <= best.values[..., -1:])
        n_rows = min(n_rows, int(candidates.sum(-1).max()))
    rows = maxima.topk(n_rows).indices
    entries = block.gather(-2, rows[..., None].expand(*rows.shape, n_columns)).flatten(-2)
    values, places = entries.topk(min(k, entries.shape[-1]))
    return TopEntries(values, start + rows.gather(-1, places // n_columns), places % n_columns)


def _merged(a: TopEntries, b: TopEntries, k: int) -> TopEntries:
    values = torch.cat([a.values, b.values], -1)
    values, order = values.topk(min(k, values.shape[-1]))
    rows, columns = torch.cat([a.rows, b.rows], -1), torch.cat([a.columns, b.columns], -1)
    return TopEntries(values, rows.gather(-1, order), columns.gather(-1, order))


BLOCK_BYTES = 16 * 1024**2
"""Bytes of a block of rows of a matrix that is too large to hold."""


@checked
@dataclass(frozen=True, eq=False, repr=False)
class FactoredSVD(Reading):
    """M = sum_s sigma_s l_s r_s', the largest singular values first.

    The sign of each pair (l_s, r_s) is arbitrary.

    Attributes:
        values: sigma_s.
        left: l_s, orthonormal rows.
        right: r_s, orthonormal rows.
        norm: Frobenius norm of the matrix; norm^2 - sum(values^2) is the square that was cut off.
    """

    values: Float[Tensor, "*batch k"]
    left: Float[Tensor, "*batch k n_rows"]
    right: Float[Tensor, "*batch k n_columns"]
    norm: Float[Tensor, "*batch"]

    axes: ClassVar[dict[str, str]] = {"x": "number", "y": "value", "color": "matrix"}

    def facts(self) -> list[Fact]:
        batch = self.values.shape[:-1]
        facts: list[Fact] = [("matrices", shape_fact(batch))] if batch else []
        return [
            *facts,
            ("components", self.values.shape[-1]),
            ("rows", self.left.shape[-1]),
            ("columns", self.right.shape[-1]),
        ]

    def columns(self) -> Columns:
        """Return a row for each singular value; matrices are counted through the batch."""
        values = self.values.detach().cpu()
        values = values.reshape(-1, values.shape[-1])
        columns = {
            "matrix": torch.arange(len(values))[:, None].expand_as(values),
            "number": torch.arange(1, values.shape[1] + 1).expand_as(values),
            "value": values,
        }
        return {name: column.flatten().tolist() for name, column in columns.items()}

    def dense(self) -> Float[Tensor, "*batch n_rows n_columns"]:
        """Return the matrix that these components make."""
        return (self.left * self.values[..., None]).mT @ self.right


@checked
@dataclass(frozen=True, eq=False, repr=False)
class FactoredMatrix(Reading):
    """M = A B, or a batch of such matrices, stored as the thin A and B only.

    The matrices of an attention head have this form, also between tens of thousands of tokens. All
    methods but `dense` cost O(n rank^2). All are differentiable if the factors have full rank,
    singular vectors if the singular values differ.

    Attributes:
        left: A.
        right: B.
    """

    left: Float[Tensor, "*batch n_rows rank"]
    right: Float[Tensor, "*batch rank n_columns"]

    axes: ClassVar[dict[str, str]] = {"x": "number", "y": "value", "color": "matrix"}

    def facts(self) -> list[Fact]:
        facts: list[Fact] = [
            ("rows", self.n_rows),
            ("columns", self.n_columns),
            ("rank at most", self.rank),
            ("", str(self.left.dtype).removeprefix("torch.")),
        ]
        if self.batch_shape:
            facts.insert(0, ("matrices", "x".join(map(str, self.batch_shape))))
        return facts

    def columns(self) -> Columns:
        """Return a row for each singular value, at the cost of `svd`.

        Matrices are counted through the batch.
        """
        return self.svd().columns()

    def __post_init__(self) -> None:
        A, B = self.left, self.right
        check_factors(left=A, right=B)
        if 0 in (*A.shape[-2:], *B.shape[-2:]):
            raise BilensError(
                f"The matrix is empty: left {tuple(A.shape)}, right {tuple(B.shape)}. Expected a "
                "row, a column and a rank of 1 or more."
            )

    @property
    def n_rows(self) -> int:
        """Number of rows of M."""
        return self.left.shape[-2]

    @property
    def n_columns(self) -> int:
        """Number of columns of M."""
        return self.right.shape[-1]

    @property
    def rank(self) -> int:
        """Width of the factors, which bounds the rank of M."""
        return self.left.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of matrices; empty for a single one."""
        return self.left.shape[:-2]

    @property
    def T(self) -> "FactoredMatrix":
        """The transpose."""
        return replace(self, left=self.right.mT, right=self.left.mT)

    def __getitem__(self, index: int | slice) -> "FactoredMatrix":
        """Return one or several matrices along the first batch axis."""
        if not self.batch_shape:
            raise BilensError("This matrix is a single one, without a batch to index")
        return replace(self, left=self.left[index], right=self.right[index])

    def apply(self, x: Float[Tensor, "*batch k n_columns"]) -> Float[Tensor, "*batch k n_rows"]:
        """Return M x for k vectors x of each matrix, one in each row."""
        check_last_axis("x", x, self.n_columns, "column of the matrix")
        x = x.to(self.right)
        return x @ self.right.mT @ self.left.mT

    def rows(self, index: slice | Int[Tensor, " rows"]) -> Float[Tensor, "*batch rows columns"]:
        """Return rows of M by their numbers."""
        if isinstance(index, Tensor):
            check_numbers("index", index, self.n_rows, "rows of the matrix")
        return self.left[..., index, :] @ self.right

    def entries(
        self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"]
    ) -> Float[Tensor, "*batch n"]:
        """Return M[row, column] for n pairs of a row and a column."""
        check_numbers("rows", rows, self.n_rows, "rows of the matrix")
        check_numbers("columns", columns, self.n_columns, "columns of the matrix")
        return (self.left[..., rows, :] * self.right[..., columns].mT).sum(-1)

    def __matmul__(self, other: "FactoredMatrix") -> "FactoredMatrix":
        """Return the product of two matrices, of the smaller rank of both; batches broadcast."""
        batch = self._common_batch(other)
        if self.n_columns != other.n_rows:
            raise BilensError(
                f"A matrix of {self.n_columns} columns cannot be multiplied with one of "
                f"{other.n_rows} rows"
            )
        left, right = self.left, other.right.to(self.left)
        between = self.right @ other.left.to(self.left)
        if self.rank <= other.rank:
            right = between @ right
        else:
            left = left @ between
        return FactoredMatrix(left.expand(*batch, -1, -1), right.expand(*batch, -1, -1))

    def __mul__(self, other: "FactoredMatrix") -> "FactoredMatrix":
        """Return the product entry by entry; batches broadcast.

        (A B) * (C D) = (A (*) C)(B' (*) D')', with (*) the Kronecker product row by row. Ranks
        multiply.

        Source: The post on tensor-transformer variants, appendix B (row-wise Khatri-Rao product).
        """
        batch = self._entrywise_batch(other)
        left = (self.left[..., :, None] * other.left[..., None, :]).flatten(-2)
        right = (self.right[..., :, None, :] * other.right[..., None, :, :]).flatten(-3, -2)
        return FactoredMatrix(left.expand(*batch, -1, -1), right.expand(*batch, -1, -1))

    def top_entries(
        self,
        k: int,
        *,
        times: "Sequence[FactoredMatrix]" = (),
        largest: bool = True,
        batch_size: Count | None = None,
    ) -> TopEntries:
        """Return the k largest or smallest entries of each matrix, without building it.

        Costs O(n_rows n_columns rank), in blocks of rows. With `times` the entries are those of
        M * N * ..., entry by entry, and the product's factors are not formed. Not differentiable:
        `entries` is. Ties are broken arbitrarily.

        Args:
            k: number of entries; all of them if the matrix has fewer.
            times: matrices of the same shape that this one is multiplied with entry by entry.
            largest: the largest entries, otherwise the smallest.
            batch_size: rows of a block; by default those that 16 MiB hold.
        """
        matrices = (self, *times)
        batch = self.batch_shape
        for matrix in matrices:
            batch = torch.broadcast_shapes(batch, self._entrywise_batch(matrix))
            matrix._check_finite()
        if batch_size is None:
            row_bytes = batch.numel() * self.n_columns * self.left.element_size()
            batch_size = max(1, BLOCK_BYTES // row_bytes)

        def blocks() -> Iterator[Tensor]:
            for start in range(0, self.n_rows, batch_size):
                block = slice(start, start + batch_size)
                # The product of blocks needs no product of factors, whose ranks would multiply.
                yield reduce(mul, [matrix.rows(block) for matrix in matrices])

        return top_entries(blocks(), k, largest=largest)

    def norm(self) -> Float64[Tensor, "*batch"]:
        """Return the Frobenius norm of each matrix, in float64."""
        self._check_finite()
        _, core, _, scale = self._orthogonalised()
        return in_range(norm=scale * torch.linalg.matrix_norm(core))

    def svd(self, k: int | None = None) -> FactoredSVD:
        """Return the singular value decomposition in float64, the k largest components or all.

        By QR of the factors, M = Q_A (R_A R_B') Q_B', so that only a small core is decomposed.
        """
        most = min(self.rank, self.n_rows, self.n_columns)
        k = most if k is None else k
        check_count("k", k, most, "the number of components")
        self._check_finite()
        Q_A, core, Q_B, scale = self._orthogonalised()
        U, values, Vh = torch.linalg.svd(core, full_matrices=False)
        like = torch.promote_types(self.left.dtype, torch.float32)
        return FactoredSVD(
            values=in_range(values=(scale[..., None] * values[..., :k]).to(like)),
            left=(Q_A @ U[..., :k]).mT.to(like),
            right=(Vh[..., :k, :] @ Q_B.mT).to(like),
            norm=in_range(norm=(scale * torch.linalg.vector_norm(values, dim=-1)).to(like)),
        )

    def eigenvalues(self) -> Complex[Tensor, "*batch k"]:
        """Return the eigenvalues of a square M that can differ from zero, in descending magnitude.

        A B and B A have the same ones. In double precision.
        """
        if self.n_rows != self.n_columns:
            raise BilensError(
                f"eigenvalues() needs as many rows as columns; this matrix has {self.n_rows} and "
                f"{self.n_columns}"
            )
        self._check_finite()
        (A, B), scale = self._without_scale()
        # The smaller product: the eigenvalues that the larger one has besides are all 0.
        values = torch.linalg.eigvals(B @ A if self.rank <= self.n_rows else A @ B)
        values = in_range(eigenvalues=scale[..., None] * values)
        return values.gather(-1, values.abs().argsort(dim=-1, descending=True))

    def dense(self, max_bytes: int = DENSE_LIMIT) -> Float[Tensor, "*batch n_rows n_columns"]:
        """Return the matrices themselves, (*batch, n_rows, n_columns)."""
        shape = (*self.batch_shape, self.n_rows, self.n_columns)
        check_dense_size(shape, self.left, max_bytes)
        return self.left @ self.right

    def _without_scale(self) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return both factors in float64, of a largest entry from 1/2 to 1, and their scale."""
        units, scale = (
            [],
            torch.ones(self.batch_shape, dtype=torch.float64, device=self.left.device),
        )
        for factor in (self.left.double(), self.right.double()):
            # A power of two, so that nothing is rounded; zeros keep their size.
            size = torch.exp2(torch.frexp(factor.detach().abs().amax((-2, -1))).exponent.double())
            units.append(factor / size[..., None, None])
            scale = scale * size
        return (units[0], units[1]), scale

    def _orthogonalised(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return Q_A, R_A R_B' and Q_B of the matrix without its scale, and the scale."""
        (A, B), scale = self._without_scale()
        # Gram matrices would square the condition number, which QR leaves as it is.
        Q_A, R_A = torch.linalg.qr(A)
        Q_B, R_B = torch.linalg.qr(B.mT)
        return Q_A, R_A @ R_B.mT, Q_B, scale

    def _common_batch(self, other: "FactoredMatrix") -> torch.Size:
        try:
            shape: torch.Size = torch.broadcast_shapes(self.batch_shape, other.batch_shape)
        except RuntimeError as error:
            raise BilensError(
                f"Batches of shapes {tuple(self.batch_shape)} and {tuple(other.batch_shape)} do "
                "not broadcast"
            ) from error
        return shape

    def _entrywise_batch(self, other: "FactoredMatrix") -> torch.Size:
        shape, other_shape = (self.n_rows, self.n_columns), (other.n_rows, other.n_columns)
        if shape != other_shape:
            raise BilensError(
                f"Matrices of shapes {shape} and {other_shape} have no product entry by entry"
            )
        return self._common_batch(other)

    def _check_finite(self) -> None:
        check_finite(left=self.left, right=self.right)

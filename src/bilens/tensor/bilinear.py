"""A bilinear layer as a symmetric third-order tensor that is never built, and its SVD."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, SupportsIndex

import torch
from einops import einsum
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.nn import functional

from bilens.analysis import Reading
from bilens.checks import check_count, check_finite, check_index, checked
from bilens.errors import BilensError
from bilens.sections import Columns, Fact
from bilens.tensor import factors
from bilens.tensor.factored import FactoredMatrix
from bilens.tensor.quadratic import QuadraticForm
from bilens.tensor.tracing import module_factors


@checked
@dataclass(frozen=True, eq=False, repr=False)
class TensorSVD(Reading):
    """B = sum_s sigma_s r_s (x) Q_s, the largest singular values first.

    The r_s are orthonormal, and so are the Q_s in the Frobenius inner product. The sign of each
    pair (r_s, Q_s) is arbitrary.

    Attributes:
        values: sigma_s.
        outputs: r_s, one row each.
        components: the interaction matrices Q_s, a batch of quadratic forms.
        norm: Frobenius norm of the tensor; norm^2 - sum(values^2) is the square that was cut off.
    """

    values: Float[Tensor, " k"]
    outputs: Float[Tensor, "k n_out"]
    components: QuadraticForm
    norm: Float[Tensor, ""]

    axes: ClassVar[dict[str, str]] = {"x": "component", "y": "value"}

    def facts(self) -> list[Fact]:
        shares = self._shares()
        # A zero tensor has effective rank 0, as a zero form has.
        effective = shares.sum() ** 2 / (shares**2).sum() if shares.any() else 0.0
        return [
            ("components", len(self)),
            ("outputs", self.outputs.shape[1]),
            ("inputs", self.components.n_in),
            ("top singular value", float(self.values[0])),
            ("effective rank", round(float(effective), 1)),
        ]

    def columns(self) -> Columns:
        """Return a row for each component: its singular value and share of the squared norm."""
        columns = {"value": self.values.tolist(), "share": self._shares().tolist()}
        return {"component": range(1, len(self) + 1), **columns}

    def _shares(self) -> Float64[Tensor, " k"]:
        """Return each component's share of the squared norm, on the CPU; 0 of a zero tensor."""
        norm = self.norm.detach().cpu().double()
        # The quotient is squared: squares themselves may leave the range of the dtype.
        return (self.values.detach().cpu().double() / torch.where(norm > 0, norm, 1)) ** 2

    def __len__(self) -> int:
        """Return the number of components."""
        return self.values.shape[0]

    def truncate(self, k: int) -> "TensorSVD":
        """Return the k largest components."""
        check_count("k", k, len(self), "the number of components")
        return replace(
            self, values=self.values[:k], outputs=self.outputs[:k], components=self.components[:k]
        )

    def __call__(self, x: Float[Tensor, "*batch n_in"]) -> Float[Tensor, "*batch n_out"]:
        """Evaluate the tensor through these components only, as a bottleneck."""
        return (self.components(x) * self.values) @ self.outputs

    def projector(self) -> Float[Tensor, "n_out n_out"]:
        """Return the projector on the output directions, the sum of r_s r_s', (n_out, n_out).

        `tensor.change_basis(outputs=svd.truncate(k).projector())` is the nearest tensor of rank k.
        """
        return self.outputs.T @ self.outputs


UNFOLDED_BYTES = 64 * 1024**2
"""Largest unfolding that is decomposed itself."""


@checked
@dataclass(frozen=True, eq=False, repr=False)
class BilinearTensor(Reading):
    """The symmetric tensor of x -> D((L x) * (R x)), kept as its three factors.

    B[o,i,j] = 1/2 sum_h D[o,h] (L[h,i] R[h,j] + L[h,j] R[h,i])

    Axes: `n_out` outputs, `n_in` inputs (twice, symmetric), `rank` hidden units. Only the part of
    the tensor that is symmetric in its inputs acts on x, so only that part exists here. Every
    method follows the dtype and device of the factors: inputs and directions are moved to them. An
    autocast changes nothing, and methods are differentiable unless their docstring excludes it.
    Tensors of the same inputs and outputs can be added and subtracted; their ranks add.

    Attributes:
        left: L; one row for each hidden unit.
        right: R; one row for each hidden unit.
        out: D; one column for each hidden unit. By default the identity, as in the paper: each
            hidden unit is an output.
        constant: the last input coordinate is the constant 1, which carries biases. Inputs may
            then be given without it.
        names: of the outputs, such as classes; may be left out.

    Source: Pearce et al. 2024, sections 3.2 and 3.3; their W, V are L, R here, and their layer has
        D = 1 unless an out-projection follows.
    """

    left: Float[Tensor, "rank n_in"]
    right: Float[Tensor, "rank n_in"]
    out: Float[Tensor, "n_out rank"] = None  # type: ignore[assignment]
    constant: bool = False
    names: tuple[str, ...] = ()

    axes: ClassVar[dict[str, str]] = TensorSVD.axes

    def facts(self) -> list[Fact]:
        facts: list[Fact] = [
            ("outputs", self.n_out),
            ("inputs", self.n_in),
            ("hidden units", self.rank),
            ("", str(self.out.dtype).removeprefix("torch.")),
        ]
        facts += [("", "the last input constant")] * self.constant
        return facts + [("", str(self.out.device))] * (self.out.device.type != "cpu")

    def columns(self) -> Columns:
        """Return the singular values, at the cost of `svd`."""
        return self.svd().columns()

    @property
    def is_quick(self) -> bool:
        """Whether it is small enough to be decomposed when it is shown."""
        return max(self.n_out, self.rank) <= 1024

    def __post_init__(self) -> None:
        if self.out is None:
            identity = torch.eye(len(self.left), dtype=self.left.dtype, device=self.left.device)
            object.__setattr__(self, "out", identity)
        factors.check_factors(left=self.left, right=self.right, out=self.out)
        if len(self.names) not in (0, self.n_out):
            raise BilensError(
                f"names has {len(self.names)} entries, expected {self.n_out}, one for each output"
            )
        if 0 in (*self.left.shape, *self.out.shape):
            raise BilensError(
                f"The tensor is empty: left {tuple(self.left.shape)}, out {tuple(self.out.shape)}. "
                "Expected an input, an output and a hidden unit."
            )

    @classmethod
    def of(cls, module: nn.Module, input_shape: Sequence[int] | None = None) -> "BilinearTensor":
        """Return a torch module of one bilinear layer as a tensor, in the module's own coordinates.

        The factors are found by running the module on probes. Products may be written in any way.
        Biases, linear maps, residual connections and norms with running statistics are folded in.
        The tensor is compared with the module on random inputs, in float64.

        Args:
            module: the module; it does not change.
            input_shape: shape of a single input, such as (1, 28, 28), which is read flat. By
                default the length of a vector that the module accepts.

        Raises:
            NotBilinearError: the module is not bilinear, or has several layers.
        """
        return cls(*module_factors(module, input_shape))

    @property
    def n_in(self) -> int:
        """Number of inputs, the constant among them."""
        return self.left.shape[1]

    @property
    def n_out(self) -> int:
        """Number of outputs."""
        return self.out.shape[0]

    @property
    def rank(self) -> int:
        """Number of hidden units, which bounds the tensor's rank."""
        return self.left.shape[0]

    def to(self, target: torch.dtype | torch.device | str) -> "BilinearTensor":
        """Return the same tensor in another dtype or on another device."""
        return replace(
            self, left=self.left.to(target), right=self.right.to(target), out=self.out.to(target)
        )

    def __call__(
        self, x: Float[Tensor, "... n_in"], y: Float[Tensor, "... _"] | None = None
    ) -> Float[Tensor, "... n_out"]:
        """Evaluate B(x) = D((L x) * (R x)), one row of `x` for each input.

        With `y`, B(x, y) = 1/2 D((L x) * (R y) + (L y) * (R x)), symmetric and linear in both; the
        axes before the last broadcast. B(x, x) = B(x).
        """
        x = factors.fit_input(x, self.left, self.constant)
        if y is None:
            return ((x @ self.left.T) * (x @ self.right.T)) @ self.out.T
        y = factors.fit_input(y, self.left, self.constant, "y")
        straight = (x @ self.left.T) * (y @ self.right.T)
        cross = (y @ self.left.T) * (x @ self.right.T)
        return (straight + cross) @ self.out.T / 2

    def contract(self, x: Float[Tensor, "*batch n_in"]) -> FactoredMatrix:
        """Return the matrix of y -> B(x, y), one for each row of x, (*batch, n_out, n_in).

        Its singular vectors are the directions of the other input that x works together with, and
        of the output that they move. A constant coordinate is its last column.
        """
        x = factors.fit_input(x, self.left, self.constant)
        # Either input may be the one that is given, so the matrix is the mean of both orders.
        halves = (self.out * (x @ factor.T)[..., None, :] / 2 for factor in (self.right, self.left))
        reading = torch.cat([self.left, self.right])
        return FactoredMatrix(torch.cat([*halves], -1), reading.expand(*x.shape[:-1], -1, -1))

    def __add__(self, other: "BilinearTensor") -> "BilinearTensor":
        """Return the tensor of x -> A(x) + B(x), of the sum of both ranks."""
        self._check_alike(other)
        return BilinearTensor(
            torch.cat([self.left, other.left]),
            torch.cat([self.right, other.right]),
            torch.cat([self.out, other.out], 1),
            self.constant,
            self.names or other.names,
        )

    def __sub__(self, other: "BilinearTensor") -> "BilinearTensor":
        """Return the tensor of x -> A(x) - B(x). Its norm is the distance between the two."""
        return self + replace(other, out=-other.out)

    def interaction(
        self,
        direction: Float[Tensor, "*batch n_out"] | None = None,
        *,
        output: str | SupportsIndex | Iterable[str | SupportsIndex] | None = None,
        minus: str | SupportsIndex | Iterable[str | SupportsIndex] | None = None,
    ) -> QuadraticForm:
        """Return the interaction matrix along an output direction, as a quadratic form.

        Q(u) = 1/2 (L' diag(D'u) R + R' diag(D'u) L), so that x'Qx = u . B(x)

        Args:
            direction: u, one vector or a batch of them in the last axis.
            output: instead of a direction, the number or name of one output, or several for a
                batch.
            minus: (with output) outputs whose mean is subtracted from it.

        Source: Pearce et al. 2024, section 4.1.
        """
        if (direction is None) == (output is None) or (minus is not None and output is None):
            raise BilensError(
                "interaction() takes either a direction or output, and exactly one of them; minus "
                "goes with output"
            )
        if output is not None:
            weights = self.out[self._output_index("output", output)]
            if minus is not None:
                less = self.out[self._output_index("minus", minus)]
                weights = weights - less.reshape(-1, self.rank).mean(0)
        else:
            assert direction is not None
            factors.check_last_axis("direction", direction, self.n_out, "output of the tensor")
            weights = direction.to(self.out) @ self.out
        return QuadraticForm(self.left, self.right, weights, self.constant)

    def _output_index(self, name: str, output: Any) -> int | list[int]:
        # A tensor of no axes is a single number, although it is iterable by its type.
        is_single = isinstance(output, str) or getattr(output, "ndim", 1) == 0
        if not is_single and isinstance(output, Iterable):
            numbers = [self._single_index(name, entry) for entry in output]
            if not numbers:
                raise BilensError(f"{name} is empty, expected at least one output")
            return numbers
        return self._single_index(name, output)

    def _single_index(self, name: str, output: Any) -> int:
        if isinstance(output, str) and self.names.count(output) == 1:
            return self.names.index(output)
        hint = f", or one of {', '.join(self.names)}" if self.names else ""
        return check_index(name, output, self.n_out, f"the number of an output{hint}")

    def change_basis(
        self,
        inputs: Float[Tensor, "n_in k"] | None = None,
        outputs: Float[Tensor, "m n_out"] | None = None,
    ) -> "BilinearTensor":
        """Read inputs through features E and outputs along directions U: (L E, R E, U D).

        The result maps z to U B(E z). With a constant coordinate, E may leave it out: the
        coordinate then stays as it is.

        Args:
            inputs: E, one column for each input feature.
            outputs: U, one row for each output direction.

        Source: Pearce et al. 2024, appendix B.1; Pearce & Dooms 2024, "Transforming to a feature
            basis".
        """
        left, right, out = self.left, self.right, self.out
        if inputs is not None:
            E = inputs.to(left)
            if self.constant and E.shape[0] == self.n_in - 1:
                E = factors.affine(E, None)
            if E.shape[0] != self.n_in:
                expected = f"({self.n_in}, k), one column for each input feature"
                raise factors.wrong_shape("inputs", inputs, expected)
            left, right = left @ E, right @ E
        if outputs is not None:
            if outputs.shape[1] != self.n_out:
                expected = f"(m, {self.n_out}), one row for each output direction"
                raise factors.wrong_shape("outputs", outputs, expected)
            out = outputs.to(out) @ out
        names = self.names if outputs is None else ()
        return BilinearTensor(left, right, out, self.constant, names)

    def with_bias(
        self,
        left: Float[Tensor, " rank"] | None = None,
        right: Float[Tensor, " rank"] | None = None,
        out: Float[Tensor, " n_out"] | None = None,
    ) -> "BilinearTensor":
        """Fold biases in: the tensor of x -> D((L x + left) * (R x + right)) + out.

        `left` and `right` become the column of the constant coordinate. `out` costs one hidden unit
        that is always 1. The result has the constant coordinate, also when all are None.

        Source: Pearce et al. 2024, section 3.4.
        """
        L, R, D = self.left, self.right, self.out
        sizes = {"left": self.rank, "right": self.rank, "out": self.n_out}
        for (name, size), bias in zip(sizes.items(), (left, right, out), strict=True):
            if bias is not None and len(bias) != size:
                raise BilensError(
                    f"{name} has shape {tuple(bias.shape)}, expected ({size},), one number for "
                    f"each row of the factor {name}"
                )
        if not self.constant:
            # The constant is a coordinate like any other: a bias is a weight that reads it.
            L, R = (torch.cat([factor, factor.new_zeros(self.rank, 1)], 1) for factor in (L, R))
        L = L if left is None else torch.cat([L[:, :-1], L[:, -1:] + left.to(L)[:, None]], 1)
        R = R if right is None else torch.cat([R[:, :-1], R[:, -1:] + right.to(R)[:, None]], 1)
        if out is not None:
            # A hidden unit that reads the constant twice is 1 for every input.
            row = L.new_zeros(1, L.shape[1])
            row[0, -1] = 1
            L, R, D = (
                torch.cat([L, row]),
                torch.cat([R, row]),
                torch.cat([D, out.to(D)[:, None]], 1),
            )
        return BilinearTensor(L, R, D, constant=True, names=self.names)

    def with_residual(self) -> "BilinearTensor":
        """Fold a residual connection in: the tensor of x -> x + B(x).

        With x' = [x, 1] the factors grow by n_in rows and columns:

            L' = [L; I 0],  R' = [R; 0 1],  D' = [D, I]

        Source: Pearce et al. 2024, section 3.4.
        """
        tensor = self.with_bias()
        n = tensor.n_in - 1
        if self.n_out != n:
            raise BilensError(
                f"A residual needs as many outputs as inputs; this tensor has {n} inputs and "
                f"{self.n_out} outputs"
            )
        # x itself is the product of x and the constant, one hidden unit for each input.
        identity = torch.eye(n + 1, dtype=self.left.dtype, device=self.left.device)
        return BilinearTensor(
            torch.cat([tensor.left, identity[:n]]),
            torch.cat([tensor.right, identity[n:].expand(n, -1)]),
            torch.cat([tensor.out, identity[:n, :n]], 1),
            constant=True,
            names=self.names,
        )

    def with_constant_output(self) -> "BilinearTensor":
        """Append the constant to the outputs, x -> [B(x), 1], for a tensor above that reads the 1.

        The new output costs one hidden unit. The result has the constant coordinate.

        Source: Pearce et al. 2024, section 3.4.
        """
        bias = self.out.new_zeros(self.n_out + 1)
        bias[-1] = 1
        out = torch.cat([self.out, self.out.new_zeros(1, self.rank)])
        return replace(self, out=out, names=()).with_bias(out=bias)

    def without_scale(self) -> tuple["BilinearTensor", Float64[Tensor, ""]]:
        """Divide the tensor by a power of two so that nothing over- or underflows; return both.

        In float64, as all inner products and Gram matrices.
        """
        check_finite(left=self.left, right=self.right, out=self.out)
        left, right, out, scales = factors.take_out_scale(
            self.left.double(), self.right.double(), self.out.double()
        )
        # The outputs keep their ratios; only a common factor is divided out.
        scale = scales.max()
        return BilinearTensor(left, right, out * (scales / scale), self.constant), scale

    def inner(self, other: "BilinearTensor") -> Float64[Tensor, ""]:
        """Return the Frobenius inner product of two symmetric tensors, without building either.

        `<A,B>` = 1/2 sum_gh (D_A' D_B)_gh
        [(L_A L_B')_gh (R_A R_B')_gh + (L_A R_B')_gh (R_A L_B')_gh]

        Computed in float64. The tensors may differ in rank, not in inputs and outputs.
        """
        self._check_alike(other)
        (a, scale_a), (b, scale_b) = self.without_scale(), other.without_scale()
        return factors.in_range(inner=scale_a * scale_b * _unit_inner(a, b))

    def norm(self) -> Float64[Tensor, ""]:
        """Return the Frobenius norm of the symmetric tensor, in float64.

        Rounding leaves 1e-8 of the norms of A and B in the norm of A - B.
        """
        unit, scale = self.without_scale()
        return factors.in_range(norm=scale * _unit_norm(unit))

    def cosine(self, other: "BilinearTensor") -> Float64[Tensor, ""]:
        """Return the cosine `<A,B> / (|A| |B|)` of two symmetric tensors; 0 if either is zero."""
        self._check_alike(other)
        a, b = self.without_scale()[0], other.without_scale()[0]
        # Each at a scale near 1: products of norms may leave float64 where the cosine does not.
        scale = _unit_norm(a) * _unit_norm(b)
        return torch.where(scale > 0, _unit_inner(a, b) / scale, torch.zeros_like(scale))

    def output_gram(self) -> Float64[Tensor, "n_out n_out"]:
        """Return G = D K D', the Gram matrix of the outputs' interaction matrices, in float64."""
        unit, scale = self.without_scale()
        return factors.in_range(output_gram=scale * (scale * _unit_output_gram(unit)))

    def input_gram(self) -> Float64[Tensor, "n_in n_in"]:
        """Return the inputs' Gram matrix M[i,j] = sum_ok B[o,i,k] B[o,j,k], in float64."""
        unit, scale = self.without_scale()
        gram = factors.input_gram(unit.left, unit.right, unit.out)
        return factors.in_range(input_gram=scale * (scale * gram))

    def svd(self, k: int | None = None) -> TensorSVD:
        """Return the singular value decomposition of the n_out x n_in^2 unfolding, or its top k.

        G = D K D' = r diag(sigma^2) r'; component s has output direction r_s, singular value
        sigma_s and interaction matrix Q(r_s) / sigma_s, so B = sum_s sigma_s r_s (x) Q_s.
        Values that are rounding are 0: those below 8 n_out eps of the largest, with eps that of
        float64, and below sqrt(n_out eps) of a tensor too large to unfold (64 MiB). Costs
        O(n_out^2 n_in^2), and O(rank^2 (n_in + n_out)) of a large tensor.

        Source: Pearce et al. 2024, appendix B.2; Pearce & Dooms 2024, "SVD on the bilinear tensor".
        """
        k = self.n_out if k is None else k
        check_count("k", k, self.n_out, "the number of outputs")
        unit, scale = self.without_scale()
        dtype = torch.promote_types(self.out.dtype, torch.float32)
        eps = torch.finfo(torch.float64).eps
        if self.n_out * self.n_in**2 * unit.out.element_size() <= UNFOLDED_BYTES:
            unfolding = unit.dense().flatten(1)
            # With a column for each output at least, so that there are as many components.
            missing = max(0, self.n_out - unfolding.shape[1])
            matrix = functional.pad(unfolding, (0, missing))
            directions, values, _ = torch.linalg.svd(matrix, full_matrices=False)
            rounding = 8 * self.n_out * eps
        else:
            # A Gram matrix squares the values, and with them what rounding leaves.
            squares, directions = torch.linalg.eigh(_unit_output_gram(unit))
            values, directions = squares.flip(-1).clamp_min(0).sqrt(), directions.flip(-1)
            rounding = (self.n_out * eps) ** 0.5
        norm, outputs = torch.linalg.vector_norm(values), directions[:, :k].T
        # Below this there is only rounding: such a component is zero, and dividing by its value
        # would blow the rounding up.
        values = values[:k]
        large = values > rounding * values[:1]
        values = torch.where(large, values, torch.zeros_like(values))
        inverse = torch.where(large, 1 / values, torch.zeros_like(values))
        weights = (inverse[:, None] * (outputs @ unit.out)).to(dtype)
        unit = unit.to(dtype)
        return TensorSVD(
            values=factors.in_range(values=(scale * values).to(dtype)),
            outputs=outputs.to(dtype),
            components=QuadraticForm(unit.left, unit.right, weights, self.constant),
            norm=factors.in_range(norm=(scale * norm).to(dtype)),
        )

    def dense(self, max_bytes: int = factors.DENSE_LIMIT) -> Float[Tensor, "n_out n_in n_in"]:
        """Return the tensor itself, (n_out, n_in, n_in), for tests and small layers."""
        factors.check_dense_size((self.n_out, self.n_in, self.n_in), self.out, max_bytes)
        half = einsum(self.out, self.left, self.right, "o h, h i, h j -> o i j")
        return (half + half.mT) / 2

    def _check_alike(self, other: "BilinearTensor") -> None:
        shape, other_shape = ((t.n_out, t.n_in, t.constant) for t in (self, other))
        if shape != other_shape:
            raise BilensError(
                f"other has {other.n_out} outputs and {other.n_in} inputs (constant: "
                f"{other.constant}); expected {self.n_out} and {self.n_in} (constant: "
                f"{self.constant}), as in this tensor"
            )


def _unit_inner(a: BilinearTensor, b: BilinearTensor) -> Float64[Tensor, ""]:
    K = factors.hidden_product(a.left, a.right, b.left, b.right)
    return einsum(a.out.T @ b.out, K, "g h, g h ->")


def _unit_norm(unit: BilinearTensor) -> Float64[Tensor, ""]:
    # Rounding leaves squares of a difference of equal tensors below 0.
    return _unit_inner(unit, unit).clamp_min(0).sqrt()


def _unit_output_gram(unit: BilinearTensor) -> Float64[Tensor, "n_out n_out"]:
    K = factors.hidden_product(unit.left, unit.right, unit.left, unit.right)
    return unit.out @ K @ unit.out.T

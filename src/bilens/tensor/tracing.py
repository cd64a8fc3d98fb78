"""Bilinear factors of any torch module, found by running it on probes, and verified."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bilens.checks import check_finite, checked, detached
from bilens.errors import BilensError, NotBilinearError
from bilens.hooks import hooked

PRODUCTS = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
POWERS = {"pow", "pow_", "__pow__", "square", "square_"}
CONTRACTIONS = {"einsum", "matmul", "__matmul__", "mm", "bmm", "linear", "inner", "outer"}
# Both relative, in float64. Outputs of exact tensors agree to about 1e-13; entries below ROUNDING
# are differences of equal numbers.
TOLERANCE, ROUNDING = 1e-8, 1e-12


class Factors(NamedTuple):
    """The factors of a layer s -> D((L s) * (R s)); with `constant` s ends in a 1."""

    left: Float[Tensor, "rank n_in"]
    right: Float[Tensor, "rank n_in"]
    out: Float[Tensor, "n_out rank"]
    constant: bool

    def outputs(self, s: Float[Tensor, "samples n"]) -> Float[Tensor, "samples n_out"]:
        """Evaluate the layer on each row of s, which may leave out the 1."""
        if s.shape[1] < self.left.shape[1]:
            s = functional.pad(s, (0, 1), value=1)
        return ((s @ self.left.T) * (s @ self.right.T)) @ self.out.T

    def in_dtype_of(self, module: nn.Module) -> "Factors":
        """Return the factors in the widest dtype of a module's parameters."""
        kinds = [p.dtype for p in module.parameters() if p.is_floating_point()]
        default = torch.get_default_dtype()
        dtype = max(kinds, key=lambda kind: torch.finfo(kind).bits, default=default)
        left, right, out = (factor.to(dtype) for factor in self[:3])
        return Factors(left, right, out, self.constant)


def module_factors(module: nn.Module, input_shape: Sequence[int] | None) -> Factors:
    """Return the factors of a module of one bilinear layer; see `BilinearTensor.of`."""
    probe = _probed(module, input_shape)
    if probe.depth != 1:
        raise NotBilinearError(
            f"{type(module).__name__} has {probe.depth} layers of products, so its outputs are of "
            f"degree {2**probe.depth} in its inputs, not one bilinear tensor. "
            "bilens.load(module).layer_tensors() has a tensor for each layer."
        )
    # Coordinates stay the module's own: no basis is changed.
    n = 1 + prod(probe.shape)
    left, right = map(torch.cat, zip(*(p.factors for p in probe.products), strict=True))
    layer = _Layer(left[:, :n], right[:, :n], probe.out[:, n:], probe.out[:, :n])
    factors = layer.factors(constant=layer.is_affine)
    _check(module, probe, [factors.outputs])
    return factors.in_dtype_of(module)


def chain_factors(
    module: nn.Module, input_shape: Sequence[int] | None
) -> tuple[list[Factors], Float[Tensor, "n_read n_in"] | None, tuple[int, ...]]:
    """Return the factors of each layer of a module, the map before the first, and the input shape.

    The map is None if the first layer reads the inputs themselves. See `TensorStack`.
    """
    probe = _probed(module, input_shape)
    layers, embedding = _minimal_chain(probe)
    is_affine = any(layer.is_affine for layer in layers)
    factors = [layer.factors(constant=is_affine) for layer in layers]
    steps = [] if embedding is None else [lambda x: x @ embedding.T]
    _check(module, probe, [*steps, *(of_layer.outputs for of_layer in factors)])
    factors = [of_layer.in_dtype_of(module) for of_layer in factors]
    return factors, None if embedding is None else embedding.to(factors[0].left), probe.shape


# An affine map of n variables is a matrix of 1 + n columns, whose first one is the bias. Variables
# are the inputs, and then the hidden units.


@dataclass(frozen=True)
class _Layer:
    """The map s -> out ((left s) * (right s)) + rest s, of three affine maps."""

    left: Float[Tensor, "rank 1+n"]
    right: Float[Tensor, "rank 1+n"]
    out: Float[Tensor, "n_out rank"]
    rest: Float[Tensor, "n_out 1+n"]

    @property
    def is_affine(self) -> bool:
        """True if it has a part of degree 0 or 1, which needs the constant coordinate."""
        biases = torch.cat([m[:, 0] for m in (self.left, self.right, self.rest)])
        return self._is_linear or float(biases.abs().max()) > self._tiny

    @property
    def _tiny(self) -> float:
        return ROUNDING * max(float(self.out.norm()), 1)

    @property
    def _is_linear(self) -> bool:
        return float(self.rest[:, 1:].norm()) > self._tiny

    def factors(self, *, constant: bool) -> Factors:
        """Return the factors, with the constant coordinate or without."""
        if not constant:
            return Factors(self.left[:, 1:], self.right[:, 1:], self.out, constant=False)
        # A bias is a weight that reads the constant, the last coordinate.
        left, right = [self.left.roll(-1, 1)], [self.right.roll(-1, 1)]
        out, unit = [self.out], left[0].new_zeros(1, left[0].shape[1])
        unit[0, -1] = 1
        if float(self.rest[:, 0].abs().max()) > self._tiny:
            # A hidden unit that reads the constant twice is always 1.
            left, right, out = [*left, unit], [*right, unit], [*out, self.rest[:, :1]]
        if self._is_linear:
            # A linear map of rank k is k products with the constant coordinate.
            U, values, V = torch.linalg.svd(self.rest[:, 1:], full_matrices=False)
            k = int((values > ROUNDING * values[0]).sum())
            left.append(functional.pad(V[:k], (0, 1)))
            right.append(unit.expand(k, -1))
            out.append(U[:, :k] * values[:k])
        return Factors(torch.cat(left), torch.cat(right), torch.cat(out, 1), constant=True)


@dataclass
class _Product:
    """A product of two parts of the input: the hidden units that it makes, and their factors.

    The factors are affine maps of the variables, among which the hidden units have `columns`.
    """

    columns: slice
    factors: tuple[Tensor, Tensor]
    level: int = 0


@dataclass
class _Probe:
    """All products of a module, and its output, as affine maps of the variables."""

    shape: tuple[int, ...]
    products: list[_Product]
    out: Float[Tensor, "n_out 1+variables"]

    @property
    def depth(self) -> int:
        return max(product.level for product in self.products)


class _Products(TorchFunctionMode):
    """Replace each product of two dependent tensors by new variables, while a module runs.

    A tensor depends on the input if autograd says so, since parameters require no gradient here.
    `note` is called with each function of torch and its arguments before it runs.
    """

    def __init__(
        self,
        replace: Callable[[Tensor, Tensor], Tensor],
        note: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] = lambda *call: None,
    ) -> None:
        super().__init__()
        self.replace, self.note = replace, note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        self.note(func, args, kwargs)
        dependent = [arg for arg in _flat((args, kwargs)) if _depends(arg)]
        if name in PRODUCTS and len(dependent) == 2:
            return self.replace(*torch.broadcast_tensors(*dependent))
        if name in POWERS and dependent:
            exponent = 2 if "square" in name else [*args, *kwargs.values()][1]
            if exponent in (2, 3, 4):
                return self._power(dependent[0], int(exponent))
        if name == "bilinear" and len(dependent) == 2:
            # As in torch: W holds a matrix for each output.
            first, second, weight, bias = [*args, *kwargs.values(), None][:4]
            pairs = self.replace(*torch.broadcast_tensors(first[..., None], second[..., None, :]))
            out = torch.einsum("...ij,oij->...o", pairs, weight)
            return out if bias is None else out + bias
        if name in CONTRACTIONS and len(dependent) > 1:
            raise NotBilinearError(
                f"{name} contracts two tensors that both depend on the input; expected a product "
                "by *, whose hidden units are the layer's. Attention is read by ResidualModel."
            )
        return func(*args, **kwargs)

    def _power(self, base: Tensor, exponent: int) -> Tensor:
        result = base
        for _ in range(exponent - 1):
            result = self.replace(base, result)
        return result


def _is_curved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function of torch is neither affine in its arguments nor a product."""
    name = getattr(func, "__name__", "")
    is_product = name in PRODUCTS | POWERS | CONTRACTIONS | {"bilinear"}
    # In-place functions, whose names end so, would change their input from test to test.
    if is_product or name.endswith("_") or not any(map(_depends, _flat((args, kwargs)))):
        return False
    by = [_scaled(func, args, kwargs, factor) for factor in (-1.0, 0.0, 1.0, 2.0)]
    if not all(isinstance(y, Tensor) and y.is_floating_point() for y in by):
        return False
    # Odd functions pass the first test, homogeneous ones such as relu the second.
    curvatures = [by[0] + by[2] - 2 * by[1], by[3] - 2 * by[2] + by[1]]
    limit = TOLERANCE * float(by[2].detach().abs().max() + 1)
    return not all(float(c.detach().abs().max()) <= limit for c in curvatures if c.numel())


def _scaled(func: Any, args: Any, kwargs: Any, factor: float) -> Any:
    """Return a function's result with all dependent arguments multiplied by a number."""

    def change(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(change(entry) for entry in value)
        return value * factor if _depends(value) else value

    return func(*change(args), **{name: change(value) for name, value in kwargs.items()})


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, tuple | list):
        return [value]
    return [part for entry in value for part in _flat(entry)]


def _depends(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@checked
def _probed(module: nn.Module, input_shape: Sequence[int] | None) -> _Probe:
    """Run a module on zero and on each unit vector of each variable, which determine its maps.

    The first run, of one input, counts the products. In the second each product is replaced by
    variables of its own, so that every value is affine in the inputs and in earlier products.
    """
    check_finite(**{name: p for name, p in module.named_parameters() if p.is_floating_point()})
    model = deepcopy(module).to("cpu", torch.float64).eval().requires_grad_(False)
    shape = _input_shape(model, input_shape)
    sizes: list[int] = []

    def count(first: Tensor, second: Tensor) -> Tensor:
        sizes.append(first[0].numel())
        # A product is a variable of its own. As it requires a gradient, so does all that depends on
        # it, which is how `_depends` finds the next products.
        return (first * second).detach().requires_grad_()

    with torch.enable_grad():
        with _Products(count):
            model(_random(1, shape).requires_grad_())
        if not sizes:
            culprit = _culprit(model, shape)
            raise NotBilinearError(
                f"{type(module).__name__} multiplies no two parts of its input, expected a product "
                f"such as (L x) * (R x){culprit}"
            )
        n_in = prod(shape)
        n_rows = 1 + n_in + sum(sizes)
        # One run for all variables: the batch has a row at zero and one for each unit vector.
        x = torch.zeros(n_rows, n_in, dtype=torch.float64)
        x[1 : 1 + n_in] = torch.eye(n_in, dtype=torch.float64)
        products: list[_Product] = []

        def replace(first: Tensor, second: Tensor) -> Tensor:
            if len(first) != n_rows:
                raise NotBilinearError(
                    f"a product has shape {tuple(first.shape)} for {n_rows} inputs, expected the "
                    "batch as its first axis"
                )
            # Row 0 is the run at zero, so unit vectors begin at row 1.
            start = 1 + n_in + sum(sizes[: len(products)])
            columns = slice(start, start + sizes[len(products)])
            products.append(_Product(columns, (_affine(first), _affine(second))))
            hidden = first.new_zeros(n_rows, sizes[len(products) - 1])
            hidden[columns].fill_diagonal_(1)
            return hidden.reshape(first.shape).requires_grad_()

        with _Products(replace):
            out = _affine(model(x.reshape(-1, *shape).requires_grad_()))
    for product in products:
        # One more than the deepest product that a factor depends on.
        rows = torch.cat(product.factors)
        limit = ROUNDING * rows[:, 1:].abs().max()
        below = [p.level for p in products if float(rows[:, p.columns].abs().max()) > limit]
        product.level = 1 + max(below, default=0)
    return _Probe(shape, products, out)


def _affine(values: Tensor) -> Float[Tensor, "n_rows 1+variables"]:
    """Return the affine map with these values at zero and at each unit vector."""
    rows = values.detach().flatten(1)
    return torch.cat([rows[:1], rows[1:] - rows[0]]).T.contiguous()


def _random(n: int, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, *shape, generator=generator, dtype=torch.float64)


def _input_shape(module: nn.Module, input_shape: Sequence[int] | None) -> tuple[int, ...]:
    """Return the given shape, or the first length of a vector that the module accepts."""
    linear = [layer.in_features for layer in module.modules() if isinstance(layer, nn.Linear)]
    others = [size for p in module.parameters() for size in reversed(p.shape)]
    candidates = [tuple(input_shape)] if input_shape else [(n,) for n in [*linear, *others]]
    for shape in dict.fromkeys(candidates):
        try:
            module(_random(2, shape))
        except (RuntimeError, ValueError, TypeError) as error:
            if input_shape:
                raise BilensError(f"input_shape={shape} does not fit the module: {error}") from None
        else:
            return shape
    raise BilensError(
        f"{type(module).__name__} accepts no vector of the lengths that its parameters have; pass "
        "input_shape=, the shape of a single input, such as (1, 28, 28)"
    )


@checked
def _minimal_chain(probe: _Probe) -> tuple[list[_Layer], Float[Tensor, "n_read n_in"] | None]:
    """Return a layer for each level, and the map from inputs to the first one's inputs.

    The state between two levels is the smallest from which everything later follows. It is the row
    space of all later factors and of the output, over the variables so far. So it contains
    residual connections of any kind, and a stack of width d has states of d numbers.
    """
    n_in, depth = prod(probe.shape), probe.depth
    # The bias and variables in the order of the levels, so that those of a state come first.
    columns, ends, pairs = [torch.arange(1 + n_in)], [1 + n_in], []
    for level in range(1, depth + 1):
        products = [product for product in probe.products if product.level == level]
        columns += [torch.arange(p.columns.start, p.columns.stop) for p in products]
        ends.append(sum(map(len, columns)))
        pairs.append([*map(torch.cat, zip(*(p.factors for p in products), strict=True))])
    order = torch.cat(columns)
    maps, out = [(left[:, order], right[:, order]) for left, right in pairs], probe.out[:, order]
    bases = [
        _row_space([*chain.from_iterable(maps[level:]), out], ends[level] - 1)
        for level in range(depth)
    ]
    layers = []
    for level, (left, right) in enumerate(maps):
        basis, end = bases[level], ends[level]
        # The next state is linear in this one and in the new hidden units.
        above = out if level + 1 == depth else functional.pad(bases[level + 1], (1, 0))
        first, second, rest = (
            torch.cat([m[:, :1], m[:, 1:end] @ basis.T], 1) for m in (left, right, above)
        )
        layers.append(_Layer(first, second, above[:, end : ends[level + 1]], rest))
    return layers, None if len(bases[0]) == n_in else bases[0]


def _row_space(maps: Sequence[Tensor], n: int) -> Float[Tensor, "k n"]:
    """Return orthonormal rows that span the rows of maps, restricted to the first n variables."""
    parts = []
    for m in maps:
        part = m[:, 1 : 1 + n]
        # Each map at its own scale: a small one counts as much as a large one, but what rounding
        # leaves of one that reads other variables does not count.
        size = part.norm()
        parts.append(part / size if size > ROUNDING * m.norm() else torch.zeros_like(part))
    rows = torch.cat(parts)
    rows = rows[rows.abs().amax(1) > ROUNDING]
    # Variables that nobody reads are left out exactly.
    is_used = rows.abs().amax(0) > ROUNDING if len(rows) else torch.zeros(n, dtype=torch.bool)
    # Rows of many maps repeat each other; an SVD finds their span whatever their number.
    values, vectors = torch.linalg.svd(rows[:, is_used], full_matrices=False)[1:]
    k = int((values > ROUNDING * values[:1]).sum())
    basis = rows.new_zeros(k, n)
    # The module's own coordinates are kept where they span everything.
    basis[:, is_used] = vectors[:k] if k < int(is_used.sum()) else torch.eye(k, dtype=rows.dtype)
    return basis


def _culprit(module: nn.Module, shape: Sequence[int]) -> str:
    """Return a clause that names the first function that is neither affine nor a product."""
    names = {part: name for name, part in module.named_modules()}
    stack, culprits = list[str](), list[str]()

    def note(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not culprits and _is_curved(func, args, kwargs):
            where = f" in {stack[-1]}" if stack and stack[-1] else ""
            culprits.append(f"; {func.__name__}{where} is neither linear nor a product")

    mode = _Products(lambda first, second: (first * second).detach().requires_grad_(), note)
    before = [(part, lambda part, *_: stack.append(names[part])) for part in names]
    after = [(part, lambda *_: stack.pop() and None) for part in names]
    with torch.enable_grad(), mode, hooked(before, after):
        module(_random(2, shape).requires_grad_())
    return "".join(culprits)


@detached
def _check(module: nn.Module, probe: _Probe, steps: Sequence[Callable[[Tensor], Tensor]]) -> None:
    """Raise unless maps, one after another, of flat inputs equal their module on random ones."""
    model = deepcopy(module).to("cpu", torch.float64).eval().requires_grad_(False)
    x = _random(16, probe.shape)
    expected, outputs = model(x).flatten(1), x.flatten(1)
    for step in steps:
        outputs = step(outputs)
    error = (outputs - expected).abs()
    if not bool((error <= TOLERANCE * (1 + expected.abs().max())).all()):
        worst = error.nan_to_num(torch.inf).argmax()
        raise NotBilinearError(
            f"{type(module).__name__} is {float(expected.flatten()[worst]):.6g} at a random input, "
            f"and its tensor {float(outputs.flatten()[worst]):.6g}; expected the same "
            f"number{_culprit(model, probe.shape)}. Give a part without it, such as one layer. "
            "Norms with running statistics, as BatchNorm1d in evaluation mode, are folded in; "
            "norms that divide by the length of their input cannot be."
        )

"""The rules of torch's operations: an exact backward pass between two texts, of any model.

Two texts run side by side, in the halves of the first axis of every activation. In the backward
pass each operation has its secant between both in place of its derivative. The adjoint w of an
activation x then satisfies, over any cut of the graph,

    metric(first) - metric(second) = sum of w . (x_first - x_second)

Any model of torch runs under `Rules` as it is: nothing of it is changed, and what it computes is
the same. Arguments have the names that torch gives them, in calls of functions, of methods, in
place and with `out`. An operation that has no rule is refused by its name and line.

Source: Shrikumar et al. 2017 for secants.
"""

import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bilens.flows.secants import (
    Attend,
    Elementwise,
    Function,
    Gather,
    Linear,
    LogSumExp,
    MatrixProduct,
    Multiply,
    Rows,
    Softmax,
    Solve,
    TwoFactors,
    UnknownOperationError,
    Where,
    before_change,
    differs,
    forget_kept,
)
from bilens.transformer.experts import ExpertCall
from bilens.transformer.mixing import AttentionCall, Mix, product_mix
from bilens.transformer.running import NARROW

MASKED = -1e30
"""Scores below this are of masked positions."""


class Leaf(NamedTuple):
    """Numbers that a flow starts at beside the embeddings: what was chosen, or is seen.

    Those of tokens are of a further embedding.
    """

    kind: Literal["choice", "seen", "token"]
    value: Tensor


# The table: how each operation is called, and its rule.

Rule = Callable[..., Any]
"""A function of the mode, the operation, and the arguments of its call."""

RULES: dict[str, Rule] = {}

CALLED = {
    "__add__": "add",
    "__radd__": "add",
    "__iadd__": "add_",
    "__sub__": "sub",
    "__rsub__": "rsub",
    "__isub__": "sub_",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__imul__": "mul_",
    "multiply": "mul",
    "__truediv__": "div",
    "__itruediv__": "div_",
    "divide": "div",
    "true_divide": "div",
    "__rtruediv__": "rdiv",
    "__rdiv__": "rdiv",
    "__matmul__": "matmul",
    "__rmatmul__": "rmatmul",
    "__pow__": "pow",
    "__rpow__": "rpow",
    "special_expm1": "expm1",
    "concat": "cat",
    "concatenate": "cat",
    "negative": "neg",
    "__neg__": "neg",
    "absolute": "abs",
    "__abs__": "abs",
    "log_sigmoid": "logsigmoid",
    "_threshold": "threshold",
}
"""Names of operations that torch calls by another one as well."""

LINEAR = set(
    """
    alias as_strided broadcast_to chunk clone contiguous copy_ cumsum diagonal diff double dropout
    expand expand_as fft_irfft fft_rfft flatten flip float half imag index_add
    index_add_ index_copy index_copy_ index_select mean movedim moveaxis narrow neg neg_ pad permute
    real repeat repeat_interleave reshape reshape_as roll rot90 scatter scatter_ scatter_add
    scatter_add_ select split squeeze squeeze_ sum swapaxes swapdims t take_along_dim tensor_split
    tile to transpose transpose_ tril tril_ triu triu_ type type_as unbind unflatten unfold
    unsqueeze unsqueeze_ view view_as view_as_complex view_as_real zero_ bfloat16
    masked_scatter masked_scatter_ fill_ hsplit vsplit dsplit split_with_sizes trace
    __getitem__ nan_to_num feature_dropout alpha_dropout conj
    resolve_conj pixel_shuffle adaptive_avg_pool1d avg_pool1d upsample interpolate
    """.split()  # noqa: SIM905
)
"""Operations that are linear in one activation: their secant is torch's own derivative."""
AFFINE = {"pad", "fill_", "copy_", "index_copy", "index_copy_", "scatter", "scatter_"}
"""Those of them that may put constants beside it."""

READ = set(
    """
    __get__ __set__ __len__ __repr__ __format__ __bool__ __contains__ __hash__ size dim
    ndimension numel nelement stride storage_offset data_ptr element_size is_contiguous
    is_complex is_floating_point is_nonzero get_device requires_grad_ register_hook retain_grad
    backward cpu cuda gt lt ge le eq ne greater less __gt__ __lt__ __ge__ __le__ __eq__ __ne__
    equal allclose isclose isnan isinf isfinite any all argmax argmin argsort nonzero
    count_nonzero bucketize searchsorted histc bincount zeros_like ones_like empty_like
    full_like rand_like randn_like new_empty new_zeros new_ones new_full new_tensor one_hot
    logical_not logical_and logical_or signbit sign is_same_size has_names dim_order
    is_inference untyped_storage
    """.split()  # noqa: SIM905
)
"""Operations whose results carry no activation."""

OF_NUMBERS = set(
    """
    abs atan ceil celu clamp clamp_max clamp_min cos cosh elu erf erfc exp exp2 expm1 floor gelu
    hardshrink hardsigmoid hardswish hardtanh leaky_relu log log10 log1p log2 logsigmoid mish
    reciprocal relu relu6 round rsqrt selu sigmoid silu sin sinh softplus softshrink softsign sqrt
    square tanh tanhshrink threshold trunc
    """.split()  # noqa: SIM905
)
"""Functions of each number."""
ALIASES = {
    "axis": "dim",
    "keepdims": "keepdim",
    **dict.fromkeys(("x", "x1", "self", "A"), "input"),
    "x2": "other",
}
"""Names of arguments for which torch has another one as well."""


DATA = Tensor.data.__get__  # type: ignore[attr-defined]


def is_live(x: Any) -> bool:
    """Return True for an activation: numbers that follow from the embeddings."""
    return isinstance(x, Tensor) and x.requires_grad


def make_leaf(x: Tensor) -> Tensor:
    """Return the numbers of an activation as a start of the graph, in a pass under rules."""
    with torch._C.DisableTorchFunction():
        leaf = x.detach().requires_grad_()
    leaf.in_pass = True  # type: ignore[attr-defined]
    return leaf


def values_of(x: Any) -> Any:
    """Return the numbers of an activation as constants, in a pass under rules."""
    with torch._C.DisableTorchFunction():
        return x.detach() if is_live(x) else x


class Rules(TorchFunctionMode):
    """Mode in which torch's operations on activations have rules.

    Weights are constants: parameters are used without their gradients, and nothing of the model
    is changed.

    Args:
        texts: number of texts in the first axis.

    Attributes:
        leaves: what was chosen, and further embeddings of tokens; in the order of the pass.
        mixes: values that heads mixed by their patterns.
        experts: the last call of experts, and its output.
        paused: whether operations run without a graph.
    """

    def __init__(self, texts: int = 2) -> None:
        super().__init__()
        forget_kept()
        self.texts = texts
        self.leaves: list[Leaf] = []
        self.mixes: list[Mix] = []
        self.experts: tuple[ExpertCall, Tensor] | None = None
        self.paused = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # `no_grad` in the model's code: flows pass there too.
        if func is torch._C._set_grad_enabled:
            return None
        if self.paused:
            with torch.no_grad():
                return func(*args, **(kwargs or {}))
        args = [_without_gradient(x) for x in args]
        kwargs = {name: _without_gradient(x) for name, x in (kwargs or {}).items()}
        live = next(filter(is_live, tensors_in((*args, *kwargs.values()))), None)
        if live is None:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        name = "where_of" if func == Tensor.where else CALLED.get(name, name)
        try:
            _check_context(live)
            result = self.run(name, func, args, kwargs)
            mark((result, *args[:1]))
        except UnknownOperationError as error:
            raise _named(error, name) from None
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
            # The model runs, or its own pass had failed before.
            message = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise _named(UnknownOperationError(message), name) from None
        return result

    def run(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation under its rule."""
        if name in READ:
            return args[0].view_as(args[0]) if func == DATA else func(*args, **kwargs)
        out = kwargs.pop("out", None)
        if out is not None:
            return _into(out, self.run(name, func, args, kwargs))
        args, kwargs, in_place = _without_in_place(func, args, kwargs)
        if in_place:
            return _into(args[0], self.run(name, func, args, kwargs))
        base = name.removesuffix("_")
        if name != base and name not in LINEAR and base in RULES:
            plain = getattr(torch, base, None) or getattr(functional, base)
            return _into(args[0], self.run(base, plain, args, kwargs))
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            before_change(args[0])
        rule = RULES.get(name)
        if rule is not None:
            return rule(self, func, *args, **_renamed(rule, kwargs))
        if name not in LINEAR:
            raise UnknownOperationError("has no rule")
        return self.affine(func, args, kwargs) if name in AFFINE else func(*args, **kwargs)

    def chosen(
        self, one_hot: Tensor, like: Tensor, kind: Literal["choice", "seen"] = "choice"
    ) -> Tensor:
        """Return what was chosen, as numbers at which a flow starts."""
        leaf = make_leaf(self.start(one_hot, like).to(like.dtype))
        self.leaves.append(Leaf(kind, leaf))
        return leaf

    def known(self, x: Any, like: Any) -> Any:
        """Return an operand; numbers that are no activation and differ are what was chosen."""
        if not isinstance(x, Tensor) or is_live(x):
            return x
        # Of masks softmax takes what was chosen.
        if not differs(x, like) or bool((x < MASKED).any()):
            return self.spread(x, like)
        return self.chosen(x, like)

    def summand(self, x: Any, like: Any) -> Any:
        """Return a term of a sum, or one of several numbers that are taken."""
        x = self.known(x, like)
        return x if is_live(x) else self.constant(x, like)

    # What a pass of tangents does otherwise.

    def start(self, one_hot: Tensor, like: Tensor) -> Tensor:
        """Return what was chosen in the rows of an activation."""
        return one_hot

    def constant(self, x: Any, like: Any) -> Any:
        """Return a constant term of a sum."""
        return x

    def affine(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation that may put constants beside an activation."""
        return func(*args, **kwargs)

    def spread(self, x: Tensor, like: Any) -> Tensor:
        """Return what is no activation, such as indices, in the rows of one."""
        return x

    def write(self, func: Any, x: Tensor, index: Any, value: Any) -> None:
        """Write numbers into places of an activation."""
        func(x, index, value)

    def in_either(self, mask: Tensor) -> Tensor:
        """Return where something holds in either text, for all rows."""
        return mask.unflatten(0, (2, -1)).any(0).repeat(2, *[1] * (mask.dim() - 1))

    def seen(self, mask: Tensor, like: Tensor) -> Tensor | None:
        """Return which scores are seen, as what was chosen; None where both texts see the same."""
        seen = mask if mask.dtype == torch.bool else mask.detach() >= MASKED
        return self.chosen(seen, like, "seen") if differs(seen, like) else None


def _without_gradient(value: Any) -> Any:
    """Return an argument; what requires a gradient and is no activation is a constant."""
    if isinstance(value, Tensor):
        if not value.requires_grad or hasattr(value, "in_pass") or _is_changed(value):
            return value
        if value.grad_fn is not None and _follows(value.grad_fn):
            raise _named(UnknownOperationError("has no rule"), value.grad_fn.name())
        return value.detach()
    if type(value) in (list, tuple):
        return type(value)(_without_gradient(x) for x in value)
    return value


def _is_changed(x: Tensor) -> bool:
    """Return whether numbers became an activation because a view of them was changed, or its base.

    Operations in place are seen as all others are.
    """
    by_view = x.grad_fn is not None and x.grad_fn.name().endswith("CopySlices")
    return by_view or (x._is_view() and hasattr(x._base, "in_pass"))


def _follows(node: Any) -> bool:
    """Return whether a graph, which no rule made, starts at an activation of the pass."""
    visited, stack = set(), [node]
    while stack:
        node = stack.pop()
        if hasattr(getattr(node, "variable", None), "in_pass"):
            return True
        for before, _ in node.next_functions:
            if before is not None and before not in visited:
                visited.add(before)
                stack.append(before)
    return False


def _check_context(x: Tensor) -> None:
    """Refuse contexts of torch in which activations have no graph, or are rounded."""
    if torch.is_inference_mode_enabled():
        raise UnknownOperationError("no flow passes torch.inference_mode")
    if torch.is_autocast_enabled(x.device.type):
        raise UnknownOperationError("torch.autocast rounds to 16 bits")


def mark(result: Any) -> None:
    """Mark what follows from the embeddings in this pass, as an operation returned it."""
    for x in tensors_in((result,)):
        if x.requires_grad:
            if x.dtype in NARROW:
                raise UnknownOperationError(f"activations are rounded to {x.dtype}")
            x.in_pass = True  # type: ignore[attr-defined]


def _named(error: UnknownOperationError, name: str) -> UnknownOperationError:
    """Return an error with the name of its operation, and the line that calls it."""
    if error.is_named:
        return error
    message = str(error)
    separator = " " if message == "has no rule" else ": "
    result = UnknownOperationError(f"{name}{separator}{message}{called_by()}")
    result.is_named = True
    return result


def _into(place: Any, result: Any) -> Any:
    """Write the result of an operation into its place, one tensor or several, and return that."""
    for x, y in zip(tensors_in((place,)), tensors_in((result,)), strict=True):
        if x.shape != y.shape:
            raise UnknownOperationError(
                f"a result of shape {tuple(y.shape)} in the place of {tuple(x.shape)}"
            )
        before_change(x)
        x.copy_(y)
    mark(place)
    return place


@cache
def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # of a function in C
        return None


def _without_in_place(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any], bool]:
    """Return the arguments of a call without `inplace`, and whether it is set."""
    signature = _signature(func) if inspect.isfunction(func) else None
    if signature is None or "inplace" not in signature.parameters:
        return args, kwargs, False
    arguments = signature.bind(*args, **kwargs).arguments
    in_place = arguments.pop("inplace", False)
    first, *others = arguments
    return [arguments[first]], {name: arguments[name] for name in others}, in_place


def _renamed(rule: Rule, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return named arguments by the names that a rule has for them."""
    own = _signature(rule)
    assert own is not None
    names = {name: name if name in own.parameters else ALIASES.get(name, name) for name in kwargs}
    return {names[name]: value for name, value in kwargs.items()}


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, which may be lists of tensors."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def called_by() -> str:
    """Return the line of the model's code that calls an operation."""
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "einops")
    for frame in reversed(traceback.extract_stack()):
        if not any(folder in frame.filename for folder in inside):
            place = f"{Path(frame.filename).name}, line {frame.lineno}"
            return f" at {place}: {(frame.line or '').strip()[:80]}"
    return ""


def rule(names: str) -> Callable[[Rule], Rule]:
    """Add a function to the table as the rule of some operations."""

    def add(function: Rule) -> Rule:
        for name in names.split():
            RULES[name] = function
        return function

    return add


def composed(names: str) -> Callable[[Rule], Rule]:
    """Add a function of other operations, which have their own rules."""

    def add(function: Rule) -> Rule:
        def run(mode: Rules, func: Any, *args: Any, **kwargs: Any) -> Any:
            with mode:
                return function(*args, **kwargs)

        parameters = [*inspect.signature(lambda mode, func: 0).parameters.values()]
        parameters += inspect.signature(function).parameters.values()
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return rule(names)(run)

    return add


# Functions of each number.


def _elementwise(name: str) -> None:
    def secant(mode: Rules, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not is_live(input) or any(map(is_live, tensors_in((*args, *kwargs.values())))):
            raise UnknownOperationError("more than one activation in a function of one")
        return Elementwise.apply(input, lambda z: func(z, *args, **kwargs))

    rule(name)(secant)


for _name in sorted(OF_NUMBERS):
    _elementwise(_name)


@rule("prelu")
def _prelu(mode: Rules, func: Any, input: Tensor, weight: Tensor) -> Tensor:
    def f(z: Tensor) -> Tensor:
        # Its channels are the second axis, also of several points in a further one in front.
        return func(z.flatten(0, z.dim() - input.dim()), weight).reshape(z.shape)

    return Elementwise.apply(input, f)


def activation(f: Function, x: Tensor) -> Tensor:
    """Return a function of each number that is made of several operations, by one rule."""
    y: Tensor = Elementwise.apply(x, f)
    y.in_pass = True  # type: ignore[attr-defined]
    return y


@rule("clamp clip")
def _clamped(mode: Rules, func: Any, input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    if not any(isinstance(limit, Tensor) for limit in (min, max)):
        return Elementwise.apply(input, lambda z: func(z, min, max))
    x = input if min is None else _larger(mode, torch.maximum, input, min)
    return x if max is None else _larger(mode, torch.minimum, x, max)


@rule("pow")
def _power(mode: Rules, func: Any, input: Any, exponent: Any) -> Tensor:
    if is_live(exponent):
        if is_live(input):
            raise UnknownOperationError("a base and an exponent that are activations")
        return Elementwise.apply(exponent, lambda z: func(input, z))
    return Elementwise.apply(input, lambda z: func(z, exponent))


@rule("rpow")
def _exponential(mode: Rules, func: Any, input: Tensor, other: Any) -> Tensor:
    return _power(mode, torch.pow, other, input)


# Sums.


@rule("cat stack")
def _side_by_side(mode: Rules, func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    axes = tensors[0].dim() + (func.__name__ == "stack")
    if dim % axes == 0:
        raise UnknownOperationError("activations are joined along the axis of texts")
    like = next(x for x in tensors if is_live(x))
    return func([mode.summand(x, like) for x in tensors], dim)


@rule("add sub rsub")
def _sum(mode: Rules, func: Any, input: Any, other: Any, **options: Any) -> Tensor:
    return func(mode.summand(input, other), mode.summand(other, input), **options)


@rule("linear conv1d conv2d")
def _affine(
    mode: Rules,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    def product(x: Tensor, W: Tensor) -> Tensor:
        return func(x, W, None, *args, **kwargs)

    if not is_live(weight) and not is_live(bias):
        # Tangents pass weights as texts do, so that those in 16 bits are widened.
        if func.__name__ == "linear" and Rows.running() is None:
            return Linear.apply(input, weight, bias)
        y = product(input, weight)
        return y if bias is None else y + mode.summand(_by_channel(bias, weight), y)
    is_product = is_live(input) and is_live(weight)
    y = TwoFactors.apply(input, weight, product) if is_product else product(input, weight)
    return y if bias is None else y + mode.summand(_by_channel(bias, weight), y)


def _by_channel(bias: Tensor, weight: Tensor) -> Tensor:
    """Return the bias of a map with the axes of a convolution that come after that of channels."""
    return bias.reshape(-1, *[1] * (weight.dim() - 2))


# Products.


@rule("mul")
def _product(mode: Rules, func: Any, input: Any, other: Any) -> Tensor:
    a, b = mode.known(input, other), mode.known(other, input)
    return Multiply.apply(a, b) if is_live(a) and is_live(b) else func(a, b)


@rule("matmul rmatmul")
def _matrix_product(mode: Rules, func: Any, input: Tensor, other: Tensor) -> Tensor:
    a, b = (other, input) if func.__name__ == "__rmatmul__" else (input, other)
    if min(a.dim(), b.dim()) > 2:  # else the first axis is none of texts
        a, b = mode.known(a, b), mode.known(b, a)
    if is_live(a) and is_live(b):
        vectors = min(a.dim(), b.dim()) < 2
        y = TwoFactors.apply(a, b, torch.matmul) if vectors else MatrixProduct.apply(a, b)
    elif is_live(a) and a.dim() > 1 and b.dim() == 2:
        return Linear.apply(a, b.T, None)
    else:
        y = a @ b
    if is_live(b):
        mark(y)
        with mode:
            mix = product_mix(a, b, y, mode.texts)
        mode.mixes += [] if mix is None else [mix]
    return y


@rule("bmm mm")
def _product_of_matrices(mode: Rules, func: Any, input: Tensor, mat2: Tensor) -> Tensor:
    return _matrix_product(mode, torch.matmul, input, mat2)


@composed("addmm")
def _added_product(
    input: Any, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    product = mat1 @ mat2
    return beta * input + alpha * product if (beta, alpha) != (1, 1) else input + product


@composed("baddbmm")
def _added_products(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    product = alpha * torch.matmul(batch1, batch2)
    return beta * input + product if beta else product


@composed("addcmul")
def _added_elements(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    return input + value * (tensor1 * tensor2)


@composed("lerp")
def _between(input: Tensor, end: Tensor, weight: Any) -> Tensor:
    return input + weight * (end - input)


@rule("einsum")
def _contraction(mode: Rules, func: Any, equation: str, *operands: Any) -> Tensor:
    tensors = [*tensors_in(operands)]
    live = [x for x in tensors if is_live(x)]

    def contract(*factors: Tensor) -> Tensor:
        pieces = iter(factors)
        return func(equation, *(next(pieces) if is_live(x) else x for x in tensors))

    if len(live) == 1:
        return contract(*live)
    if len(live) > 2:
        raise UnknownOperationError("einsum of more than two activations")
    return TwoFactors.apply(*live, contract)


@rule("div")
def _divided(
    mode: Rules, func: Any, input: Any, other: Any, *, rounding_mode: Any = None
) -> Tensor:
    if rounding_mode is not None:
        raise UnknownOperationError("a quotient that is rounded")
    if not is_live(other):
        return func(input, other)
    with mode:
        return input * torch.reciprocal(other)


@rule("rdiv")
def _divides(mode: Rules, func: Any, input: Tensor, other: Any) -> Tensor:
    return _divided(mode, torch.div, other, input)


# Norms.


@composed("rms_norm")
def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Tensor:
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _affine_norm(input, range(-len(normalized_shape), 0), weight, None, eps)


@composed("layer_norm")
def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    return _affine_norm(input - input.mean(axes, keepdim=True), axes, weight, bias, eps)


@composed("group_norm")
def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    x, shape = input.unflatten(1, (num_groups, -1)), (num_groups, -1, *[1] * (input.dim() - 2))
    axes = tuple(range(2, x.dim()))
    weight, bias = (y if y is None else y.reshape(shape) for y in (weight, bias))
    return _affine_norm(x - x.mean(axes, keepdim=True), axes, weight, bias, eps).flatten(1, 2)


def _affine_norm(
    centred: Tensor, axes: Sequence[int], weight: Any, bias: Any, eps: float
) -> Tensor:
    y = centred * torch.rsqrt((centred * centred).mean(tuple(axes), keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@composed("var")
def _variance(
    input: Tensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Tensor:
    if isinstance(dim, bool):  # var(input, unbiased)
        dim, unbiased = None, dim
    less = int(unbiased) if correction is None else correction
    count = input.numel() if dim is None else math.prod(input.shape[d] for d in _axes(dim))
    dim = tuple(range(input.dim())) if dim is None else dim
    centred = input - input.mean(dim, keepdim=True)
    return (centred * centred).sum(dim, keepdim=keepdim) / (count - less)


@composed("std")
def _deviation(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.sqrt(torch.var(input, *args, **kwargs))


@rule("norm linalg_norm linalg_vector_norm")
def _size(
    mode: Rules,
    func: Any,
    input: Tensor,
    p: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    ord: Any = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    order = next((x for x in (ord, p) if x is not None), 2)
    of_matrix = func.__name__ == "linalg_norm" and order != "fro" and ord is not p
    if order not in (1, 2, "fro") or (of_matrix and dim is not None and len(_axes(dim)) == 2):
        raise UnknownOperationError(f"a norm of order {order}")
    with mode:
        x = input if dtype is None else input.to(dtype)
        if order == 1:
            return torch.abs(x).sum(dim, keepdim=keepdim)
        return torch.sqrt((x * x).sum(dim, keepdim=keepdim))


@composed("normalize")
def _normalised(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    if p != 2:
        raise UnknownOperationError(f"a norm of order {p}")
    return input / torch.sqrt((input * input).sum(dim, keepdim=True)).clamp_min(eps)


def _axes(dim: Any) -> tuple[int, ...]:
    return (dim,) if isinstance(dim, int) else tuple(dim)


# Softmax and attention.


@rule("softmax log_softmax")
def _softmax(
    mode: Rules, func: Any, input: Tensor, dim: Any = None, *args: Any, dtype: Any = None, **_: Any
) -> Tensor:
    if dim is None:
        raise UnknownOperationError("a softmax without dim")
    dtype = dtype or next((a for a in args if isinstance(a, torch.dtype)), None)
    x = (input if dtype is None else input.to(dtype)).movedim(dim, -1)
    if func.__name__ == "log_softmax":
        return (x - _log_sum(x)).movedim(-1, dim)
    return Softmax.apply(x, mode.seen(x, x)).movedim(-1, dim)


def _log_sum(x: Tensor) -> Tensor:
    if differs(x < MASKED, x):
        raise UnknownOperationError("positions that are masked in one text and not in the other")
    return LogSumExp.apply(x)


@rule("logsumexp")
def _log_of_sum(mode: Rules, func: Any, input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    if len(_axes(dim)) > 1:
        raise UnknownOperationError("logsumexp over several axes")
    (axis,) = _axes(dim)
    y = _log_sum(input.movedim(axis, -1)).movedim(-1, axis)
    return y if keepdim else y.squeeze(axis)


@composed("glu")
def _gated(input: Tensor, dim: int = -1) -> Tensor:
    a, b = input.chunk(2, dim)
    return a * torch.sigmoid(b)


@rule("scaled_dot_product_attention")
def _attention(
    mode: Rules, func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    dropout = kwargs.get("dropout_p", args[1] if len(args) > 1 else 0.0)
    if dropout:
        raise UnknownOperationError(f"attention with dropout_p={dropout}")
    if query.dim() != 4:
        raise UnknownOperationError(f"queries of shape {tuple(query.shape)}, expected four axes")
    with mode:
        call = AttentionCall.of(query, key, value, *args, **kwargs)
    seen = mode.seen(call.mask, query)
    y: Tensor = Attend.apply(*call, seen)
    mix = call.mix(y)
    mode.mixes.append(mix if seen is None else replace(mix, entry=partial(_entry, call, seen)))
    return y


def _entry(
    call: AttentionCall, choice: Tensor, head: int, position: int, source: int
) -> Float[Tensor, " texts"]:
    """Return an entry of a pattern of which both texts see unlike scores, in the same graph."""
    with torch._C.DisableTorchFunction():
        query, key = call.query[:, head, position, :, None], call.key[:, head]
        scores = call.scale * MatrixProduct.apply(key, query)[..., 0]
        shape = (len(scores), call.query.shape[1], call.query.shape[2], call.key.shape[2])
        mask, visible = (x.expand(shape)[:, head, position] for x in (call.mask, choice))
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(scores).masked_fill(~mask, -torch.inf)
        weights: Tensor = Softmax.apply(scores + mask, visible)[:, source]
        mark(weights)
    return weights


# Choices: a leaf of the flow is what was chosen.


def _take(mode: Rules, x: Tensor, index: Int[Tensor, "*shape"]) -> Tensor:
    """Return x at an index of its last axis, which depends on the texts."""
    if not differs(index, x):
        return torch.gather(x, -1, mode.spread(index, x))
    one_hot = functional.one_hot(index, x.shape[-1])
    return Gather.apply(x, mode.chosen(one_hot, x), index)


@rule("topk")
def _largest(
    mode: Rules, func: Any, input: Tensor, k: int, dim: int = -1, *args: Any, **options: Any
) -> Any:
    return _picked(mode, input, dim, func(input.detach(), k, dim, *args, **options))


@rule("sort")
def _sorted(
    mode: Rules, func: Any, input: Tensor, dim: int = -1, *args: Any, **options: Any
) -> Any:
    return _picked(mode, input, dim, func(input.detach(), dim=dim, *args, **options))  # noqa: B026


def _picked(mode: Rules, x: Tensor, dim: int, result: Any) -> Any:
    """Return what an operation picked along an axis: values with a graph, and their places."""
    index = mode.spread(result[1], x)
    values = _take(mode, x.movedim(dim, -1), index.movedim(dim, -1)).movedim(-1, dim)
    return type(result)((values, index))


@rule("max min amax amin")
def _extreme(
    mode: Rules,
    func: Any,
    input: Tensor,
    dim: Any = None,
    keepdim: bool = False,
    *,
    other: Tensor | None = None,
) -> Any:
    name = func.__name__
    other = dim if isinstance(dim, Tensor) else other
    if other is not None:
        return _larger(mode, torch.maximum if name == "max" else torch.minimum, input, other)
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    if not isinstance(dim, int):
        raise UnknownOperationError("over all numbers, which joins both texts")
    find = torch.argmax if "max" in name else torch.argmin
    rows = input.movedim(dim, -1)
    index = mode.spread(find(rows.detach(), -1, keepdim=True), rows)
    values = _take(mode, rows, index).movedim(-1, dim)
    index = index.movedim(-1, dim)
    if not keepdim:
        values, index = values.squeeze(dim), index.squeeze(dim)
    if name in ("amax", "amin"):
        return values
    kind = torch.return_types.max if name == "max" else torch.return_types.min
    return kind((values, index))


@rule("maximum minimum")
def _larger(mode: Rules, func: Any, input: Any, other: Any) -> Tensor:
    x, y = (input, other) if is_live(input) else (other, input)
    if is_live(y) or (isinstance(y, Tensor) and y.numel() > 1):
        first = (x >= y) if func.__name__ == "maximum" else (x <= y)
        return _choose(mode, first, x, y)
    y = torch.as_tensor(y, dtype=x.dtype, device=x.device)
    return Elementwise.apply(x, lambda z: func(z, y))


def _choose(mode: Rules, condition: Tensor, a: Any, b: Any) -> Any:
    like = a if is_live(a) else b
    a, b = (torch.as_tensor(x, dtype=like.dtype, device=like.device) for x in (a, b))
    shape = torch.broadcast_shapes(condition.shape, a.shape, b.shape)
    if not differs(condition, like.expand(shape)):
        condition = mode.spread(condition, like)
        return torch.where(condition, mode.summand(a, b), mode.summand(b, a))
    a, b = (
        x.expand(shape[:1] + x.shape[1:]) if x.dim() == len(shape) else x.expand(shape)
        for x in (a, b)
    )
    return Where.apply(mode.chosen(condition, like), a, b)


@rule("where")
def _where(mode: Rules, func: Any, condition: Tensor, input: Any = None, other: Any = None) -> Any:
    if input is None:
        return func(condition)
    return _choose(mode, condition.bool(), input, other)


@rule("where_of")  # the method, whose tensor comes before its condition
def _where_of(mode: Rules, func: Any, input: Tensor, condition: Tensor, other: Any) -> Any:
    return _choose(mode, condition.bool(), input, other)


@rule("detach detach_")  # flows pass there too, as in `no_grad`
def _attached(mode: Rules, func: Any, input: Tensor) -> Tensor:
    return input.view_as(input) if func.__name__ == "detach" else input


@rule("masked_fill")
def _masked(mode: Rules, func: Any, input: Tensor, mask: Tensor, value: Any) -> Tensor:
    if is_live(value) or differs(mask, input):
        return _choose(mode, mask, value, input)
    return torch.where(mode.spread(mask, input), mode.summand(value, input), input)


@rule("__setitem__")
def _written(mode: Rules, func: Any, input: Tensor, index: Any, value: Any) -> None:
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
    if not (is_mask and differs(index, input)):
        mode.write(func, input, mode.spread(index, input) if is_mask else index, value)
    elif isinstance(value, Tensor) and value.dim():
        raise UnknownOperationError("places that differ between both texts have several values")
    else:
        input.copy_(_choose(mode, index, value, input.clone()))


@rule("gather")
def _gathered(
    mode: Rules, func: Any, input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False
) -> Tensor:
    if dim in (-1, input.dim() - 1) and index.shape[:-1] == input.shape[:-1]:
        return _take(mode, input, index)
    if differs(index, input):
        raise UnknownOperationError("places that differ between both texts, on an inner axis")
    return func(input, dim, mode.spread(index, input))


@rule("linalg_solve_triangular")
def _solved(
    mode: Rules,
    func: Any,
    A: Tensor,
    B: Tensor,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Tensor:
    if not is_live(A):
        return func(A, B, upper=upper, left=left, unitriangular=unitriangular)
    if not left:
        raise UnknownOperationError("left=False")
    return Solve.apply(A, B, upper, unitriangular)

"""Secants of torch's operations: a backward pass that is exact between two texts.

Two texts run side by side, in the halves of the first axis of every activation. In the backward
pass each operation has its secant between both in place of its derivative. The adjoint w of an
activation x then satisfies, over any cut of the graph,

    number(first) - number(second) = sum of w . (x_first - x_second)

Any model of torch runs under `Rules` as it is: nothing of it is changed. `SECANTS` are the rules
between two texts; on one text, `RELEVANCE` has those of layer-wise relevance propagation in their
place. An operation that has no rule is refused by its name.

Source: Shrikumar et al. 2017 for secants; on one text Achtibat et al. 2024 (arXiv 2402.05602) and
    Rezaei Jafari et al. 2025 (arXiv 2508.21258).
"""

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bilens.errors import BilensError
from bilens.transformer.experts import ExpertCall
from bilens.transformer.mixing import AttentionCall, Mix, head_blocks, product_mix

Function = Callable[[Tensor], Tensor]
"""A function of each number."""
GAUSS = ((0.5 - math.sqrt(0.15), 5 / 18), (0.5, 8 / 18), (0.5 + math.sqrt(0.15), 5 / 18))
"""Points and weights of Gauss's quadrature between 0 and 1."""

MASKED = -1e30
"""Scores below this are of masked positions."""


class UnknownOperationError(BilensError):
    """An operation of a model that has no rule."""


class Leaf(NamedTuple):
    """Numbers that a flow starts at beside the embeddings: what was chosen, or a constant.

    Those of tokens are of a further embedding.
    """

    kind: Literal["choice", "constant", "token"]
    value: Tensor


# Both texts of an activation.


def pair(x: Tensor) -> Tensor:
    """Return an activation with an axis of its two texts, (2, ...).

    Models fold further axes, such as heads or positions, into the first one.
    """
    if x.dim() == 0 or x.shape[0] % 2:
        raise UnknownOperationError(
            f"an activation of shape {tuple(x.shape)} does not hold two texts side by side"
        )
    return x.unflatten(0, (2, -1))


def mean(x: Tensor, dims: int = 0) -> Tensor:
    """Return the mean of both texts, in the shape of the activation.

    It is a factor of a result with `dims` axes.
    """
    if x.dim() < dims or x.shape[0] == 1:
        raise UnknownOperationError(
            f"a factor of shape {tuple(x.shape)} has no axis of texts, and depends on them"
        )
    both = pair(x)
    return both.mean(0, keepdim=True).expand_as(both).flatten(0, 1)


def differs(x: Tensor, like: Tensor) -> bool:
    """Return True if numbers beside an activation, such as indices, differ between both texts."""
    if x.dim() != like.dim() or x.shape[:1] != like.shape[:1] or x.shape[0] % 2:
        return False
    first, second = x.unflatten(0, (2, -1))
    return not torch.equal(first, second)


def log_mean(p: Tensor, q: Tensor, difference: Tensor) -> Tensor:
    """Return the logarithmic mean (p - q) / (log p - log q), given the difference of logarithms."""
    near = difference.abs() < 1e-2
    # The series of sinh(x / 2) / (x / 2), where the quotient would cancel.
    square = difference * difference
    series = torch.sqrt(p * q) * (1 + square / 24 + square * square / 1920)
    quotient = (p - q) / torch.where(near, 1.0, difference)
    mean_of_both = torch.where(near, series, quotient)
    # A position that neither text sees has the difference inf - inf.
    return torch.where((p > 0) | (q > 0), mean_of_both, 0.0)


# Secants: each is linear from the change of its input to that of its output, without an error.


class Elementwise(torch.autograd.Function):
    """A function of each number: (f(a) - f(b)) / (a - b)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Function) -> Tensor:
        y = f(x)
        ctx.save_for_backward(x, y)
        ctx.f = f
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        (a, b), (first, second) = pair(x), pair(y)
        d = torch.where(a == b, 0.0, a - b)  # both may be -inf
        quotient = (first - second) / torch.where(d == 0, 1.0, d)
        # The mean of the derivative between both, by three Gauss points.
        mean_slope = torch.zeros_like(d)
        for point, weight in GAUSS:
            at = b + point * d
            mean_slope = mean_slope + weight * _derivative(ctx.f, torch.cat([at, at]))[: len(at)]
        # It is taken where the quotient cancels: where both agree within rounding.
        size = a.abs() + b.abs()
        rounding = 8 * torch.finfo(d.dtype).eps * (first.abs() + second.abs() + size)
        agree = (mean_slope - quotient).abs() * d.abs() <= rounding
        near = (d.abs() <= 1e-2 * (1 + size)) & agree
        return (pair(g) * torch.where(near, mean_slope, quotient)).flatten(0, 1), None


def _derivative(f: Function, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = f(x)
        if not y.requires_grad:  # steps, such as round
            return torch.zeros_like(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
    return slope


class Multiply(torch.autograd.Function):
    """a b: each factor gets the mean of the other."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        of_a = (g * mean(b, g.dim())).sum_to_size(a.shape)
        return of_a, (g * mean(a, g.dim())).sum_to_size(b.shape)


class MatrixProduct(torch.autograd.Function):
    """A B of matrices: each factor gets the mean of the other."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        of_a = g @ mean(b, g.dim()).transpose(-1, -2)
        of_b = mean(a, g.dim()).transpose(-1, -2) @ g
        return of_a.sum_to_size(a.shape), of_b.sum_to_size(b.shape)


class TwoFactors(torch.autograd.Function):
    """An operation that is linear in each of two activations: the derivative at the mean."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.f = f
        return f(a, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        with torch.enable_grad():
            a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
            (of_a,) = torch.autograd.grad(ctx.f(a, mean(b).detach()), a, g)
            (of_b,) = torch.autograd.grad(ctx.f(mean(a).detach(), b), b, g)
        return of_a, of_b, None


class Softmax(torch.autograd.Function):
    """p = softmax(s) over the last axis: dp_i = L_i (ds_i - sum L ds / sum L).

    `seen` is 1 where a score is seen, and 0 where it is masked.
    """

    @staticmethod
    def forward(ctx: Any, s: Tensor, seen: Tensor | None) -> Tensor:
        ctx.save_for_backward(s)
        return s.softmax(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None]:
        (s,) = ctx.saved_tensors
        of_scores, of_seen = softmax_secant(s.log_softmax(-1), g)
        return of_scores, of_seen if ctx.needs_input_grad[1] else None


def softmax_secant(logs: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the adjoints of scores, and of whether they are seen, given log-probabilities.

    Where only one text sees a score, L = 0, and L ds becomes the probability p times the change of
    whether it is seen.
    """
    g, means = pair(g), _log_means(pair(logs))
    total = means.sum(-1, keepdim=True)
    # There may be no score that both texts see.
    centred = g - (g * means).sum(-1, keepdim=True) / torch.where(total == 0, 1.0, total)
    of_seen = pair(logs.exp()).sum(0) * centred
    return (means * centred).flatten(0, 1), of_seen.flatten(0, 1)


def _log_means(logs: Float[Tensor, "2 *shape"]) -> Tensor:
    p, q = logs.exp()
    return log_mean(p, q, logs[0] - logs[1])


class LogSumExp(torch.autograd.Function):
    """log sum exp s over the last axis, which stays: sum L ds / sum L."""

    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Tensor:
        ctx.save_for_backward(s)
        return s.logsumexp(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (s,) = ctx.saved_tensors
        means = _log_means(pair(s.log_softmax(-1)))
        return (pair(g) * means / means.sum(-1, keepdim=True)).flatten(0, 1)


class Attend(torch.autograd.Function):
    """softmax(q k' scale + mask) v, in blocks of heads, so that few patterns exist at once."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, seen: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale, ctx.seen_shape = scale, None if seen is None else seen.shape
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask = ctx.saved_tensors
        call = AttentionCall(q, k, v, mask, scale := ctx.scale)
        adjoints = [torch.empty_like(x) for x in (q, k, v)]
        shape = ctx.seen_shape
        of_seen = None if shape is None else q.new_zeros(shape)
        size = len(q) * q.shape[2] * k.shape[2] * q.element_size()
        for heads in head_blocks(q.shape[1], size):
            logs = call.logs(heads)
            of_pattern = g[:, heads] @ mean(v[:, heads]).transpose(-1, -2)
            of_scores, of_choice = softmax_secant(logs, of_pattern)
            adjoints[0][:, heads] = scale * of_scores @ mean(k[:, heads])
            adjoints[1][:, heads] = scale * of_scores.transpose(-1, -2) @ mean(q[:, heads])
            adjoints[2][:, heads] = mean(logs.exp()).transpose(-1, -2) @ g[:, heads]
            if of_seen is not None:
                of_block = of_seen if shape[1] == 1 else of_seen[:, heads]
                of_block += of_choice.sum_to_size(of_block.shape)
        return *adjoints, None, None, of_seen


class Gather(torch.autograd.Function):
    """x at chosen places of the last axis: a product of x and of what was chosen, one-hot."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(x, chosen)
        return x.gather(-1, index)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, chosen = ctx.saved_tensors
        # Masked entries of a router are -inf, and are not chosen in either text.
        means = torch.nan_to_num(mean(x), nan=0.0, posinf=0.0, neginf=0.0)
        g = g.unsqueeze(-1)
        return (g * mean(chosen)).sum(-2), g * means.unsqueeze(-2), None


class Where(torch.autograd.Function):
    """a where chosen is 1, and b where it is 0: products with what was chosen."""

    @staticmethod
    def forward(ctx: Any, chosen: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(chosen, a, b)
        return torch.where(chosen.bool(), a, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chosen, a, b = ctx.saved_tensors
        shares, shape = mean(chosen), g.shape
        gap = mean(a.expand(shape)) - mean(b.expand(shape))
        of_choice = (g * torch.nan_to_num(gap, nan=0.0, posinf=0.0, neginf=0.0)).sum_to_size(
            chosen.shape
        )
        return of_choice, (g * shares).sum_to_size(a.shape), (g * (1 - shares)).sum_to_size(b.shape)


class Solve(torch.autograd.Function):
    """X of A X = B with a triangular A: mean(A) dX = dB - dA mean(X).

    On one text the second run is nothing, where X = 0 and A is its diagonal, which only divides.
    """

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor, upper: bool, unit: bool, two_texts: bool) -> Tensor:
        X = torch.linalg.solve_triangular(A, B, upper=upper, unitriangular=unit)
        ctx.save_for_backward(A, X)
        ctx.upper, ctx.unit, ctx.two_texts = upper, unit, two_texts
        return X

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        A, X = ctx.saved_tensors
        upper, unit = ctx.upper, ctx.unit
        if ctx.two_texts:
            A, X = mean(A), mean(X)
        else:
            A, X = (A + A.diagonal(dim1=-2, dim2=-1).diag_embed()) / 2, X / 2
        of_B = torch.linalg.solve_triangular(
            A.transpose(-1, -2), g, upper=not upper, unitriangular=unit
        )
        of_A = -of_B @ X.transpose(-1, -2)
        diagonal = int(unit or not ctx.two_texts)  # the diagonal is constant
        return of_A.triu(diagonal) if upper else of_A.tril(-diagonal), of_B, None, None, None


# On one text a product gives equal shares to its factors, and a function is a constant ratio.


class Shared(torch.autograd.Function):
    """An operation that is linear in each of n activations, each of which gets an nth."""

    @staticmethod
    def forward(ctx: Any, f: Callable[..., Tensor], *factors: Tensor) -> Tensor:
        ctx.save_for_backward(*factors)
        ctx.f = f
        return f(*factors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        factors = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            gradients = torch.autograd.grad(ctx.f(*factors), factors, g)
        return None, *(gradient / len(factors) for gradient in gradients)


class Ratio(torch.autograd.Function):
    """A function of each number with f(0) = 0, whose ratio f(x) / x is held fixed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Function) -> Tensor:
        y = f(x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        return g * torch.where(x == 0, 0.0, y / torch.where(x == 0, 1.0, x)), None


# The tables: how each operation is called, and its rule.

Rule = Callable[..., Any]
"""A function of the mode, the operation, and the arguments of its call."""

SECANTS: dict[str, Rule] = {}
RELEVANCE: dict[str, Rule] = {}

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
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "negative": "neg",
    "__neg__": "neg",
    "absolute": "abs",
    "__abs__": "abs",
    "linalg_vector_norm": "norm",
    "linalg_norm": "norm",
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
    __getitem__ __setitem__ detach detach_ data nan_to_num feature_dropout alpha_dropout conj
    resolve_conj pixel_shuffle adaptive_avg_pool1d avg_pool1d upsample interpolate
    """.split()  # noqa: SIM905
)
"""Operations that are linear in one activation: their secant is torch's own derivative."""

READ = set(
    """
    __get__ __set__ __len__ __repr__ __format__ __bool__ __contains__ __hash__ size dim ndimension
    numel nelement stride storage_offset data_ptr element_size is_contiguous is_complex
    is_floating_point is_nonzero get_device requires_grad_ register_hook retain_grad backward item
    tolist numpy cpu cuda gt lt ge le eq ne greater less __gt__ __lt__ __ge__ __le__ __eq__ __ne__
    equal allclose isclose isnan isinf isfinite any all argmax argmin argsort nonzero count_nonzero
    bucketize searchsorted histc bincount zeros_like ones_like empty_like full_like rand_like
    randn_like new_empty new_zeros new_ones new_full new_tensor one_hot logical_not logical_and
    logical_or signbit sign is_same_size has_names dim_order is_inference untyped_storage
    """.split()  # noqa: SIM905
)
"""Operations whose results carry no activation."""

OF_NUMBERS = set(
    """
    abs atan ceil celu clamp clamp_max clamp_min cos cosh elu erf erfc exp exp2 expm1 floor gelu
    hardshrink hardsigmoid hardswish hardtanh leaky_relu log log10 log1p log2 logsigmoid mish prelu
    reciprocal relu relu6 round rsqrt selu sigmoid silu sin sinh softplus softshrink softsign sqrt
    square tanh tanhshrink threshold trunc
    """.split()  # noqa: SIM905
)
"""Functions of each number."""
FROZEN = {"exp", "exp2", "rsqrt", "reciprocal", "log", "softmax", "log_softmax", "norm"}
"""Functions whose values are held fixed on one text."""


def is_live(x: Any) -> bool:
    """Return True for an activation: numbers that follow from the embeddings."""
    return isinstance(x, Tensor) and x.requires_grad


class Rules(TorchFunctionMode):
    """Mode in which torch's operations on activations have the rules of a table.

    Weights are constants: parameters are used without their gradients, and nothing of the model
    is changed.

    Args:
        table: `SECANTS` for two texts side by side, `RELEVANCE` for one text.
        texts: number of texts in the first axis.

    Attributes:
        leaves: what was chosen, and constants; in the order of the pass.
        mixes: values that heads mixed by their patterns.
        experts: the last call of experts, and its output.
        paused: whether operations run without a graph.
    """

    def __init__(self, table: dict[str, Rule], texts: int = 2) -> None:
        super().__init__()
        self.table, self.texts = table, texts
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
        args = [_constant_weights(x) for x in args]
        kwargs = {name: _constant_weights(x) for name, x in (kwargs or {}).items()}
        live = [x for x in _tensors((*args, *kwargs.values())) if is_live(x)]
        if not live:
            return func(*args, **kwargs)
        for x in live:
            _check_derivative(x)
        name = getattr(func, "__name__", str(func))
        name = CALLED.get(name, name)
        if name in READ:
            return func(*args, **kwargs)
        rule = self.table.get(name)
        if rule is None and name in LINEAR:
            return func(*args, **kwargs)
        if rule is None:
            raise UnknownOperationError(f"{name} has no rule{_called_by()}")
        try:
            return rule(self, func, *args, **kwargs)
        except UnknownOperationError as error:
            if " at " in str(error):
                raise
            raise UnknownOperationError(f"{name}: {error}{_called_by()}") from None

    def chosen(self, one_hot: Tensor, like: Tensor) -> Tensor:
        """Return what was chosen, as numbers at which a flow starts."""
        leaf = one_hot.to(like.dtype).detach().requires_grad_()
        self.leaves.append(Leaf("choice", leaf))
        return leaf

    def known(self, x: Any, like: Any) -> Any:
        """Return an operand; numbers that are no activation and differ are what was chosen."""
        if not isinstance(x, Tensor) or is_live(x):
            return x
        # Of masks softmax takes what was chosen.
        if self.table is not SECANTS or not differs(x, like) or bool((x < MASKED).any()):
            return x
        return self.chosen(x, like)

    def seen(self, mask: Tensor, like: Tensor) -> Tensor | None:
        """Return which scores are seen, as what was chosen; None where both texts see the same."""
        seen = mask if mask.dtype == torch.bool else mask.detach() >= MASKED
        return self.chosen(seen, like) if differs(seen, like) else None

    def constant(self, value: Any, like: Tensor) -> Tensor:
        """Return a constant that is added to an activation, at which a flow starts."""
        value = torch.as_tensor(value, dtype=like.dtype, device=like.device)
        leaf = value.detach().clone().requires_grad_()
        self.leaves.append(Leaf("constant", leaf))
        return leaf


def _check_derivative(x: Tensor) -> None:
    """Refuse an activation that a function with a derivative of its own made."""
    function = getattr(type(x.grad_fn), "_forward_cls", None)
    if function is not None and function.__module__ != __name__:
        raise UnknownOperationError(
            f"{function.__name__}, a torch.autograd.Function, has no rule{_called_by()}"
        )


def _constant_weights(value: Any) -> Any:
    if isinstance(value, nn.Parameter):
        return value.detach()
    if type(value) in (list, tuple):
        return type(value)(_constant_weights(x) for x in value)
    return value


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, which may be lists of tensors."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors(value)


def _called_by() -> str:
    """Return the line of the model's code that calls an operation."""
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "einops")
    for frame in reversed(traceback.extract_stack()):
        if not any(folder in frame.filename for folder in inside):
            place = f"{Path(frame.filename).name}, line {frame.lineno}"
            return f" at {place}: {(frame.line or '').strip()[:80]}"
    return ""


def rule(names: str, *tables: dict[str, Rule]) -> Callable[[Rule], Rule]:
    """Add a function to tables as the rule of some operations."""

    def add(function: Rule) -> Rule:
        for table in tables:
            for name in names.split():
                table[name] = function
        return function

    return add


def composed(names: str, *tables: dict[str, Rule]) -> Callable[[Rule], Rule]:
    """Add a function of other operations, which have their own rules."""

    def add(function: Rule) -> Rule:
        def run(mode: Rules, func: Any, *args: Any, **kwargs: Any) -> Any:
            with mode:
                return function(*args, **kwargs)

        return rule(names, *tables)(run)

    return add


# Functions of each number.


def _elementwise(name: str) -> None:
    def secant(mode: Rules, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not is_live(x) or any(is_live(y) for y in _tensors((*args, *kwargs.values()))):
            if name == "clamp":
                return _clamped(mode, x, *args, **kwargs)
            raise UnknownOperationError("more than one activation in a function of one")
        kwargs.pop("inplace", None)
        return Elementwise.apply(x, lambda z: func(z, *args, **kwargs))

    def relevance(mode: Rules, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if name in FROZEN:
            return func(x, *args, **kwargs).detach()
        kwargs.pop("inplace", None)
        return ratio(mode, lambda z: func(z, *args, **kwargs), x)

    rule(name, SECANTS)(secant)
    rule(name, RELEVANCE)(relevance)
    for table, function in ((SECANTS, secant), (RELEVANCE, relevance)):
        rule(f"{name}_", table)(_written_back(name, function))


def _written_back(name: str, function: Rule) -> Rule:
    def run(mode: Rules, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        plain = getattr(torch, name, None) or getattr(functional, name)
        return x.copy_(function(mode, plain, x.clone(), *args, **kwargs))

    return run


def ratio(mode: Rules, f: Function, x: Tensor) -> Tensor:
    """Return f(x) = r x + f(0) with the ratio r held fixed, on one text."""
    at_zero = f(torch.zeros_like(x)).detach()
    if not at_zero.any():
        return Ratio.apply(x, f)
    return Ratio.apply(x, lambda z: f(z) - at_zero) + mode.constant(at_zero, x)


for _name in sorted(OF_NUMBERS):
    _elementwise(_name)


def activation(mode: Rules, f: Function, x: Tensor) -> Tensor:
    """Return a function of each number that is made of several operations, by one rule."""
    if mode.table is not SECANTS:
        return ratio(mode, f, x)
    return Elementwise.apply(x, f)


@rule("pow", SECANTS, RELEVANCE)
def _power(mode: Rules, func: Any, x: Tensor, exponent: Any) -> Tensor:
    if is_live(exponent):
        raise UnknownOperationError("an exponent that is an activation")
    if mode.table is not SECANTS:
        if exponent < 0:  # as rsqrt and reciprocal
            return x.pow(exponent).detach()
        return ratio(mode, lambda z: z.pow(exponent), x)
    return Elementwise.apply(x, lambda z: z.pow(exponent))


@rule("rpow", SECANTS, RELEVANCE)
def _exponential(mode: Rules, func: Any, x: Tensor, base: Any) -> Tensor:
    if mode.table is not SECANTS:
        return func(x, base).detach()
    return Elementwise.apply(x, lambda z: func(z, base))


# Sums. On one text a constant that is added is a start of the flow.


@rule("add add_ sub sub_ rsub", RELEVANCE)
def _sum_with_constant(mode: Rules, func: Any, a: Any, b: Any, **options: Any) -> Tensor:
    a = a if is_live(a) else mode.constant(a, b)
    b = b if is_live(b) else mode.constant(b, a)
    return func(a, b, **options)


@rule("cat stack", RELEVANCE)
def _joined(mode: Rules, func: Any, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    like = next(x for x in tensors if is_live(x))
    parts = [x if is_live(x) else mode.constant(x, like) for x in tensors]
    return func(parts, *args, **kwargs)


@rule("cat stack", SECANTS)
def _side_by_side(mode: Rules, func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    if dim == 0:
        raise UnknownOperationError("activations are joined along the axis of texts")
    return func(tensors, dim)


@rule("add add_ sub sub_ rsub", SECANTS)
def _sum(mode: Rules, func: Any, a: Any, b: Any, **options: Any) -> Tensor:
    return func(mode.known(a, b), mode.known(b, a), **options)


@rule("linear conv1d conv2d", SECANTS, RELEVANCE)
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

    if is_live(input) and is_live(weight):
        y = (
            Shared.apply(product, input, weight)
            if mode.table is not SECANTS
            else TwoFactors.apply(input, weight, product)
        )
    elif mode.table is SECANTS and not is_live(bias):
        return func(input, weight, bias, *args, **kwargs)
    else:
        y = product(input, weight)
    if bias is None:
        return y
    bias = bias if is_live(bias) or mode.table is SECANTS else mode.constant(bias, input)
    spatial = weight.dim() - 2  # a convolution's further axes, after that of channels
    return y + bias.reshape(-1, *[1] * spatial)


# Products.


@rule("mul", SECANTS, RELEVANCE)
def _product(mode: Rules, func: Any, a: Any, b: Any) -> Tensor:
    a, b = mode.known(a, b), mode.known(b, a)
    if not (is_live(a) and is_live(b)):
        return func(a, b)
    return Shared.apply(torch.mul, a, b) if mode.table is not SECANTS else Multiply.apply(a, b)


@rule("mul_", SECANTS, RELEVANCE)
def _product_in_place(mode: Rules, func: Any, a: Tensor, b: Any) -> Tensor:
    return a.copy_(_product(mode, torch.mul, a.clone(), b)) if is_live(b) else func(a, b)


@rule("matmul bmm rmatmul", SECANTS, RELEVANCE)
def _matrix_product(mode: Rules, func: Any, a: Tensor, b: Tensor) -> Tensor:
    if getattr(func, "__name__", "") == "__rmatmul__":
        a, b = b, a
    if not (is_live(a) and is_live(b)):
        y = a @ b
    elif mode.table is not SECANTS:
        y = Shared.apply(torch.matmul, a, b)
    elif min(a.dim(), b.dim()) < 2:
        y = TwoFactors.apply(a, b, torch.matmul)
    else:
        y = MatrixProduct.apply(a, b)
    mix = product_mix(a, b, y, mode.texts) if is_live(b) else None
    if mix is not None:
        mode.mixes.append(mix)
    return y


@composed("addmm", SECANTS, RELEVANCE)
def _added_product(c: Any, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * c + alpha * (a @ b) if (beta, alpha) != (1, 1) else c + a @ b


@composed("baddbmm", SECANTS, RELEVANCE)
def _added_products(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    product = alpha * torch.matmul(batch1, batch2)
    return beta * input + product if beta else product


@composed("addcmul", SECANTS, RELEVANCE)
def _added_elements(c: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return c + value * (a * b)


@composed("lerp", SECANTS, RELEVANCE)
def _between(a: Tensor, b: Tensor, weight: Any) -> Tensor:
    return a + weight * (b - a)


@rule("einsum", SECANTS, RELEVANCE)
def _contraction(mode: Rules, func: Any, equation: str, *operands: Any) -> Tensor:
    tensors = list(operands[0]) if len(operands) == 1 and not is_live(operands[0]) else [*operands]
    live = [x for x in tensors if is_live(x)]

    def contract(*given: Tensor) -> Tensor:
        left = iter(given)
        return func(equation, *(next(left) if is_live(x) else x for x in tensors))

    if len(live) == 1:
        return contract(*live)
    if mode.table is not SECANTS:
        return Shared.apply(contract, *live)
    if len(live) > 2:
        raise UnknownOperationError("einsum of more than two activations")
    return TwoFactors.apply(*live, contract)


@rule("div", SECANTS, RELEVANCE)
def _divided(mode: Rules, func: Any, a: Any, b: Any, **options: Any) -> Tensor:
    if options.get("rounding_mode") is not None:
        raise UnknownOperationError("a quotient that is rounded")
    if not is_live(b):
        return func(a, b)
    with mode:
        return a * torch.reciprocal(b)


@rule("rdiv", SECANTS, RELEVANCE)
def _divides(mode: Rules, func: Any, b: Tensor, a: Any) -> Tensor:
    return _divided(mode, torch.div, a, b)


@rule("div_", SECANTS, RELEVANCE)
def _divided_in_place(mode: Rules, func: Any, a: Tensor, b: Any) -> Tensor:
    return a.copy_(_divided(mode, torch.div, a.clone(), b)) if is_live(b) else func(a, b)


# Norms.


@composed("rms_norm", SECANTS, RELEVANCE)
def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Tensor:
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _affine_norm(input, range(-len(normalized_shape), 0), weight, None, eps)


@composed("layer_norm", SECANTS, RELEVANCE)
def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    return _affine_norm(input - input.mean(axes, keepdim=True), axes, weight, bias, eps)


@composed("group_norm", SECANTS, RELEVANCE)
def _group_norm(
    input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
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


@composed("var", SECANTS, RELEVANCE)
def _variance(
    x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, correction: Any = None
) -> Tensor:
    less = int(unbiased) if correction is None else correction
    count = x.numel() if dim is None else math.prod(x.shape[d] for d in _axes(dim))
    dim = tuple(range(x.dim())) if dim is None else dim
    centred = x - x.mean(dim, keepdim=True)
    return (centred * centred).sum(dim, keepdim=keepdim) / (count - less)


@composed("std", SECANTS, RELEVANCE)
def _deviation(*args: Any, **kwargs: Any) -> Tensor:
    return torch.sqrt(torch.var(*args, **kwargs))


@composed("norm", SECANTS, RELEVANCE)
def _size(
    x: Tensor,
    p: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    ord: Any = None,
    dtype: torch.dtype | None = None,
    out: None = None,
) -> Tensor:
    order = p if ord is None else ord
    if order not in (1, 2, "fro"):
        raise UnknownOperationError(f"a norm of order {order}")
    x = x if dtype is None else x.to(dtype)
    if order == 1:
        return torch.abs(x).sum(dim, keepdim=keepdim)
    return torch.sqrt((x * x).sum(dim, keepdim=keepdim))


@composed("normalize", SECANTS, RELEVANCE)
def _normalised(
    input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None
) -> Tensor:
    if p != 2:
        raise UnknownOperationError(f"a norm of order {p}")
    return input / torch.sqrt((input * input).sum(dim, keepdim=True)).clamp_min(eps)


def _axes(dim: Any) -> tuple[int, ...]:
    return (dim,) if isinstance(dim, int) else tuple(dim)


# Softmax and attention.


@rule("softmax log_softmax", SECANTS, RELEVANCE)
def _softmax(
    mode: Rules, func: Any, x: Tensor, dim: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    if dim is None:
        raise UnknownOperationError("a softmax without dim")
    dtype = kwargs.get("dtype") or next((a for a in args if isinstance(a, torch.dtype)), None)
    if mode.table is not SECANTS:
        return func(x, dim, *args, **kwargs).detach()
    x = (x if dtype is None else x.to(dtype)).movedim(dim, -1)
    if func.__name__ == "log_softmax":
        return (x - _log_sum(x)).movedim(-1, dim)
    return Softmax.apply(x, mode.seen(x, x)).movedim(-1, dim)


def _log_sum(x: Tensor) -> Tensor:
    if differs(x < MASKED, x):
        raise UnknownOperationError("positions that are masked in one text and not in the other")
    return LogSumExp.apply(x)


@rule("logsumexp", SECANTS, RELEVANCE)
def _log_of_sum(mode: Rules, func: Any, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    if len(_axes(dim)) > 1:
        raise UnknownOperationError("logsumexp over several axes")
    if mode.table is not SECANTS:
        return func(x, dim, keepdim=keepdim).detach()
    (axis,) = _axes(dim)
    y = _log_sum(x.movedim(axis, -1)).movedim(-1, axis)
    return y if keepdim else y.squeeze(axis)


@composed("glu", SECANTS, RELEVANCE)
def _gated(input: Tensor, dim: int = -1) -> Tensor:
    a, b = input.chunk(2, dim)
    return a * torch.sigmoid(b)


@rule("scaled_dot_product_attention", SECANTS, RELEVANCE)
def _attention(mode: Rules, func: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    dropout = kwargs.get("dropout_p", args[3] if len(args) > 3 else 0.0)
    if dropout:
        raise UnknownOperationError(f"attention with dropout_p={dropout}")
    if query.dim() != 4:
        raise UnknownOperationError(f"queries of shape {tuple(query.shape)}, expected four axes")
    call = AttentionCall.of(query, *args, **kwargs)
    if mode.table is not SECANTS:
        call = call._replace(query=call.query.detach(), key=call.key.detach())
        y = functional.scaled_dot_product_attention(
            *call[:3], attn_mask=call.mask, scale=call.scale
        )
    else:
        y = Attend.apply(*call, mode.seen(call.mask, query))
    mode.mixes.append(call.mix(y))
    return y


# Choices: a leaf of the flow is what was chosen.


def _take(mode: Rules, x: Tensor, index: Int[Tensor, "*shape"]) -> Tensor:
    """Return x at an index of its last axis, which depends on the texts."""
    if mode.table is not SECANTS or not differs(index, x):
        return torch.gather(x, -1, index)
    one_hot = functional.one_hot(index, x.shape[-1])
    return Gather.apply(x, mode.chosen(one_hot, x), index)


@rule("topk sort", SECANTS, RELEVANCE)
def _largest(mode: Rules, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    result = func(x.detach(), *args, **kwargs)
    default = 1 if func.__name__ == "topk" else 0
    dim = kwargs.get("dim", args[default] if len(args) > default else -1)
    index = result[1]
    values = _take(mode, x.movedim(dim, -1), index.movedim(dim, -1)).movedim(-1, dim)
    return type(result)((values, index))


@rule("max min amax amin", SECANTS, RELEVANCE)
def _extreme(mode: Rules, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    name = func.__name__
    dim = kwargs.get("dim", args[0] if args and isinstance(args[0], (int, tuple)) else None)
    if args and isinstance(args[0], Tensor):
        return _larger(mode, torch.maximum if name == "max" else torch.minimum, x, args[0])
    if dim is None or not isinstance(dim, int):
        raise UnknownOperationError(f"{name} over all numbers, which joins both texts")
    keepdim = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
    moved = x.movedim(dim, -1)
    find = torch.argmax if "max" in name else torch.argmin
    index = find(moved.detach(), -1, keepdim=True)
    values = _take(mode, moved, index).movedim(-1, dim)
    index = index.movedim(-1, dim)
    if not keepdim:
        values, index = values.squeeze(dim), index.squeeze(dim)
    if name in ("amax", "amin"):
        return values
    kind = torch.return_types.max if name == "max" else torch.return_types.min
    return kind((values, index))


def _clamped(mode: Rules, x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """Return numbers between bounds that are activations."""
    x = x if min is None else _larger(mode, torch.maximum, x, min)
    return x if max is None else _larger(mode, torch.minimum, x, max)


@rule("maximum minimum", SECANTS, RELEVANCE)
def _larger(mode: Rules, func: Any, a: Any, b: Any) -> Tensor:
    of_both = is_live(a) and is_live(b)
    x, other = (a, b) if is_live(a) else (b, a)
    if of_both or (isinstance(other, Tensor) and other.numel() > 1):
        first = (x >= other) if getattr(func, "__name__", "") == "maximum" else (x <= other)
        return _choose(mode, first, x, other)
    if mode.table is not SECANTS:
        return ratio(mode, lambda z: func(z, other), x)
    return Elementwise.apply(x, lambda z: func(z, other))


def _choose(mode: Rules, condition: Tensor, a: Any, b: Any) -> Any:
    like = a if is_live(a) else b
    a, b = (torch.as_tensor(x, dtype=like.dtype, device=like.device) for x in (a, b))
    if mode.table is not SECANTS:
        return torch.where(condition, *(_started(mode, x, like) for x in (a, b)))
    shape = torch.broadcast_shapes(condition.shape, a.shape, b.shape)
    if not differs(condition, like.expand(shape)):
        return torch.where(condition, a, b)
    a, b = (
        x.expand(shape[:1] + x.shape[1:]) if x.dim() == len(shape) else x.expand(shape)
        for x in (a, b)
    )
    return Where.apply(mode.chosen(condition, like), a, b)


def _started(mode: Rules, x: Tensor, like: Tensor) -> Tensor:
    """Return an operand of one text as a start of the flow, unless it masks scores."""
    return x if is_live(x) or bool((x < MASKED).any()) else mode.constant(x, like)


@rule("where", SECANTS, RELEVANCE)
def _where(mode: Rules, func: Any, condition: Tensor, a: Any = None, b: Any = None) -> Any:
    if a is None:
        return func(condition)
    if is_live(condition):
        condition = condition.bool()
    return _choose(mode, condition, a, b)


@rule("masked_fill masked_fill_", SECANTS, RELEVANCE)
def _masked(mode: Rules, func: Any, x: Tensor, mask: Tensor, value: Any) -> Tensor:
    if mode.table is SECANTS and not differs(mask, x):
        return func(x, mask, value)
    y = _choose(mode, mask, value, x.clone())
    return x.copy_(y) if func.__name__.endswith("_") else y


@rule("gather", SECANTS, RELEVANCE)
def _gathered(mode: Rules, func: Any, x: Tensor, dim: int, index: Tensor, **options: Any) -> Tensor:
    if dim in (-1, x.dim() - 1) and index.shape[:-1] == x.shape[:-1]:
        return _take(mode, x, index)
    if mode.table is SECANTS and differs(index, x):
        raise UnknownOperationError("places that differ between both texts, on an inner axis")
    return func(x, dim, index)


@rule("linalg_solve_triangular", SECANTS, RELEVANCE)
def _solved(
    mode: Rules, func: Any, A: Tensor, B: Tensor, *, upper: bool, unitriangular: bool = False
) -> Tensor:
    if not is_live(A):
        return func(A, B, upper=upper, unitriangular=unitriangular)
    return Solve.apply(A, B, upper, unitriangular, mode.table is SECANTS)

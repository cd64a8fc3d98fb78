"""Secants of single operations: linear from the change of an input to that of the output.

Two texts stand side by side, in the halves of the first axis of every activation. Each class has
the secant of an operation between both in place of its derivative, without an error: `backward`
pulls adjoints back, and `push` carries tangents forward. The adjoint of the second text is minus
that of the first, wherever the axis of texts is the first one.

Source: Shrikumar et al. 2017.
"""

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from bilens.errors import BilensError
from bilens.transformer.mixing import AttentionCall, head_blocks

Function = Callable[[Tensor], Tensor]
"""A function of each number."""
GAUSS = ((0.5 - math.sqrt(0.15), 5 / 18), (0.5, 8 / 18), (0.5 + math.sqrt(0.15), 5 / 18))
"""Points and weights of Gauss's quadrature between 0 and 1."""


class UnknownOperationError(BilensError):
    """An operation of a model that has no rule.

    Attributes:
        is_named: whether the message has its name and line.
    """

    is_named = False


# What the backward pass needs of activations.


class _Kept:
    """An activation that a backward pass needs, as it was, whatever a model does to it in place."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Tensor) -> None:
        self.value = value


_by_storage = threading.local()
"""What this thread keeps, by the address of its numbers, and the rows of its tangents."""


def keep(ctx: Any, *tensors: Tensor) -> None:
    """Keep activations for the backward pass of an operation."""
    of_storage = _by_storage.__dict__.setdefault("kept", defaultdict(list))
    ctx.kept = [_Kept(x.detach()) for x in tensors]
    for value in ctx.kept:
        of_storage[value.value.untyped_storage().data_ptr()].append(weakref.ref(value))


def kept(ctx: Any) -> list[Tensor]:
    """Return the activations that were kept for the backward pass of an operation."""
    return [x.value for x in ctx.kept]


def forget_kept() -> None:
    """Forget which activations this thread keeps, after a pass in which they may change."""
    _by_storage.__dict__.pop("kept", None)


def before_change(x: Tensor) -> None:
    """Copy what is kept of an activation that is about to be changed in place."""
    of_storage = _by_storage.__dict__.get("kept", {})
    for reference in of_storage.pop(x.untyped_storage().data_ptr(), ()):
        if (one := reference()) is not None:
            one.value = one.value.clone()


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


def mean(x: Tensor) -> Tensor:
    """Return the mean of both texts, in the shape of the activation."""
    texts = pair(x)
    return texts.mean(0, keepdim=True).expand_as(texts).flatten(0, 1)


def half_mean(x: Tensor) -> Tensor:
    """Return the mean of both texts, once."""
    return pair(x).mean(0)


def sides(g: Tensor) -> Tensor:
    """Return an adjoint by its texts, (2, ...), or (1, ...) where the second is minus the first.

    It is so wherever the axis of texts is the first one, and half of the work is enough there.
    """
    texts = pair(g)
    return texts[:1] if torch.equal(texts[1], -texts[0]) else texts


def whole(w: Tensor) -> Tensor:
    """Return the adjoint of all texts, given that of `sides`."""
    return torch.cat([w[0], -w[0]]) if len(w) == 1 else w.flatten(0, 1)


def check_texts(x: Tensor, dims: int = 1) -> None:
    """Raise unless an activation has both texts in its first axis, as a factor of `dims` axes."""
    if x.dim() < dims or x.shape[:1] == (1,):
        raise UnknownOperationError(
            f"a factor of shape {tuple(x.shape)} has no axis of texts, and depends on them"
        )
    pair(x)


def differs(x: Tensor, like: Tensor) -> bool:
    """Return True if numbers beside an activation, such as indices, differ between both texts."""
    rows = Rows.running()
    texts = 2 if rows is None else rows.of(x, like)
    if x.dim() != like.dim() or not texts:
        return False
    if rows is None and (x.shape[:1] != like.shape[:1] or x.shape[0] % 2):
        return False
    first, second, *_ = x.unflatten(0, (texts, -1))
    return not torch.equal(first, second)


# Tangents of an activation, beside its two texts.


class Rows:
    """What the first axis of each activation holds in a pass of tangents: both texts, and tangents.

    A module that takes each position by itself runs on one long text instead, of both texts and of
    those positions of tangents that are not 0.

    Args:
        count: number of tangents.

    Attributes:
        places: in a long text the position of each entry of a tangent; None elsewhere.
        time: number of positions of a text.
    """

    def __init__(self, count: int) -> None:
        self.count, self.time = count, 0
        self.places: Tensor | None = None

    @staticmethod
    def running() -> "Rows | None":
        """Return the rows of the pass of tangents that this thread runs; None without one."""
        return _by_storage.__dict__.get("rows")

    @contextmanager
    def run(self) -> Iterator[None]:
        """Let this thread carry tangents with these rows."""
        _by_storage.rows = self
        try:
            yield
        finally:
            del _by_storage.rows

    def of(self, x: Tensor, like: Tensor) -> int:
        """Return how many rows numbers beside an activation have: of texts, or of all; else 0."""
        if self.places is not None or x.dim() != like.dim() or x.dim() == 0:
            return 0
        rows = 2 + self.count
        if len(x) == len(like) and len(x) % rows == 0:
            return rows
        return 2 if len(x) * rows == len(like) * 2 else 0

    def split(self, x: Tensor) -> tuple[Float[Tensor, "2 *half"], Float[Tensor, "count *half"]]:
        """Return both texts of an activation, and its tangents; those of constants are 0."""
        if self.places is None:
            if x.dim() == 0 or len(x) % (2 + self.count):
                raise UnknownOperationError(
                    f"an activation of shape {tuple(x.shape)} does not hold two texts and "
                    f"{self.count} tangents side by side"
                )
            rows = x.unflatten(0, (2 + self.count, -1))
            texts, tangents = rows[:2], rows[2:]
        else:
            entries = x.flatten(0, 1) if len(x) == 1 else x
            texts = entries[: 2 * self.time].unflatten(0, (2, self.time))
            tangents = entries[2 * self.time :]
        return texts.detach(), tangents if x.requires_grad else torch.zeros_like(tangents)

    def join(
        self, texts: Float[Tensor, "2 *half"], tangents: Float[Tensor, "count *half"], like: Tensor
    ) -> Tensor:
        """Return the activation of both texts and tangents, with the first axis of another one."""
        if self.places is None:
            return torch.cat([texts, tangents]).flatten(0, 1)
        entries = torch.cat([texts.flatten(0, 1), tangents])
        return entries[None] if len(like) == 1 else entries

    def at(self, half: Float[Tensor, "*half"]) -> Tensor:
        """Return numbers of both texts where the tangents have theirs."""
        return half if self.places is None else half[self.places]


class Secant(torch.autograd.Function):
    """An operation whose linear map between both texts runs in both directions."""

    @classmethod
    def apply(cls, *inputs: Any) -> Any:
        """Run the operation in a pass of texts, or of texts and tangents."""
        rows = Rows.running()
        if rows is None:
            return super().apply(*inputs)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunction():
            return cls.push(rows, *inputs)

    @staticmethod
    def push(rows: Rows, *inputs: Any) -> Tensor:
        """Return the output of both texts, and that of the tangents by the secant."""
        raise NotImplementedError


def log_mean(p: Tensor, q: Tensor, difference: Tensor) -> Tensor:
    """Return the logarithmic mean (p - q) / (log p - log q), given the difference of logarithms."""
    near = difference.abs() < 1e-2
    # The series of sinh(x / 2) / (x / 2), where the quotient would cancel.
    square = difference * difference
    series = torch.sqrt(p * q) * (1 + square / 24 + square * square / 1920)
    quotient = (p - q) / torch.where(near, 1.0, difference)
    value = torch.where(near, series, quotient)
    # A position that neither text sees has the difference inf - inf.
    return torch.where((p > 0) | (q > 0), value, 0.0)


# Secants: each is linear from the change of its input to that of its output, without an error.


class Elementwise(Secant):
    """A function of each number: (f(a) - f(b)) / (a - b)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Function) -> Tensor:
        pair(x)
        y = f(x)
        keep(ctx, x, y)
        ctx.f = f
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        x, y = kept(ctx)
        return (pair(g) * mean_slope(ctx.f, pair(x), pair(y))).flatten(0, 1), None

    @staticmethod
    def push(rows: Rows, x: Tensor, f: Function) -> Tensor:
        texts, tangents = rows.split(x)
        y = f(texts.flatten(0, 1)).unflatten(0, (2, -1))
        return rows.join(y, tangents * rows.at(mean_slope(f, texts, y)), x)


@torch.no_grad()
def mean_slope(
    f: Function, x: Float[Tensor, "2 *half"], y: Float[Tensor, "2 *half"]
) -> Float[Tensor, "*half"]:
    """Return the slope of a function of each number between both texts, x and y = f(x)."""
    (a, b), (first, second) = x, y
    d = torch.where(a == b, 0.0, a - b)  # both may be -inf
    quotient = (first - second) / torch.where(d == 0, 1.0, d)
    # The mean of the derivative between both, by three Gauss points. They stand in a further axis
    # in front, so that constants of the function meet the same axes.
    at = torch.stack([b + point * d for point, _ in GAUSS])
    slopes = _derivative(f, torch.cat([at, at], 1))[:, : len(d)]
    slope = sum(weight * of_point for (_, weight), of_point in zip(GAUSS, slopes, strict=True))
    # It is taken where the quotient cancels: where both agree within rounding.
    size = a.abs() + b.abs()
    rounding = 8 * torch.finfo(d.dtype).eps * (first.abs() + second.abs() + size)
    agree = (slope - quotient).abs() * d.abs() <= rounding
    near = (d.abs() <= 1e-2 * (1 + size)) & agree
    return torch.where(near, slope, quotient)


def _derivative(f: Function, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = f(x)
        if not y.requires_grad:  # steps, such as round
            return torch.zeros_like(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
    return slope


class Multiply(Secant):
    """a b: each factor gets the mean of the other."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        y = a * b
        for factor in (a, b):
            check_texts(factor, y.dim())
        keep(ctx, a, b)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        a, b = kept(ctx)
        return (g * mean(b)).sum_to_size(a.shape), (g * mean(a)).sum_to_size(b.shape)

    @staticmethod
    def push(rows: Rows, a: Tensor, b: Tensor) -> Tensor:
        return _product(rows, torch.mul, a, b)


class MatrixProduct(Secant):
    """A B of matrices: each factor gets the mean of the other."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        y = a @ b
        for factor in (a, b):
            check_texts(factor, y.dim())
        keep(ctx, a, b)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        (a, b), g = kept(ctx), sides(g)
        of_a = g @ half_mean(b).transpose(-1, -2)
        of_b = half_mean(a).transpose(-1, -2) @ g
        shapes = ((len(g), len(x) // 2, *x.shape[1:]) for x in (a, b))
        of_a, of_b = (w.sum_to_size(shape) for w, shape in zip((of_a, of_b), shapes, strict=True))
        return whole(of_a), whole(of_b)

    @staticmethod
    def push(rows: Rows, a: Tensor, b: Tensor) -> Tensor:
        return _product(rows, torch.matmul, a, b)


def _product(rows: Rows, f: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Return a product of two activations, D(ab) = mean(a) Db + mean(b) Da."""
    (first, of_a), (second, of_b) = rows.split(a), rows.split(b)
    tangents = f(of_a, rows.at(second.mean(0))) + f(rows.at(first.mean(0)), of_b)
    return rows.join(f(first, second), tangents, a)


class Linear(Secant):
    """W x + b with constants W and b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        ctx.W = W
        return functional.linear(x, W, b).data  # no view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        W = ctx.W.to(g)
        if g.dim() == 1 or len(g) % 2:  # a map of one vector, or along another axis
            return g @ W, None, None
        return whole(sides(g) @ W), None, None

    @staticmethod
    def push(rows: Rows, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        y = functional.linear(x, W.to(x))  # rules of other operations give weights as stored
        if b is None:
            return y
        texts, tangents = rows.split(y)
        return rows.join(texts + b, tangents, x)


class TwoFactors(Secant):
    """An operation that is linear in each of two activations: the derivative at the mean."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        for factor in (a, b):
            check_texts(factor)
        keep(ctx, a, b)
        ctx.f = f
        return f(a, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = kept(ctx)
        with torch.enable_grad():
            a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
            (of_a,) = torch.autograd.grad(ctx.f(a, mean(b).detach()), a, g)
            (of_b,) = torch.autograd.grad(ctx.f(mean(a).detach(), b), b, g)
        return of_a, of_b, None

    @staticmethod
    def push(rows: Rows, a: Tensor, b: Tensor, f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        (a, of_a), (b, of_b) = rows.split(a), rows.split(b)
        means = (x.mean(0).expand(rows.count, *x.shape[1:]).flatten(0, 1) for x in (a, b))
        a_mean, b_mean = means
        tangents = f(of_a.flatten(0, 1), b_mean) + f(a_mean, of_b.flatten(0, 1))
        y = f(a.flatten(0, 1), b.flatten(0, 1))
        return torch.cat([y, tangents])


class Softmax(Secant):
    """p = softmax(s) over the last axis: dp_i = L_i (ds_i - sum L ds / sum L).

    `seen` is 1 where a score is seen, and 0 where it is masked.
    """

    @staticmethod
    def forward(ctx: Any, s: Tensor, seen: Tensor | None) -> Tensor:
        keep(ctx, s)
        return s.softmax(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None]:
        (s,) = kept(ctx)
        of_scores, of_seen = softmax_secant(s.log_softmax(-1), pair(g))
        return whole(of_scores), whole(of_seen) if ctx.needs_input_grad[1] else None

    @staticmethod
    def push(rows: Rows, s: Tensor, seen: Tensor | None) -> Tensor:
        texts, tangents = rows.split(s)
        logs = texts.log_softmax(-1)
        return rows.join(logs.exp(), softmax_tangents(rows, logs, tangents), s)


def softmax_secant(
    logs: Float[Tensor, "texts *shape"], g: Float[Tensor, "sides *half"]
) -> tuple[Float[Tensor, "sides *half"], Float[Tensor, "sides *half"]]:
    """Return the adjoints of scores, and of whether they are seen, given log-probabilities.

    Where only one text sees a score, L = 0, and L ds becomes the probability p times the change of
    whether it is seen.
    """
    means = _log_means(pair(logs))
    total = means.sum(-1, keepdim=True)
    # There may be no score that both texts see.
    centred = g - (g * means).sum(-1, keepdim=True) / torch.where(total == 0, 1.0, total)
    return means * centred, pair(logs.exp()).sum(0) * centred


def softmax_tangents(
    rows: Rows, logs: Float[Tensor, "2 *half"], tangents: Float[Tensor, "count *half"]
) -> Float[Tensor, "count *half"]:
    """Return the tangents of probabilities, given those of scores."""
    means = rows.at(_log_means(logs))
    total = means.sum(-1, keepdim=True)
    inner = (means * tangents).sum(-1, keepdim=True)
    return means * (tangents - inner / torch.where(total == 0, 1.0, total))


def _log_means(logs: Float[Tensor, "2 *shape"]) -> Tensor:
    p, q = logs.exp()
    return log_mean(p, q, logs[0] - logs[1])


class LogSumExp(Secant):
    """log sum exp s over the last axis, which stays: sum L ds / sum L."""

    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Tensor:
        keep(ctx, s)
        return s.logsumexp(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (s,) = kept(ctx)
        means = _log_means(pair(s.log_softmax(-1)))
        return (pair(g) * means / means.sum(-1, keepdim=True)).flatten(0, 1)

    @staticmethod
    def push(rows: Rows, s: Tensor) -> Tensor:
        texts, tangents = rows.split(s)
        means = rows.at(_log_means(texts.log_softmax(-1)))
        tangent = (means * tangents).sum(-1, keepdim=True) / means.sum(-1, keepdim=True)
        return rows.join(texts.logsumexp(-1, keepdim=True), tangent, s)


class Attend(Secant):
    """softmax(q k' scale + mask) v, in blocks of heads, so that few patterns exist at once."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, seen: Tensor | None
    ) -> Tensor:
        keep(ctx, q, k, v, mask)
        ctx.scale, ctx.seen_shape = scale, None if seen is None else seen.shape
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, mask), g = kept(ctx), sides(g)
        call = AttentionCall(q, k, v, mask, scale := ctx.scale)
        adjoints = [torch.empty_like(pair(x)[: len(g)]) for x in (q, k, v)]
        of_mask = mask.new_zeros(mask.shape) if ctx.needs_input_grad[3] else None
        of_seen = None if ctx.seen_shape is None else q.new_zeros(ctx.seen_shape)
        size = len(q) * q.shape[2] * k.shape[2] * q.element_size()
        for heads in head_blocks(q.shape[1], size):
            logs = call.logs(heads)
            q_mean, k_mean, v_mean = (half_mean(x[:, heads]) for x in (q, k, v))
            of_heads = g[:, :, heads]
            of_scores, of_choice = softmax_secant(logs, of_heads @ v_mean.transpose(-1, -2))
            adjoints[0][:, :, heads] = scale * of_scores @ k_mean
            adjoints[1][:, :, heads] = scale * of_scores.transpose(-1, -2) @ q_mean
            adjoints[2][:, :, heads] = half_mean(logs.exp()).transpose(-1, -2) @ of_heads
            for gradient, of_block in ((of_mask, of_scores), (of_seen, of_choice)):
                if gradient is not None:
                    block = gradient if gradient.shape[1] == 1 else gradient[:, heads]
                    block += whole(of_block).sum_to_size(block.shape)
        return *map(whole, adjoints), of_mask, None, of_seen

    @staticmethod
    def push(
        rows: Rows, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, seen: Tensor | None
    ) -> Tensor:
        split = [rows.split(x) for x in (q, k, v)]
        (query, key, value), tangents = (
            [x.flatten(0, 1) for x in side] for side in zip(*split, strict=True)
        )
        of_mask = None
        if len(mask) > 2:
            mask, of_mask = (x.flatten(0, 1) for x in rows.split(mask))
        call = AttentionCall(query, key, value, mask, scale)
        means = [half_mean(x) for x in (query, key, value)]
        blocks = []
        for heads in head_blocks(q.shape[1], len(q) * q.shape[2] * k.shape[2] * q.element_size()):
            q_mean, k_mean, v_mean = (x[:, heads] for x in means)
            of_q, of_k, of_v = (x[:, heads] for x in tangents)
            of_scores = scale * (of_q @ k_mean.mT + q_mean @ of_k.mT)
            if of_mask is not None:
                of_scores = of_scores + (of_mask if of_mask.shape[1] == 1 else of_mask[:, heads])
            logs = call.logs(heads).unflatten(0, (2, -1))
            of_pattern = softmax_tangents(rows, logs, of_scores[:, None])[:, 0]
            blocks.append(of_pattern @ v_mean + logs.exp().mean(0) @ of_v)
        y = functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
        return torch.cat([y, torch.cat(blocks, 1)])


class Gather(Secant):
    """x at chosen places of the last axis: a product of x and of what was chosen, one-hot."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor, index: Tensor) -> Tensor:
        keep(ctx, x, chosen)
        return x.gather(-1, index)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, choice = kept(ctx)
        # Masked entries of a router are -inf, and are not chosen in either text.
        means = torch.nan_to_num(mean(x), nan=0.0, posinf=0.0, neginf=0.0)
        g = g.unsqueeze(-1)
        return (g * mean(choice)).sum(-2), g * means.unsqueeze(-2), None

    @staticmethod
    def push(rows: Rows, x: Tensor, chosen: Tensor, index: Tensor) -> Tensor:
        texts, tangents = rows.split(x)
        share = rows.split(chosen)[0].mean(0)
        y = texts.gather(-1, rows.split(index)[0])
        return rows.join(y, (tangents.unsqueeze(-2) * share).sum(-1), x)


class Where(Secant):
    """a where chosen is 1, and b where it is 0: products with what was chosen."""

    @staticmethod
    def forward(ctx: Any, chosen: Tensor, a: Tensor, b: Tensor) -> Tensor:
        keep(ctx, chosen, a, b)
        return torch.where(chosen.bool(), a, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        choice, a, b = kept(ctx)
        shares, shape = mean(choice), g.shape
        gap = mean(a.expand(shape)) - mean(b.expand(shape))
        of_choice = (g * torch.nan_to_num(gap, nan=0.0, posinf=0.0, neginf=0.0)).sum_to_size(
            choice.shape
        )
        return of_choice, (g * shares).sum_to_size(a.shape), (g * (1 - shares)).sum_to_size(b.shape)

    @staticmethod
    def push(rows: Rows, chosen: Tensor, a: Tensor, b: Tensor) -> Tensor:
        (mask, _), (a, of_a), (b, of_b) = map(rows.split, (chosen, a, b))
        share = mask.mean(0)
        tangents = share * of_a + (1 - share) * of_b
        return rows.join(torch.where(mask.bool(), a, b), tangents, chosen)


class Solve(Secant):
    """X of A X = B with a triangular A: mean(A) dX = dB - dA mean(X)."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor, upper: bool, unit: bool) -> Tensor:
        X = torch.linalg.solve_triangular(A, B, upper=upper, unitriangular=unit)
        check_texts(A, X.dim())
        keep(ctx, A, X)
        ctx.upper, ctx.unit = upper, unit
        return X

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        A, X = map(mean, kept(ctx))
        upper, unit = ctx.upper, ctx.unit
        of_B = torch.linalg.solve_triangular(
            A.transpose(-1, -2), g, upper=not upper, unitriangular=unit
        )
        of_A = -of_B @ X.transpose(-1, -2)
        return of_A.triu(int(unit)) if upper else of_A.tril(-int(unit)), of_B, None, None

    @staticmethod
    def push(rows: Rows, A: Tensor, B: Tensor, upper: bool, unit: bool) -> Tensor:
        def solved(A: Tensor, B: Tensor) -> Tensor:
            return torch.linalg.solve_triangular(A, B, upper=upper, unitriangular=unit)

        (A, of_A), (B, of_B) = rows.split(A), rows.split(B)
        X = solved(A, B)
        of_A = of_A.triu(int(unit)) if upper else of_A.tril(-int(unit))
        tangents = solved(A.mean(0).expand_as(of_A), of_B - of_A @ X.mean(0))
        return rows.join(X, tangents, X)

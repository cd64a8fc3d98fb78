"""Each rule alone: adjoints times changes are the change of the output."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from bilens.flows.rules import LINEAR, OF_NUMBERS, READ, RULES, Rules, make_leaf
from bilens.flows.secants import Rows, UnknownOperationError
from bilens.flows.tangents import TangentRules
from tests.refusals import refused

Operation = Callable[..., Tensor]
SEEDS = st.integers(0, 2**16)
APART = (1.0, 1e-3, 1e-9, 0.0)
"""Distances between both texts."""

POSITIVE = {"log", "log2", "log10", "log1p", "sqrt", "rsqrt"}
WITH_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "clamp": (-0.3, 0.4),
    "clamp_min": (0.1,),
    "clamp_max": (0.1,),
    "threshold": (0.1, 0.0),
}


def function_of_numbers(name: str) -> Operation:
    function = getattr(functional, name, None) or getattr(torch, name)
    arguments = WITH_ARGUMENTS.get(name, ())
    return lambda x: function(x.abs() + 0.1 if name in POSITIVE else x, *arguments)


def overwritten(a: torch.Tensor) -> torch.Tensor:
    """Constants in places of an activation."""
    a[..., 0].fill_(0.5)
    a[..., 1].copy_(torch.full(a.shape[:-1], 2.0))
    return a


def router(x: Tensor) -> Tensor:
    values, index = x.softmax(-1).topk(2, -1)
    return x.gather(-1, index) * values / values.sum(-1, keepdim=True)


def largest(x: Tensor, count: int) -> Tensor:
    """Return which numbers are among the largest of the last axis, as a mask."""
    return torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(count, -1).indices, True)


def hiding(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).double().masked_fill(~mask, -torch.inf)


def lower(x: Tensor) -> Tensor:
    return x[..., :4] @ x[..., :4].mT + 3 * torch.eye(x.shape[-2]).double()


def in_place(name: str, *arguments: Any) -> Operation:
    def run(x: Tensor, *others: Tensor) -> Tensor:
        y = x * 2
        getattr(y, name)(*others, *arguments)
        return y

    return run


def in_mask(x: Tensor) -> Tensor:
    x[x < 0] = 0.5
    return x


def sizes(x: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * size + torch.linalg.norm(x, ord=1, dim=2, keepdim=True)


def sink(x: Tensor) -> Tensor:
    """Return keys or values with one more in front, of a position that is none of the text."""
    return torch.cat([torch.ones_like(x[:, :, :1]), x], 2)


W = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()
KERNEL = torch.randn(3, 1, 2, generator=torch.Generator().manual_seed(1)).double()
PLANE = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(1)).double()
RAMP, LEAST = -torch.ones(5, 5).double().cumsum(0), torch.finfo(torch.float64).min
attend, solve = functional.scaled_dot_product_attention, torch.linalg.solve_triangular
ATTEND, SOLVE = "scaled_dot_product_attention", "linalg_solve_triangular"
UNSEEN = torch.ones(5, 6).tril(-1).bool()
"""A mask by which the first query sees nothing."""
# Texts, heads, positions and numbers: what an operation takes.
CUBE = (2, 3, 5, 4)
CUBE_ONLY = (CUBE,)
# A name of the case, its names in the tables, the operation, and the shapes of its activations.
CASES: list[tuple[str, Operation, tuple[tuple[int, ...], ...]]] = [
    ("add sub", lambda a, b: a + 2 * b - 1 - W.T[:1, :4], (CUBE, CUBE)),
    ("rsub", lambda a: 1 - a, (CUBE,)),
    ("add_ sub_", lambda a, b: (a * 1).add_(b).sub_(1), (CUBE, CUBE)),
    ("mul", lambda a, b: a * b, (CUBE, CUBE)),
    ("mul", lambda a, b: a * b, (CUBE, (2, 1, 5, 1))),
    ("mul", lambda a, b: a.flatten(0, 1) * b.flatten(0, 1), (CUBE, CUBE)),
    ("mul_", in_place("mul_"), (CUBE, CUBE)),
    ("div", lambda a, b: a / (b.abs() + 0.5), (CUBE, CUBE)),
    ("div_", lambda a, b: (a * 1).div_(b.abs() + 0.5), (CUBE, CUBE)),
    ("matmul", lambda a, b: a @ b.mT, (CUBE, CUBE)),
    ("matmul", lambda a, b: a @ b.mT, (CUBE, (2, 1, 5, 4))),
    ("bmm", lambda a, b: torch.bmm(a.flatten(0, 1), b.flatten(0, 1).mT), (CUBE, CUBE)),
    ("rmatmul", lambda a: W @ a.mT, (CUBE,)),
    ("einsum", lambda a, b: torch.einsum("bhtd,bhsd->bhts", a, b), (CUBE, CUBE)),
    (
        "baddbmm",
        lambda a, b: torch.baddbmm(a.sum(-1, keepdim=True), a, b.mT, beta=0.5, alpha=2),
        ((2, 5, 4), (2, 5, 4)),
    ),
    ("addmm", lambda a: torch.addmm(W[:, 0], a, W.T), ((2, 4),)),
    ("addcmul", lambda a, b: torch.addcmul(a, a, b, value=0.5), (CUBE, CUBE)),
    ("lerp", lambda a, b: torch.lerp(a, b, b.sigmoid()), (CUBE, CUBE)),
    ("linear", lambda a: functional.linear(a, weight=W, bias=W[:, 0]), (CUBE,)),
    (
        "conv1d",
        lambda a: functional.conv1d(input=a, weight=KERNEL, bias=KERNEL[:, 0, 0], groups=3),
        ((2, 3, 6),),
    ),
    ("conv2d", lambda a: functional.conv2d(a, PLANE, bias=PLANE[:, 0, 0, 0]), (CUBE,)),
    (
        "cat stack",
        lambda a, b: torch.stack([torch.cat([a, b], -1), torch.cat([b, a], -1)], 1),
        (CUBE, CUBE),
    ),
    ("pow", lambda a: a.abs().add(0.1).pow(-0.5) * a, (CUBE,)),
    ("rms_norm", lambda a: functional.rms_norm(a, (4,), W[0]), (CUBE,)),
    ("layer_norm", lambda a: functional.layer_norm(a, (4,), W[0], W[1]), (CUBE,)),
    ("group_norm", lambda a: functional.group_norm(a, 2, W[0], W[1]), ((2, 4, 5),)),
    ("var std", lambda a: a * a.var(-1, keepdim=True) + a.std(-1, keepdim=True), (CUBE,)),
    ("norm", lambda a: a * a.norm(dim=-1, keepdim=True), (CUBE,)),
    ("normalize", lambda a: functional.normalize(a, dim=-1), (CUBE,)),
    ("softmax", lambda a, b: a.softmax(-1) @ b, ((2, 3, 5, 5), CUBE)),
    ("softmax", lambda a, b: a.softmax(-2).mT @ b, ((2, 3, 5, 5), CUBE)),
    ("softmax", lambda a, b: (a + hiding(largest(b, 3))).softmax(-1) * a, ((2, 3, 5, 6),) * 2),
    ("softmax", lambda a, b: a.masked_fill(~largest(b, 1), LEAST).softmax(-1) * a, (CUBE, CUBE)),
    ("log_softmax", lambda a: a.log_softmax(-1), (CUBE,)),
    ("logsumexp", lambda a: a.logsumexp(-1), (CUBE,)),
    ("logsumexp", lambda a: torch.logsumexp(a, dim=1, keepdim=True), (CUBE,)),
    ("glu", functional.glu, (CUBE,)),
    (ATTEND, lambda q, k, v: attend(q, k, v, is_causal=True), (CUBE, CUBE, CUBE)),
    (
        ATTEND,
        lambda q, k: attend(q, k, k, attn_mask=RAMP, scale=0.3, enable_gqa=True),
        (CUBE, (2, 1, 5, 4)),
    ),
    (ATTEND, lambda q, k: attend(q, k, k, largest(q @ k.mT, 2)), (CUBE, CUBE)),
    (
        ATTEND,
        lambda q, k: attend(q, k, k, hiding(largest((q @ k.mT).sum(1, keepdim=True), 3))),
        (CUBE, CUBE),
    ),
    ("topk", lambda a: a.topk(2, -1).values, (CUBE,)),
    ("sort", lambda a: a.sort(1).values, (CUBE,)),
    ("max", lambda a: a.max(-1).values * a.max(1, keepdim=True).values.sum(-1), (CUBE,)),
    ("min amin amax", lambda a: a.min(-1).values + a.amin(2) + a.amax(2), ((2, 3, 4, 4),)),
    (
        "maximum minimum",
        lambda a, b: torch.maximum(a, b) + torch.minimum(a, b * 2) + torch.maximum(a, W[0, 0]),
        (CUBE, CUBE),
    ),
    ("where", lambda a, b: torch.where(a > 0, a, b), (CUBE, CUBE)),
    ("masked_fill", lambda a, b: a.masked_fill(b > 0, 0.5), (CUBE, CUBE)),
    ("masked_fill_", lambda a, b: (a * 1).masked_fill_(b > 0, 0.5), (CUBE, CUBE)),
    ("pad", lambda a: functional.pad(a, (0, 2), value=1.0), (CUBE,)),
    ("fill_", lambda a: torch.cat([a, torch.zeros_like(a).fill_(2.0)], -1), (CUBE,)),
    ("copy_", lambda a: overwritten(a * 1), (CUBE,)),
    ("scatter", lambda a: a.scatter(-1, torch.zeros_like(a[..., :1]).long(), 0.5), (CUBE,)),
    (
        "index_copy",
        lambda a: a.index_copy(-1, torch.tensor([1]), torch.ones_like(a[..., :1])),
        (CUBE,),
    ),
    ("gather", lambda x, scores: x.gather(-1, scores.topk(2, -1).indices), (CUBE, CUBE)),
    ("gather", router, (CUBE,)),
    (SOLVE, lambda a, b: solve(lower(a), b, upper=False), (CUBE, CUBE)),
    (SOLVE, lambda a, b: solve(lower(a), b, upper=True, unitriangular=True), (CUBE, CUBE)),
    ("rdiv", lambda a: 2 / (a.abs() + 0.5), (CUBE,)),
    ("clamp", lambda a, b: a.clamp(b - 1, b) + a.clamp(max=b), (CUBE, CUBE)),
    ("rpow", lambda a: 2**a, (CUBE,)),
    ("pow", lambda a: torch.pow(2, a), (CUBE,)),
    ("where_of", lambda a, b: a.where(b > 0, 0.1 * a), (CUBE, CUBE)),
    ("__setitem__", lambda a: in_mask(a * 1), (CUBE,)),
    ("prelu", lambda a: functional.prelu(a, W[0, :3]), (CUBE,)),
    ("clip", lambda a: a.clip(-0.1, 0.2), (CUBE,)),
    ("detach", lambda a: a * a.detach(), (CUBE,)),
    ("detach_", lambda a: (a * 1).detach_() * a, (CUBE,)),
    ("mm", lambda a: torch.mm(a, W.T), ((2, 4),)),
    ("linalg_norm linalg_vector_norm", sizes, (CUBE,)),
    (ATTEND, lambda q, k, bias: attend(q, k, k, attn_mask=bias), (CUBE, CUBE, (2, 3, 5, 5))),
    (ATTEND, lambda q, k, v: attend(q, sink(k), sink(v), UNSEEN), (CUBE, CUBE, CUBE)),
]
"""Operations and their names in the table."""
OF_NUMBERS_CASES = [(name, function_of_numbers(name), (CUBE,)) for name in sorted(OF_NUMBERS)]
IN_PLACE = sorted(
    name for name in OF_NUMBERS if hasattr(Tensor, f"{name}_") and name not in WITH_ARGUMENTS
)
IN_PLACE_CASES = [
    (f"{name}_", lambda x, name=name: getattr(x.abs() + 0.1, f"{name}_")(), (CUBE,))
    for name in IN_PLACE
]
CASES += [*OF_NUMBERS_CASES, *IN_PLACE_CASES]


def of_each(cases):
    return pytest.mark.parametrize(
        ("names", "f", "shapes"), cases, ids=lambda x: x if isinstance(x, str) else ""
    )


def pairs(shapes: tuple[tuple[int, ...], ...], seed: int, apart: float) -> list[Tensor]:
    """Return activations of two texts, which differ by some distance."""
    torch.manual_seed(seed)
    both = []
    for shape in shapes:
        first = torch.randn(shape[0] // 2, *shape[1:]).double()
        both.append(torch.cat([first, first + apart * torch.randn(first.shape).double()]))
    return both


def sums(f: Operation, inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of adjoints times changes, the change of a number, and the output."""
    plain = f(*(x.clone() for x in inputs))
    inputs = [make_leaf(x.clone()) for x in inputs]
    with Rules() as run:
        y = f(*inputs)
    torch.manual_seed(0)
    w = torch.randn(y[: len(y) // 2].shape).double()
    number = (torch.cat([w, -w]) * y).sum()
    starts = [*inputs, *(leaf.value for leaf in run.leaves)]
    adjoints: Any = [None] * len(starts)
    if number.requires_grad:
        adjoints = torch.autograd.grad(number, starts, allow_unused=True)
    total = torch.zeros(()).double()
    for start, adjoint in zip(starts, adjoints, strict=True):
        if adjoint is not None:
            first, second = start.detach().unflatten(0, (2, -1))
            total += (adjoint.unflatten(0, (2, -1))[0] * (first - second)).sum()
    torch.testing.assert_close(y.detach(), plain, rtol=1e-12, atol=1e-12)
    return total, number.detach(), y


@of_each(CASES)
@pytest.mark.parametrize("apart", APART)
def test_adjoints_times_changes_are_the_change(names, f, shapes, apart):
    total, change, y = sums(f, pairs(shapes, 0, apart))
    size = float(y.detach().abs().sum())
    torch.testing.assert_close(total, change, rtol=1e-9, atol=1e-14 * size)


@of_each(CASES)
@pytest.mark.parametrize("apart", APART)
def test_tangents_are_carried_by_the_transpose_of_adjoints(names, f, shapes, apart):
    texts, rows = pairs(shapes, 0, apart), Rows(3)
    torch.manual_seed(1)
    tangents = [torch.randn(3 * len(x) // 2, *x.shape[1:]).double() for x in texts]
    below = [make_leaf(torch.cat(x)) for x in zip(texts, tangents, strict=True)]
    with rows.run(), TangentRules(rows):
        y = f(*below)
    plain = f(*(x.clone() for x in texts))
    torch.testing.assert_close(y[: len(plain)].detach(), plain, rtol=1e-12, atol=1e-12)
    carried = y[len(plain) :].detach().unflatten(0, (3, -1))
    # Dense: the adjoint of any number of the output, times the change of each tangent.
    leaves = [make_leaf(x) for x in texts]
    with Rules():
        of_texts = f(*leaves)
    w = torch.randn(carried.shape[1:]).double()
    number = (torch.cat([w, -w]) * of_texts).sum()
    adjoints: Any = [None] * len(leaves)
    if number.requires_grad:
        adjoints = torch.autograd.grad(number, leaves, allow_unused=True)
    expected = torch.zeros(3).double()
    for adjoint, change in zip(adjoints, tangents, strict=True):
        if adjoint is not None:
            half = adjoint.unflatten(0, (2, -1))[0]
            expected += (half * change.unflatten(0, (3, -1))).flatten(1).sum(1)
    size = float((w.abs() * carried.abs()).sum())
    found = (w * carried).flatten(1).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * size)


def test_every_rule_has_a_case_and_stands_in_one_table():
    tested = {name for names, _, _ in CASES for name in names.split()}
    in_place = {f"{name}_" for name in OF_NUMBERS}
    elsewhere = {"bilinear_attention"}  # of the models of bilens, in test_flow.py
    assert set(RULES) - tested - in_place - elsewhere == set()
    assert set(RULES) & (LINEAR | READ) == LINEAR & READ == set()


@given(SEEDS, st.sampled_from([1e-1, 1e-4, 1e-8, 1e-12]), st.sampled_from(["gelu", "relu", "exp"]))
def test_secants_of_functions_are_exact_at_any_distance(seed, apart, name):
    total, change, y = sums(function_of_numbers(name), pairs(CUBE_ONLY, seed, apart))
    size = float(y.detach().abs().sum())
    torch.testing.assert_close(total, change, rtol=1e-8, atol=1e-14 * size)


def test_no_grad_in_the_code_of_a_model_hides_nothing():
    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * x
        return x + y

    (x,) = pairs(CUBE_ONLY, 0, 1.0)
    with Rules() as run:
        f(make_leaf(x))
    assert not run.leaves  # else the square would be a start of the flow
    total, change, _ = sums(f, [x])
    torch.testing.assert_close(total, change)


class Clipped(torch.autograd.Function):
    """A square root with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.abs().sqrt()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def quick(x: Tensor) -> Tensor:
    return x * x


def masked(x: Tensor) -> Tensor:
    mask = torch.zeros(x.shape).double()
    mask[0, ..., 0] = -torch.inf
    return (x + mask).logsumexp(-1)


def between(f: Operation) -> Callable[[], Any]:
    return lambda: sums(f, pairs(CUBE_ONLY, 0, 1.0))


UNKNOWN = {
    "ClippedBackward has no rule at": between(lambda x: Clipped.apply(x) * 2),
    "masked in one text and not in the other": between(masked),
    "stack: activations are joined along the axis of texts": between(lambda x: torch.stack([x, x])),
    "norm: a norm of order 3": between(lambda x: x.norm(3, -1)),
    "kthvalue has no rule at test_rules.py": between(lambda x: x.kthvalue(2).values),
    "mul: a factor of shape .* has no axis of texts": between(lambda x: x * x.mean(0)),
    "MulBackward0 has no rule at test_rules.py": between(lambda x: torch.vmap(quick)(x) * 2),
}
test_operations_without_a_rule_are_refused_by_name = refused(UNKNOWN, UnknownOperationError)

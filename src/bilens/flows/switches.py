"""Weights that two models have differently, as activations: the rules between two models.

Both models have one architecture, and run side by side: the first half of each batch with the
weights W_1, the second with W_0. Each weight that differs has a *switch* s, which is 1 in the first
half and 0 in the second:

    y = f(x, W_0) + s f(x, W_1 - W_0)

The switch is one more activation, so the rules between two texts are exact as they are:

    D y = f(D x, mean W) + f(mean x, W_1 - W_0),

and the gradient at s is the flow of the weight. Linear maps run in a cheaper form of the same sum,
which keeps no difference of weights.

With s a number between 0 and 1 in all texts and torch's own derivatives, the same gradient is that
of the metric along the change of the weight, between both models.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from bilens.flows.rules import CALLED, READ, Rules, is_live, make_leaf, mark, tensors_in
from bilens.flows.secants import Multiply, UnknownOperationError, keep, kept
from bilens.transformer.maps import working_dtype

BILINEAR = ("conv1d", "conv2d", "einsum", "matmul", "rmatmul", "bmm", "mm")
"""Operations that are linear in an activation and in a weight."""
COMPOSED = ("layer_norm", "rms_norm", "group_norm", "addmm", "baddbmm", "addcmul", "lerp")
"""Operations that are made of others."""


@dataclass(frozen=True, eq=False)
class WeightPair:
    """A weight of two models, or what follows from weights alone.

    Attributes:
        name: name of the parameter, or of several, joined by +.
        tuned: the weight of the first half, in the numbers that it is stored in.
        base: the weight of the second half.
        factors: A and B of a low-rank change, tuned = base + B A; None for any change.
    """

    name: str
    tuned: Tensor
    base: Tensor
    factors: tuple[Tensor, Tensor] | None = None

    @property
    def relative_size(self) -> float:
        """The norm of the difference over that of the base model's weight."""
        base = self.base.detach().to(working_dtype(self.base.dtype))
        change = self.tuned.detach().to(base) - base
        return float(change.norm() / base.norm().clamp_min(1e-12))

    def mapped(
        self, x: Float[Tensor, "*tokens columns"], at: float
    ) -> Float[Tensor, "*tokens rows"]:
        """Return x W', W between both: base at 0, tuned at 1."""
        if at == 1:
            return functional.linear(x, self.tuned)
        y = functional.linear(x, self.base)
        if at == 0:
            return y
        if self.factors is None:
            return y + at * (functional.linear(x, self.tuned) - y)
        A, B = self.factors
        return y + at * functional.linear(functional.linear(x, A), B)

    def pulled(
        self, g: Float[Tensor, "*tokens rows"]
    ) -> tuple[Float[Tensor, "*tokens columns"], Float[Tensor, "*tokens columns"]]:
        """Return g W of the base model, and g times the change of the weight."""
        # In a backward pass, where nothing else widens or moves what is stored.
        of_base = g @ self.base.detach().to(g)
        if self.factors is not None:
            A, B = self.factors
            return of_base, g @ B @ A
        return of_base, g @ self.tuned.detach().to(g) - of_base


@dataclass(frozen=True)
class LinearFlow:
    """The flow of a linear map's weight, in float64.

    Attributes:
        tokens: for each question and token.
        columns: by column of the weight, or by input.
        ranks: by rank of a low-rank change, if it is one.
    """

    tokens: Float[Tensor, "*tokens"]
    columns: Float[Tensor, " columns"]
    ranks: Float[Tensor, " ranks"] | None = None

    @classmethod
    def of(
        cls, flows: Float[Tensor, "*tokens columns"], ranks: Float[Tensor, "*tokens ranks"] | None
    ) -> "LinearFlow":
        """Return the sums of flows by token and column, and by token and rank."""
        flows = flows.cpu().double()
        of_ranks = None if ranks is None else ranks.cpu().double().flatten(0, -2).sum(0)
        return cls(flows.sum(-1), flows.flatten(0, -2).sum(0), of_ranks)


class PairLinear(torch.autograd.Function):
    """x W' with both weights, each in its half, at the cost of one model.

    The adjoint of the second half is minus that of the first. Its images under both weights have
    the mean that goes on, and a difference whose product with the mean of x is the flow.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: WeightPair, note: Callable[..., None]) -> Tensor:
        ctx.pair, ctx.note = pair, note
        keep(ctx, x)
        first, second = x.chunk(2)
        return torch.cat([pair.mapped(first, 1), pair.mapped(second, 0)])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (x,), pair = kept(ctx), ctx.pair
        g = g.chunk(2)[0]
        first, second = x.chunk(2)
        mean_x = (first + second) / 2
        of_base, of_change = pair.pulled(g)
        ranks = None
        if pair.factors is not None:
            A, B = pair.factors
            ranks = (mean_x @ A.T) * (g @ B)
        ctx.note(pair.name, LinearFlow.of(of_change * mean_x, ranks))
        w = of_base + of_change / 2
        return torch.cat([w, -w]), None, None


class LinearBetween(torch.autograd.Function):
    """x W' with a weight between both models, and the derivative along the change of the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, pair: WeightPair, at: float, note: Callable[..., None]
    ) -> Tensor:
        ctx.pair, ctx.at, ctx.note = pair, at, note
        keep(ctx, x)
        return pair.mapped(x, at)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = kept(ctx)
        of_base, of_change = ctx.pair.pulled(g)
        ctx.note(ctx.pair.name, LinearFlow.of(of_change * x, None))
        return of_base + ctx.at * of_change, None, None, None


class SwitchedRules(Rules):
    """Rules of a pass in whose halves some weights differ, or of a model between both.

    Args:
        texts: number of texts, the first half of which runs with the tuned weights.
        pairs: weights by the number (`id`) of the parameter of the model that runs.
        at: None for both models. A number for one between them, all of whose weights are changed as
            far, 0 for the base model, 1 for the tuned one: the rules are torch's derivatives then.

    Attributes:
        linear: flows of linear maps by the name of their weight, once the backward pass is run.
        switches: starts of the flow of other weights, by name.
        embeddings: starts of the flow of tokens.
    """

    def __init__(
        self, texts: int, pairs: Mapping[int, WeightPair], at: float | None = None
    ) -> None:
        super().__init__(texts)
        self.at = at
        self.linear: dict[str, list[LinearFlow]] = defaultdict(list)
        self.switches: dict[str, list[Tensor]] = defaultdict(list)
        self.embeddings: list[Tensor] = []
        self._base = {key: pair.base for key, pair in pairs.items()}
        # By weights that run in place of parameters, and are kept so that numbers stay theirs.
        self._pairs = {id(pair.base): pair for pair in pairs.values()}

    def differs(self, weight: nn.Parameter) -> bool:
        """Return whether both models have another value of a parameter of the one that runs."""
        return id(weight) in self._base

    def pair(self, x: Any) -> WeightPair | None:
        """Return both values of a weight; None if it is the same in both models."""
        return self._pairs.get(id(x)) if isinstance(x, Tensor) else None

    def _of_base(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._base.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(map(self._of_base, value))
        return value

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        args = [self._of_base(x) for x in args]
        kwargs = {name: self._of_base(x) for name, x in (kwargs or {}).items()}
        tensors = [*tensors_in((*args, *kwargs.values()))]
        if self.paused or not any(self.pair(x) for x in tensors):
            return self._other(func, types, args, kwargs)
        name = getattr(func, "__name__", str(func))
        name = CALLED.get(name, name)
        if name == "embedding":
            result = self._embedded(*args, **kwargs)
        elif not any(map(is_live, tensors)):
            return self._of_weights(func, args, kwargs)
        elif name in READ:
            return func(*args, **kwargs)
        elif name in COMPOSED:
            return super().__torch_function__(func, types, args, kwargs)
        elif name == "linear":
            result = self._linear(*args, **kwargs)
        elif name in BILINEAR:
            result = self._bilinear(name, func, args, kwargs)
        else:
            like = next(filter(is_live, tensors))
            args = [self._activations(x, like) for x in args]
            kwargs = {key: self._activations(x, like) for key, x in kwargs.items()}
            return self._other(func, types, args, kwargs)
        mark(result)
        return result

    def _other(self, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation on activations and on weights that are the same."""
        # Kernels of attention take one constant for all texts; their rule takes one for each.
        if self.at is None or getattr(func, "__name__", "") == "bilinear_attention":
            return super().__torch_function__(func, types, args, kwargs)
        if func is torch._C._set_grad_enabled:  # derivatives pass `no_grad` of the model's code
            return None
        result = func(*args, **kwargs)
        mark((result, *args[:1]))
        return result

    def _of_weights(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what follows from weights alone, such as 1 + W or W[expert], with both values."""
        names: dict[str, None] = {}
        result = func(*args, **kwargs)
        options = {name: self._tuned(x, names) for name, x in kwargs.items()}
        other = func(*self._tuned(list(args), names), **options)
        pairs = zip(tensors_in((result,)), tensors_in((other,)), strict=True)
        for base, tuned in pairs:
            if base.is_floating_point():
                self._pairs[id(base)] = WeightPair("+".join(names), tuned, base)
        return result

    def _tuned(self, value: Any, names: dict[str, None]) -> Any:
        """Return an argument with tuned weights, and note their names."""
        if (pair := self.pair(value)) is not None:
            names[pair.name] = None
            return pair.tuned
        if type(value) in (list, tuple):
            return type(value)(self._tuned(x, names) for x in value)
        return value

    def _switched(self, name: str, change: Tensor, axes: int) -> Tensor:
        """Return a change times a switch, with its axes of texts and some more."""
        s = change.new_zeros(*change.shape[:axes], *[1] * (change.dim() - axes))
        if self.at is None:
            s[: len(s) // 2] = 1
        else:
            s += self.at
        switch = make_leaf(s)
        self.switches[name].append(switch)
        return Multiply.apply(switch, change) if self.at is None else switch * change

    def _activations(self, value: Any, like: Tensor) -> Any:
        """Return weights that differ as activations, with the axis of texts of another one."""
        if type(value) in (list, tuple):
            return type(value)(self._activations(x, like) for x in value)
        pair = self.pair(value)
        if pair is None:
            return value
        base, change = pair.base, pair.tuned - pair.base
        if not (base.dim() == like.dim() and len(base) == len(like)):
            shape = (*[1] * (like.dim() - base.dim()), *base.shape)
            if len(shape) != like.dim() or shape[0] != 1:
                raise UnknownOperationError(
                    f"the weight {pair.name}, of shape {tuple(base.shape)}, beside activations of "
                    f"shape {tuple(like.shape)} is none that a switch is known for"
                )
            base, change = (x.view(shape).expand(len(like), *shape[1:]) for x in (base, change))
        result = base + self._switched(pair.name, change, change.dim())
        mark(result)
        return result

    def _embedded(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        pair = self.pair(weight)
        assert pair is not None
        of_base = functional.embedding(input, pair.base, *args, **kwargs)
        change = functional.embedding(input, pair.tuned, *args, **kwargs) - of_base
        if len(of_base) != self.texts:  # positions, which all texts share
            self._pairs[id(of_base)] = WeightPair(pair.name, of_base + change, of_base)
            return of_base
        parts = [make_leaf(x) for x in (of_base, change)]
        self.embeddings += parts
        return parts[0] + self._switched(pair.name, parts[1], 2)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        pair = self.pair(weight)
        if pair is not None:
            y = self._mapped(input, pair)
        else:
            with self:
                y = functional.linear(input, weight)
        if bias is None:
            return y
        with self:
            return y + bias

    def _mapped(self, x: Tensor, pair: WeightPair) -> Tensor:
        note = lambda name, flow: self.linear[name].append(flow)  # noqa: E731
        if self.at is None:
            y = PairLinear.apply(x, pair, note)
        else:
            y = LinearBetween.apply(x, pair, self.at, note)
        mark(y)
        return y

    def _bilinear(
        self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor:
        # By position or by name, as the model's code gives them.
        operands = dict[int | str, Any]([*enumerate(args), *kwargs.items()])
        bias = None
        if name.startswith("conv"):  # a bias is in the first term alone, where it may differ too
            of_bias = "bias" if "bias" in kwargs else 2
            bias, operands[of_bias] = operands.get(of_bias), None
        pairs = {place: pair for place, x in operands.items() if (pair := self.pair(x))}
        if len(pairs) != 1:
            raise UnknownOperationError(
                f"{name} of {len(pairs)} weights that differ has no rule; expected one"
            )
        ((at, pair),) = pairs.items()
        if name in ("matmul", "mm") and at == 1 and pair.base.dim() == 2 and args[0].dim() > 1:
            factors = None if pair.factors is None else (pair.factors[1].mT, pair.factors[0].mT)
            turned = WeightPair(pair.name, pair.tuned.mT, pair.base.mT, factors)
            return self._mapped(args[0], turned)
        values = []
        for weight in (pair.base.clone(), pair.tuned - pair.base):
            operands[at] = weight
            with self:
                arguments = [operands[i] for i in range(len(args))]
                values.append(func(*arguments, **{key: operands[key] for key in kwargs}))
        y = values[0] + self._switched(pair.name, values[1], 2)
        mark(y)
        if bias is None:
            return y
        with self:
            return y + bias.reshape(-1, *[1] * (pair.base.dim() - 2))

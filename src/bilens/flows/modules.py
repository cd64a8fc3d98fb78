"""Modules that have a rule as a whole: activations, and mixtures of experts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bilens.errors import BilensError
from bilens.flows.rules import Rules, activation, is_live, values_of
from bilens.flows.secants import UnknownOperationError
from bilens.transformer.experts import ExpertCall, expert_count, is_experts
from bilens.transformer.running import first_input

Hook = tuple[nn.Module, Callable[..., Any]]

ACTIVATIONS = "transformers.activations"
"""A file whose classes are functions of each number."""


def module_hooks(model: nn.Module, rules: Callable[[], Rules]) -> tuple[list[Hook], list[Hook]]:
    """Return hooks before and after modules, by which they have rules in a pass.

    Args:
        model: the model.
        rules: a function that returns the rules of the running pass.
    """
    before: list[Hook] = []
    after: list[Hook] = []
    for module in model.modules():
        if _is_activation(module):
            pause, apply = _function(rules)
            before.append((module, pause))
            after.append((module, apply))
        elif is_experts(module):
            hide, mix = _mixture(rules)
            before.append((module, hide))
            after.append((module, mix))
    return before, after


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ == ACTIVATIONS or "Gelu" in type(module).__name__


def _function(rules: Callable[[], Rules]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return hooks by which a module is one function of each number, whatever its code."""

    def pause(_: nn.Module, args: tuple[Any, ...], __: Any) -> None:
        if args and is_live(args[0]) and not rules().paused:
            rules().paused = True
            inputs.append(args[0])

    def apply(module: nn.Module, *_: Any) -> Tensor | None:
        if not inputs:
            return None
        rules().paused = False
        return activation(lambda x: type(module).forward(module, x), inputs.pop())

    inputs: list[Tensor] = []
    return pause, apply


def _mixture(rules: Callable[[], Rules]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return hooks that let a module of experts run once more, expert by expert, under rules.

    Its own run may use fused operations, and sees constants.
    """
    calls: list[ExpertCall] = []

    def hide(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_live(first_input(args, kwargs)) or rules().paused:
            return None
        try:
            calls.append(ExpertCall.of(module, args, kwargs))
        except BilensError as error:
            raise UnknownOperationError(str(error)) from None
        # What it writes is not used: a single token takes the least time.
        count = min(1, len(first_input(args, kwargs))) if calls[-1].x.dim() == 2 else None

        def constant(y: Any) -> Any:
            if not isinstance(y, Tensor):
                return y
            return values_of(y)[:count]

        return tuple(map(constant, args)), {name: constant(y) for name, y in kwargs.items()}

    def mix(_: nn.Module, __: Any, ___: Any, ____: Any) -> Any:
        if not calls:
            return None
        call, mode = calls.pop(), rules()
        call = _in_either(mode, call)
        output = call.run()
        mode.experts = call, output
        return output

    return hide, mix


def _in_either(mode: Rules, call: ExpertCall) -> ExpertCall:
    """Let each expert run where one of the texts chose it, with the weight 0 where a text did not.

    The axis of texts survives: both texts have the same places of each expert.
    """
    index, count = call.chosen, expert_count(call.module)
    one_hot = functional.one_hot(index, count)
    dense = (mode.chosen(one_hot, call.weights) * call.weights.unsqueeze(-1)).sum(-2)
    mask = torch.zeros(len(index), count, dtype=torch.bool, device=index.device)
    mask = mode.in_either(mask.scatter(1, index, True))
    if not call.knows_none:
        mask[:] = True
    numbers = torch.arange(count, device=index.device)
    return call._replace(chosen=torch.where(mask, numbers, count), weights=dense)

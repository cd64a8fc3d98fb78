"""Modules that have a rule as a whole: activations, and mixtures of experts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bilens.read.flow.rules import SECANTS, Rules, UnknownOperationError, activation, is_live

Hook = tuple[nn.Module, Callable[..., Any]]

ACTIVATIONS = "transformers.activations"
"""A file whose classes are functions of each number."""
WITHOUT_NONE = ("GptOss", "Dbrx", "NemotronH")
"""Families whose experts' code knows no number for "no expert"."""
INDICES = ("top_k_index", "router_indices")
"""Names by which experts are called: what was chosen,"""
WEIGHTS = ("top_k_weights", "routing_weights")
"""and the weights of the chosen."""


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
            after.append((module, _activated(rules)))
        elif "Experts" in type(module).__name__ and hasattr(module, "num_experts"):
            hide, mix = _mixture(rules)
            before.append((module, hide))
            after.append((module, mix))
    return before, after


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ == ACTIVATIONS or "Gelu" in type(module).__name__


def _activated(rules: Callable[[], Rules]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], _: Any, output: Tensor) -> Tensor | None:
        if not (args and is_live(args[0])):
            return None
        return activation(rules(), lambda x: type(module).forward(module, x), args[0])

    return hook


def _mixture(rules: Callable[[], Rules]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return hooks that let a module of experts run once more, expert by expert, under rules.

    Its own run may use fused operations, and sees constants.
    """
    calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def hide(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(("hidden_states", INDICES[0], WEIGHTS[0]), args, strict=False)) | kwargs
        x = given["hidden_states"]
        index = next((given[name] for name in INDICES if name in given), None)
        weights = next((given[name] for name in WEIGHTS if name in given), None)
        if not is_live(x) or rules().paused:
            return None
        if index is None or weights is None:
            raise UnknownOperationError(
                f"{type(module).__name__} takes {', '.join(given)}, expected what was chosen, as "
                f"{' or '.join(INDICES)}, and its weights"
            )
        calls.append((x, index, weights))
        constant = {name: y.detach() if is_live(y) else y for name, y in kwargs.items()}
        return tuple(y.detach() if is_live(y) else y for y in args), constant

    def mix(module: nn.Module, _: Any, __: Any, output: Any) -> Any:
        if not calls:
            return None
        x, index, weights = calls.pop()
        mode = rules()
        experts: Any = getattr(type(module).forward, "__wrapped__", type(module).forward)
        if mode.table is not SECANTS:
            return experts(module, x, index, weights.detach())
        return experts(module, x, *_in_either(mode, module, index, weights))

    return hide, mix


def _in_either(mode: Rules, module: Any, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Let each expert run where one of the texts chose it, with the weight 0 where a text did not.

    The axis of texts survives: both texts have the same places of each expert.
    """
    count = module.num_experts
    one_hot = functional.one_hot(index, count)
    dense = (mode.chosen(one_hot, weights) * weights.unsqueeze(-1)).sum(-2)
    asked = torch.zeros(len(index), count, dtype=torch.bool, device=index.device)
    asked = asked.scatter(1, index, True).unflatten(0, (2, -1)).any(0).repeat(2, 1)
    if type(module).__name__.startswith(WITHOUT_NONE):
        asked[:] = True
    numbers = torch.arange(count, device=index.device)
    return torch.where(asked, numbers, count), dense

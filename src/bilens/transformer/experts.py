"""The experts of a layer: each is a term of what its MLP adds up."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bilens.errors import BilensError

INDICES = ("top_k_index", "router_indices")
"""Names by which experts are called: what was chosen,"""
WEIGHTS = ("top_k_weights", "routing_weights")
"""and the weights of the chosen."""
COUNTS = ("num_experts", "total_experts")
"""Names of their number, and"""
WITHOUT_NONE = ("GptOss", "Dbrx", "NemotronH", "LongcatFlash")
"""families whose experts' code knows no number for "no expert"."""


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds the experts of a layer."""
    return "Experts" in type(module).__name__ and any(hasattr(module, name) for name in COUNTS)


def expert_count(module: nn.Module) -> int:
    """Return the number of experts of a module that holds them."""
    return next(int(getattr(module, name)) for name in COUNTS if hasattr(module, name))


class ExpertCall(NamedTuple):
    """A call of the module of a layer's experts.

    Its output is the sum over all experts of their weight times their output.
    """

    module: Any
    x: Float[Tensor, "*tokens d_model"]
    chosen: Int[Tensor, "*tokens k"]  # the experts of each token
    weights: Float[Tensor, "*tokens k"]

    @classmethod
    def of(cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "ExpertCall":
        """Return the call with these arguments.

        Raises:
            BilensError: what was chosen, or its weights, are not among them.
        """
        inputs = {**dict(zip(("hidden_states", INDICES[0], WEIGHTS[0]), args, strict=False))}
        inputs |= kwargs
        index = next((inputs[name] for name in INDICES if name in inputs), None)
        weights = next((inputs[name] for name in WEIGHTS if name in inputs), None)
        if index is None or weights is None:
            raise BilensError(
                f"{type(module).__name__} takes {', '.join(inputs)}, expected what was chosen, as "
                f"{' or '.join(INDICES)}, and its weights"
            )
        return cls(module, inputs["hidden_states"], index, weights)

    @property
    def knows_none(self) -> bool:
        """Whether the number of experts stands for no expert in the module's code."""
        return not type(self.module).__name__.startswith(WITHOUT_NONE)

    def run(self) -> Tensor:
        """Return the output, expert by expert, in the graph of the pass that runs."""
        forward = type(self.module).forward
        output: Tensor = getattr(forward, "__wrapped__", forward)(self.module, *self[1:])
        return output

    def term(self, number: int) -> Tensor:
        """Return the weight times the output of one expert; 0 for tokens that have others."""
        is_expert = self.chosen == number
        ids = self.chosen
        if self.knows_none:
            ids = torch.where(is_expert, ids, expert_count(self.module))
        return self._replace(chosen=ids, weights=self.weights * is_expert).run()

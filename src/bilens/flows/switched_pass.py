"""A pass of two models side by side, and the change of each metric pulled back to what differs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bilens.flows.adjoints import GraphCut
from bilens.flows.fitted import Fitted, rounded_size
from bilens.flows.modules import Hook, module_hooks
from bilens.flows.rules import is_live, make_leaf
from bilens.flows.secants import forget_kept
from bilens.flows.split import fits
from bilens.flows.switches import SwitchedRules
from bilens.hooks import hooked
from bilens.memory import return_freed
from bilens.transformer import ResidualModel
from bilens.transformer.experts import is_experts
from bilens.transformer.places import Places
from bilens.transformer.running import first_input, first_output, with_input


def pulled(
    model: ResidualModel,
    rules: SwitchedRules,
    questions: Sequence[Fitted],
    ids: Int[Tensor, "texts time"],
    signs: Sequence[float],
) -> tuple[Float[Tensor, " texts"], float]:
    """Run a model on texts under rules, and pull the sum of their metrics with signs.

    Returns the metrics and the size of what they are rounded with. The adjoints are left at
    the starts. Each layer runs again when it is its turn if the graphs of all are too large.
    """
    places, cuts = model.places, list[_LayerCut]()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stream = GraphCut.of(first_input(args, kwargs))
        cuts.append(_LayerCut(module, stream, (args, kwargs), len(rules.leaves)))
        return with_input(stream.leaf.clone(), args, kwargs)

    def leave(_: nn.Module, __: Any, ___: Any, output: Any) -> Any:
        # What starts in a layer starts in its second run.
        del rules.leaves[cuts[-1].starts :]
        rules.mixes.clear()
        cuts[-1].out = make_leaf(first_output(output))
        leaf = cuts[-1].out.clone()
        several = isinstance(output, (tuple, list))
        return type(output)((leaf, *output[1:])) if several else leaf

    def start(_: nn.Module, __: object, ___: object, output: Tensor) -> Tensor | None:
        if is_live(output):
            return None
        rules.embeddings.append(make_leaf(output))
        return rules.embeddings[-1].clone()

    before, after = _hooks(places.model, rules)
    after += [(table, start) for table in (places.embed, *places.tables)]
    if not fits(model, ids):
        before += [(layer.module, enter) for layer in places.layers]
        after += [(layer.module, leave) for layer in places.layers]
    with hooked(before, after), places.context(), torch.enable_grad(), rules:
        logits = places.forward(ids)
        values = metrics(questions, logits)
    with torch.enable_grad():
        (values @ torch.tensor(signs).to(values)).backward(retain_graph=bool(cuts))
    while cuts:
        _pull(cuts.pop(), rules, places)
    forget_kept()
    # They hold the graph, which holds the rules: a cycle that only the collector would free.
    rules.mixes.clear()
    rules.experts = None
    return values.detach(), rounded_size(questions, logits.detach())


@dataclass(eq=False)
class _LayerCut:
    """A run of a layer whose graph is not kept."""

    module: nn.Module
    stream: GraphCut
    call: tuple[tuple[Any, ...], dict[str, Any]]
    starts: int  # number of leaves before it
    out: Tensor = field(init=False)  # what goes on after it


def _pull(cut: _LayerCut, rules: SwitchedRules, places: Places) -> None:
    """Run a layer again, and pull the adjoint of what goes on after it down to its stream."""
    with hooked(*_hooks(cut.module, rules)), places.context(), torch.enable_grad(), rules:
        args, kwargs = with_input(cut.stream.leaf.clone(), *cut.call)
        output = first_output(cut.module(*args, **kwargs))
    with torch.enable_grad():
        for value, adjoint in ((output, cut.out), (cut.stream.value, cut.stream.leaf)):
            if adjoint.grad is not None and value.requires_grad:
                torch.autograd.backward(value, adjoint.grad, retain_graph=True)
    forget_kept()
    rules.mixes.clear()
    return_freed()


def _hooks(module: nn.Module, rules: SwitchedRules) -> tuple[list[Hook], list[Hook]]:
    """Return the hooks by which modules have rules as a whole."""

    def is_whole(inside: nn.Module) -> bool:
        """Return whether a module has one rule; functions of numbers may differ in weights."""
        # Between both models functions have torch's own derivative.
        is_function = rules.at is None and not any(map(rules.differs, inside.parameters()))
        return is_function or is_experts(inside)

    before, after = module_hooks(module, lambda: rules)
    return [x for x in before if is_whole(x[0])], [x for x in after if is_whole(x[0])]


def metrics(
    questions: Sequence[Fitted], logits: Float[Tensor, "texts vocab"]
) -> Float[Tensor, " texts"]:
    """Return the metrics of questions of one target, given logits after a soft cap."""
    (target,) = {fitted.target for fitted in questions}
    numbers = logits if target == "logit" else logits.log_softmax(-1)
    if target == "probability":
        numbers = numbers.exp()
    tokens, shares = [], []
    most = max(len(fitted.shares) for fitted in questions)
    for fitted in questions:
        of_one = [*fitted.tokens, *fitted.minus]
        tokens.append(of_one + of_one[:1] * (most - len(of_one)))
        shares.append(fitted.shares + [0.0] * (most - len(of_one)))
    values = numbers.gather(1, torch.tensor(tokens, device=logits.device))
    return (values * torch.tensor(shares, device=logits.device, dtype=logits.dtype)).sum(-1)

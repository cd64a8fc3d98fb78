"""Two models of one architecture, and the models between them: passes of all over questions.

Questions whose texts have one length run in one batch.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from bilens.checks import check_count
from bilens.convert.adapters import Change
from bilens.errors import BilensError
from bilens.flows.fitted import Fitted
from bilens.flows.interval import Interval
from bilens.flows.switched_pass import metrics, pulled
from bilens.flows.switches import SwitchedRules, WeightPair
from bilens.transformer import ResidualModel
from bilens.transformer.experts import is_experts
from bilens.transformer.maps import working_dtype
from bilens.transformer.places import Places
from bilens.transformer.running import device_of, on_device

BATCH = 16
"""Most questions that run at once."""
POINTS = 3
"""Points of integrated gradients."""
DRAWN = 4
"""Random choices of weights, beside which a choice stands."""


class Undone(NamedTuple):
    """What some weights lose and bring, as shares of the change, in runs of the model.

    Attributes:
        weights: number of weights that are undone.
        lost: share of the change that the tuned model loses without them.
        won: share that the base model gains with only these.
    """

    weights: int
    lost: Interval
    won: Interval


@dataclass(frozen=True, eq=False)
class BothModels:
    """Two models and questions to both.

    Attributes:
        base: the base model.
        pairs: both values of each weight that differs, by name.
        questions: the questions, in the numbers of the model.
    """

    base: ResidualModel
    pairs: Mapping[str, WeightPair]
    questions: tuple[Fitted, ...]

    @cached_property
    def layers(self) -> dict[int, list[str]]:
        """Names of the weights of each layer that differ; -1 for those of no layer."""
        layers: dict[int, list[str]] = defaultdict(list)
        for name in self.pairs:
            layers[layer_of(name)].append(name)
        return dict(sorted(layers.items()))

    @cached_property
    def groups(self) -> list[list[int]]:
        """Numbers of the questions that run at once."""
        # Rows of experts are tokens of several texts, whose flows would be mixed.
        most = 1 if self._has_experts else BATCH
        alike: dict[tuple[int, str], list[int]] = defaultdict(list)
        for i, fitted in enumerate(self.questions):
            alike[len(fitted.clean), fitted.target].append(i)
        return [
            numbers[start : start + most]
            for numbers in alike.values()
            for start in range(0, len(numbers), most)
        ]

    def run(self, tuned: Iterable[str], *, second: bool = False) -> Float[Tensor, " questions"]:
        """Return the metrics of the base model with some weights of the tuned one.

        They are of the text, or with `second` of the second text.
        """
        places, values = self.base.places, torch.zeros(len(self.questions), dtype=torch.float64)
        weights = {f"model.{name}": self.pairs[name].tuned for name in tuned}
        with torch.no_grad(), places.context():
            for numbers in self.groups:
                group = [self.questions[i] for i in numbers]
                ids = torch.stack([both_ids(fitted)[int(second)] for fitted in group])
                logits = functional_call(_Runner(places), weights, (ids,))
                values[numbers] = metrics(group, logits).cpu().double()
        return values

    def side_by_side(
        self, numbers: Sequence[int]
    ) -> tuple[Float[Tensor, "2 n"], float, SwitchedRules]:
        """Run both models on some questions of one length, and pull the change of each metric.

        Returns:
            The metrics of the tuned and of the base model, the size of what they are rounded with,
            and the rules with all flows.
        """
        group = [self.questions[i] for i in numbers]
        rules = SwitchedRules(2 * len(group), self._by_number)
        ids = torch.stack([both_ids(fitted) for fitted in group], 1).flatten(0, 1)
        signs = [1.0] * len(group) + [-1.0] * len(group)
        values, size = pulled(self.base, rules, [*group, *group], ids, signs)
        return values.unflatten(0, (2, -1)).cpu().double(), size, rules

    def flows(
        self,
    ) -> tuple[
        Float[Tensor, "2 questions"],
        float,
        Float[Tensor, "questions weights"],
        Float[Tensor, " questions"],
    ]:
        """Return the metrics of both models, the flow of each weight, and of tokens and choices.

        The second value is the size of what the metrics are rounded with.
        """
        count, size = len(self.questions), 0.0
        values = torch.zeros(2, count, dtype=torch.float64)
        flows = torch.zeros(count, len(self.pairs), dtype=torch.float64)
        rest = torch.zeros(count, dtype=torch.float64)
        for numbers in self.groups:
            values[:, numbers], largest, rules = self.side_by_side(numbers)
            size = max(size, largest)
            flows[numbers] = weight_flows(rules, [*self.pairs], len(numbers))
            starts = [*rules.embeddings, *(leaf.value for leaf in rules.leaves)]
            for flow in start_flows(starts, len(numbers)):
                rest[numbers] += flow.sum(1)
        return values, size, flows, rest

    def slopes(self, at: float) -> Float[Tensor, "questions weights"]:
        """Return the derivative of each metric along the change of each weight, on the texts.

        The model is between both: `at` is 0 for the base model, 1 for the tuned one.
        """
        slopes = torch.zeros(len(self.questions), len(self.pairs), dtype=torch.float64)
        for numbers in self.groups:
            # The rules of experts know two halves, the second of which is not pulled.
            group = [self.questions[i] for i in numbers] * (1 + self._has_experts)
            rules = SwitchedRules(len(group), self._by_number, at)
            ids = torch.stack([fitted.clean for fitted in group])
            signs = [float(i < len(numbers)) for i in range(len(group))]
            pulled(self.base, rules, group, ids, signs)
            slopes[numbers] = weight_flows(rules, [*self.pairs], len(numbers))
        return slopes

    def path(self, points: int = POINTS) -> Float[Tensor, "questions weights"]:
        """Return integrated gradients over the weights, at some points of Gauss's quadrature.

        They add up to the changes on the texts within the error of the quadrature. One point is the
        gradient at the middle.
        """
        check_count("points", points)
        nodes, shares = np.polynomial.legendre.leggauss(points)
        slopes = [
            share / 2 * self.slopes((1 + node) / 2)
            for node, share in zip(nodes.tolist(), shares.tolist(), strict=True)
        ]
        return torch.stack(slopes).sum(0)

    def shapley(self, orders: int, seed: int = 0) -> Float[Tensor, "questions layers"]:
        """Measure the Shapley value of each layer's weights: a mean over random orders.

        Every second order is the one before backwards. Each takes as many runs as there are layers,
        and its values add up to the change on the text.
        """
        layers, generator = [*self.layers.values()], torch.Generator().manual_seed(seed)
        values = torch.zeros(len(self.questions), len(layers), dtype=torch.float64)
        start, order = self.run(()), list[int]()
        for turn in range(orders):
            permutation = torch.randperm(len(layers), generator=generator).tolist()
            order = order[::-1] if turn % 2 else permutation
            names: list[str] = []
            before = start
            for i in order:
                names += layers[i]
                after = self.run(names)
                values[:, i] += (after - before) / orders
                before = after
        return values

    def undo(
        self, k: int, flows: Float[Tensor, "questions weights"], seed: int = 0
    ) -> dict[str, Undone]:
        """Measure what weights lose and bring, on the texts, by what chose them.

        These are the k weights with the largest mean flow in the direction of the change; and as
        many by rivals: integrated gradients, the gradient at the middle, the size of the difference
        over the weight's own, and random choice, a mean over a few.

        Raises:
            BilensError: there are fewer weights, or no answer changes on its text.
        """
        check_count("k", k, len(self.pairs), "the number of weights that differ")
        names = [*self.pairs]
        with_all, with_none = self.run(names), self.run(())
        changes = with_all - with_none
        if not changes.any():
            raise BilensError(
                "The models answer the same on this text, so that no share of a change is lost"
            )
        signs, generator = changes.sign(), torch.Generator().manual_seed(seed)
        strengths = {
            "flow": [signs @ flows],
            "integrated gradients": [signs @ self.path()],
            "gradient at the middle": [signs @ self.path(1)],
            "size of the difference": [
                torch.tensor([pair.relative_size for pair in self.pairs.values()])
            ],
            "random choice": [torch.rand(len(names), generator=generator) for _ in range(DRAWN)],
        }
        undone = {}
        for by, rankings in strengths.items():
            losses, gains = torch.zeros_like(changes), torch.zeros_like(changes)
            for strength in rankings:
                selection = {names[i] for i in strength.topk(k).indices.tolist()}
                without = self.run(name for name in names if name not in selection)
                losses += signs * (with_all - without) / len(rankings)
                gains += signs * (self.run(selection) - with_none) / len(rankings)
            shares = (Interval.of(rises, changes.abs()) for rises in (losses, gains))
            undone[by] = Undone(k, *shares)
        return undone

    @cached_property
    def _has_experts(self) -> bool:
        return any(map(is_experts, self.base.model.modules()))

    @cached_property
    def _by_number(self) -> dict[int, WeightPair]:
        parameters = dict(self.base.model.named_parameters())
        return {id(parameters[name]): pair for name, pair in self.pairs.items()}


class _Runner(nn.Module):
    """A model whose forward pass is that of its places, so that weights can be put in its place."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.model, self.forward = places.model, places.forward


def weight_flows(
    rules: SwitchedRules, names: Sequence[str], questions: int
) -> Float[Tensor, "questions weights"]:
    """Return the flow of each weight in each question, after the backward pass.

    What follows from several weights counts for each of them in equal shares.
    """
    flows = torch.zeros(questions, len(names), dtype=torch.float64)
    numbers = {name: i for i, name in enumerate(names)}
    for label, gradient in of_weights(rules, questions):
        parts = label.split("+")
        for name in parts:
            flows[:, numbers[name]] += gradient.reshape(questions, -1).sum(1) / len(parts)
    return flows


def of_weights(rules: SwitchedRules, questions: int) -> Iterable[tuple[str, Tensor]]:
    """Yield the names and the flow of each use of weights, its first axis of questions."""
    for name, uses in rules.linear.items():
        for use in uses:
            yield name, use.tokens
    for name, switches in rules.switches.items():
        for switch in switches:
            if (slope := switch.grad) is not None:
                rows = len(slope) * questions // rules.texts
                yield name, slope[:rows].cpu().double()


def start_flows(starts: Iterable[Tensor], questions: int) -> Iterable[Float[Tensor, "questions _"]]:
    """Yield the flow of each start that differs between both halves, by question."""
    for start in starts:
        if start.grad is not None:
            first, second = start.detach().chunk(2)
            flow = (start.grad.chunk(2)[0] * (first - second)).cpu().double()
            yield flow.reshape(questions, -1)


def layer_of(name: str) -> int:
    """Return the number of the layer that a parameter belongs to, or -1."""
    numbers = [part for part in name.split(".")[1:-1] if part.isdigit()]
    return int(numbers[0]) if numbers else -1


def both_ids(fitted: Fitted) -> Int[Tensor, "2 time"]:
    """Return the tokens of the text, and of the second text or else the same."""
    if fitted.embeddings is not None:
        raise BilensError("against holds embeddings, expected a text of as many tokens")
    return torch.stack([fitted.clean, fitted.clean if fitted.corrupt is None else fitted.corrupt])


def weight_pairs(base: nn.Module, tuned: nn.Module | Mapping[str, Change]) -> dict[str, WeightPair]:
    """Return the weights that differ, by name.

    Weights of models stay what and where they are, such as 16 bits in a file: passes widen one at a
    time. The tuned weights of an adapter are in memory.

    Args:
        base: the base model.
        tuned: the other model, or changes by the name of the parameter, as `load_adapter` returns
            them: a weight, or factors A and B of tuned = base + B A.

    Raises:
        BilensError: a weight is in no memory and no file, or a buffer differs.
    """
    pairs: dict[str, WeightPair] = {}
    if isinstance(tuned, Mapping):
        weights = dict(base.named_parameters())
        for name, change in tuned.items():
            weight = _stored(weights[name])
            if isinstance(change, Tensor):
                pairs[name] = WeightPair(name, change.to(weight.detach()), weight)
                continue
            whole = weight.detach().to(device_of(weight), working_dtype(weight.dtype))
            A, B = (factor.to(whole) for factor in change)
            pairs[name] = WeightPair(name, whole + B @ A, weight, (A, B))
        return pairs
    for kind, ours, theirs in _alike(base, tuned):
        for name, value in ours.items():
            other = theirs[name]
            if value.is_meta or other.is_meta:
                raise BilensError(f"{name} is in no memory and no file, expected a whole model")
            wide = torch.promote_types(value.dtype, other.dtype)
            if torch.equal(value.detach().to(wide), other.detach().to(value.device, wide)):
                continue
            if kind == "buffer":
                raise BilensError(f"tuned and base differ in the buffer {name}, which is no weight")
            # Passes widen and move weights only of a base model that is stored so.
            device = other.device if hasattr(value, "used_on") else value.device
            tuned_weight = on_device(other.detach().to(device, wide), device_of(value))
            pairs[name] = WeightPair(name, tuned_weight, _stored(value))
    return pairs


def check_alike(base: nn.Module, tuned: nn.Module) -> None:
    """Raise BilensError unless both models have parameters and buffers of the same shapes."""
    for kind, ours, theirs in _alike(base, tuned):
        if names := sorted(ours.keys() ^ theirs.keys()):
            has = "base" if names[0] in ours else "tuned"
            raise BilensError(
                f"base is a {type(base).__name__}, tuned a {type(tuned).__name__}, and only {has} "
                f"has the {kind} {names[0]}; expected models of one architecture"
            )
        for name, value in ours.items():
            if value.shape != theirs[name].shape:
                raise BilensError(
                    f"tuned has {name} of shape {tuple(theirs[name].shape)}, base "
                    f"{tuple(value.shape)}; expected models of one architecture"
                )


def _alike(
    base: nn.Module, tuned: nn.Module
) -> tuple[tuple[str, dict[str, Tensor], dict[str, Tensor]], ...]:
    """Return the parameters of both models by name, and their buffers."""
    return (
        ("parameter", dict(base.named_parameters()), dict(tuned.named_parameters())),
        ("buffer", dict(base.named_buffers()), dict(tuned.named_buffers())),
    )


def _stored(weight: Tensor) -> nn.Parameter:
    """Return a weight as passes take it: a constant, in the numbers that it is stored in."""
    return on_device(weight.detach(), device_of(weight))

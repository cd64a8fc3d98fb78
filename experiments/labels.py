"""Labels: whether the tokens that a node of a flow raises are raised by it in other texts too.

The 20 strongest nodes of the contrastive flows of some pairs of a task are named by the ten tokens
that they raise most, as measured (`bilens.flows.measure`). On other pairs of the task the same
head or MLP, at the same position from the end, raises tokens too; the ten that it raises in most of
them are what it does. The score of a label is the share of its tokens that are among these.

Beside it are the old label, the ten tokens whose unembedding has the largest cosine with what the
node writes, and chance: what another of these nodes does.

Small: SmolLM2, two tasks, three pairs to label and three others. Paper: all models that are
installed, five tasks, ten and ten; 20 minutes of processor time for SmolLM2.
"""

import statistics
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch.nn import functional

from bilens.analysis import Table
from bilens.flows import Flow, Node, Question, flow, measure
from bilens.transformer import ResidualModel
from experiments.context import Outcome, RecipeContext
from experiments.pretrained import open_models
from experiments.results import Row
from experiments.tasks import questions_of

NODES, TOKENS = 20, 10
TASKS = ("agreement", "gender", "tense", "quantity", "ioi")

Place = tuple[Any, ...]
"""Kind, layer and number of a part, and the positions that it writes and attends to."""


class Labelled(NamedTuple):
    """The measured label of a node, and its label by cosine."""

    measured: tuple[str, ...]
    nearest: tuple[str, ...]


def run(context: RecipeContext) -> Outcome:
    """Measure the labels of all models that are installed."""
    count = context.choose(3, 10)
    numbers: dict[str, Any] = {}
    parts = []
    for name, model in open_models(context.models):
        if numbers and context.scale == "small":
            break
        asked = questions_of(model, 2 * count)
        rows = [
            {"task": task, **overlaps(model, asked[task][:count], asked[task][count:])}
            for task in TASKS[: context.choose(2, len(TASKS))]
        ]
        numbers[name] = rows
        parts.append(Table(pd.DataFrame(rows), f"{name}: share of a label's tokens that recur"))
    settings = {"pairs": count, "models": list(numbers), "low and high": "range of tasks"}
    return Outcome(numbers, parts=parts, rows=_rows(numbers), settings=settings)


def _rows(numbers: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Return the mean shares of each model, with their range over tasks."""
    rows = []
    for name, tasks in numbers.items():
        for kind, key, others in (
            ("labels of nodes", "measured", {"nearest tokens": "nearest tokens",
                                             "another node's": "chance"}),
        ):  # fmt: skip
            of_tasks = [row[key] for row in tasks]
            rows.append(
                Row(
                    f"{name}, {kind}: share of tokens that recur",
                    statistics.fmean(of_tasks),
                    min(of_tasks),
                    max(of_tasks),
                    len(of_tasks),
                    baselines={
                        other: statistics.fmean(row[beside] for row in tasks)
                        for other, beside in others.items()
                    },
                )
            )
    return rows


def overlaps(
    model: ResidualModel, questions: list[Question], others: list[Question]
) -> dict[str, float]:
    """Return the mean scores of labels of some questions on others."""
    does = typical([labels(model, question) for question in others])
    scores: dict[str, list[float]] = defaultdict(list)
    generator = torch.Generator().manual_seed(0)
    places = sorted(does, key=str)
    for question in questions:
        for place, label in labels(model, question).items():
            if place not in does:
                continue
            drawn = places[int(torch.randint(len(places), (), generator=generator))]
            scores["measured"].append(_share(label.measured, does[place]))
            scores["nearest tokens"].append(_share(label.nearest, does[place]))
            scores["chance"].append(_share(label.measured, does[drawn]))
    means = {name: statistics.fmean(values) for name, values in scores.items()}
    return {**means, "labels": len(scores["measured"])}


def _share(tokens: tuple[str, ...], among: set[str]) -> float:
    return len(among.intersection(tokens)) / max(len(tokens), 1)


def typical(of_questions: list[dict[Place, Labelled]]) -> dict[Place, set[str]]:
    """Return the tokens that each node raises in most questions, of nodes in at least half."""
    counts: dict[Place, Counter[str]] = defaultdict(Counter)
    seen: Counter[Place] = Counter()
    for of_question in of_questions:
        for place, label in of_question.items():
            seen[place] += 1
            counts[place].update(label.measured)
    return {
        place: {token for token, _ in counts[place].most_common(TOKENS)}
        for place, times in seen.items()
        if 2 * times >= len(of_questions)
    }


def labels(model: ResidualModel, question: Question) -> dict[Place, Labelled]:
    """Return the labels of the strongest nodes."""
    of_text = flow(
        model,
        question.text,
        question.token,
        minus=question.minus,
        against=question.against,
        ablate=0,
    )
    parts = [node for node in of_text.nodes if node.is_removable][:NODES]
    effects = measure(model, of_text, parts, tokens=TOKENS)
    result = {}
    for node, effect in zip(parts, effects, strict=True):
        # Positions are counted from the end, since texts of a task differ in length.
        at = [None if p is None else p - len(of_text.ids) for p in (node.position, node.source)]
        place = (node.kind, node.layer, node.number, *at)
        result[place] = Labelled(effect.raises, nearest(model, of_text, node))
    return result


def nearest(model: ResidualModel, of_text: Flow, node: Node) -> tuple[str, ...]:
    """Return the tokens whose unembedding has the largest cosine with what a node writes."""
    (written,) = of_text.written([node])
    if node.kind == "head":
        out = model.layer(node.layer or 0).heads.weights().out
        written = written.to(out) @ out[node.number or 0]
    W, _ = model.modules.logit_weights()
    cosines = functional.normalize(written.to(W), dim=0) @ functional.normalize(W, dim=0)
    tokenizer: Any = model.tokenizer
    texts = [text.strip() for text in tokenizer.batch_decode(cosines.topk(TOKENS).indices[:, None])]
    # As words of labels are written, of which some are in quotes.
    words = (text if any(map(str.isalnum, text)) else f'"{text}"' for text in texts)
    return tuple(dict.fromkeys(words))

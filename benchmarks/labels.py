"""How well labels of nodes agree with what removal does to the next tokens.

`python -m benchmarks.labels --write` reads pairs of texts of seven tasks (`experiments/pairs.py`)
in SmolLM2 and Gemma 3, after `make test-models`, and writes `results/labels.json`; `--pairs` is
their number of each task. The twenty strongest heads and MLPs of each flow are exchanged between
both texts, in both directions, and all logits are read. Beside the lens, which carries a node's
change forward by secants, are the mean of both texts' Jacobians, the logit lens (the change of the
stream after the node's own layer, at its position, read by the last norm and the unembedding), and
the two directions of the exchange with each other.
"""

import argparse
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from experiments.pairs import Pair, pairs_of
from experiments.results import Recording, Row
from tests.real.packages import GEMMA3, SMOLLM2, gguf_file
from torch import Tensor

import bilens
from bilens.flows import Flow, Node, Question, adjoints_of, flow
from bilens.flows.ablation import run_without
from bilens.flows.labels import token_scores
from bilens.flows.tangents import Start, Tangents
from bilens.flows.token_lens import LogitChanges, starts_of
from bilens.transformer import ResidualModel

NODES, TOP = 20, 10
OPENED: dict[int, ResidualModel] = {}
"""The model, which processes share."""


def agreement(scores: Tensor, measured: Tensor) -> float:
    """Return the share of the ten most raised tokens that two scores have in common, the mean."""
    shares = [
        torch.isin(a.topk(TOP).indices, b.topk(TOP).indices).double().mean()
        for a, b in zip(scores, measured, strict=True)
    ]
    return float(torch.stack(shares).mean())


def exchanged(model: ResidualModel, through: Flow, nodes: list[Node]) -> list[Tensor]:
    """Return scores of tokens by exchanging nodes, from the first text and into the second."""
    runs = run_without(model, through, [[node.where] for node in nodes])
    logits = [[model.places.logits(x[:, -1]) for x in run] for run in runs]
    return [token_scores(present, absent) for present, absent in logits]


def jacobian(model: ResidualModel, pair: Pair, starts: list[Start]) -> Tensor:
    """Return the changes of all logits by the mean of both texts' Jacobians."""
    total = torch.zeros(())
    for text in (pair.text, pair.against):
        # Between a text and itself secants are derivatives.
        asked = Question(text, pair.token, pair.minus, text)
        tangents = Tangents(adjoints_of(model, [asked]))
        total = total + tangents.logits(tangents.carry(starts), 1)[1][0]
    return total / 2


def directly(tangents: Tangents, starts: list[Start]) -> Tensor:
    """Return the changes of all logits by the logit lens."""
    rows = []
    for start in starts:
        after = tangents.carry([start], start.layer + 1)
        rows.append(after[:, [start.position]])
    return tangents.logits(torch.cat(rows), 1)[1][0]


def of_pair(pair: Pair) -> dict[str, float]:
    """Return the agreement of each method with the exchange, and the error of sums."""
    model = OPENED[0]
    options: dict[str, Any] = {"minus": pair.minus, "against": pair.against}
    through = flow(model, pair.text, pair.token, labels=0, **options)
    nodes = [node for node in through.nodes if node.kind in ("head", "mlp")][:NODES]
    tangents = Tangents(through.adjoints)
    starts = starts_of(through, nodes, tangents)
    logits, changes = tangents.logits(tangents.carry(starts), 1)
    noising, denoising = exchanged(model, through, nodes)
    measured = (noising + denoising).cpu()

    def score(by: Tensor) -> float:
        return agreement(LogitChanges(logits, by[None]).scores(model.places), measured)

    middle = model.n_layers // 2
    stream = tangents.adjoints.change(tangents.adjoints.graphs[middle].stream.leaf)[0]
    cut = [Start(middle, "stream", position, row) for position, row in enumerate(stream)]
    total = tangents.logits(tangents.carry(cut), 1)[1][0].sum(0)
    change = logits[0, 0] - logits[0, 1]
    numbers = {
        "error": float((total - change).abs().max() / change.abs().max()),
        "lens": score(changes[0]),
        "logit lens": score(directly(tangents, starts)),
        "two directions": agreement(noising, denoising),
    }
    return numbers | {"mean Jacobian": score(jacobian(model, pair, starts))}


def main() -> None:
    """Print each number, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    recording = Recording() if given.write else None
    rows = []
    for name, package in (("SmolLM2", SMOLLM2), ("Gemma 3", GEMMA3)):
        model = bilens.load(gguf_file(package), dtype=torch.float32)
        assert isinstance(model, ResidualModel)
        found = defaultdict(list)
        OPENED[0] = model
        with ProcessPoolExecutor(given.jobs, get_context("fork")) as pool:
            for numbers in pool.map(of_pair, pairs_of(model, given.pairs)):
                for method, value in numbers.items():
                    found[method].append(value)
                print(name, {x: round(y, 5) for x, y in numbers.items()}, flush=True)
        errors = found.pop("error")
        claim = f"{name}: error of the sum over the middle layer's stream, all tokens"
        rows.append(Row.of_range(claim, errors))
        lens = found.pop("lens")
        ahead = [ours - other for ours, other in zip(lens, found["mean Jacobian"], strict=True)]
        means = {method: sum(values) / len(values) for method, values in found.items()}
        claim = f"{name}: ten most raised tokens of a node, shared by the lens and the exchange"
        rows.append(Row.of_shares(claim, lens, baselines=means))
        rows.append(Row.of(f"{name}: the same, the lens less the mean Jacobian, by pair", ahead))
        worst = {method: min(values) for method, values in found.items()}
        rows.append(Row(f"{name}: the same, the worst pair", min(lens), baselines=worst))
        for row in rows[-4:]:
            print(row, flush=True)
    if recording is not None:
        recording.write(
            "labels",
            title="Labels of nodes, beside what removal does to the next tokens",
            command=f"python -m benchmarks.labels --pairs {given.pairs} --write",
            rows=rows,
            settings={
                "models": "SmolLM2-135M and Gemma 3 270M in float32",
                "pairs of each of 7 tasks": given.pairs,
                "nodes": NODES,
                "tokens": TOP,
                "low and high of errors": "the range over pairs",
            },
        )


if __name__ == "__main__":
    main()

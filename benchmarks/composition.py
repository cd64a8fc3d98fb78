"""Memory and time of the composition scores of all heads, at the widths of a Llama of 1.24 billion.

The model has fewer layers and hidden units, as memory beside its cores does not grow with them.
"""

import time
from functools import partial

import torch

from benchmarks.clock import machine
from benchmarks.subprocess_memory import peak_above, random_model
from bilens.read.language import composition_scores

SIZES = {"d_model": 2048, "n_heads": 32, "n_layers": 3, "d_hidden": 2048, "vocab_size": 256}


def main() -> None:
    """Print the most memory above the model's, and the seconds of the processor."""
    torch.set_num_threads(1)
    print(machine())
    model = random_model(**SIZES, n_ctx=64)
    start = time.process_time()
    above, scores = peak_above(partial(composition_scores, model))
    took = time.process_time() - start
    print(f"{scores.scores.shape} scores: {above:.0f} MB above the model, {took:.1f} s")


if __name__ == "__main__":
    main()

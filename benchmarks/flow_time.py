"""Time of a flow of SmolLM2 between two texts over a forward and a backward pass of one of them.

`python -m benchmarks.flow_time` takes a minute of the processor, after `make test-models`. The
backward pass is that of a logit to the embeddings. Beside it is the time of the labels of 20 nodes
over that of the flow. All take turns. Times are the processor's, or wall time on a GPU. With
`--llama 2048 8192 16` the model is a Llama with random weights, and these are its width, hidden
units and layers.
"""

import argparse
import statistics
from functools import partial
from typing import Any

import torch
from tests.real.packages import SMOLLM2, gguf_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import bilens
from benchmarks.clock import machine, spent
from bilens.read.flow import flow
from bilens.residual import ResidualModel

TOKEN, VOCAB = 5, 20_000


def both_ways(model: ResidualModel, ids: Tensor) -> None:
    """Run a model on a text, and its logit back to the embeddings."""
    with torch.enable_grad():
        x = model.parts.embed.rows(ids)[None].requires_grad_()
        logit = model.model(inputs_embeds=x, use_cache=False).logits[0, -1, TOKEN]
        torch.autograd.grad(logit, x)


def opened(sizes: list[int] | None) -> ResidualModel:
    """Return SmolLM2, or a Llama of these sizes with random weights, on a GPU if present."""
    model: Any
    if sizes is None:
        model = bilens.load(gguf_file(SMOLLM2), dtype=torch.float32)
    else:
        width, hidden, depth = sizes
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=width,
            intermediate_size=hidden,
            num_hidden_layers=depth,
            num_attention_heads=width // 64 or 1,
            num_key_value_heads=width // 256 or 1,
        )
        model = ResidualModel(LlamaForCausalLM(config).requires_grad_(False))
    assert isinstance(model, ResidualModel)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    """Print the ratio for each length, the median over turns and its range."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--llama", type=int, nargs=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    model = opened(given.llama)
    direction, generator = model.direction(TOKEN), torch.Generator().manual_seed(0)
    for length in given.tokens:
        ids = torch.randint(1000, VOCAB, (length,), generator=generator).to(model.device)
        other = ids.clone()
        other[length // 4] = 500
        calls = (
            partial(flow, model, ids, direction, against=other, ablate=0),
            partial(both_ways, model, ids),
            partial(flow, model, ids, direction, against=other, ablate=20),
        )
        turns = [[spent(call) for call in calls] for _ in range(given.turns + 1)][1:]
        ratios = [of_flow / of_passes for of_flow, of_passes, _ in turns]
        labels = [labelled / of_flow - 1 for of_flow, _, labelled in turns]
        of_flow, of_passes, _ = (statistics.median(column) for column in zip(*turns, strict=True))
        print(
            f"{length:4} tokens {of_flow:6.2f} s over {of_passes:5.2f} s: "
            f"{statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f}); labels "
            f"{statistics.median(labels):5.2f} ({min(labels):.2f} to {max(labels):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Cost and exactness of flows between two texts, over a forward and a backward pass of both.

`python -m benchmarks.flow_time --write` takes three minutes, after `make test-models`, and
writes `results/flow_time.json`. The backward pass is that of the change of a logit to the
embeddings. Flows and passes take turns. Times are the processor's, of one thread, or wall time on a
GPU. With `--llama 2048 8192 16` the model is a Llama with random weights, and these are its width,
hidden units and layers; nothing is written.
"""

import argparse
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from statistics import median
from typing import Any

import torch
from experiments.results import Recording, Row
from tests.real.packages import GEMMA3, SMOLLM2, gguf_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import bilens
from benchmarks.clock import spent
from benchmarks.flow_memory import TEXTS
from bilens.flows import Question, adjoints_of, diffs, flow
from bilens.transformer import ResidualModel

TOKEN, VOCAB, NODES, LENGTH, TOGETHER = 5, 20_000, 20, 8, 4


def both_ways(model: ResidualModel, texts: Tensor) -> None:
    """Run a model on texts, and a logit of each back to the embeddings."""
    with torch.enable_grad():
        x = model.modules.embed.rows(texts).requires_grad_()
        logits = model.model(inputs_embeds=x, use_cache=False).logits[:, -1, TOKEN]
        torch.autograd.grad(logits.sum(), x)


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


def ratios(model: ResidualModel, length: int, turns: int) -> list[list[float]]:
    """Return the time over both passes in each turn: of a flow, and of one with labelled nodes."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, VOCAB, (length,), generator=generator).to(model.device)
    other = ids.clone()
    other[length // 4] = 500
    asked = partial(flow, model, ids, model.direction(TOKEN), against=other)
    calls: list[Callable[[], Any]] = [partial(both_ways, model, torch.stack([ids, other]))]
    calls += [partial(asked, labels=count) for count in (0, NODES)]
    columns: list[list[float]] = [[], []]
    for _ in range(turns):
        passes, *of_flows = (spent(call) for call in calls)
        for column, taken in zip(columns, of_flows, strict=True):
            column.append(taken / passes)
    return columns


def batch_ratios(model: ResidualModel, turns: int) -> list[float]:
    """Return the time of the adjoints of a few questions over both passes of all, in each turn.

    What follows of a flow are products of them with the changes.
    """
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(1000, VOCAB, (TOGETHER, LENGTH), generator=generator).to(model.device)
    others = texts.clone()
    others[:, LENGTH // 4] = 500
    pairs = zip(texts, others, strict=True)
    asked = [Question(first, f"[{TOKEN}]", against=second) for first, second in pairs]
    passes = partial(both_ways, model, torch.cat([texts, others]))
    return [
        spent(lambda: [*adjoints_of(model, asked).layers()]) / spent(passes) for _ in range(turns)
    ]


def diff_ratios(model: ResidualModel, count: int, turns: int) -> list[list[float]]:
    """Return the time of what tuning changed, in each turn, and of it with its checks.

    It is over the passes of each model on its own. All weights of the layers differ, and the
    questions have 8 tokens each.
    """
    other = deepcopy(model.model)
    generator = torch.Generator().manual_seed(0)
    for name, weight in other.named_parameters():
        if "layers." in name:
            weight.data *= 1.01
    texts = torch.randint(1000, VOCAB, (count, LENGTH), generator=generator)
    questions = [Question(ids, f"[{TOKEN}]") for ids in texts]
    tuned = ResidualModel(other, model.tokenizer)
    whole = partial(diffs, model, tuned, questions)
    models = whole().models
    calls: list[Callable[[], Any]] = [partial(both_ways, x, texts) for x in (model, tuned)]
    calls += [models.flows, whole]
    columns: list[list[float]] = [[], []]
    for _ in range(turns):
        base_pass, tuned_pass, *taken = (spent(call) for call in calls)
        for column, seconds in zip(columns, taken, strict=True):
            column.append(seconds / (base_pass + tuned_pass))
    return columns


def error(package: str) -> float:
    """Return by how much the flows of tokens miss the change of a logit, over the change."""
    model = bilens.load(gguf_file(package), dtype=torch.float32)
    assert isinstance(model, ResidualModel)
    asked = partial(flow, model, TEXTS[0], " are", minus=" is", against=TEXTS[1], labels=0)
    through = asked()
    return abs(float(through.embeddings.double().sum()) / through.value - 1)


def main() -> None:
    """Print each number, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--llama", type=int, nargs=3)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    recording = Recording() if given.write and given.llama is None else None
    model = opened(given.llama)
    rows = []
    ratios(model, given.tokens[0], 1)
    for length in given.tokens:
        columns = ratios(model, length, given.turns)
        for column, name in zip(columns, ("", f", {NODES} nodes labelled"), strict=True):
            claim = f"flow of {length} tokens over both passes of both texts{name}"
            rows.append(Row.of_range(claim, column))
            print(rows[-1], flush=True)
    claim = f"adjoints of {TOGETHER} questions of {LENGTH} tokens over both passes of all texts"
    rows.append(Row.of_range(claim, batch_ratios(model, given.turns)))
    print(rows[-1], flush=True)
    for count in (1, 8) if given.llama is None else ():
        alone, checked = diff_ratios(model, count, given.turns)
        claim = f"flows of the weights of two models over passes of both, {count} questions"
        beside = {"with runs that check them": median(checked)}
        rows.append(Row.of_range(claim, alone, baselines=beside))
        print(rows[-1], flush=True)
    if given.llama is None:
        for name, package in (("SmolLM2", SMOLLM2), ("Gemma 3", GEMMA3)):
            rows.append(Row(f"error of the sum, relative, {name} in float32", error(package)))
            print(rows[-1], flush=True)
    if recording is not None:
        recording.write(
            "flow_time",
            title="Time and exactness of flows between two texts",
            command="python -m benchmarks.flow_time --write",
            rows=rows,
            settings={
                "model": "SmolLM2-135M in float32",
                "of the last row": "Gemma 3 270M in float32",
                "tokens": given.tokens,
                "labelled": NODES,
                "questions to two models": [1, 8],
                "questions in one batch": TOGETHER,
                "rows": "median and range of the turns",
            },
        )


if __name__ == "__main__":
    main()

"""What a flow's checks let through and what they refuse, and what flows hold, move and cost.

`python -m benchmarks.checks --write` takes some minutes on two cores, after `make test-models`, and
writes `results/checks.json`. Parts run side by side; times are the processor's. Errors are planted
into the reading of each model, one at a time: its logits are scaled, the output of one head is, or
the scores of its eager attention. A flow should refuse each, and refuse nothing for rounding.
"""

import copy
import gc
import itertools
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import transformers
from experiments.results import Recording, Row
from tests.families import DAILY, FAMILIES, family_view
from tests.flows.test_precision import Widened, made
from tests.real.packages import GEMMA3, SMOLLM2, gguf_file
from torch import Tensor

import bilens
from benchmarks.clock import spent
from benchmarks.flow_memory import resident
from bilens.errors import BilensError
from bilens.flows import adjoints, audit, flow
from bilens.flows.rules import RULES
from bilens.transformer import Pass, ResidualModel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOGITS, HEAD, SCORES = 1.005, 1.005, 1.02
"""Factors of what is planted."""
TEXTS = (
    ("The capital of Argentina is", "The capital of Australia is"),
    ("My favourite city is ", "My favourite food is "),
    ("One two three ", "One two four "),
    ("The keys to the cabinet ", "The key to the cabinet "),
)
TOKENS = (
    *(" the", " a", " city", " are", ",", " Paris", " food", " cabinet"),
    *(" of", " five", " New", " is", " old", " and", ".", " in"),
)
ANSWERS = (
    *("Buenos Aires", " Buenos Aires", " New York", "\n\nThe", " a city", " the keys"),
    *(" five six", " is open", " in the old", ", but", " and the", " of all", " not at all"),
    *(" an apple", " red and blue", " fish and chips", " twenty one", " of the house"),
)
EVERY = 10
"""Of the heads of SmolLM2 one of so many is scaled."""
SMALL = [name for name in DAILY if name in FAMILIES] + ["mixtral"]


def opened(package: str) -> ResidualModel:
    """Return a real model in float32."""
    model = bilens.load(gguf_file(package), dtype=torch.float32)
    assert isinstance(model, ResidualModel)
    return model


# Planted errors.


@contextmanager
def scaled_logits(view: ResidualModel) -> Iterator[None]:
    """Scale the logits in the view of a model."""
    modules = replace(view.modules, logit_scale=LOGITS * view.modules.logit_scale)
    places = replace(view.places, modules=modules)
    with patch.multiple(view, modules=modules, places=places):
        yield


@contextmanager
def scaled_head(view: ResidualModel, layer: int, head: int) -> Iterator[None]:
    """Scale the output of one head of one layer in the pass under rules."""
    own, calls = adjoints._cut, itertools.count()

    def cut(x: Tensor, *others: Any) -> Any:
        # Each layer is cut at its heads and at its MLP.
        if next(calls) == 2 * layer:
            factors = torch.ones(view.places.n_heads).to(x)
            factors[head] = HEAD
            x = x * factors.repeat_interleave(x.shape[-1] // len(factors))
        return own(x, *others)

    with patch.object(adjoints, "_cut", cut):
        yield


@contextmanager
def scaled_scores() -> Iterator[None]:
    """Scale the scores that eager attention takes the softmax of, of all layers."""
    own = RULES["softmax"]

    def softmax(mode: Any, func: Any, x: Tensor, *args: Any, **others: Any) -> Any:
        return own(mode, func, SCORES * x, *args, **others)

    with patch.dict(RULES, softmax=softmax):
        yield


def is_refused(read: Callable[[], Any]) -> bool:
    """Return whether a reading is refused by a check."""
    try:
        read()
    except BilensError:
        return True
    return False


def plants(view: ResidualModel, read: Callable[[], Any], every: int = 1) -> dict[str, list[bool]]:
    """Return whether each planted error is refused, of the heads one of `every`."""
    found: dict[str, list[bool]] = {"logits": [], "head": [], "scores": []}

    def note(kind: str, plant: AbstractContextManager[None]) -> None:
        # As of a model that was not compared before.
        audit._compared.clear()
        with plant:
            found[kind].append(is_refused(read))

    read()
    note("logits", scaled_logits(view))
    usual = view.model.config._attn_implementation
    heads = itertools.product(range(view.n_layers), range(view.places.n_heads))
    for layer, head in itertools.islice(heads, 0, None, every):
        note("head", scaled_head(view, layer, head))
    view.model.set_attn_implementation("eager")
    read()
    note("scores", scaled_scores())
    view.model.set_attn_implementation(usual)
    return found


def small_families(dtype: torch.dtype) -> Iterator[tuple[ResidualModel, Callable[[], Any]]]:
    """Yield small models of families of transformers with a flow."""
    for name in SMALL:
        view = family_view(name, dtype=dtype)
        first = torch.tensor([5, 6, 7, 8, 9])
        second = torch.tensor([5, 11, 7, 8, 9])
        yield view, partial(flow, view, first, 11, minus=12, against=second, labels=0)


def planted() -> list[Row]:
    """Return how many planted errors are let through: of small families, and of a real model."""
    rows = []
    for dtype in DTYPES:
        sums: dict[str, list[bool]] = {"logits": [], "head": [], "scores": []}
        for view, read in small_families(dtype):
            for name, refused in plants(view, read).items():
                sums[name] += refused
        rows += let_through(f"small families, {str(dtype).removeprefix('torch.')}", sums)
    view = opened(SMOLLM2)
    first, second = TEXTS[0]
    read = partial(flow, view, first, " the", minus=" a", against=second, labels=0)
    sums = plants(view, read, EVERY)
    return rows + let_through("SmolLM2, float32", sums)


def let_through(where: str, refused: dict[str, list[bool]]) -> list[Row]:
    """Return a row for each kind of planted error."""
    words = {
        "logits": "logits times 1.005",
        "head": "output of one head times 1.005",
        "scores": "scores of eager attention times 1.02",
    }
    return [
        Row(f"{where}: {words[name]}, let through", found.count(False), n=len(found))
        for name, found in refused.items()
    ]


# Refusals for rounding.


def refused(package: str, name: str, n_tokens: int, n_answers: int) -> list[Row]:
    """Return how many flows of a real model are refused for rounding, by what is explained."""
    view, rows = opened(package), []
    for target in ("log-probability", "probability"):
        asked = list(itertools.product(TEXTS, TOKENS))[:: 64 // n_tokens]
        read = [
            partial(flow, view, a, token, against=b, target=target, labels=0)
            for (a, b), token in asked[:n_tokens]
        ]
        count = sum(map(is_refused, read))
        rows.append(Row(f"{name}, {target}: refused for rounding", count, n=len(read)))
    answers = list(itertools.product(TEXTS, ANSWERS))[:: 72 // n_answers][:n_answers]
    read = [partial(flow, view, a, answer, against=b, labels=0) for (a, b), answer in answers]
    count = sum(map(is_refused, read))
    rows.append(Row(f"{name}, answers of several tokens: refused for rounding", count, n=len(read)))
    return rows


# What flows hold, move and cost.


def held() -> list[Row]:
    """Return the memory that each of some kept flows of SmolLM2 holds, and whether it is copied."""
    view, count = opened(SMOLLM2), 12
    text = "The {} to the old wooden cabinet in the corner of the small room"
    first, second = text.format("keys"), text.format("key")
    read = partial(flow, view, first, " are", minus=" is", against=second, labels=0)
    again = read()
    gc.collect()
    start, kept = resident(), []
    for _ in range(count):
        kept.append(read())
    gc.collect()
    each = (resident() - start) / count
    same = [pickle.loads(pickle.dumps(again)), copy.deepcopy(again)]
    works = sum(torch.equal(x.heads, again.heads) for x in same)
    return [
        Row("a kept flow of SmolLM2, 14 tokens", each, n=count, unit="MiB"),
        Row("copies of a flow, by pickle and deepcopy, that are the flow", works, n=len(same)),
    ]


def moved() -> list[Row]:
    """Return numbers widened in a flow over those of the weights that it uses, in bfloat16."""
    model: Any = made("qwen3_moe", torch.bfloat16, num_experts=128, vocab_size=64)
    view, used = ResidualModel(model), set[tuple[int, int]]()
    first = torch.randint(64, (60,), generator=torch.Generator().manual_seed(0))
    second = first.clone()
    second[20] = (second[20] + 1) % 64
    handles = []
    for number, layer in enumerate(model.model.layers):

        def note(_: Any, args: Any, number: int = number) -> None:
            used.update((number, int(expert)) for expert in args[1].flatten())

        handles.append(layer.mlp.experts.register_forward_pre_hook(note))
    with torch.no_grad():
        for ids in (first, second):
            model(ids[None])
    for handle in handles:
        handle.remove()
    each = sum(weight[0].numel() for weight in model.model.layers[0].mlp.experts.parameters())
    rest = sum(p.numel() for name, p in model.named_parameters() if "experts" not in name)
    read = partial(flow, view, first, view.direction(5), against=second, labels=0)
    rows = []
    for which in ("first", "second"):
        with Widened() as widened:
            read()
        share = widened.count / (len(used) * each + rest)
        claim = f"128 experts, 60 tokens, {which} flow: widened over the weights used"
        rows.append(Row(claim, share))
    table = made("llama", torch.bfloat16, vocab_size=200_000, hidden_size=256)
    wide = ResidualModel(table)
    with Widened() as widened:
        Pass.of(wide, torch.tensor([3, 4, 5]))
    claim = "largest array of a pass, vocabulary of 200,000, width 256, 3 tokens"
    return [*rows, Row(claim, widened.largest / 1e6, unit="MB")]


def costs() -> list[Row]:
    """Return the time of the comparison pass, and of flows of a hybrid with a state space."""
    view = opened(SMOLLM2)
    ids = torch.randint(1000, 20_000, (32,), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[8] = 500
    read = partial(flow, view, ids, view.direction(5), against=other, labels=0)
    read()
    with_comparison, without = [], []
    for _ in range(5):
        audit._compared.clear()
        with_comparison.append(spent(read))
        without.append(spent(read))
    shares = [a / b for a, b in zip(with_comparison, without, strict=True)]
    rows = [Row.of_range("SmolLM2, 32 tokens: first flow over a later one", shares)]
    hybrid = falcon()
    ids = torch.randint(3, 97, (128,), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[8] = 2
    read = partial(flow, hybrid, ids, 5, against=other, labels=0)
    read()
    ratios = []
    for _ in range(5):
        passes = spent(partial(both_ways, hybrid, torch.stack([ids, other])))
        ratios.append(spent(read) / passes)
    return [
        *rows,
        Row.of_range("Falcon H1, 128 tokens: flow over both passes of both texts", ratios),
    ]


def falcon() -> ResidualModel:
    """Return a hybrid of attention and state spaces with random weights."""
    config = transformers.FalconH1Config(
        vocab_size=97,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        mamba_d_ssm=512,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_d_state=32,
        mamba_chunk_size=32,
    )
    torch.manual_seed(0)
    return ResidualModel(transformers.FalconH1ForCausalLM(config).eval().requires_grad_(False))


def both_ways(view: ResidualModel, texts: Tensor) -> None:
    """Run a model on two texts, and the change of a logit back to the embeddings."""
    with torch.enable_grad():
        x = view.model.get_input_embeddings()(texts).requires_grad_()
        first, second = view.model(inputs_embeds=x, use_cache=False).logits[:, -1, 5]
        torch.autograd.grad(first - second, x)


PARTS: dict[str, Callable[[], list[Row]]] = {
    "planted": planted,
    "smollm2": partial(refused, SMOLLM2, "SmolLM2", 64, 72),
    "gemma3": partial(refused, GEMMA3, "Gemma 3", 9, 9),
    "others": lambda: [*held(), *moved(), *costs()],
}


def part(name: str) -> list[Row]:
    """Return the rows of a part, and print them."""
    torch.set_num_threads(1)
    rows = PARTS[name]()
    print(*rows, sep="\n", flush=True)
    return rows


def main() -> None:
    """Measure, print, and write if asked to."""
    recording = Recording() if "--write" in sys.argv else None
    with ProcessPoolExecutor(len(PARTS)) as pool:
        rows = [row for of_part in pool.map(part, PARTS) for row in of_part]
    if recording is not None:
        recording.write(
            "checks",
            title="What checks of flows let through and refuse, and what flows hold and cost",
            command="python -m benchmarks.checks --write",
            rows=rows,
            settings={
                "factors": [LOGITS, HEAD, SCORES],
                "families": SMALL,
                "tokens": [3, 14, 32, 60, 128],
                "heads of SmolLM2": f"one of {EVERY}",
                "experts": 128,
                "vocabulary": 200_000,
                "width": 256,
                "real": "SmolLM2-135M and Gemma 3 270M, in float32",
            },
        )


if __name__ == "__main__":
    main()

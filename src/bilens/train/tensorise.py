"""Turn a pretrained transformer into a tensor: linear gates, and attention without softmax."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from bilens.convert.language_model import as_language_model, without_softmax
from bilens.convert.loading import open_model, save_model
from bilens.data import Corpus
from bilens.errors import CheckpointError
from bilens.files import write_json, write_text
from bilens.lazy_imports import accelerate, datasets, pd
from bilens.model_card import AGREEMENT_NAME, CARD_NAME, model_card
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.progress import progress_bar
from bilens.reading import Fact, Reading
from bilens.train.linearise import linearise
from bilens.train.patterns import PatternTraining, teach_patterns
from bilens.train.run_directory import is_begun, is_finished
from bilens.train.settings import Distillation, TensoriseTraining
from bilens.train.trainer import alone_with_seed, train_steps

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
    device = next(model.parameters()).device
    # Softmax and gates are parts of every family; attention without softmax is one of ours.
    original = model if training.attention == "softmax" else as_language_model(model)
    if not resume and (run / STAGES).exists():
        raise CheckpointError(
            f"{run / STAGES} exists already; resume with --resume, or choose another --output"
        )
    stages: dict[str, dict[str, Agreement]] = {}

    def measure(stage: str, other: Any) -> None:
        stages[stage] = {
            name: agreement(other, original, ids.to(device)) for name, ids in held_out.items()
        }
        if accelerate.PartialState().is_main_process:
            record = {k: _record(texts) for k, texts in stages.items()}
            write_json(run / AGREEMENT_NAME, record)

    @cache
    def pool() -> Tensor:
        # Drawn once a stage needs it: a resumed run with all stages at hand does not.
        rows = OwnText(original, training, training.calibration_tokens // training.length, 1).all()
        return rows if texts is None else torch.cat([rows, texts[: len(rows)].to(rows)])

    student: Any = original
    how = {"resume": resume, "use_cpu": use_cpu}
    with alone_with_seed(training.seed):
        held_out = held_out or {"own text": OwnText(original, training, VALIDATION_TEXTS, 0).all()}
        measure("original", original)
        if training.mlp == "bilinear":
            student = _gates(model, pool, tokenizer, training, run, resume).to(device)
            if training.attention == "squared":
                student = as_language_model(student)
            measure("gates", student)
        if training.attention == "squared":
            student = _attention(student, original, pool, tokenizer, training, run, how).to(device)
            measure("attention", student)
        if training.steps:
            student = deepcopy(student) if student is original else student
            _distil(student, original, tokenizer, texts, training, run, how)
            measure("distilled", student)
        elif accelerate.PartialState().is_main_process:
            save_model(run, student, tokenizer)
    if accelerate.PartialState().is_main_process:
        # The card was written before the last measurement.
        write_text(run / CARD_NAME, str(model_card(student.config.to_diff_dict(), run)))
    return Tensorised(stages)


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


def interleaved(texts: list[Int[Tensor, "_ time"]]) -> Int[Tensor, "n_texts time"]:
    """Return texts of several kinds in turn, as many of each as the shortest list has."""
    least = min(map(len, texts))
    return torch.stack([rows[:least] for rows in texts], 1).flatten(0, 1)


class OwnText(Dataset[dict[str, Tensor]]):
    """Texts drawn from a model at temperature 1, each from one random first token.

    Every other text begins with the beginning-of-text token if the model has one. Texts are drawn
    in parts as they are read, so none is stored and none repeats. They follow from the seed, the
    stage and their numbers, so a resumed training reads the same.

    Args:
        model: model to draw from.
        training: settings, with the length of a text and the number that is drawn at once.
        n_texts: number of texts.
        stage: number of the stage, from 0 to 2; each has its own texts.
        texts: given texts to mix in, at most a share `training.data_share`.
    """

    in_order = True

    def __init__(
        self,
        model: Any,
        training: TensoriseTraining,
        n_texts: int,
        stage: int,
        texts: Int[Tensor, "n_given time"] | None = None,
    ) -> None:
        self.model, self.training, self.n_texts, self.stage = model, training, n_texts, stage
        n_given = 0 if texts is None else min(len(texts), int(n_texts * training.data_share))
        self.given, self.share = texts, n_given / n_texts
        self._part, self._rows = -1, torch.empty(0)

    def __len__(self) -> int:
        return self.n_texts

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        before, given = int(number * self.share), int((number + 1) * self.share)
        if self.given is not None and given > before:
            return {"input_ids": self.given[before].cpu()}
        return {"input_ids": self._drawn(number - before)}

    def all(self) -> Int[Tensor, "n_texts time"]:
        """Return all texts, on the device of the model."""
        device = next(self.model.parameters()).device
        with progress_bar() as bar:
            numbers = bar.track(range(self.n_texts), description="own text")
            return torch.stack([self[number]["input_ids"] for number in numbers]).to(device)

    @torch.no_grad()
    def _drawn(self, number: int) -> Int[Tensor, " time"]:
        model, size = self.model, self.training.sample_batch
        part, row = divmod(number, size)
        if part != self._part:
            device = next(model.parameters()).device
            seed = (3 * self.training.seed + self.stage << 24) + part
            generator = torch.Generator(device).manual_seed(seed % 2**63)
            n = min(size, self.n_texts - part * size)
            ids = torch.randint(model.config.vocab_size, (n, 1), device=device, generator=generator)
            if model.config.bos_token_id is not None:
                ids[::2] = model.config.bos_token_id
            columns, cache = [ids], None
            for _ in range(self.training.length - 1):
                output = model(columns[-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = output.past_key_values
                probabilities = output.logits[:, -1].float().softmax(-1)
                columns.append(probabilities.multinomial(1, generator=generator))
            self._part, self._rows = part, torch.cat(columns, 1).cpu()
        return self._rows[row]


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


def _gates(
    model: Any,
    pool: Callable[[], Tensor],
    tokenizer: Any,
    training: TensoriseTraining,
    run: Path,
    resume: bool,
) -> Any:
    """Return the model with linear gates, fitted and saved, or saved by an earlier run."""
    folder = run / STAGES / "gates"
    if resume and (folder / "config.json").is_file():
        return open_model(folder)
    linear, rows = deepcopy(model), pool()
    distillation = Distillation(steps=training.layer_steps, seed=training.seed)
    linearise(linear, rows[1:], rows[:1], distillation=distillation, alone=False)
    if accelerate.PartialState().is_main_process:
        save_model(folder, linear, tokenizer)
    return linear


def _attention(
    student: LanguageModel,
    original: LanguageModel,
    pool: Callable[[], Tensor],
    tokenizer: Any,
    training: TensoriseTraining,
    run: Path,
    how: dict[str, bool],
) -> Any:
    """Return the model with squared attention that has learned the original's patterns."""
    folder = run / STAGES / "attention"
    if how["resume"] and is_finished(folder):
        return open_model(folder)
    squared, rows = without_softmax(student), pool().cpu()
    names = ("accumulate", "precision", "log_every", "save_every", "report_to", "seed")
    settings = PatternTraining(
        steps=training.pattern_steps,
        batch_size=min(training.pattern_batch, len(rows)),
        **{name: getattr(training, name) for name in names},
    )
    train, validation = (
        datasets.Dataset.from_dict({"input_ids": part.numpy()}).with_format("torch")
        for part in (rows, rows[: settings.batch_size])
    )
    corpus = Corpus("own text", tokenizer, train, validation)
    how = how | {"resume": how["resume"] and is_begun(folder)}
    teach_patterns(squared, original, corpus, settings, folder, **how)
    return squared


def _distil(
    student: Any,
    original: Any,
    tokenizer: Any,
    texts: Tensor | None,
    training: TensoriseTraining,
    run: Path,
    how: dict[str, bool],
) -> None:
    """Train all weights towards the original's distribution, through the Trainer."""
    train = OwnText(original, training, training.steps * training.batch_size, 2, texts)
    validation = OwnText(original, training, VALIDATION_TEXTS, 0)
    corpus = Corpus("own text", tokenizer, train, validation)

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        with torch.no_grad():
            target = original.to(labels.device)(labels.clamp_min(0), use_cache=False).logits
        return distillation_loss(outputs.logits, target, labels >= 0, num_items_in_batch)

    shape = student.config.to_diff_dict()
    shape.pop("transformers_version", None)
    train_steps(
        student.requires_grad_(),
        corpus,
        training,
        run,
        training.steps,
        arguments={
            "lr_scheduler_type": "cosine",
            "adam_beta2": 0.95,
            "activation_checkpointing": training.checkpointing,
        },
        settings={"model": shape},
        use_cpu=how["use_cpu"],
        resume=how["resume"] and is_begun(run),
        compute_loss_func=loss,
    )
    student.train(mode=False)

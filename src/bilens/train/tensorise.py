"""Turn a pretrained transformer into a tensor: linear gates, and attention without softmax."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, astuple, dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from bilens.analysis import Reading
from bilens.convert.language_model import as_language_model, without_softmax
from bilens.convert.loading import open_model, save_model
from bilens.data import Corpus
from bilens.files import write_json, write_safetensors, write_text
from bilens.lazy_imports import accelerate
from bilens.nn.card import CARD_NAME, model_card
from bilens.nn.checkpoint import CONFIG_NAME
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.nn.language.attention import Attention, Rope
from bilens.nn.language.model import CACHE
from bilens.processes import this_process
from bilens.progress import progress_bar
from bilens.sections import Columns, Fact, by_column
from bilens.train.layers import (
    LayerStreams,
    TrainingRows,
    learn_layer,
    open_stages,
    sharing_copy,
    teach,
    working_folder,
)
from bilens.train.linearise import linearise
from bilens.train.run_directory import is_begun
from bilens.train.settings import OWN_TEXT, Distillation, TensoriseTraining
from bilens.train.trainer import Stage, alone_with_seed, shape_of
from bilens.transformer.maps import working_dtype


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


@dataclass(frozen=True, eq=False, repr=False)
class Tensorised(Reading):
    """Agreement of a model with the original on each held-out text, after each stage."""

    stages: dict[str, dict[str, Agreement]]

    title = "From a transformer to a tensor"
    explanation = (
        "Each row compares the model after a stage with the original, on text that no stage used."
    )

    def facts(self) -> list[Fact]:
        final = next(reversed(self.stages.values()))
        return [(f"rise on {name}", agreement.rise) for name, agreement in final.items()]

    def columns(self) -> Columns:
        """Return a row for each stage and text."""
        rows = [
            (stage, name, *astuple(agreement))
            for stage, texts in self.stages.items()
            for name, agreement in texts.items()
        ]
        return by_column(["stage", "text", *(x.name for x in fields(Agreement))], rows)


@dataclass(frozen=True)
class Measurements:
    """The measurements of a run, written to its record and its model card."""

    run: Path
    original: Any
    held_out: Mapping[str, Int[Tensor, "texts time"]]
    stages: dict[str, dict[str, Agreement]] = field(default_factory=dict)

    def add(self, stage: str, model: Any) -> None:
        """Measure the model after a stage."""
        device = next(model.parameters()).device
        self.stages[stage] = {
            name: agreement(model, self.original, ids.to(device))
            for name, ids in self.held_out.items()
        }
        if this_process().is_main_process:
            write_json(self.run / "tensorise.json", asdict(Tensorised(self.stages))["stages"])

    def finish(self, model: Any) -> Tensorised:
        """Write the card of the finished model, and return all measurements."""
        if this_process().is_main_process:
            card = model_card(model.config.to_diff_dict(), self.run)
            write_text(self.run / CARD_NAME, str(card))
        return Tensorised(self.stages)


@torch.no_grad()
def agreement(model: Any, original: Any, texts: Int[Tensor, "texts time"]) -> Agreement:
    """Return the loss of a model on texts, and its agreement with the original."""
    sums = torch.zeros(4, dtype=torch.float64)
    # The logits of four texts are the largest tensors of a stage.
    for ids in progress_bar("agreement with the original", texts.split(4)):
        ours, theirs = (_log_probs(m(ids, use_cache=False).logits) for m in (model, original))
        labels = ids[:, 1:, None]
        parts = [
            -ours[:, :-1].gather(-1, labels).sum(),
            -theirs[:, :-1].gather(-1, labels).sum(),
            (theirs.exp() * (theirs - ours))[:, :-1].sum(),
            (ours.argmax(-1) == theirs.argmax(-1))[:, :-1].sum(),
        ]
        sums += torch.stack(parts).double().cpu()
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


def interleaved(texts: list[Int[Tensor, "_ time"]]) -> Int[Tensor, "n_texts time"]:
    """Return texts of several kinds in turn; those of longer lists alone after the shorter end."""
    places = torch.cat([torch.arange(len(rows)) for rows in texts])
    return torch.cat(texts)[places.argsort(stable=True)]


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
        self.texts, self.share = texts, n_given / n_texts
        self._part, self._rows = -1, torch.empty(0)

    def __len__(self) -> int:
        return self.n_texts

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        before, after = int(i * self.share), int((i + 1) * self.share)
        if self.texts is not None and after > before:
            return {"input_ids": self.texts[before].cpu()}
        return {"input_ids": self._drawn(i - before)}

    def all(self) -> Int[Tensor, "n_texts time"]:
        """Return all texts, on the device of the model; processes draw in turn and exchange."""
        state, size, every = this_process(), self.training.sample_batch, range(self.n_texts)
        own = [n for n in every if n // size % state.num_processes == state.process_index]
        own_rows = [(n, self[n]["input_ids"]) for n in progress_bar("own text", own)]
        rows = dict(accelerate.utils.gather_object(own_rows))
        device = next(self.model.parameters()).device
        return torch.stack([rows[i] for i in range(self.n_texts)]).to(device)

    @torch.no_grad()
    def _drawn(self, i: int) -> Int[Tensor, " time"]:
        model, size = self.model, self.training.sample_batch
        part, row = divmod(i, size)
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
                options = {CACHE: cache, "use_cache": True, "logits_to_keep": 1}
                output = model(columns[-1], **options)
                cache = output[CACHE]
                probabilities = output.logits[:, -1].float().softmax(-1)
                columns.append(probabilities.multinomial(1, generator=generator))
            self._part, self._rows = part, torch.cat(columns, 1).cpu()
        return self._rows[row]


def teach_patterns(
    student: LanguageModel,
    teacher: LanguageModel,
    texts: Int[Tensor, "texts time"],
    training: Distillation,
    run: Path | None = None,
) -> list[float]:
    """Train queries, keys and constants of a student in place; return the losses of its layers.

    Every layer of the student reads the teacher's stream, so layers learn one by one. The loss is
    `pattern_loss`, and `training.batch_size` counts texts. Everything else of the student stays.
    The training is one of the Trainer: processes, ctrl-C and checkpoints are as in
    `train_language`.

    Args:
        student: model of the teacher's sizes, whose rows of patterns sum to 1.
        teacher: model with softmax.
        texts: texts in their tokens.
        training: settings.
        run: folder for the layers that have learned, and for checkpoints. Layers that are there
            already are opened, so a call with the same arguments resumes.

    Raises:
        BilensError: the training diverged.
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved.
    """
    like = next(teacher.parameters())
    dtype = working_dtype(like.dtype)
    positions = torch.arange(texts.shape[1], device=like.device)
    rope = teacher.embed_text(texts[:1].to(like.device), positions[None])[2]
    rope = None if rope is None else (rope[0].to(dtype), rope[1].to(dtype))
    pairs: list[Any] = list(zip(student.blocks, teacher.blocks, strict=True))
    losses = []
    with working_folder(run) as folder:
        streams = LayerStreams(teacher, [block for _, block in pairs], texts, folder)
        for layer, (pupil, block) in enumerate(pairs):
            norm, attention = (deepcopy(part).to(dtype) for part in (block.attn_norm, block.attn))

            def loss(
                module: Any, x: Tensor, norm: Any = norm, attention: Any = attention
            ) -> Tensor:
                return pattern_loss(module, attention, norm(x.to(dtype)), rope)

            def learn(
                place: Path, pupil: Any = pupil, layer: int = layer, loss: Any = loss
            ) -> dict[str, float]:
                name, rows = f"patterns, layer {layer + 1} of {len(pairs)}", streams.stream
                run_arguments = training, place, name
                return {
                    "loss": teach(
                        pupil.attn, loss, TrainingRows(rows), *run_arguments, learned=_learned
                    )
                }

            losses.append(learn_layer(run, folder, layer, pupil.attn, learn)["loss"])
            streams.advance()
    return losses


def pattern_loss(
    student: Attention,
    teacher: Attention,
    x: Float[Tensor, "batch time d_model"],
    rope: Rope | None,
) -> Float[Tensor, ""]:
    """Return the loss of a layer's patterns on the teacher's normalised stream x.

        - sum_s A_ts log A'_ts + |sum_s (A'_ts - A_ts) v_s|^2 / mean_t |sum_s A_ts v_s|^2,

    the mean over heads and rows, with A the teacher's pattern and A' the student's.
    """
    # Smallest attention that the cross-entropy resolves.
    eps = 1e-6
    with torch.no_grad():
        target = teacher.attention_pattern(x, None, rope)
        values = teacher.values(x).repeat_interleave(teacher.n_heads // teacher.n_kv_heads, 1)
        outputs = target @ values
        size = outputs.square().sum(-1).mean(-1, keepdim=True).clamp_min(eps)
    pattern = student.attention_pattern(x, None, rope)
    # A product of two scores may be negative, where the cross-entropy has no slope.
    entropy = -(target * (pattern.clamp_min(0) + eps).log()).sum(-1)
    error = (pattern @ values - outputs).square().sum(-1) / size
    return (entropy + error).mean()


def _learned(attention: Any) -> list[nn.Parameter]:
    maps = [attention.query, attention.key]
    if attention.pairs == 2:
        maps += [attention.query2, attention.key2]
    weights = [weight for part in maps for weight in part.parameters()]
    return [*weights, attention.score_constant]


VALIDATION_TEXTS = 64


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
        CheckpointError: `run` has stages already and `resume` is False, or stages of other settings
            or texts.
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved.
    """
    # Softmax and gates are parts of every family; attention without softmax is one of ours.
    original = model if training.attention == "softmax" else as_language_model(model)
    stages: dict[str, Callable[..., Any]] = {}
    if training.mlp == "bilinear":
        stages["gates"] = _linear_gates
    if training.attention == "squared":
        stages["attention"] = partial(_squared_attention, original)
    student: Any = original
    record = {**asdict(training), "model": shape_of(model.config)}
    for name in ("tokens", "learning_rate"):
        # Of the last stage alone, which has a record of its own: the others serve any of them.
        del record[name]
    with (
        open_stages(run, record, texts, resume=resume) as stages_folder,
        alone_with_seed(training.seed),
    ):
        held_out = held_out or {OWN_TEXT: OwnText(original, training, VALIDATION_TEXTS, 0).all()}
        measurements = Measurements(run, original, held_out)
        measurements.add("original", original)
        text = cache(partial(_text_of_stages, original, training, texts, stages_folder))
        for name, learn in stages.items():
            folder = stages_folder / name
            # A model's configuration is written last.
            if (folder / CONFIG_NAME).is_file():
                student = open_model(folder).to(next(model.parameters()).device)
            else:
                student = learn(student, text, training, folder)
                if this_process().is_main_process:
                    save_model(folder, student, tokenizer)
            measurements.add(name, student)
        if training.steps:
            # The layers that have not changed share their weights with the original.
            student = deepcopy(student)
            stage = _distillation(student, original, tokenizer, texts, training)
            stage.run(run, resume=resume and is_begun(run), use_cpu=use_cpu)
            student.eval()
            measurements.add("distilled", student)
        elif this_process().is_main_process:
            save_model(run, student, tokenizer)
    return measurements.finish(student)


def _text_of_stages(
    original: Any, training: TensoriseTraining, texts: Tensor | None, folder: Path
) -> Tensor:
    """Return the texts that layers learn from, drawn once for all stages."""
    file = folder / "text.safetensors"
    if file.is_file():
        return load_file(file)["input_ids"]
    rows = OwnText(original, training, training.calibration_tokens // training.length, 1).all()
    if texts is not None:
        rows = torch.cat([rows, texts[: len(rows)].to(rows)])
    if this_process().is_main_process:
        write_safetensors(file, {"input_ids": rows})
    return rows


def _linear_gates(
    student: Any, text: Callable[[], Tensor], training: TensoriseTraining, folder: Path
) -> Any:
    linear, rows = sharing_copy(student), text()
    distillation = _of_layers(training, training.layer_steps)
    linearise(linear, rows[1:], rows[:1], distillation=distillation, alone=False, run=folder)
    return linear


def _squared_attention(
    original: Any,
    student: LanguageModel,
    text: Callable[[], Tensor],
    training: TensoriseTraining,
    folder: Path,
) -> LanguageModel:
    result = without_softmax(student)
    distillation = _of_layers(training, training.pattern_steps, batch_size=training.pattern_batch)
    teach_patterns(result, original, text(), distillation, folder)
    return result


def _of_layers(training: TensoriseTraining, steps: int, **batch: Any) -> Distillation:
    """Return the settings of a stage in which layers learn."""
    names = ("accumulate", "precision", "log_every", "save_every", "report_to", "seed")
    settings: dict[str, Any] = {name: getattr(training, name) for name in names}
    return Distillation(steps=steps, **batch, **settings)


def _distillation(
    student: Any, original: Any, tokenizer: Any, texts: Tensor | None, training: TensoriseTraining
) -> Stage:
    """Return the training of all weights towards the original's distribution."""
    train = OwnText(original, training, training.steps * training.batch_size, 2, texts)
    validation = OwnText(original, training, VALIDATION_TEXTS, 0)
    corpus = Corpus(OWN_TEXT, tokenizer, train, validation)

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        with torch.no_grad():
            target = original.to(labels.device)(labels.clamp_min(0), use_cache=False).logits
        return distillation_loss(outputs.logits, target, labels >= 0, num_items_in_batch)

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
        settings={"model": shape_of(student.config)},
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

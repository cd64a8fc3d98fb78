"""Teach attention without softmax the patterns of attention with softmax, on the same stream."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bilens.data import Corpus
from bilens.nn.language import LanguageModel
from bilens.nn.language.attention import Attention, Rope
from bilens.settings import Count, NotNegative, Positive
from bilens.train.settings import TrainerSettings
from bilens.train.trainer import train_steps

EPS = 1e-6
"""Smallest attention that the cross-entropy resolves."""


@dataclass(frozen=True)
class PatternTraining(TrainerSettings):
    """Settings of the training of patterns.

    Attributes:
        steps: steps of Adam.
        batch_size: texts in a step.
        learning_rate: at the start. It falls to zero along half a cosine.
    """

    steps: Count = 400
    batch_size: Count = 16
    learning_rate: Positive = 3e-3
    weight_decay: NotNegative = 0.0


def teach_patterns(
    student: LanguageModel,
    teacher: LanguageModel,
    corpus: Corpus,
    training: PatternTraining,
    run: Path,
    *,
    resume: bool = False,
    use_cpu: bool = False,
) -> list[dict[str, Any]]:
    """Train queries, keys and constants of a student in place; return the logged losses.

    Every layer of the student reads the teacher's stream, so no gradient crosses layers and all
    layers learn at once. The loss is the mean of `pattern_loss` over layers. Everything else of the
    student stays. The training is one of the Trainer: processes, ctrl-C and checkpoints are as in
    `train_language`.

    Args:
        student: model of the teacher's sizes, whose rows of patterns sum to 1.
        teacher: model with softmax.
        corpus: texts in their tokens.
        training: settings.
        run: the directory to write to.
        resume: resume from the newest intact checkpoint in `run`.
        use_cpu: ignore GPUs.

    Raises:
        BilensError: the training diverged.
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved.
    """
    tutor: Any = teacher
    blocks: Any = zip(student.blocks, teacher.blocks, strict=True)
    pairs: list[tuple[Attention, Attention]] = [(pupil.attn, block.attn) for pupil, block in blocks]
    required = {name: weight.requires_grad for name, weight in student.named_parameters()}
    student.requires_grad_(False)
    for pupil, _ in pairs:
        for weight in _learned(pupil):
            weight.requires_grad_()

    def forward(input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        inputs = _attention_inputs(tutor.to(input_ids.device), input_ids)
        # Recomputed in the backward pass: the patterns of all layers do not fit into memory.
        losses = [
            checkpoint(pattern_loss, *pair, *x, use_reentrant=False)
            for pair, x in zip(pairs, inputs, strict=True)
        ]
        return {"loss": torch.stack(losses).mean()}

    # The Trainer, and the wrappers of several processes, call the model for its loss.
    student.forward = forward  # type: ignore[assignment]
    try:
        return train_steps(
            student,
            corpus,
            training,
            run,
            training.steps,
            arguments={"lr_scheduler_type": "cosine", "adam_beta2": 0.99},
            settings={"model": student.config.settings()},
            resume=resume,
            use_cpu=use_cpu,
        )
    finally:
        del student.forward
        for name, weight in student.named_parameters():
            weight.requires_grad_(required[name])
        student.train(mode=False)


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
    with torch.no_grad():
        target = teacher.attention_pattern(x, None, rope)
        values = teacher.values(x).repeat_interleave(teacher.n_heads // teacher.n_kv_heads, 1)
        outputs = target @ values
        size = outputs.square().sum(-1).mean(-1, keepdim=True).clamp_min(EPS)
    pattern = student.attention_pattern(x, None, rope)
    # A product of two scores may be negative, where the cross-entropy has no slope.
    entropy = -(target * (pattern.clamp_min(0) + EPS).log()).sum(-1)
    error = (pattern @ values - outputs).square().sum(-1) / size
    return (entropy + error).mean()


def _learned(attention: Attention) -> list[torch.nn.Parameter]:
    maps = [attention.query, attention.key]
    if attention.pairs == 2:
        maps += [attention.query2, attention.key2]
    weights = [weight for part in maps for weight in part.parameters()]
    return [*weights, attention.score_constant]  # type: ignore[list-item]


@torch.no_grad()
def _attention_inputs(
    teacher: LanguageModel, ids: Int[Tensor, "batch time"]
) -> list[tuple[Float[Tensor, "batch time d_model"], Rope | None]]:
    """Return the normalised stream before the attention of each layer, and the rotation."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    x, _, rope = teacher.embed_text(ids, positions)
    inputs = []
    for block in teacher.blocks:
        inputs.append((block.attn_norm(x), rope))  # type: ignore[operator]
        x = block(x, None, rope)
    return inputs

"""Teach attention without softmax the patterns of attention with softmax, on the same stream."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_weights
from bilens.errors import BilensError
from bilens.nn.language import LanguageModel
from bilens.nn.language.attention import Attention, Rope
from bilens.progress import progress_bar
from bilens.settings import CheckedSettings, Count, Positive, Seed

EPS = 1e-6
"""Smallest attention that the cross-entropy resolves."""


@dataclass(frozen=True)
class PatternTraining(CheckedSettings):
    """Settings of the training of patterns.

    Attributes:
        steps: Steps of Adam.
        batch_size: Texts in a step.
        learning_rate: At the start. It falls to zero along half a cosine.
        seed: Seed of the order of the texts.
    """

    steps: Count = 400
    batch_size: Count = 16
    learning_rate: Positive = 3e-3
    seed: Seed = 0


def teach_patterns(
    student: LanguageModel,
    teacher: LanguageModel,
    texts: Int[Tensor, "texts time"],
    training: PatternTraining,
) -> list[float]:
    """Train queries, keys and constants of a student in place; return each layer's last loss.

    Every layer of the student reads the teacher's stream, so no gradient crosses layers and all
    layers learn at once. The loss of a layer is the mean over heads and rows of

        - sum_s A_ts log A'_ts + |sum_s (A'_ts - A_ts) v_s|^2 / mean_t |sum_s A_ts v_s|^2

    with A the teacher's pattern and A' the student's. Everything else of the student stays.

    Args:
        student: model of the teacher's sizes, whose rows of patterns sum to 1.
        teacher: model with softmax.
        texts: texts in their tokens.
        training: settings.

    Raises:
        BilensError: the training diverged.
    """
    blocks: Any = zip(student.blocks, teacher.blocks, strict=True)
    pairs: list[tuple[Attention, Attention]] = [(pupil.attn, block.attn) for pupil, block in blocks]
    learned = [parameter for pupil, _ in pairs for parameter in _learned(pupil)]
    optimizer = torch.optim.Adam(learned, training.learning_rate, betas=(0.9, 0.99))
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
    generator = torch.Generator().manual_seed(training.seed)
    losses: list[Tensor] = []
    with progress_bar() as bar:
        task = bar.add_task("patterns", total=training.steps, note="")
        for _ in range(training.steps):
            rows = torch.randint(len(texts), (training.batch_size,), generator=generator)
            ids = texts[rows.to(texts.device)].to(student.embed.weight.device)
            losses = []
            for (pupil, tutor), x in zip(pairs, _attention_inputs(teacher, ids), strict=True):
                loss = pattern_loss(pupil, tutor, *x)
                # Layers share no graph: each frees its activations before the next begins.
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            fall.step()
            mean = float(torch.stack(losses).mean())
            if not math.isfinite(mean):
                raise BilensError(
                    "The loss of patterns became infinite or NaN; lower learning_rate"
                )
            bar.update(task, advance=1, note=f"loss {mean:.4f}")
    student.zero_grad()
    check_weights(student)
    return [float(loss) for loss in losses]


def pattern_loss(
    student: Attention,
    teacher: Attention,
    x: Float[Tensor, "batch time d_model"],
    rope: Rope | None,
) -> Float[Tensor, ""]:
    """Return the loss of a layer's patterns on the teacher's normalised stream x."""
    with torch.no_grad():
        target = teacher.attention_pattern(x, None, rope)
        values = teacher.values(x).repeat_interleave(teacher.n_heads // teacher.n_kv_heads, 1)
        outputs = target @ values
        size = outputs.square().sum(-1).mean(-1, keepdim=True).clamp_min(EPS)
    pattern = student.attention_pattern(x, None, rope)
    entropy = -(target * (pattern + EPS).log()).sum(-1)
    error = (pattern @ values - outputs).square().sum(-1) / size
    return (entropy + error).mean()


def _learned(attention: Attention) -> list[torch.nn.Parameter]:
    maps = [*attention.query.parameters(), *attention.key.parameters()]
    return [*maps, attention.score_constant]  # type: ignore[list-item]


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

"""Teach attention without softmax the patterns of attention with softmax, on the same stream."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bilens.nn.language import LanguageModel
from bilens.nn.language.attention import Attention, Rope
from bilens.residual.parts import working_dtype
from bilens.train.layers import (
    LayerStreams,
    Rows,
    learn_layer,
    teach,
    working_folder,
)
from bilens.train.settings import Distillation

EPS = 1e-6
"""Smallest attention that the cross-entropy resolves."""


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
                rows, name = Rows(streams.stream), f"patterns, layer {layer + 1} of {len(pairs)}"
                last = teach(pupil.attn, loss, rows, training, place, name, learned=_learned)
                return {"loss": last}

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


def _learned(attention: Any) -> list[nn.Parameter]:
    maps = [attention.query, attention.key]
    if attention.pairs == 2:
        maps += [attention.query2, attention.key2]
    weights = [weight for part in maps for weight in part.parameters()]
    return [*weights, attention.score_constant]

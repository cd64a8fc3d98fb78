"""Train language models."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bilens.data import Corpus
from bilens.errors import BilensError
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.train.settings import LanguageTraining, check_precision
from bilens.train.trainer import (
    alone_with_seed,
    check_vocabulary,
    run_trainer,
    steps_per_epoch,
    trainer_arguments,
)


def train_language(
    config: LanguageConfig,
    corpus: Corpus,
    training: LanguageTraining,
    run: Path,
    *,
    resume: bool = False,
    use_cpu: bool = False,
) -> tuple[LanguageModel, list[dict[str, Any]]]:
    """Train a language model on `corpus` and save it with its tokenizer in `run`.

    Under `torchrun` or `accelerate launch` every process calls this function, and the Trainer
    shares the batches out (DDP, FSDP). The result is that of one process within the rounding of
    sums. Ctrl-C saves a checkpoint between two steps. `resume` of a finished training returns its
    result.

    Args:
        config: architecture and sizes; its ids of text ends and padding become the tokenizer's.
        corpus: texts as token ids.
        training: settings of the training.
        run: the directory to write to; checkpoints go below it.
        resume: resume from the newest intact checkpoint in `run`.
        use_cpu: ignore GPUs.

    Returns:
        The trained model in evaluation mode, and the logged metrics. Each record has the seconds
        of its steps, without validations and checkpoints.

    Raises:
        BilensError: the corpus does not fit the model, the batch cannot be shared out evenly, or
            the training diverged.
        CheckpointError: `run` holds a training and `resume` is False, or no training and it is
            True.
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved.
    """
    check_precision(config.attention, training.precision)
    check_vocabulary(corpus, config.vocab_size)
    length = len(corpus.train[0]["input_ids"])
    if length > config.n_ctx:
        raise BilensError(
            f"The texts of {corpus.name} are {length} tokens long; the model has "
            f"n_ctx={config.n_ctx}"
        )
    with alone_with_seed(training.seed):
        arguments = trainer_arguments(
            training,
            run,
            use_cpu=use_cpu,
            lr_scheduler_type="linear",
            # The Trainer requires a name that it knows even if it is handed an optimizer.
            optim="adamw_torch" if training.optimizer == "muon" else training.optimizer,
        )
        steps = steps_per_epoch(arguments, corpus)
        # Rounded, as 0.3 times 10 is a little more than 3.
        arguments.max_steps = math.ceil(round(training.epochs * steps, 6))
        arguments.eval_steps = training.evaluate_every or steps
        settings = {**corpus.provenance, **asdict(training), "model": config.settings()}
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        tokens = {name: getattr(corpus.tokenizer, name) for name in names}
        texts = min(training.evaluate_texts or len(corpus.validation), len(corpus.validation))
        model = LanguageModel(LanguageConfig(**{**config.to_dict(), **tokens}))
        muon = None
        if training.optimizer == "muon":
            rates = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
            muon = MuonWithAdamW(model, **rates)
        history = run_trainer(
            model,
            corpus,
            settings,
            run,
            arguments,
            resume=resume,
            target=training.target_loss,
            eval_dataset=corpus.validation.select(range(texts)),
            optimizers=(muon, None),
        )
    return model.eval(), history  # type: ignore[no-untyped-call]


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices inside the blocks, and AdamW for all other weights, as one optimizer.

        W <- (1 - lr decay) W - 0.2 sqrt(max(n_out, n_in)) lr U V',  momentum = U S V'

    U V' has all singular values equal, so a step is equally large in all directions. It comes from
    torch's Muon, which approximates it by five Newton-Schulz iterations in bfloat16. The factor
    makes the step as large as one of AdamW, so that both share one learning rate and one schedule.
    AdamW trains embeddings, unembedding, norms and biases. Gains and biases do not decay.

    Args:
        model: the model to train.
        lr: learning rate.
        weight_decay: weight decay of matrices, embeddings and the unembedding.

    Source: Jordan 2024, *Muon*; the factor: Liu et al. 2025, *Muon is Scalable for LLM Training*.
    """

    def __init__(self, model: LanguageModel, *, lr: float, weight_decay: float) -> None:
        matrices = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
        inside = set(matrices)
        outside = [weight for weight in model.parameters() if weight not in inside]
        self.muon = torch.optim.Muon(
            matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = torch.optim.AdamW(
            [
                _group([weight for weight in outside if weight.ndim > 1], weight_decay),
                _group([weight for weight in outside if weight.ndim == 1], 0.0),
            ],
            lr=lr,
        )
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of both optimizers."""
        loss = None if closure is None else closure()
        # Loading a state replaces the groups and the state of this object: share them again.
        self.muon.param_groups = self.param_groups[:1]
        self.adamw.param_groups = self.param_groups[1:]
        self.muon.state = self.adamw.state = self.state
        self.muon.step()
        self.adamw.step()
        return loss


def _group(weights: list[nn.Parameter], weight_decay: float) -> dict[str, Any]:
    return {"params": weights, "weight_decay": weight_decay}

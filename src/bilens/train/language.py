"""Train a language model through the Hugging Face Trainer, on one device or under torchrun."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    set_seed,
)
from transformers.training_args import OptimizerNames

from bilens.convert import save_model
from bilens.data import Corpus
from bilens.errors import BilensError
from bilens.files import write_json, write_text
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.nn.language.no_progress import no_progress
from bilens.progress import progress_bar
from bilens.train.classifier import METRICS_NAME
from bilens.train.clock import Clock
from bilens.train.interrupt import interrupt_between_steps
from bilens.train.language_settings import LanguageTraining
from bilens.train.muon import MuonWithAdamW
from bilens.train.state import TRAINING_NAME
from bilens.train.trainer import (
    Watch,
    check_settings,
    check_vocabulary,
    checkpoint_to_resume,
    last_checkpoint,
    trainer_arguments,
)

__all__ = ["LanguageTraining", "finished_history", "last_checkpoint", "train_language"]

MUON = "muon"


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

    Started by `torchrun` or `accelerate launch`, every process calls this and the Trainer shares
    the batches out; the result is that of one process up to the rounding of sums. Ctrl-C saves a
    checkpoint between two steps.

    Args:
        config: what to train; its ends of text and padding become those of the tokenizer.
        corpus: texts as token ids.
        training: how to train it.
        run: the directory to write to; checkpoints go below it.
        resume: go on from the last checkpoint in `run`.
        use_cpu: leave GPUs alone.

    Returns:
        The trained model in evaluation mode, and the metrics as they were logged, each with the
        seconds that its steps took, without validations and checkpoints.

    Raises:
        BilensError: the corpus does not fit the model, the optimizer is unknown, the batch cannot
            be shared out evenly, or the loss is no longer finite.
        CheckpointError: `resume` finds nothing it can go on from.
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved.
    """
    _check_corpus(config, corpus)
    _check_optimizer(training.optimizer)
    settings = _settings(config, corpus, training)
    checkpoint = checkpoint_to_resume(run, settings) if resume else None
    set_seed(training.seed)
    model = LanguageModel(_with_tokens(config, corpus.tokenizer))
    texts = min(training.evaluate_texts or len(corpus.validation), len(corpus.validation))
    with interrupt_between_steps() as interrupt, progress_bar() as bar, no_progress():
        watch = Watch(interrupt, bar)
        trainer = _Trainer(
            model=model,
            args=trainer_arguments(
                training,
                run,
                use_cpu=use_cpu,
                num_train_epochs=training.epochs,
                lr_scheduler_type="linear",
                warmup_steps=training.warmup,
                # The Trainer wants a name of its own even where it is handed an optimizer.
                optim="adamw_torch" if training.optimizer == MUON else training.optimizer,
                eval_strategy="epoch" if training.evaluate_every is None else "steps",
                eval_steps=training.evaluate_every,
            ),
            data_collator=_collate,
            train_dataset=corpus.train,
            eval_dataset=corpus.validation.select(range(texts)),
            processing_class=corpus.tokenizer,
            callbacks=[Clock(), watch, _Target(training.target_loss)],
            optimizers=(_muon(model, training), None),
        )
        trainer.remove_callback(PrinterCallback)
        if trainer.is_world_process_zero():
            write_json(run / TRAINING_NAME, settings)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    history = trainer.state.log_history
    if any(not math.isfinite(record.get("loss", 0.0)) for record in history):
        raise BilensError("The loss became infinite or NaN; lower learning_rate, or raise warmup")
    if interrupt.requested:
        raise KeyboardInterrupt
    if trainer.is_world_process_zero():
        save_model(run, model, corpus.tokenizer)
        lines = (json.dumps(record) + "\n" for record in history)
        write_text(run / METRICS_NAME, "".join(lines))
    return model.eval(), history  # type: ignore[no-untyped-call]


def finished_history(
    config: LanguageConfig, corpus: Corpus, training: LanguageTraining, run: Path
) -> list[dict[str, Any]] | None:
    """The metrics of a training that has ended; None where it has not, or never began.

    Raises:
        CheckpointError: `run` was trained with other settings.
    """
    path = run / METRICS_NAME
    if not path.is_file():
        return None
    check_settings(run, _settings(config, corpus, training))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class _Trainer(Trainer):
    """The Trainer, whose validations leave no text out, unlike its passes over the training set."""

    def get_eval_dataloader(self, *which: Any) -> Any:
        self.args.dataloader_drop_last = False
        try:
            return super().get_eval_dataloader(*which)
        finally:
            self.args.dataloader_drop_last = True


class _Target(TrainerCallback):
    """Ends the training when the validation loss is small enough."""

    def __init__(self, loss: float | None) -> None:
        self.loss = -math.inf if loss is None else loss

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        if rest["metrics"]["eval_loss"] <= self.loss:
            control.should_training_stop = True


def _muon(model: LanguageModel, training: LanguageTraining) -> MuonWithAdamW | None:
    if training.optimizer != MUON:
        return None
    return MuonWithAdamW(model, lr=training.learning_rate, weight_decay=training.weight_decay)


def _collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def _check_corpus(config: LanguageConfig, corpus: Corpus) -> None:
    check_vocabulary(corpus, config.vocab_size)
    length = len(corpus.train[0]["input_ids"])
    if length > config.n_ctx:
        raise BilensError(
            f"The texts of {corpus.name} are {length} tokens long; the model has "
            f"n_ctx={config.n_ctx}"
        )


def _check_optimizer(name: str) -> None:
    known = [MUON, *(str(one.value) for one in OptimizerNames)]
    if name not in known:
        raise BilensError(f"optimizer={name!r}, expected one of {', '.join(known)}")


def _with_tokens(config: LanguageConfig, tokenizer: PreTrainedTokenizerBase) -> LanguageConfig:
    own = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    return LanguageConfig(**{**config.to_dict(), **own})


def _settings(config: LanguageConfig, corpus: Corpus, training: LanguageTraining) -> dict[str, Any]:
    """As they are read from JSON."""
    settings = {"data": corpus.name, **asdict(training), "model": config.to_diff_dict()}
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found

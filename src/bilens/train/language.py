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
    set_seed,
)

from bilens.convert import save_model
from bilens.data import Corpus
from bilens.errors import BilensError
from bilens.files import write_json, write_text
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.nn.language.quiet import quiet
from bilens.progress import progress_bar
from bilens.train.classifier import METRICS_NAME
from bilens.train.interrupt import interrupt_between_steps
from bilens.train.language_settings import LanguageTraining
from bilens.train.state import TRAINING_NAME
from bilens.train.trainer import (
    Watch,
    check_vocabulary,
    checkpoint_to_resume,
    last_checkpoint,
    trainer_arguments,
)

__all__ = ["LanguageTraining", "last_checkpoint", "train_language"]


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
        The trained model in evaluation mode, and the metrics as they were logged.

    Raises:
        BilensError: the corpus does not fit the model, the batch cannot be shared out evenly, or
            the loss is no longer finite.
        CheckpointError: `resume` finds nothing it can go on from.
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved.
    """
    _check_corpus(config, corpus)
    settings = json.loads(json.dumps(_settings(config, corpus, training)))
    checkpoint = checkpoint_to_resume(run, settings) if resume else None
    set_seed(training.seed)
    model = LanguageModel(_with_tokens(config, corpus.tokenizer))
    with interrupt_between_steps() as interrupt, progress_bar() as bar, quiet():
        watch = Watch(interrupt, bar)
        trainer = Trainer(
            model=model,
            args=trainer_arguments(
                training,
                run,
                use_cpu=use_cpu,
                num_train_epochs=training.epochs,
                lr_scheduler_type="linear",
                warmup_steps=training.warmup,
                optim=training.optimizer,
                eval_strategy="epoch",
            ),
            data_collator=_collate,
            train_dataset=corpus.train,
            eval_dataset=corpus.validation,
            processing_class=corpus.tokenizer,
            callbacks=[watch],
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


def _with_tokens(config: LanguageConfig, tokenizer: PreTrainedTokenizerBase) -> LanguageConfig:
    own = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    return LanguageConfig(**{**config.to_dict(), **own})


def _settings(config: LanguageConfig, corpus: Corpus, training: LanguageTraining) -> dict[str, Any]:
    return {"data": corpus.name, **asdict(training), "model": config.to_diff_dict()}

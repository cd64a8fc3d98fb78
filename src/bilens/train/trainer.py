"""Training through the Hugging Face Trainer: seeds, progress, metrics, ctrl-C and resuming."""

import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import SequentialSampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState, TrainingArguments

from bilens.checks import check_weights
from bilens.convert import open_model, save_model
from bilens.convert.loading import FINGERPRINT
from bilens.data import Corpus
from bilens.errors import BilensError, CheckpointError
from bilens.files import file_errors, write_safetensors
from bilens.nn.checkpoint import WEIGHTS_NAME
from bilens.processes import from_main_process
from bilens.progress import no_progress, progress_bar
from bilens.train.run_directory import (
    CHECKPOINTS,
    RunDirectory,
    interrupt_between_steps,
    open_run,
    read_metrics,
)
from bilens.train.settings import TrainerSettings

_ALONE = threading.RLock()


@contextmanager
def alone_with_seed(seed: int) -> Iterator[None]:
    """Seed all random numbers inside the block, and restore their state afterwards.

    The Trainer keeps its state in the generators of the process, so threads take turns.
    """
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with _ALONE, torch.random.fork_rng(devices=gpus):
        python, numpy = random.getstate(), np.random.get_state()
        transformers.set_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def trainer_arguments(
    training: TrainerSettings, run: Path, *, use_cpu: bool, **options: Any
) -> TrainingArguments:
    """Return the Trainer's arguments, with the batch shared out over its processes.

    `options` are arguments of one kind of training, its optimizer and schedule. Raises BilensError
    if the batch cannot be shared out evenly, or the device does not support the precision.
    """
    if training.precision == "fp16" and (use_cpu or not torch.cuda.is_available()):
        raise BilensError("precision='fp16' needs a GPU; expected 'bf16' or 'float32' on a CPU")
    arguments = TrainingArguments(
        output_dir=str(run / CHECKPOINTS),
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        warmup_steps=training.warmup,
        gradient_accumulation_steps=training.accumulate,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        seed=training.seed,
        eval_strategy="steps",
        eval_steps=training.evaluate_every or 1,
        save_strategy="steps",
        save_steps=training.save_every,
        logging_steps=training.log_every,
        logging_nan_inf_filter=False,
        report_to="none",  # the run directory sends records to the tracker
        # transformers refuses bf16 on a machine without a GPU unless the CPU is asked for.
        use_cpu=use_cpu or not torch.accelerator.is_available(),
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available() and not use_cpu,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        **options,
    )
    share, remainder = divmod(training.batch_size, arguments.world_size * training.accumulate)
    if remainder or not share:
        raise BilensError(
            f"batch_size={training.batch_size} cannot be shared out evenly over "
            f"{arguments.world_size} processes in accumulate={training.accumulate} parts"
        )
    arguments.per_device_train_batch_size = arguments.per_device_eval_batch_size = share
    return arguments


def steps_per_epoch(arguments: TrainingArguments, corpus: Corpus) -> int:
    """Return the steps of the optimizer in a pass over the texts; an incomplete part is dropped."""
    parts, texts = arguments.gradient_accumulation_steps, len(corpus.train)
    size: int = arguments.per_device_train_batch_size * arguments.world_size
    if texts < size * parts:
        raise BilensError(
            f"batch_size={size * parts}, expected at most {texts}, the texts of {corpus.name} to "
            "train on; use more text, or a smaller batch"
        )
    return math.ceil((texts // size) / parts)


def shape_of(config: transformers.PretrainedConfig) -> dict[str, Any]:
    """Return the configuration of a model for training.json."""
    # What its files say beside its shape.
    keys = ("transformers_version", FINGERPRINT)
    return {k: v for k, v in config.to_diff_dict().items() if k not in keys}


def check_vocabulary(corpus: Corpus, vocab_size: int) -> None:
    """Raise BilensError if a corpus may hold tokens that a model does not have."""
    # Texts spell special tokens in pieces, so that the model may lack those.
    special = set(corpus.tokenizer.all_special_ids)
    size = 1 + max(set(corpus.tokenizer.get_vocab().values()) - special, default=-1)
    if size > vocab_size:
        raise BilensError(
            f"The tokenizer of {corpus.name} has {size} tokens; the model has "
            f"vocab_size={vocab_size}"
        )


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join texts of any lengths into a batch."""
    texts = [row["input_ids"] for row in rows]
    # Padding comes after the text, so causal attention does not see it, and it has no loss.
    labels = pad_sequence(texts, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp_min(0), "labels": labels}


class ResumableTrainer(Trainer):
    """A Trainer with complete checkpoints, which stops when a training diverges.

    A data set that names itself `in_order` is read from its first text to its last.

    `extra` returns more entries for every record; `options` are passed to the Trainer.
    """

    def __init__(
        self, directory: RunDirectory, extra: Callable[[], dict[str, float]] = dict, **options: Any
    ) -> None:
        self.directory, self.extra = directory, extra
        self.draft: Path | None = None
        super().__init__(**options)
        self.remove_callback(transformers.PrinterCallback)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        texts: Any = self.train_dataset if train_dataset is None else train_dataset
        if getattr(texts, "in_order", False):
            return SequentialSampler(texts)
        return super()._get_train_sampler(train_dataset)

    def get_eval_dataloader(self, *which: Any) -> Any:
        """Return the data of a validation, which drops no text, unlike passes of training."""
        self.args.dataloader_drop_last = False
        try:
            return super().get_eval_dataloader(*which)
        finally:
            self.args.dataloader_drop_last = True

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Record losses, which have to be finite, without timings and summaries of calls."""
        losses = [logs[name] for name in ("loss", "eval_loss") if name in logs]
        if not all(map(math.isfinite, losses)):
            self._diverged(f"The loss became {losses[0]}")
        if losses and losses[0] > 2 * (uniform := self._uniform_loss()):
            problem = f"The loss became {losses[0]:.4g}, where a uniform guess has {uniform:.3g},"
            self._diverged(problem)
        if losses:
            timings = ("_runtime", "_per_second")
            record = {name: value for name, value in logs.items() if not name.endswith(timings)}
            super().log({**record, **self.extra()}, *args, **kwargs)

    def require_finite_weights(self) -> None:
        """Raise BilensError if a weight is NaN or infinite in any process."""
        try:
            check_weights(cast(PreTrainedModel, self.model))
            finite = 1.0
        except CheckpointError:
            finite = 0.0
        everywhere = self.accelerator.reduce(torch.tensor(finite, device=self.args.device), "mean")
        if everywhere < 1:
            self._diverged("The weights became infinite or NaN")

    def _uniform_loss(self) -> float:
        """Return the loss of a uniform guess of a token in nats; infinity for other losses."""
        vocab_size = getattr(getattr(self.model, "config", None), "vocab_size", None)
        return math.inf if vocab_size is None or self.compute_loss_func else math.log(vocab_size)

    def _diverged(self, problem: str) -> NoReturn:
        raise BilensError(
            f"{problem} by step {self.state.global_step}; lower learning_rate, or raise warmup"
        )

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self.draft is None else str(self.draft.parent)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.require_finite_weights()
        loss = float(self.accelerator.reduce(self._tr_loss.clone(), "mean"))
        # The Trainer's checkpoint does not hold the losses since the last record. Without them the
        # first record after a resume would differ from that of an uninterrupted training.
        progress = {"loss": loss, "logged": self._globalstep_last_logged}
        self._callbacks()[ResumableTrainer.__name__] = progress
        self.draft = draft = self.directory.draft(self.state.global_step)
        try:
            with file_errors(draft):
                super()._save_checkpoint(model, trial)
        except RuntimeError as error:
            # torch has no class for a file that it could not write.
            if not re.search("inline_container|basic_ios", str(error)):
                raise
            raise CheckpointError(f"{draft} could not be written: {error}") from error
        finally:
            self.draft = None
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            self.directory.keep(draft)
        self.accelerator.wait_for_everyone()

    def restore_loss(self) -> None:
        """Restore the mean of the losses since the last record."""
        progress = self._callbacks().get(ResumableTrainer.__name__)
        if progress is not None:
            self._tr_loss.fill_(progress["loss"])
            self._globalstep_last_logged = progress["logged"]

    def _callbacks(self) -> dict[str, Any]:
        """Return the states of callbacks, which a checkpoint includes."""
        # transformers annotates the list of callbacks from which it makes this dictionary.
        return cast(dict[str, Any], self.state.stateful_callbacks)


class _Watch(TrainerCallback):
    """Callback that shows progress, writes metrics, and ends a training at its target or ctrl-C.

    Every record has the seconds of all steps so far, also of those before a resume, without
    validations and checkpoints.
    """

    def __init__(self, interrupt: threading.Event, bar: Any, target: float | None) -> None:
        self.interrupt, self.bar = interrupt, bar
        self.target = -math.inf if target is None else target
        self.reached = False
        self.anywhere = torch.zeros(())
        self.trainer: ResumableTrainer

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        self.trainer.restore_loss()
        self.bar.total = state.max_steps
        self.bar.initial = self.bar.n = state.global_step
        self.seconds = self._stored(state).get("seconds", 0.0)
        self.since = time.perf_counter()
        if state.is_world_process_zero:
            self.trainer.directory.start_metrics(state.log_history)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        if state.global_step >= state.max_steps:
            # The end has no checkpoint: a training that resumes needs a step to take.
            control.should_log = control.should_evaluate = True
            control.should_save = False
        elif self._is_interrupted(args):
            control.should_save = control.should_training_stop = True
        if torch.cuda.is_available() and (control.should_evaluate or control.should_save):
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds += now - self.since
        self.since = now
        self._stored(state)["seconds"] = self.seconds
        self.bar.update(state.global_step - self.bar.n)

    def _is_interrupted(self, args: Any) -> bool:
        """Whether this process was interrupted or, by the step before, any of several."""
        if args.world_size == 1:
            return self.interrupt.is_set()
        # A signal reaches processes in different steps, and all have to stop in the same one. That
        # of the step before is known by now, so that no GPU is waited for.
        before, here = self.anywhere, float(self.interrupt.is_set())
        self.anywhere = self.trainer.accelerator.reduce(torch.full((), here, device=args.device))
        return bool(before > 0)

    def on_log(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        record = state.log_history[-1]
        record["seconds"] = self.seconds
        if state.is_world_process_zero:
            self.trainer.directory.add_metrics(record)
        for name in record.keys() & {"loss", "eval_loss"}:
            self.bar.set_postfix_str(f"{name} {record[name]:.4f}", refresh=False)

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        self.since = time.perf_counter()
        if more["metrics"]["eval_loss"] <= self.target:
            self.reached = control.should_training_stop = True
            control.should_save = False

    def on_save(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        self.since = time.perf_counter()

    def _stored(self, state: TrainerState) -> dict[str, Any]:
        """Return this callback's state, which a checkpoint includes."""
        callbacks = cast(dict[str, Any], state.stateful_callbacks)
        return cast(dict[str, Any], callbacks.setdefault(type(self).__name__, {}))


@dataclass(frozen=True, eq=False)
class Stage:
    """A training of some weights of a model by AdamW: which weights, on what text, by which loss.

    Attributes:
        name: for the progress display.
        model: transformer or part of one, saved at the end. All weights that require gradients
            learn.
        corpus: texts in its tokens, or inputs of the part.
        training: settings of the training.
        steps: steps of the optimizer.
        arguments: other arguments of `transformers.TrainingArguments`.
        settings: entries of training.json besides `training`.
        options: options of `run_trainer`; `compute_loss_func` is another loss than the model's.
    """

    name: str
    model: nn.Module
    corpus: Corpus
    training: TrainerSettings
    steps: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, run: Path, *, resume: bool, use_cpu: bool) -> list[dict[str, Any]]:
        """Train the model in place and save it in `run`; return the logged metrics."""
        training, steps = self.training, self.steps
        with alone_with_seed(training.seed):
            arguments = trainer_arguments(
                training,
                run,
                use_cpu=use_cpu,
                max_steps=steps,
                optim="adamw_torch",
                **self.arguments,
            )
            steps_per_epoch(arguments, self.corpus)
            arguments.eval_steps = training.evaluate_every or steps
            record = {**self.corpus.provenance, **asdict(training), **self.settings}
            options = {"name": self.name, "resume": resume, **self.options}
            return run_trainer(self.model, self.corpus, record, run, arguments, **options)


def run_trainer(
    model: nn.Module,
    corpus: Corpus,
    settings: dict[str, Any],
    run: Path,
    arguments: TrainingArguments,
    *,
    resume: bool,
    name: str = "training",
    **options: Any,
) -> list[dict[str, Any]]:
    """Train a model in place and save it in `run` with its tokenizer, or resume that.

    Returns the logged metrics. `settings` are the contents of training.json, which a resumed
    training shares. `options` are those of `ResumableTrainer`, and `target`, the loss to end at.
    """
    target, callbacks = options.pop("target", None), list(options.pop("callbacks", ()))
    network: Any = model
    is_transformer = isinstance(model, PreTrainedModel)
    with ExitStack() as stack:

        def begin() -> tuple[RunDirectory, Path | None]:
            directory = stack.enter_context(open_run(run, settings, resume=resume))
            resumes = resume and not directory.finished
            return directory, directory.newest_checkpoint() if resumes else None

        directory, checkpoint = from_main_process(begin)
        if directory.finished:
            model.load_state_dict(
                open_model(run).state_dict() if is_transformer else load_file(run / WEIGHTS_NAME)
            )
            return read_metrics(run)
        interrupt = stack.enter_context(interrupt_between_steps())
        bar = stack.enter_context(progress_bar(name))
        stack.enter_context(no_progress())
        watch = _Watch(interrupt, bar, target)
        if is_transformer:
            use_cache, network.config.use_cache = network.config.use_cache, False
        trainer = watch.trainer = ResumableTrainer(
            directory,
            model=model,
            args=arguments,
            train_dataset=corpus.train,
            processing_class=corpus.tokenizer,
            callbacks=[*callbacks, watch],
            **{"data_collator": collate, "eval_dataset": corpus.validation} | options,
        )
        _check_sharding(trainer)
        with _others_are_needed(run):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if not watch.reached and trainer.state.global_step < arguments.max_steps:
            raise KeyboardInterrupt
        trainer.require_finite_weights()
        # Under FSDP each process holds a part of every weight, and all have to take part here.
        is_sharded = trainer.is_fsdp_enabled
        state = trainer.accelerator.get_state_dict(trainer.model) if is_sharded else None
        if is_transformer:
            network.config.use_cache = use_cache
        if trainer.is_world_process_zero():
            if is_transformer:
                save_model(run, network, corpus.tokenizer, state)
            else:
                write_safetensors(run / WEIGHTS_NAME, state or model.state_dict())
            directory.finish()
        trainer.accelerator.wait_for_everyone()
    return trainer.state.log_history


def _check_sharding(trainer: Trainer) -> None:
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        raise BilensError(
            "accelerate shards by FSDP version 1, expected version 2: version 1 flattens the "
            "weights; set fsdp_version: 2 in its configuration, or use torchrun"
        )


@contextmanager
def _others_are_needed(run: Path) -> Iterator[None]:
    """Say in a line, with a remedy, if this process cannot go on because another one has ended."""
    try:
        yield
    except RuntimeError as error:
        # gloo has no class of its own for it, and names the peer; NCCL's errors have one.
        is_lost = isinstance(error, torch.distributed.DistError) or re.search(
            "(closed|reset) by peer|Broken pipe|Timed out waiting", str(error)
        )
        if not is_lost or not torch.distributed.is_initialized():
            raise
        raise BilensError(
            "Another process of this training has ended, and none can go on alone. Its own "
            "message, if it had time for one, says why. Start the same command again with "
            f"--resume: the newest checkpoint in {run}, or its beginning, is where it goes on"
        ) from error

"""`bilens anneal` and `bilens export`: a gated model becomes a bilinear one."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bilens.cli.console import DataDir, ModelName, RunDir, out
from bilens.errors import BilensError
from bilens.train.anneal_settings import AnnealTraining, DecayName, ScheduleName
from bilens.train.language_settings import Precision, Tracker

__all__ = ["Anneal", "Export", "number_of_tokens"]

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


@dataclass(frozen=True)
class Anneal:
    """Train a pretrained gated model on while its activation becomes a straight line.

    The activation becomes Swish, whose beta falls from what the model has (1 for SiLU, 1.702 for
    GELU) to 0, where the model is bilinear. The run directory holds the model with its beta,
    training.json, metrics.jsonl and checkpoints. For several processes put `torchrun
    --nproc-per-node=N -m bilens` in the place of `bilens`, or `accelerate launch` for FSDP.

    Attributes:
        model: folder of a Hugging Face model, the name of a repository, or a .bin file of llama2.c.
        data: tinystories, or a text, parquet or jsonl file, or a folder of them.
        data_dir: folder that holds tinystories; by default the environment variable BILENS_DATA,
            and without that the Hugging Face hub.
        output: run directory; by default runs/annealed-NAME.
        schedule: how beta falls: linear, cosine, zero (from the start), or held (not at all).
        tokens: how many to train on, as 1000000, 500K, 1M or 0.5B.
        annealing: share of the training in which beta falls; the rest is at beta = 0.
        length: tokens of a text.
        shortest: of texts with so many tokens to length, each stands alone, and others are left
            out (384 in the paper); by default all are joined and cut.
        batch_size: texts in a step, over all processes and accumulated parts.
        learning_rate: of AdamW.
        decay: how the learning rate falls to zero by the end; none, as in the paper: not at all.
        warmup: share of the steps in which the learning rate rises from zero.
        weight_decay: of AdamW.
        accumulate: parts that each process does its share of a batch in.
        precision: bf16 or fp16 for mixed precision.
        checkpointing: work activations out twice instead of keeping them.
        log_every: steps between records of loss and beta.
        evaluate_every: steps between validations; none but the last by default.
        save_every: steps between checkpoints.
        report_to: a tracker that gets the metrics too.
        seed: of the order of the texts.
        resume: go on from where an earlier annealing in output was stopped.
        device: auto takes a GPU where there is one; cpu leaves it alone.
    """

    model: ModelName
    data: str
    data_dir: DataDir = None
    output: Path | None = None
    schedule: ScheduleName = "linear"
    tokens: str = "105M"
    annealing: float = 1.0
    length: int = 512
    shortest: int | None = None
    batch_size: int = 8
    learning_rate: float = 3e-6
    decay: DecayName = "none"
    warmup: float = 0.0
    weight_decay: float = 0.0
    accumulate: int = 1
    precision: Precision = "float32"
    checkpointing: bool = False
    log_every: int = 50
    evaluate_every: int | None = None
    save_every: int = 500
    report_to: Tracker = "none"
    seed: int = 0
    resume: bool = False
    device: Literal["auto", "cpu"] = "auto"

    def run(self) -> None:
        """Anneal one model."""
        training = self._training()
        # transformers takes seconds to import, and other commands do without it.
        from accelerate import PartialState  # noqa: PLC0415

        from bilens.convert import open_model, open_tokenizer  # noqa: PLC0415
        from bilens.data import load_documents  # noqa: PLC0415
        from bilens.train.anneal import anneal  # noqa: PLC0415

        model = open_model(self.model)
        tokenizer = open_tokenizer(self.model, model)
        output = self.output or Path("runs") / f"annealed-{Path(self.model).stem}"
        cpu = self.device == "cpu"
        state = PartialState(cpu=cpu)
        # One process fills the cache of token ids, and the others open it.
        with state.main_process_first():
            corpus = load_documents(
                self.data,
                tokenizer,  # type: ignore[arg-type]
                n_ctx=self.length,
                shortest=self.shortest,
                data_dir=self.data_dir,
            )
        history = anneal(model, corpus, training, output, resume=self.resume, use_cpu=cpu)
        if state.is_main_process:
            last = next(record for record in reversed(history) if "eval_loss" in record)
            out.print(
                f"{output}: beta {last['beta']:.4g}, validation loss {last['eval_loss']:.4f} nats "
                "a token",
                highlight=False,
                soft_wrap=True,
            )

    def _training(self) -> AnnealTraining:
        own = AnnealTraining.__dataclass_fields__.keys()
        settings: dict[str, Any] = {k: v for k, v in asdict(self).items() if k in own}
        return AnnealTraining(**{**settings, "tokens": number_of_tokens(self.tokens)})


@dataclass(frozen=True)
class Export:
    """Save an annealed model as an ordinary Hugging Face checkpoint with hidden_act "linear".

    Plain transformers loads and runs it, without bilens.

    Attributes:
        run_dir: directory that `bilens anneal` wrote.
        output: folder for the model; by default RUN/bilinear.
    """

    run_dir: RunDir
    output: Path | None = None

    def run(self) -> None:
        """Fold the 1/2 of Swish into the gates and save."""
        # transformers takes seconds to import, and other commands do without it.
        from bilens.convert import (  # noqa: PLC0415
            make_bilinear,
            open_model,
            open_tokenizer,
            save_model,
        )

        model = open_model(self.run_dir)
        tokenizer = open_tokenizer(self.run_dir, model)
        make_bilinear(model)
        output = self.output or self.run_dir / "bilinear"
        save_model(output, model, tokenizer)
        out.print(f"model: {output}", highlight=False, soft_wrap=True)


def number_of_tokens(text: str, name: str = "tokens") -> int:
    """A number such as 1000000, 500K, 1M or 0.5B.

    Raises:
        BilensError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.upper())
    if found is None:
        raise BilensError(f"--{name}={text}, expected a number such as 1000000, 500K, 1M or 0.5B")
    return round(float(found[1]) * UNITS[found[2]])

"""`bilens train language`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bilens.cli.language_setup import LanguageSetup
from bilens.cli.terminal import out
from bilens.lazy_imports import lazy_import

if TYPE_CHECKING:
    from bilens.train import language
else:  # transformers takes seconds to import, and classifiers do without it.
    language = lazy_import("bilens.train.language")

__all__ = ["TrainLanguage"]


@dataclass(frozen=True)
class TrainLanguage(LanguageSetup):
    """Train a language model from scratch and save it with its tokenizer.

    The run directory holds the model and the tokenizer as Hugging Face folders do, training.json,
    metrics.jsonl and checkpoints, from the last whole one of which --resume goes on. For several
    processes write `torchrun --nproc-per-node=N -m bilens` instead of `bilens`.

        bilens train language --data grammar
        bilens train language --data stories.txt --preset tiny --report-to tensorboard

    Attributes:
        output: run directory; by default runs/NAME-OF-THE-DATA.
        resume: go on from where an earlier training in output was stopped.
    """

    output: Path | None = None
    resume: bool = False

    def run(self) -> dict[str, Any] | None:
        """Train one model."""
        config, corpus = self.prepare()
        run = self.output or Path("runs") / Path(self.data).name
        model, history = language.train_language(
            config, corpus, self.training, run, resume=self.resume, use_cpu=self.use_cpu
        )
        if not self.is_main_process():
            return None
        loss = next(r["eval_loss"] for r in reversed(history) if "eval_loss" in r)
        size = sum(parameter.numel() for parameter in model.parameters())
        out.print(f"{run}: {size:,} parameters, validation loss {loss:.4f} nats a token")
        return {"run": run, "parameters": size, "validation_loss": loss}

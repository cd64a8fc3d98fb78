"""`bilens train language`."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from bilens.cli.setup import Setup, is_main_process
from bilens.cli.terminal import out
from bilens.nn import AttentionName, MlpName

__all__ = ["TrainLanguage"]


@dataclass(frozen=True)
class TrainLanguage:
    """Train a language model from scratch and save it with its tokenizer.

    The run directory holds the model and the tokenizer as Hugging Face folders do, training.json,
    metrics.jsonl and checkpoints, from the last of which --resume goes on. For several processes
    put `torchrun --nproc-per-node=N -m bilens` in the place of `bilens`.

    Attributes:
        output: run directory; by default runs/NAME-OF-THE-DATA.
        resume: go on from where an earlier training in output was stopped.
        mlp: only bilinear is a tensor; the others are for comparison.
        attention: only squared and bilinear are tensors; the others are for comparison.
        seed: of the weights and the order of the texts.
        target_loss: the training ends at a validation loss as small as this.
    """

    setup: Setup = field(default=Setup())
    output: Path | None = None
    resume: bool = False
    mlp: MlpName = "bilinear"
    attention: AttentionName = "softmax"
    seed: int = 0
    target_loss: float | None = None

    def run(self) -> None:
        """Train one model."""
        # transformers takes seconds to import, and other commands do without it.
        from bilens.train.language import train_language  # noqa: PLC0415

        config, training, corpus = self.setup.prepare(mlp=self.mlp, attention=self.attention)
        run = self.output or Path("runs") / Path(self.setup.data).name
        model, history = train_language(
            config,
            corpus,
            replace(training, seed=self.seed, target_loss=self.target_loss),
            run,
            resume=self.resume,
            use_cpu=self.setup.use_cpu,
        )
        if is_main_process():
            loss = next(r["eval_loss"] for r in reversed(history) if "eval_loss" in r)
            size = sum(parameter.numel() for parameter in model.parameters())
            out.print(
                f"{run}: {size:,} parameters, validation loss {loss:.4f} nats a token",
                highlight=False,
            )

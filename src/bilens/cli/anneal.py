"""`bilens anneal` and `bilens export`: a gated model becomes a bilinear one."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bilens.cli.console import DataDir, ModelName, RunDir
from bilens.cli.terminal import out
from bilens.lazy_imports import lazy_import
from bilens.settings import Count, check_settings
from bilens.train.settings import AnnealTraining

if TYPE_CHECKING:
    import accelerate

    from bilens import convert
    from bilens import data as texts
    from bilens.train import anneal
else:  # transformers takes seconds to import, and `bilens anneal --help` does without it.
    accelerate, convert = lazy_import("accelerate"), lazy_import("bilens.convert")
    texts, anneal = lazy_import("bilens.data"), lazy_import("bilens.train.anneal")

__all__ = ["Anneal", "Export"]


@dataclass(frozen=True)
class Anneal:
    """Go on training a pretrained gated model while its activation becomes a straight line.

    The activation becomes Swish, whose beta falls from what the model has (1 for SiLU, 1.702 for
    GELU) to 0, where the model is bilinear. The run directory holds the model with its beta,
    training.json, metrics.jsonl and checkpoints. For several processes write `torchrun
    --nproc-per-node=N -m bilens` instead of `bilens`, or `accelerate launch` for FSDP.

        bilens anneal HuggingFaceTB/SmolLM2-135M --data stories.txt --output runs/annealed

    Attributes:
        model: folder of a Hugging Face model, the name of a repository, or a .bin file of llama2.c.
        data: tinystories, or a text, parquet or jsonl file, or a folder of them.
        data_dir: folder that holds tinystories; by default the environment variable BILENS_DATA,
            and without that the Hugging Face hub.
        output: run directory; by default runs/annealed-NAME.
        shortest: keep only texts of this many tokens up to length, each on its own (384 in the
            paper); by default all are joined and cut.
        resume: go on from where an earlier annealing in output was stopped.
        device: auto takes a GPU where there is one; cpu ignores it.
    """

    model: ModelName
    data: str
    data_dir: DataDir = None
    output: Path | None = None
    shortest: Count | None = None
    resume: bool = False
    device: Literal["auto", "cpu"] = "auto"
    training: AnnealTraining = field(default_factory=AnnealTraining)

    def __post_init__(self) -> None:
        check_settings(self)

    def run(self) -> dict[str, Any] | None:
        """Anneal one model."""
        model = convert.open_model(self.model)
        tokenizer = convert.open_tokenizer(self.model, model)
        output = self.output or Path("runs") / f"annealed-{Path(self.model).stem}"
        cpu = self.device == "cpu"
        state = accelerate.PartialState(cpu=cpu)
        # One process fills the cache of token ids, and the others open it.
        with state.main_process_first():
            corpus = texts.load_documents(
                self.data,
                tokenizer,  # type: ignore[arg-type]
                n_ctx=self.training.length,
                shortest=self.shortest,
                data_dir=self.data_dir,
            )
        history = anneal.anneal(
            model, corpus, self.training, output, resume=self.resume, use_cpu=cpu
        )
        if not state.is_main_process:
            return None
        last = next(record for record in reversed(history) if "eval_loss" in record)
        beta, loss = last["beta"], last["eval_loss"]
        out.print(f"{output}: beta {beta:.4g}, validation loss {loss:.4f} nats a token")
        return {"run": output, "beta": beta, "validation_loss": loss}


@dataclass(frozen=True)
class Export:
    """Save an annealed model as an ordinary Hugging Face checkpoint with hidden_act "linear".

    Plain transformers loads and runs it, without bilens.

        bilens export runs/annealed --output bilinear

    Attributes:
        run_dir: directory that `bilens anneal` wrote.
        output: folder for the model; by default RUN/bilinear.
    """

    run_dir: RunDir
    output: Path | None = None

    def run(self) -> dict[str, Any]:
        """Fold the 1/2 of Swish into the gates and save."""
        model = convert.open_model(self.run_dir)
        tokenizer = convert.open_tokenizer(self.run_dir, model)
        convert.make_bilinear(model)
        output = self.output or self.run_dir / "bilinear"
        convert.save_model(output, model, tokenizer)
        out.print(f"model: {output}")
        return {"model": output}

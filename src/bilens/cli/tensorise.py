"""`bilens tensorise`: a pretrained transformer becomes a tensor."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bilens.cli.console import DataDir, ModelName, choose_device
from bilens.cli.terminal import out, show_table
from bilens.lazy_imports import lazy_import
from bilens.settings import Count, check_settings
from bilens.train.settings import TensoriseTraining

if TYPE_CHECKING:
    import accelerate

    from bilens import convert
    from bilens import data as texts
    from bilens.train import tensorise
else:  # transformers takes seconds to import, and `bilens tensorise --help` does without it.
    accelerate, convert = lazy_import("accelerate"), lazy_import("bilens.convert")
    texts, tensorise = lazy_import("bilens.data"), lazy_import("bilens.train.tensorise")


@dataclass(frozen=True)
class Tensorise:
    """Turn a pretrained Llama-like model into a tensor: linear gates, attention without softmax.

    Gates become lines, attention becomes squared with rows divided by their sum, and then all
    weights learn the next-token distribution of the original. The text is drawn from the model
    itself. Each stage is saved in the folder stages of the run directory, and its loss is printed.

        bilens tensorise HuggingFaceTB/SmolLM2-135M --data stories.txt --output runs/tensor

    Attributes:
        model: folder of a Hugging Face model, the name of a repository, or a .bin file of llama2.c.
        data: texts to measure on, and to learn from besides own text: tinystories, or a text,
            parquet or jsonl file, or a folder of them. Without any, held-out own text is measured.
        data_dir: folder that holds tinystories; by default the environment variable BILENS_DATA,
            and without that the Hugging Face hub.
        output: run directory; by default runs/tensor-NAME.
        held_out: tokens of each text to measure on.
        resume: continue from the last finished stage or checkpoint in output.
        device: auto takes a GPU if there is one; cpu ignores it.
    """

    model: ModelName
    data: tuple[str, ...] = ()
    data_dir: DataDir = None
    output: Path | None = None
    held_out: Count = 16_384
    resume: bool = False
    device: Literal["auto", "cpu"] = "auto"
    training: TensoriseTraining = field(default_factory=TensoriseTraining)

    def __post_init__(self) -> None:
        check_settings(self)

    def run(self) -> dict[str, Any] | None:
        """Train, save and print."""
        cpu = self.device == "cpu"
        state = accelerate.PartialState(cpu=cpu)
        model: Any = convert.open_model(self.model)
        tokenizer: Any = convert.open_tokenizer(self.model, model)
        output = self.output or Path("runs") / f"tensor-{Path(self.model).stem}"
        length = self.training.length
        with state.main_process_first():
            corpora = [
                texts.load_documents(name, tokenizer, n_ctx=length, data_dir=self.data_dir)
                for name in self.data
            ]
        n_texts = max(1, self.held_out // length)
        held_out = {c.name: c.validation[:n_texts]["input_ids"] for c in corpora}
        learned = [c.train[:]["input_ids"] for c in corpora]
        tensorised = tensorise.tensorise(
            model.to(choose_device(self.device)),
            tokenizer,
            held_out,
            self.training,
            output,
            texts=tensorise.interleaved(learned) if learned else None,
            resume=self.resume,
            use_cpu=cpu,
        )
        if not state.is_main_process:
            return None
        frame = tensorised.frame()
        rows = [
            (stage, text, f"{loss:.4f}", f"{rise:+.4f}", f"{kl:.4f}", f"{top1:.1%}")
            for stage, text, loss, rise, kl, top1 in frame.itertuples(index=False)
        ]
        show_table(("stage", "text", "loss", "rise", "KL", "same top token"), rows, words=2)
        out.print(f"model: {output}")
        return {"model": output, "stages": frame}

"""`bilens process`: fold and centre the weights of a transformer, its function unchanged."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bilens.cli.console import Device, ModelName, choose_device
from bilens.cli.terminal import out, show_table
from bilens.files import write_json
from bilens.lazy_imports import lazy_import

if TYPE_CHECKING:
    from bilens import convert
else:  # transformers takes seconds to import, and `--help` does without it.
    convert = lazy_import("bilens.convert")

__all__ = ["Process"]

STEP_NAMES = ("fold_norms", "fold_value_biases", "center_writing_weights", "center_unembed")


@dataclass(frozen=True)
class Process:
    """Fold norms and biases into the weights and centre them, so that they are easier to read.

    What the model computes stays the same; the largest change of a log-probability on random
    tokens is measured and printed. For bilens transformers, GPT-2, GPT-NeoX (Pythia), Llama,
    Mistral, Qwen 2 and 3, Gemma 1 to 3, Phi-3, Granite, OLMo 2, Helium, GLM and Cohere 2.

        bilens process runs/grammar
        bilens process gpt2 --steps fold_norms --output gpt2-folded

    Attributes:
        model: folder of a Hugging Face or bilens model, the name of a repository, or a .bin file of
            llama2.c.
        steps: which to apply; by default all that leave what the model computes unchanged.
        output: folder for the processed model and processing.json; by default
            runs/processed-NAME.
    """

    model: ModelName
    steps: tuple[Literal[STEP_NAMES], ...] = ()  # type: ignore[valid-type]
    output: Path | None = None
    device: Device = "auto"

    def run(self) -> dict[str, Any]:
        """Process and save."""
        model: Any = convert.open_model(self.model).to(choose_device(self.device))  # type: ignore[arg-type]
        tokenizer = convert.find_tokenizer(self.model, model)
        model, report = convert.process(model, self.steps or None, in_place=True)
        output = self.output or Path("runs") / f"processed-{Path(self.model).stem}"
        convert.save_model(output, model, tokenizer)
        write_json(output / "processing.json", report.record())
        done = {step: f"{len(folded)} times" for step, folded in report.folded.items()}
        refused = {step: f"no: {reason}" for step, reason in report.refused.items()}
        show_table(("step", "applied"), {**done, **refused}.items(), words=2)
        if report.untied:
            out.print("embedding and unembedding were one matrix and are two now")
        if not report.loads_in_transformers:
            out.print(
                f"{len(report.added_biases)} maps have a bias that plain transformers has no room "
                "for; open the model with bilens.load, or choose other --steps",
            )
        out.print(
            f"largest change of a log-probability: {report.change:.1e}",
        )
        out.print(f"model: {output}")
        return {"model": output, **report.record()}

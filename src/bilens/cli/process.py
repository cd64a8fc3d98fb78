"""`bilens process`: fold and centre the weights of a transformer, its function unchanged."""

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from bilens.cli.console import ModelName
from bilens.cli.terminal import out

__all__ = ["Process"]


@dataclass(frozen=True)
class Process:
    """Fold norms and biases into the weights and centre them, so that they are easier to read.

    What the model computes stays the same; the largest change of a log-probability on random
    tokens is measured and printed. For bilens transformers, GPT-2, GPT-NeoX (Pythia), Llama,
    Mistral, Qwen 2 and 3, Gemma 2 and 3, and Phi-3.

    Attributes:
        model: folder of a Hugging Face or bilens model, the name of a repository, or a .bin file of
            llama2.c.
        output: folder for the processed model and processing.json; by default
            runs/processed-NAME.
    """

    model: ModelName
    output: Path | None = None

    def run(self) -> None:
        """Process and save."""
        # transformers takes seconds to import, and other commands do without it.
        from bilens.convert import open_model, open_tokenizer, process, save_model  # noqa: PLC0415
        from bilens.files import write_json  # noqa: PLC0415

        model = open_model(self.model)
        tokenizer = open_tokenizer(self.model, model)
        model, report = process(model, in_place=True)
        output = self.output or Path("runs") / f"processed-{Path(self.model).stem}"
        save_model(output, model, tokenizer)
        write_json(output / "processing.json", report.record())
        table = Table("step", "applied")
        for step, folded in report.folded.items():
            table.add_row(step, f"{len(folded)} times")
        for step, reason in report.refused.items():
            table.add_row(step, f"no: {reason}")
        out.print(table)
        if report.untied:
            out.print("embedding and unembedding were one matrix and are two now")
        if report.added_biases:
            out.print(
                f"{len(report.added_biases)} maps have a bias that plain transformers has no room "
                "for; open the model with bilens.convert.open_model",
                soft_wrap=True,
            )
        out.print(
            f"largest change of a log-probability: {report.change:.1e}",
            highlight=False,
            soft_wrap=True,
        )
        out.print(f"model: {output}", highlight=False, soft_wrap=True)

"""`bilens generate`, and language models for commands."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bilens.cli.console import Device, ModelName, choose_device
from bilens.cli.terminal import out
from bilens.errors import BilensError
from bilens.lazy_imports import lazy_import
from bilens.models import load

if TYPE_CHECKING:
    from bilens.read import language
    from bilens.residual import ResidualModel
else:  # transformers takes seconds to import, and `--help` does without it.
    language = lazy_import("bilens.read.language")


@dataclass(frozen=True)
class Generate:
    """Let a language model continue a text.

        bilens generate runs/grammar --prompt "then ben"

    Attributes:
        model: run directory, folder or name of a model of a known family, .gguf or llama2.c file.
        prompt: how the text begins.
        tokens: at most how many to add.
        temperature: 0 takes the most likely token each time; 1 draws from what the model says.
        seed: of the sampling.
    """

    model: ModelName
    prompt: str = "once upon a time"
    tokens: int = 120
    temperature: float = 0.7
    seed: int = 0
    device: Device = "auto"

    def run(self) -> dict[str, Any]:
        """Write and print."""
        text = language.generate_text(
            load_language(self.model, self.device),
            self.prompt,
            tokens=self.tokens,
            temperature=self.temperature,
            seed=self.seed,
        )
        out.print(text)
        return {"text": text}


def load_language(source: str, device: str) -> "ResidualModel":
    """A language model and its tokenizer.

    Raises:
        CheckpointError: one of them is missing or damaged.
        BilensError: the model is of another kind, or there is no such device.
    """
    model: Any = load(source, device=choose_device(device))
    if not hasattr(model, "parts"):
        raise BilensError(
            f"{source} holds {type(model).__name__}, and this command reads language models; "
            "`bilens decompose` and `bilens report` read classifiers"
        )
    return model

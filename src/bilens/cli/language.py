"""`bilens generate` and `spectra`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bilens
from bilens.checks import check_index
from bilens.cli.console import Device, ModelName, choose_device
from bilens.cli.terminal import out, show_table
from bilens.errors import BilensError
from bilens.lazy_imports import accelerate, lazy_import
from bilens.models import load
from bilens.reading import signed

if TYPE_CHECKING:
    from bilens.read import language
    from bilens.residual import ResidualModel
else:  # It imports transformers, which takes seconds, and `--help` does without it.
    language = lazy_import("bilens.read.language")


@dataclass(frozen=True)
class Generate:
    """Let a language model continue a text.

        bilens generate runs/grammar --prompt "then ben"

    Attributes:
        model: run directory, folder or name of a model of a known family, .gguf or llama2.c file.
        prompt: how the text begins.
        tokens: at most how many to add.
        temperature: 0 takes the most likely token; 1 draws from the model's probabilities.
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
    """Load a language model with its tokenizer.

    Raises:
        CheckpointError: one of them is missing or damaged.
        BilensError: the model is of another kind, or this machine has no such device.
    """
    model: Any = load(source, device=choose_device(device))
    if not hasattr(model, "parts"):
        raise BilensError(
            f"{source} holds {type(model).__name__}, and this command reads language models; "
            "`bilens decompose` and `bilens report` read classifiers"
        )
    return model


SHOWN = 10


@dataclass(frozen=True)
class Spectra:
    """Find the top eigenpairs of a bilinear layer along the logit of every token, and save them.

    Writes spectra.json and spectra-NNNNN.safetensors, each the spectra of some tokens; what is
    there already is kept. For several devices write `torchrun --nproc-per-node=N -m bilens`
    instead of `bilens`.

        bilens spectra runs/annealed --layer 3
        bilens spectra runs/annealed --tokens cat,dog --top 4 --json

    Attributes:
        model: folder of a bilinear model: annealed, exported, or trained with bilens.
        layer: number of the layer, from 0.
        tokens: all, or some separated by commas, each as the vocabulary writes it or its number.
        top: eigenpairs of each token.
        batch: tokens in a file.
        tolerance: largest residual of a pair.
        output: folder; by default runs/spectra-NAME-LAYER.
    """

    model: ModelName
    layer: int = 0
    tokens: str = "all"
    top: int = 8
    batch: int = 256
    tolerance: float = 1e-4
    output: Path | None = None
    device: Device = "auto"

    def run(self) -> dict[str, Any] | None:
        """Decompose and save."""
        model = load_language(self.model, self.device)
        numbers = self._numbers(model)
        output = self.output or Path("runs") / f"spectra-{Path(self.model).stem}-{self.layer}"
        bilens.convert.write_spectra(
            model.mlp(self.layer),
            model.parts.logit_weights(numbers)[0].T,
            output,
            names=numbers,
            k=self.top,
            batch_size=self.batch,
            tolerance=self.tolerance,
        )
        state = accelerate.PartialState()
        if state.num_processes > 1:
            out.print(f"{output}: the part of process {state.process_index} is done")
            return None
        names, spectrum = bilens.convert.read_spectra(output)
        tokens = language.token_names(model, names)
        values = spectrum.values.tolist()
        residuals = spectrum.residuals.amax(-1).tolist()
        show_table(
            ("token", "eigenvalues", "largest residual"),
            [
                (
                    tokens[i],
                    "  ".join(signed(value) for value in values[i]),
                    f"{residuals[i]:.1e}",
                )
                for i in range(min(SHOWN, len(names)))
            ],
            words=2,
        )
        out.print(f"{len(names):,} tokens: {output}")
        rows = zip(names, tokens, values, residuals, strict=True)
        keys = ("number", "token", "eigenvalues", "largest_residual")
        return {"output": output, "tokens": [dict(zip(keys, row, strict=True)) for row in rows]}

    def _numbers(self, model: "ResidualModel") -> list[int]:
        """Return the tokens' numbers: all, or those of names or numbers."""
        if self.tokens == "all":
            return list(range(model.parts.unembed.n_out))
        words = self.tokens.split(",")
        known = model.tokenizer.get_vocab() if model.tokenizer is not None else {}
        return [
            # Python refuses to read numbers of thousands of digits.
            check_index("tokens", int(name[:20]), model.vocab_size, "the model's tokens")
            if name.isdecimal() and name not in known
            else model.token(name)
            for name in words
        ]

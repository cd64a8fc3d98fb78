"""`bilens spectra`: the top eigenpairs of one layer along the logits of many tokens."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text

from bilens.cli.console import ModelName, choose_device
from bilens.cli.terminal import out
from bilens.errors import BilensError

__all__ = ["Spectra"]

SHOWN = 10


@dataclass(frozen=True)
class Spectra:
    """Find the top eigenpairs of a bilinear layer along the logit of every token, and save them.

    Writes spectra.json and spectra-NNNNN.safetensors (directions, values, vectors, residuals), some
    tokens in each; what is there is not made again. For several devices put `torchrun
    --nproc-per-node=N -m bilens` in the place of `bilens`.

    Attributes:
        model: folder of a bilinear model: annealed, exported, or trained with bilens.
        layer: number of the layer, from 0.
        tokens: all, or some separated by commas, each as the vocabulary writes it or its number.
        top: eigenpairs of each token.
        batch: tokens in a file.
        tolerance: largest residual of a pair.
        output: folder; by default runs/spectra-NAME-LAYER.
        device: auto takes a GPU where there is one.
    """

    model: ModelName
    layer: int = 0
    tokens: str = "all"
    top: int = 8
    batch: int = 256
    tolerance: float = 1e-4
    output: Path | None = None
    device: str = "auto"

    def run(self) -> None:
        """Decompose and save."""
        # transformers takes seconds to import, and other commands do without it.
        from bilens.convert import (  # noqa: PLC0415
            Share,
            mlp_tensor,
            open_model,
            open_tokenizer,
            read_spectra,
            unembedding_directions,
            write_spectra,
        )

        share = Share(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
        model = open_model(self.model)
        tokenizer = open_tokenizer(self.model, model)
        vocabulary = tokenizer.get_vocab()
        numbers = self._numbers(vocabulary, model.config.vocab_size)
        output = self.output or Path("runs") / f"spectra-{Path(self.model).stem}-{self.layer}"
        write_spectra(
            mlp_tensor(model, self.layer).to(self._device()),
            unembedding_directions(model)[numbers],
            output,
            names=numbers,
            top=self.top,
            batch=self.batch,
            tolerance=self.tolerance,
            share=share,
        )
        if share.of > 1:
            out.print(
                f"{output}: the part of process {share.rank} is done",
                highlight=False,
                soft_wrap=True,
            )
            return
        names, spectrum = read_spectra(output)
        table = Table("token", "eigenvalues", "largest residual")
        for row in range(min(SHOWN, len(names))):
            values = "  ".join(f"{value:+.3g}" for value in spectrum.values[row].tolist())
            shown = str(tokenizer.convert_ids_to_tokens(int(names[row])))
            table.add_row(Text(shown), values, f"{spectrum.residuals[row].max():.1e}")
        out.print(table)
        out.print(f"{len(names):,} tokens: {output}", highlight=False, soft_wrap=True)

    def _numbers(self, vocabulary: dict[str, int], size: int) -> list[int]:
        if self.tokens == "all":
            return list(range(size))
        found = []
        for name in self.tokens.split(","):
            number = vocabulary.get(name, int(name) if name.isdecimal() else -1)
            if not 0 <= number < size:
                raise BilensError(
                    f"--tokens={self.tokens}: {name!r} is no token of the model and no number "
                    f"below {size}"
                )
            found.append(number)
        return found

    def _device(self) -> torch.device:
        local = os.environ.get("LOCAL_RANK")
        if self.device == "auto" and torch.cuda.is_available() and local is not None:
            return torch.device("cuda", int(local) % torch.cuda.device_count())
        return choose_device(self.device)

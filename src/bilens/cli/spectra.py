"""`bilens spectra`: the top eigenpairs of one layer along the logits of many tokens."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from bilens.cli.console import Device, ModelName
from bilens.cli.language import load_language
from bilens.cli.terminal import out
from bilens.lazy_imports import lazy_import

if TYPE_CHECKING:
    from bilens import convert
    from bilens.read import language
    from bilens.residual import ResidualModel
else:  # transformers takes seconds to import, and `--help` does without it.
    convert = lazy_import("bilens.convert")
    language = lazy_import("bilens.read.language")

__all__ = ["Spectra"]

SHOWN = 10


@dataclass(frozen=True)
class Spectra:
    """Find the top eigenpairs of a bilinear layer along the logit of every token, and save them.

    Writes spectra.json and spectra-NNNNN.safetensors, each the spectra of some tokens; what is
    there is not made again. For several devices put `torchrun --nproc-per-node=N -m bilens` in the
    place of `bilens`.

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

    def run(self) -> None:
        """Decompose and save."""
        model = load_language(self.model, self.device)
        numbers = self._numbers(model)
        output = self.output or Path("runs") / f"spectra-{Path(self.model).stem}-{self.layer}"
        share = convert.Share(
            int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        )
        convert.write_spectra(
            model.mlp(self.layer),
            model.W_U[numbers],
            output,
            names=numbers,
            k=self.top,
            batch_size=self.batch,
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
        names, spectrum = convert.read_spectra(output)
        table = Table("token", "eigenvalues", "largest residual")
        shown = language.token_names(model, names[:SHOWN])
        for row, name in enumerate(shown):
            values = "  ".join(f"{value:+.3g}" for value in spectrum.values[row].tolist())
            table.add_row(Text(name), values, f"{spectrum.residuals[row].max():.1e}")
        out.print(table)
        out.print(f"{len(names):,} tokens: {output}", highlight=False, soft_wrap=True)

    def _numbers(self, model: "ResidualModel") -> list[int]:
        """The tokens' numbers: all, or each by its name or as a number."""
        if self.tokens == "all":
            return list(range(model.parts.unembed.n_out))
        chosen = self.tokens.split(",")
        known = model.tokenizer.get_vocab() if model.tokenizer is not None else {}
        return [
            int(name) if name.isdecimal() and name not in known else model.token(name)
            for name in chosen
        ]

"""`bilens linearise`: the gates of a pretrained model made linear, fitted and not trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bilens.cli.console import DataDir, Device, ModelName, choose_device
from bilens.cli.terminal import out, show_table
from bilens.errors import BilensError
from bilens.lazy_imports import lazy_import
from bilens.reading import signed

if TYPE_CHECKING:
    from bilens import convert, data
    from bilens.train import linearise
else:  # transformers takes seconds to import, and `--help` does without it.
    convert, data = lazy_import("bilens.convert"), lazy_import("bilens.data")
    linearise = lazy_import("bilens.train.linearise")

__all__ = ["Linearise"]

WORST = 5


@dataclass(frozen=True)
class Linearise:
    """Make the gates of a pretrained gated model linear, so that its layers are bilinear.

    Each gate becomes the line nearest to it on a text, and each down map is fitted to what the
    layer gave, in closed form, layer by layer. Prints the loss with each layer linear alone and
    with all of them.

        bilens linearise HuggingFaceTB/SmolLM2-135M --data stories.txt --budget 0.1

    Attributes:
        model: folder of a Hugging Face model, the name of a repository, or a .bin file of llama2.c.
        data: tinystories, or a text, parquet or jsonl file, or a folder of them.
        data_dir: folder that holds tinystories; by default the environment variable BILENS_DATA,
            and without that the Hugging Face hub.
        output: folder for the model; by default runs/linear-NAME.
        layers: which layers, by their numbers; all by default.
        budget: nats a token by which the loss may rise; layers that cost most are left gated.
        steps: of Adam, by which each layer then learns, by itself, to give what it gave.
        tokens: to fit on, as 8192, 32K or 1M.
        held_out: tokens of other texts to measure losses on.
        length: tokens of a text.
    """

    model: ModelName
    data: str
    data_dir: DataDir = None
    output: Path | None = None
    layers: tuple[int, ...] | None = None
    budget: float | None = None
    steps: int = 0
    tokens: int = 8192
    held_out: int = 8192
    length: int = 256
    device: Device = "auto"

    def run(self) -> dict[str, Any]:
        """Fit, save and print."""
        how = linearise.Distillation(steps=self.steps)
        model: Any = convert.open_model(self.model)
        tokenizer = convert.open_tokenizer(self.model, model)
        corpus = data.load_documents(
            self.data,
            tokenizer,  # type: ignore[arg-type]
            n_ctx=self.length,
            data_dir=self.data_dir,
        )
        found = linearise.linearise(
            model.to(choose_device(self.device)),
            self._rows("tokens", corpus.train),
            self._rows("held_out", corpus.validation),
            self.layers,
            budget=self.budget,
            distillation=how,
        )
        output = self.output or Path("runs") / f"linear-{Path(self.model).stem}"
        convert.save_model(output, model, tokenizer)
        rows = []
        for layer, loss in found.alone.items():
            fit = found.fits.get(layer)
            distance = "" if fit is None else f"{fit.distance:.3f}"
            rise = signed(loss - found.before, ".4f")
            rows.append((str(layer), "yes" if fit else "no", f"{loss:.4f}", rise, distance))
        header = ("layer", "linear", "loss alone", "rise", "distance of the MLP's output")
        show_table(header, rows, words=2)
        worst = sorted(found.alone, key=lambda layer: -found.alone[layer])[:WORST]
        out.print(f"layers that suffer most: {', '.join(map(str, worst))}")
        out.print(
            f"{len(found.layers)} layers linear: {found.after:.4f} nats a token, "
            f"{found.before:.4f} before\nmodel: {output}",
        )
        return {
            "model": output,
            "layers": found.layers,
            "loss_before": found.before,
            "loss": found.after,
            "loss_alone": found.alone,
            "distances": {layer: fit.distance for layer, fit in found.fits.items()},
        }

    def _rows(self, name: str, texts: Any) -> torch.Tensor:
        """As many texts as hold the tokens that were asked for."""
        asked = int(getattr(self, name))
        if asked < self.length:
            raise BilensError(f"--{name}={asked}, expected at least --length={self.length}")
        rows: torch.Tensor = texts[: asked // self.length]["input_ids"]
        return rows

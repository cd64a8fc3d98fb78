"""`bilens reproduce`: the figures and tables of the papers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from bilens.cli.console import DataDir
from bilens.cli.terminal import out
from bilens.reproduce import RECIPES, reproduce

__all__ = ["Reproduce"]


@dataclass(frozen=True)
class Reproduce:
    """Reproduce a figure or table of the papers: its numbers as JSON, its figures as a page.

    Trained models are kept below the output folder, so that a second recipe, or a second try, finds
    them; ctrl-C loses nothing.

    Attributes:
        recipe: a figure of Pearce et al. 2024, fig9 being figures 9 and 10; anneal: figure 8 and
            Table 5, on a small pretrained model; stories: tables 1, 6, 7 and figures 7, 11, 13;
            grammar: a ground truth for n-grams; masks: adversarial masks from the weights; search:
            the best paths of deep models; or a part of the MNIST case study, Pearce & Dooms 2024:
            case_digits, case_svd, case_sae, case_pairs.
        scale: small takes minutes on two cores; paper is as large as the source.
        data_dir: where the IDX files are; see `bilens train images --help`.
        output: folder for NAME.json, NAME.html and the models.
    """

    recipe: tyro.conf.Positional[Literal[RECIPES]]  # type: ignore[valid-type]
    scale: Literal["small", "paper"] = "small"
    data_dir: DataDir = None
    output: Path = Path("runs/reproduced")

    def run(self) -> None:
        """Run the recipe and print its numbers."""
        record = reproduce(
            self.recipe,
            scale=self.scale,
            output=self.output,
            models=self.output / "models",
            data_dir=self.data_dir,
        )
        out.print_json(data=record)
        out.print(f"page: {self.output / self.recipe}.html", highlight=False)

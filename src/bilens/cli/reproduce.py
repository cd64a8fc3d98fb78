"""`bilens reproduce`: the figures and tables of the papers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bilens.cli.console import DataDir
from bilens.cli.terminal import out, show_table
from bilens.reproduce import recipes, reproduce

__all__ = ["Reproduce"]


@dataclass(frozen=True)
class Reproduce:
    """Reproduce a figure or table of the papers: its numbers as JSON, its figures as a page.

    Trained models are kept below the output folder, so that a second recipe, or a second try, finds
    them; ctrl-C loses nothing.

        bilens reproduce
        bilens reproduce bonds --scale small

    Attributes:
        recipe: which; without one, all are listed.
        scale: small takes minutes on two cores; paper is as large as the source.
        data_dir: where the IDX files are; see `bilens train images --help`.
        output: folder for NAME.json, NAME.html and the models.
    """

    recipe: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")] = None
    scale: Literal["small", "paper"] = "small"
    data_dir: DataDir = None
    output: Path = Path("runs/reproduced")

    def run(self) -> dict[str, Any]:
        """Run the recipe and print its numbers, or list them all."""
        if self.recipe is None:
            show_table(("recipe", "what"), recipes().items(), words=2)
            return {"recipes": recipes()}
        record = reproduce(
            self.recipe,
            scale=self.scale,
            output=self.output,
            models=self.output / "models",
            data_dir=self.data_dir,
        )
        out.print_json(data=record)
        out.print(f"page: {self.output / self.recipe}.html")
        return record

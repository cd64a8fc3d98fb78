"""`bilens demo` and `reproduce`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bilens.cli.console import DataDir
from bilens.cli.decompose import Decompose, Report
from bilens.cli.readings import command_of
from bilens.cli.terminal import out, show_table
from bilens.cli.train import Architecture, TrainImages, TrainLanguage
from bilens.nn.language_settings import LanguageSettings
from bilens.registry import analysis
from bilens.reproduce import recipes, reproduce
from bilens.train import ClassifierTraining, is_begun
from bilens.train.settings import LanguageTraining

DEEP = Architecture(d_model=64, n_layers=3, norm="scalar")
IMAGES = ClassifierTraining(epochs=40, batch_size=50, decay=0.95)
SMALL = LanguageSettings(d_model=64, n_heads=2, d_hidden=128, n_ctx=16)
WORDS = LanguageTraining(epochs=1, batch_size=64, learning_rate=5e-3)
# A name and a verb have an object: what ben ate was rice, what lily ate soup.
PROMPT, TOKEN, MINUS = "then ben was happy and ate", "rice", "soup,jam"


@dataclass(frozen=True)
class Demo:
    """See it work: a deep model on few directions, and a logit of a language model accounted for.

    Trains three layers on the bundled digits and a language model on a small grammar, which takes
    a minute or two. Prints how few directions the first needs and the sources of a logit of the
    second, and writes a page on each.

        bilens demo

    Attributes:
        output: folder of the two runs, deep and grammar.
    """

    output: Path = Path("runs/demo")

    def run(self) -> dict[str, Any]:
        """Train, decompose and report."""
        deep, grammar = self.output / "deep", self.output / "grammar"
        out.print("A deep model on few directions", style="bold")
        TrainImages(output=deep, resume=is_begun(deep), architecture=DEEP, training=IMAGES).run()
        # From the weights: the demo shows what no data has chosen.
        records = {"decompose": Decompose(deep, bonds=True, metric="weights").run()}
        Report(str(deep)).run()
        out.print(f"\n“{PROMPT}”: why {TOKEN}, and not {MINUS}?", style="bold")
        TrainLanguage(output=grammar, resume=is_begun(grammar), model=SMALL, training=WORDS).run()
        # The command, and not the function, so that the demo shows what users will type.
        flow: Any = command_of(analysis("flow"))
        page = grammar / "flow.html"
        records["flow"] = flow(
            model=str(grammar), prompt=PROMPT, token=TOKEN, minus=MINUS, output=page
        ).run()
        Report(str(grammar), token=TOKEN, minus=MINUS).run()
        return records


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
        data_dir: folder of the IDX files; see `bilens train images --help`.
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

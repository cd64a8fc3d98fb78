"""`bilens demo`: the whole way, on data that comes with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bilens.cli.decompose import Decompose, Report
from bilens.cli.readings import command_of
from bilens.cli.terminal import out
from bilens.cli.train_images import Architecture, TrainImages
from bilens.cli.train_language import TrainLanguage
from bilens.nn.language_settings import LanguageSettings
from bilens.registry import analysis
from bilens.train import ClassifierTraining, is_begun
from bilens.train.settings import LanguageTraining

__all__ = ["Demo"]

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
    a minute or two, prints how few directions the first needs and where a logit of the second
    comes from, and writes a page on each.

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
        found = {"decompose": Decompose(deep, bonds=True, metric="weights").run()}
        Report(str(deep), metric="weights").run()
        out.print(f"\n“{PROMPT}”: why {TOKEN}, and not {MINUS}?", style="bold")
        TrainLanguage(output=grammar, resume=is_begun(grammar), model=SMALL, training=WORDS).run()
        flow: Any = command_of(analysis("flow"))
        page = grammar / "flow.html"
        found["flow"] = flow(
            model=str(grammar), prompt=PROMPT, token=TOKEN, minus=MINUS, output=page
        ).run()
        Report(str(grammar), token=TOKEN, minus=MINUS).run()
        return found

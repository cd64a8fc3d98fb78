"""`bilens compare`."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from bilens.cli.setup import Schedule, Setup, is_main_process
from bilens.cli.terminal import out
from bilens.errors import BilensError
from bilens.files import write_json

if TYPE_CHECKING:
    from bilens.train.compare import LossCurve

__all__ = ["Compare"]


@dataclass(frozen=True)
class Compare:
    """Train architectures on the same texts in the same order as far as the same validation loss.

    Prints parameters, and the steps, tokens and seconds that each needed; the first architecture is
    what ratios refer to. The output holds comparison.json, comparison.html with the loss curves,
    and a run directory for each model and seed. After ctrl-C the same command goes on. For several
    processes put `torchrun --nproc-per-node=N -m bilens` in the place of `bilens`.

    Attributes:
        target_loss: in nats a token; a training ends where its validation loss is as small, at the
            latest after its epochs.
        mlp: names of MLPs, separated by commas.
        attention: names of attentions, separated by commas; each goes with each MLP.
        seeds: of weights and order of the texts, separated by commas.
        equal_parameters: fewer hidden units, or more, give all the parameters of the first.
        output: directory to write to.
    """

    target_loss: float
    mlp: str = "swiglu,bilinear"
    attention: str = "softmax,bilinear"
    seeds: str = "0"
    equal_parameters: bool = False
    output: Path = Path("runs/compare")
    setup: Setup = field(
        default=Setup(training=Schedule(evaluate_every=50, evaluate_texts=256)),
    )

    def run(self) -> None:
        """Train, print and save."""
        mlps, attentions, seeds = self.mlp.split(","), self.attention.split(","), self._seeds()
        # transformers takes seconds to import, and other commands do without it.
        from bilens.report import comparison_table, write_comparison_report  # noqa: PLC0415
        from bilens.train.compare import (  # noqa: PLC0415
            compare_architectures,
            of_equal_size,
            variants,
        )

        config, training, corpus = self.setup.prepare(mlp=mlps[0], attention=attentions[0])
        configs = variants(config, mlps, attentions)
        found = compare_architectures(
            of_equal_size(configs) if self.equal_parameters else configs,
            corpus,
            replace(training, target_loss=self.target_loss),
            self.output,
            seeds=seeds,
            use_cpu=self.setup.use_cpu,
            done=_tell,
        )
        if not is_main_process():
            return
        record = asdict(found) | {"summaries": [asdict(summary) for summary in found.summaries()]}
        write_json(self.output / "comparison.json", record)
        settings = {**asdict(training), "target_loss": self.target_loss, "seed": self.seeds}
        facts = [(name, str(value)) for name, value in settings.items()]
        page = self.output / "comparison.html"
        write_comparison_report(page, found, facts)
        whole = comparison_table(found)
        table = Table(title=whole.caption, box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for name in whole.header:
            table.add_column(name, overflow="fold")
        for row in whole.rows:
            table.add_row(*row)
        out.print(table)
        out.print(f"page: {page}", highlight=False, soft_wrap=True)

    def _seeds(self) -> list[int]:
        try:
            return [int(seed) for seed in self.seeds.split(",")]
        except ValueError as error:
            raise BilensError(
                f"--seeds={self.seeds}, expected whole numbers separated by commas"
            ) from error


def _tell(curve: "LossCurve") -> None:
    if is_main_process():
        last = curve.points[-1]
        out.print(
            f"{curve.architecture}, seed {curve.seed}: validation loss {last.loss:.4f} after "
            f"{last.steps:,.0f} steps",
            highlight=False,
            soft_wrap=True,
        )

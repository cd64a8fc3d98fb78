"""`bilens compare`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from bilens.cli.analyses import show_reading, write_reading
from bilens.cli.terminal import out
from bilens.cli.train import LanguageSetup
from bilens.lazy_imports import lazy_import, pd
from bilens.nn import MlpName
from bilens.nn.language_settings import LanguageSettings
from bilens.train.settings import LanguageTraining, check_precision

if TYPE_CHECKING:
    from bilens import report
    from bilens.train import language
else:  # transformers and plotly take seconds to import, and other commands do without them.
    report, language = lazy_import("bilens.report"), lazy_import("bilens.train.language")


@dataclass
class SharedModel(LanguageSettings):
    """Settings that all models share."""

    mlp: tyro.conf.Fixed[tyro.conf.Suppress[MlpName]] = "bilinear"
    attention: tyro.conf.Fixed[tyro.conf.Suppress[str]] = "softmax"


@dataclass(frozen=True)
class SharedTraining(LanguageTraining):
    """Settings that all trainings share."""

    seed: tyro.conf.Fixed[tyro.conf.Suppress[int]] = 0


@dataclass(frozen=True)
class Compare(LanguageSetup):
    """Train architectures on the same texts in the same order to the same validation loss.

    Prints parameters, and the steps, tokens and seconds that each needed; the first architecture is
    the reference of all ratios. The output holds comparison.json, comparison.html with the loss
    curves, and a run directory for each model and seed. After ctrl-C the same command resumes. For
    several processes write `torchrun --nproc-per-node=N -m bilens` instead of `bilens`.

        bilens compare --mlp swiglu bilinear --equal-parameters
        bilens compare --data stories.txt --preset tiny --seeds 0 1 2

    Attributes:
        mlp: kinds of MLP.
        attention: kinds of attention; each is trained with each MLP.
        seeds: of weights and order of the texts.
        equal_parameters: choose hidden units so that all have as many parameters as the first.
        output: directory to write to.
    """

    mlp: tuple[MlpName, ...] = ("swiglu", "bilinear")
    attention: tuple[str, ...] = ("softmax", "bilinear")
    seeds: tuple[int, ...] = (0,)
    equal_parameters: bool = False
    output: Path = Path("runs/compare")
    model: SharedModel = field(default_factory=SharedModel)
    training: SharedTraining = field(default_factory=SharedTraining)

    @classmethod
    def default_for(cls, args: Sequence[str]) -> "Compare":
        """Return the settings of a preset, with validations as often as a crossing needs."""
        preset = LanguageSetup.default_for(args)
        # A crossing is interpolated between two validations.
        often = replace(preset.training, evaluate_every=50, evaluate_texts=256)
        return cls(
            model=SharedModel(**preset.model.settings()), training=SharedTraining(**vars(often))
        )

    def run(self) -> dict[str, Any] | None:
        """Train, print and save."""
        mlps, attentions = self.mlp, self.attention
        for attention in attentions:
            check_precision(attention, self.training.precision)
        config, corpus = self.prepare(mlp=mlps[0], attention=attentions[0])
        configs = language.variants(config, mlps, attentions)
        # Plain settings, without the subclass that hides the seed from the command line.
        names = [field.name for field in fields(LanguageTraining)]
        training = LanguageTraining(**{name: getattr(self.training, name) for name in names})
        comparison = language.compare_architectures(
            language.of_equal_size(configs) if self.equal_parameters else configs,
            corpus,
            training,
            self.output,
            seeds=self.seeds,
            use_cpu=self.use_cpu,
            done=self._tell,
        )
        # Other processes train along and print nothing.
        if not self.is_main_process():
            return None
        reading = report.ComparisonReading(comparison, asdict(training) | {"seed": self.seeds})
        show_reading(reading)
        page = self.output / "comparison.html"
        write_reading(reading, page)
        out.print(f"page: {page}")
        return reading.record()

    def _tell(self, curve: "pd.DataFrame") -> None:
        if self.is_main_process():
            last = curve.iloc[-1]
            out.print(
                f"{last['mlp']} MLP, {last['attention']} attention, seed {last['seed']}: "
                f"validation loss {last['loss']:.4f} after {last['steps']:,.0f} steps"
            )

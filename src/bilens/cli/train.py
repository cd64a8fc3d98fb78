"""`bilens train`: images or language."""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bilens.cli.console import DataDir, choose_device, out
from bilens.nn.settings import ClassifierConfig, LanguageSettings
from bilens.settings import Between, CheckedSettings
from bilens.train.settings import ClassifierTraining, LanguageTraining, check_precision

Hidden = Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress]


@dataclass(frozen=True)
class Architecture(ClassifierConfig):
    """The model, without the sizes of the data. Defaults are Table 2 of Pearce et al. 2024."""

    n_inputs: Hidden = 1
    n_classes: Hidden = 1
    image_shape: tyro.conf.Fixed[tyro.conf.Suppress[tuple[int, int] | None]] = None
    class_names: tyro.conf.Fixed[tyro.conf.Suppress[tuple[str, ...]]] = ()


@dataclass(frozen=True)
class TrainImages(CheckedSettings):
    """Train an image classifier from scratch and save it.

    The run directory holds config.json and model.safetensors, which bilens.load and
    from_pretrained read. Besides, it has training.json, a line of metrics.jsonl for each epoch, and
    checkpoints. --resume continues from the last intact one. Ctrl-C stops between two steps
    and loses nothing.

        bilens train images --data mnist
        bilens train images --seeds 5 --n-layers 2 --output runs/five

    Attributes:
        data: digits (bundled, 8x8), mnist, fashion-mnist, hub:owner/name, or a folder: of class
            folders with PNG or JPEG images, or of four IDX files.
        data_dir: folder that holds the IDX files of mnist or fashion-mnist; by default the
            environment variable BILENS_DATA, and without that the Hugging Face hub.
        output: run directory; by default runs/NAME-OF-THE-DATA.
        seeds: train this many models, from --seed on, each in a directory of its own below output.
        resume: continue an earlier training in output.
        device: cpu, cuda, cuda:1, mps, ...; auto takes a GPU if the machine has one.
    """

    data: str = "digits"
    data_dir: DataDir = None
    output: Path | None = None
    seeds: Annotated[int, Between(1, 1024)] = 1
    resume: bool = False
    device: str = "auto"
    architecture: Architecture = field(default_factory=Architecture)
    training: ClassifierTraining = field(default_factory=ClassifierTraining)

    @property
    def place(self) -> Path:
        return Path("runs") / Path(self.data).resolve().name

    def run(self) -> dict[str, Any]:
        from bilens.data import load_images
        from bilens.train import train_classifier, train_classifiers

        data = load_images(self.data, self.data_dir).to(choose_device(self.device))
        sizes = {"n_inputs": data.n_inputs, "n_classes": data.n_classes}
        images = {"image_shape": data.shape, "class_names": data.class_names}
        config = ClassifierConfig(**asdict(self.architecture) | sizes | images)
        run = self.output or self.place
        if self.seeds == 1:
            trained = [train_classifier(config, data, self.training, run, resume=self.resume)]
            runs = [run]
        else:
            seeds = range(self.training.seed, self.training.seed + self.seeds)
            trained = train_classifiers(config, data, self.training, seeds, run, resume=self.resume)
            runs = [run / f"seed-{seed}" for seed in seeds]
        accuracies = [history[-1]["test_accuracy"] for _, history in trained]
        for folder, accuracy in zip(runs, accuracies, strict=True):
            out.print(f"{folder}: test accuracy {accuracy:.2%}")
        mean, spread = statistics.mean(accuracies), None
        if len(accuracies) > 1:
            spread = statistics.stdev(accuracies)
            out.print(
                f"{len(accuracies)} seeds: {mean:.2%} on average, standard deviation {spread:.2%}"
            )
        by_run = dict(zip(map(str, runs), accuracies, strict=True))
        return {"test_accuracy": mean, "standard_deviation": spread, "runs": by_run}


@dataclass(frozen=True)
class TrainLanguage:
    """Train a language model from scratch and save it with its tokenizer.

    The run directory holds the model and the tokenizer as Hugging Face folders do. Besides, it has
    training.json, metrics.jsonl and checkpoints. --resume continues from the last intact one. For
    several processes write `torchrun --nproc-per-node=N -m bilens` instead of `bilens`.

        bilens train language --data grammar
        bilens train language --data stories.txt --preset tiny --report-to tensorboard

    Attributes:
        data: grammar (a synthetic language made on the spot), tinystories, or a text, parquet or
            jsonl file, or a folder of them.
        data_dir: folder that holds tinystories; by default the environment variable BILENS_DATA,
            and without that the Hugging Face hub.
        preset: grammar, tiny (minutes on two cores), paper (a GPU) or 500m (several GPUs): values
            of the settings below. By default grammar for the grammar and tiny for other data.
        device: auto takes a GPU if the machine has one; cpu does not use it.
        model: of the preset, with the settings that are given.
        training: the same.
        output: run directory; by default runs/NAME-OF-THE-DATA.
        resume: continue an earlier training in output.
    """

    data: str = "grammar"
    data_dir: DataDir = None
    preset: Literal["grammar", "tiny", "paper", "500m"] | None = None
    device: Literal["auto", "cpu"] = "auto"
    model: LanguageSettings = field(default_factory=LanguageSettings)
    training: LanguageTraining = field(default_factory=LanguageTraining)
    output: Path | None = None
    resume: bool = False

    @classmethod
    def default_for(cls, args: Sequence[str]) -> "TrainLanguage":
        """Return the settings of the preset in the arguments of the command line."""
        from bilens.train.settings import PRESETS

        known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        # Before the real parser, whose defaults depend on the preset.
        known.add_argument("--preset")
        known.add_argument("--data", default="grammar")
        given, _ = known.parse_known_args(args)
        preset = PRESETS.get(given.preset or ("grammar" if given.data == "grammar" else "tiny"))
        return cls() if preset is None else cls(model=preset.model, training=preset.training)

    @property
    def place(self) -> Path:
        return Path("runs") / Path(self.data).resolve().name

    def run(self) -> dict[str, Any] | None:
        from bilens.data import load_corpus
        from bilens.nn.language import LanguageConfig
        from bilens.processes import this_process
        from bilens.train.language import train_language

        config = LanguageConfig(**self.model.settings())
        check_precision(config.attention, self.training.precision)
        run, use_cpu = self.output or self.place, self.device == "cpu"
        # One process fills the cache of token ids, and the others open it.
        with this_process(cpu=use_cpu).main_process_first():
            corpus = load_corpus(
                self.data, n_ctx=config.n_ctx, vocab_size=config.vocab_size, data_dir=self.data_dir
            )
        # A small corpus may have fewer tokens than were asked for.
        config.vocab_size = len(corpus.tokenizer)
        model, history = train_language(
            config, corpus, self.training, run, resume=self.resume, use_cpu=use_cpu
        )
        if not this_process().is_main_process:
            return None
        loss = next(r["eval_loss"] for r in reversed(history) if "eval_loss" in r)
        size = sum(parameter.numel() for parameter in model.parameters())
        out.print(f"{run}: {size:,} parameters, validation loss {loss:.4f} nats a token")
        return {"run": run, "parameters": size, "validation_loss": loss}


@dataclass(frozen=True)
class Train:
    """Train a model from scratch and save it.

    Each kind has settings of its own: `bilens train images --help`.

        bilens train images --data digits
        bilens train language --data grammar

    Attributes:
        what: images or language.
    """

    what: (
        Annotated[TrainImages, tyro.conf.subcommand("images")]
        | Annotated[TrainLanguage, tyro.conf.subcommand("language")]
    )

    @staticmethod
    def default_for(args: Sequence[str]) -> Any:
        if args[:1] != ["language"]:
            return tyro.MISSING
        default: Any = TrainLanguage.default_for(args)
        return Train(default)

    def run(self) -> dict[str, Any] | None:
        return self.what.run()

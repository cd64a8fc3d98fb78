"""What the commands that train language models share: data, preset, model and training."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from bilens.cli.console import DataDir
from bilens.lazy_imports import lazy_import
from bilens.nn.language_settings import LanguageSettings
from bilens.train.settings import PRESETS, LanguageTraining, check_precision

if TYPE_CHECKING:
    import accelerate

    from bilens import data as texts
    from bilens.nn import language
else:  # transformers takes seconds to import, and classifiers do without it.
    accelerate = lazy_import("accelerate")
    texts = lazy_import("bilens.data")
    language = lazy_import("bilens.nn.language")

__all__ = ["LanguageSetup"]


@dataclass(frozen=True)
class LanguageSetup:
    """What is trained, on what and how.

    Attributes:
        data: grammar (a synthetic language made on the spot), tinystories, or a text, parquet or
            jsonl file, or a folder of them.
        data_dir: folder that holds tinystories; by default the environment variable BILENS_DATA,
            and without that the Hugging Face hub.
        preset: grammar, tiny (minutes on two cores), paper (a GPU) or 500m (several GPUs), which
            the settings below begin with; by default grammar for the grammar and tiny for all else.
        device: auto takes a GPU where there is one; cpu leaves it alone.
        model: of the preset, but for what is given.
        training: the same.
    """

    data: str = "grammar"
    data_dir: DataDir = None
    preset: Literal["grammar", "tiny", "paper", "500m"] | None = None
    device: Literal["auto", "cpu"] = "auto"
    model: LanguageSettings = field(default_factory=LanguageSettings)
    training: LanguageTraining = field(default_factory=LanguageTraining)

    @classmethod
    def default_for(cls, args: Sequence[str]) -> "LanguageSetup":
        """The settings of the preset that arguments of the command line ask for."""
        known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        known.add_argument("--preset")
        known.add_argument("--data", default="grammar")
        given, _ = known.parse_known_args(args)
        preset = PRESETS.get(given.preset or ("grammar" if given.data == "grammar" else "tiny"))
        return cls() if preset is None else cls(model=preset.model, training=preset.training)

    @property
    def use_cpu(self) -> bool:
        """Whether GPUs are left alone."""
        return self.device == "cpu"

    def prepare(self, **parts: str) -> "tuple[language.LanguageConfig, texts.Corpus]":
        """The model's settings and the texts, which one process makes ready.

        Args:
            parts: settings of the model that the command takes itself.

        Raises:
            BilensError: the settings do not fit together; nothing is loaded then.
        """
        config = language.LanguageConfig(**{**self.model.settings(), **parts})
        check_precision(config.attention, self.training.precision)
        # One process fills the cache of token ids, and the others open it.
        with accelerate.PartialState(cpu=self.use_cpu).main_process_first():
            corpus = texts.load_corpus(
                self.data,
                n_ctx=config.n_ctx,
                vocab_size=config.vocab_size,
                data_dir=self.data_dir,
            )
        # A small corpus may have fewer tokens than were asked for.
        config.vocab_size = len(corpus.tokenizer)
        return config, corpus

    def is_main_process(self) -> bool:
        """Whether this is the process that speaks, of one or several."""
        return bool(accelerate.PartialState().is_main_process)

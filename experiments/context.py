"""The context of every recipe: data, cached trained models, and a scale."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file

from bilens import load
from bilens.analysis import ContextList, Table
from bilens.data import Corpus, ImageData, load_corpus, load_images
from bilens.nn import ClassifierConfig, ImageClassifier, LanguageSettings
from bilens.train import ClassifierTraining, LanguageTraining, train_classifiers
from experiments.autoencoder import (
    AutoencoderTraining,
    Sampler,
    SparseAutoencoder,
    save_whole,
    train_autoencoder,
)
from experiments.results import Row, commit, write_json

if TYPE_CHECKING:
    from bilens.transformer import ResidualModel

Scale = Literal["small", "paper"]


@dataclass(frozen=True)
class Outcome:
    """Results of a recipe.

    Attributes:
        numbers: measured numbers for JSON, beside the source's if it has any.
        figures: figures by the name of their file.
        parts: further tables and texts of its page.
        rows: what the file of results states.
        settings: those that the rows' texts name, beside the scale.
        details: what a page of its own shows beside the rows.
    """

    numbers: dict[str, Any]
    figures: Mapping[str, Figure] = field(default_factory=dict)
    parts: Sequence[Table | ContextList] = ()
    rows: Sequence[Row] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    details: Any = None

    @classmethod
    def of_tables(cls, tables: dict[str, pd.DataFrame]) -> "Outcome":
        """Return the outcome whose numbers are those of tables with these names."""
        numbers = {name: table.to_dict("records") for name, table in tables.items()}
        return cls(numbers, parts=[Table(table, name) for name, table in tables.items()])


@dataclass(frozen=True)
class RecipeContext:
    """Scale and folders of a recipe.

    Attributes:
        scale: small fits a laptop in minutes; paper is as large as the source.
        models: folder of trained models, which recipes share; a stopped training resumes there.
        data_dir: folder of the IDX files; see `bilens.data.load_images`.
        seeds: how many seeds a training has; by default those of the recipe's scale.
        seed: the first of them.
    """

    scale: Scale
    models: Path
    data_dir: Path | None = None
    seeds: int | None = None
    seed: int = 0

    def choose(self, small: Any, paper: Any) -> Any:
        """Return one of two values, by the scale."""
        return small if self.scale == "small" else paper

    def seed_range(self, of_scales: tuple[int, int]) -> range:
        """Return the seeds of a recipe, given how many it has at either scale."""
        return range(self.seed, self.seed + (self.seeds or self.choose(*of_scales)))

    @property
    def folder(self) -> Path:
        """The folder of data."""
        return self.data_dir or Path(os.environ.get("BILENS_DATA", "."))

    @cached_property
    def mnist(self) -> ImageData:
        """The MNIST digits."""
        return load_images("mnist", self.data_dir)

    @cached_property
    def fashion(self) -> ImageData:
        """The Fashion-MNIST clothes."""
        return load_images("fashion-mnist", self.data_dir)

    def measured(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return numbers that this commit measured, or measure them and save them with the models.

        So a stopped recipe resumes with the next model.
        """
        path = self.models / "measured" / commit() / f"{name}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, measure())
        numbers: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return numbers

    def autoencoder(
        self, vectors: str, n_features: int, sample: Sampler, training: AutoencoderTraining
    ) -> SparseAutoencoder:
        """Return a trained sparse autoencoder of these vectors, from its file if it exists."""
        settings = _changed(training, "seed")
        path = self.models / f"{vectors}-{n_features}-{settings}.safetensors"
        if not path.exists():
            kept = path.with_name(f"{path.stem}.unfinished")
            model = train_autoencoder(sample, n_features, training, kept)
            save_whole({name: x.contiguous() for name, x in model.state_dict().items()}, path)
            kept.unlink(missing_ok=True)
        weights = load_file(path)
        model = SparseAutoencoder(*weights["features"].shape)
        model.load_state_dict(weights)
        return model.requires_grad_(False)

    def classifiers(
        self,
        data: ImageData,
        training: ClassifierTraining,
        seeds: Sequence[int],
        *,
        d_model: int = 300,
        layers: int = 1,
        affine: bool = False,
    ) -> list[ImageClassifier]:
        """Return the same model from several seeds, in place of the training's.

        Models that exist in the folder of models are loaded from there. With `affine` they have
        biases and residuals.
        """
        config = ClassifierConfig(
            n_inputs=data.n_inputs,
            n_classes=data.n_classes,
            d_model=d_model,
            n_layers=layers,
            bias=affine,
            residual=affine,
            image_shape=data.shape,
            class_names=data.class_names,
        )
        settings = _changed(replace(training, seed=0), "epochs")
        kind = "affine-" if affine else ""
        name = f"{data.name}-{layers}x{d_model}-{kind}{settings}"
        run = self.models / re.sub(r"[^\w.=-]", "", name)
        resume = any(has_begun(run / f"seed-{seed}") for seed in seeds)
        trained = train_classifiers(config, data, training, seeds, run, resume=resume)
        return [model.requires_grad_(False) for model, _ in trained]

    def language(
        self, name: str, training: LanguageTraining, model: LanguageSettings
    ) -> "ResidualModel":
        """Return a trained language model, from the folder of models if it exists."""
        # transformers takes seconds to import, and most recipes do without it.
        config = import_module("bilens.nn.language").LanguageConfig(**model.settings())
        settings = f"{_changed(model)}-{_changed(training, 'seed', 'epochs')}"
        run = self.models / re.sub(r"[^\w.=-]", "", f"{name}-{settings}")
        if not has_begun(run) or not json.loads((run / "training.json").read_text())["finished"]:
            corpus = self.corpus(name, config.n_ctx, config.vocab_size)
            train = import_module("bilens.train.language").train_language
            train(config, corpus, training, run, resume=has_begun(run))
        return load(run)  # type: ignore[return-value]

    def corpus(self, name: str, n_ctx: int, vocab_size: int) -> Corpus:
        """Load texts in tokens; see `bilens.data.load_corpus`."""
        return load_corpus(name, n_ctx=n_ctx, vocab_size=vocab_size, data_dir=self.data_dir)


def has_begun(run: Path) -> bool:
    """Return whether a directory holds a training, which can be resumed."""
    return (run / "training.json").is_file()


def _changed(
    training: ClassifierTraining | AutoencoderTraining | LanguageTraining | LanguageSettings,
    *always: str,
) -> str:
    """Return the settings that differ from the defaults, and those in `always`."""
    default = type(training)()
    return "-".join(
        f"{name}={value}"
        for name, value in vars(training).items()
        if value != getattr(default, name) or name in always
    )


@torch.no_grad()
def validation_loss(model: Any, corpus: Corpus, batch_size: int = 16) -> float:
    """Return the mean loss of a language model over the validation set's tokens, in nats."""
    losses = [
        model(ids, labels=ids).loss * len(ids)
        for start in range(0, len(corpus.validation), batch_size)
        for ids in [corpus.validation[start : start + batch_size]["input_ids"]]
    ]
    return float(sum(losses)) / len(corpus.validation)

"""Training that resumes with the same bits."""

from typing import TYPE_CHECKING

from bilens.lazy_imports import lazy_names

if TYPE_CHECKING:
    from bilens.train.classifier import train_classifier, train_classifiers
    from bilens.train.run_directory import TRAINING_NAME, is_begun, is_finished, read_training
    from bilens.train.settings import (
        AnnealTraining,
        ClassifierTraining,
        Distillation,
        LanguageTraining,
    )
else:  # Settings of commands do without torch.
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "TRAINING_NAME",
    "AnnealTraining",
    "ClassifierTraining",
    "Distillation",
    "LanguageTraining",
    "is_begun",
    "is_finished",
    "read_training",
    "train_classifier",
    "train_classifiers",
]

"""Training that resumes with the same bits."""

from typing import TYPE_CHECKING

from bilens.lazy_imports import lazy_names

if TYPE_CHECKING:
    from bilens.train.classifier import train_classifier, train_classifiers
    from bilens.train.settings import (
        PRESETS,
        AnnealTraining,
        ClassifierTraining,
        Distillation,
        LanguageTraining,
        TensoriseTraining,
    )
else:  # Settings of commands do without torch.
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "PRESETS",
    "AnnealTraining",
    "ClassifierTraining",
    "Distillation",
    "LanguageTraining",
    "TensoriseTraining",
    "train_classifier",
    "train_classifiers",
]

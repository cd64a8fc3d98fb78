"""Training, resumable to the bit."""

from bilens.train.classifier import (
    METRICS_NAME,
    TRAINING_NAME,
    ClassifierTraining,
    train_classifier,
)

__all__ = ["METRICS_NAME", "TRAINING_NAME", "ClassifierTraining", "train_classifier"]

"""Training, resumable to the bit."""

from bilens.train.autoencoder import (
    AutoencoderTraining,
    Sampler,
    pair_sampler,
    row_sampler,
    similarity_penalty,
    train_autoencoder,
)
from bilens.train.classifier import (
    METRICS_NAME,
    ClassifierTraining,
    train_classifier,
)
from bilens.train.state import STATE_NAME, TRAINING_NAME, read_training

__all__ = [
    "METRICS_NAME",
    "STATE_NAME",
    "TRAINING_NAME",
    "AutoencoderTraining",
    "ClassifierTraining",
    "Sampler",
    "pair_sampler",
    "read_training",
    "row_sampler",
    "similarity_penalty",
    "train_autoencoder",
    "train_classifier",
]

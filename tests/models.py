"""Small classifiers that know the digits, and their bonds, once for all tests of a process."""

from functools import cache

import torch

from bilens.data import ImageData, load_images
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.read import BondReading, read_bonds
from bilens.train import ClassifierTraining, train_classifier

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Devices of models in tests of devices; their data stay on the CPU."""

GENTLE = ClassifierTraining(epochs=12, batch_size=50, weight_decay=0.0, input_noise=0.2)


@cache
def digits() -> ImageData:
    return load_images("digits")


@cache
def digit_model(n_layers: int = 1, bias: bool = False) -> ImageClassifier:
    config = ClassifierConfig(64, 10, 24, n_layers, bias=bias, image_shape=(8, 8))
    return train_classifier(config, digits(), GENTLE)[0]


@cache
def small_model(n_layers: int = 1, bias: bool = False) -> ImageClassifier:
    """Return a classifier that has not learned, whose readings and figures are quickly made."""
    torch.manual_seed(0)
    return ImageClassifier(ClassifierConfig(64, 10, 6, n_layers, bias=bias, image_shape=(8, 8)))


@cache
def digit_bonds(bias: bool = False) -> BondReading:
    """Return the bonds of two layers, whose cut loses up to 2 points of accuracy."""
    return read_bonds(digit_model(2, bias), digits(), drop=0.02)

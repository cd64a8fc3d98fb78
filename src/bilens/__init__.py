"""bilens reads neural networks from their weights.

model = bilens.load("runs/mnist")
spectrum = model.tensor().interaction(output=3).eigh(k=10)
spectrum.vectors        # ten pictures
spectrum.activations(x) # what each adds to the logit of 3, for each image
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bilens import convert as convert
    from bilens import data as data
    from bilens import nn as nn
    from bilens import read as read
    from bilens import report as report
    from bilens import tensor as tensor
    from bilens import train as train
    from bilens.errors import BilensError, CheckpointError, DataError, NotBilinearError
    from bilens.models import load
    from bilens.tensor import BilinearTensor, QuadraticForm, Spectrum, TensorSVD

__all__ = [
    "BilensError",
    "BilinearTensor",
    "CheckpointError",
    "DataError",
    "NotBilinearError",
    "QuadraticForm",
    "Spectrum",
    "TensorSVD",
    "load",
]

_ROOMS = ("convert", "data", "nn", "read", "report", "tensor", "train")


def __getattr__(name: str) -> Any:
    # On first use: torch takes a second to import, transformers and plotly some more.
    if name in _ROOMS:
        return import_module(f"bilens.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (import_module(f"bilens.{room}") for room in ("errors", "tensor", "models"))
    return next(getattr(home, name) for home in homes if name in home.__all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})

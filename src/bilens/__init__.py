"""bilens reads neural networks from their weights.

Example:
    >>> model = bilens.load("runs/mnist")
    >>> spectrum = model.tensor().interaction(output=3).eigh(k=10)
    >>> spectrum.vectors  # Ten pictures.
    >>> spectrum.activations(x)  # Contributions to the logit of 3.
"""

import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from bilens.lazy_imports import lazy_names
from bilens.version import __version__

if TYPE_CHECKING:
    from bilens import circuits as circuits
    from bilens import convert as convert
    from bilens import data as data
    from bilens import explore as explore
    from bilens import flows as flows
    from bilens import images as images
    from bilens import language as language
    from bilens import nn as nn
    from bilens import pages as pages
    from bilens import tensor as tensor
    from bilens import train as train
    from bilens import transformer as transformer
    from bilens.circuits import task_directions
    from bilens.circuits.reading import circuit
    from bilens.errors import BilensError, CheckpointError, DataError, NotBilinearError
    from bilens.flows import diff, flow, lens, load_graph
    from bilens.images import certify, class_spectra
    from bilens.language import TokenDirection
    from bilens.models import load
    from bilens.tensor import BilinearTensor, QuadraticForm, Spectrum, TensorSVD, bonds
    from bilens.transformer import Family, ResidualModel, register_family
else:  # torch takes a second to import, transformers and matplotlib some more.
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "BilensError",
    "BilinearTensor",
    "CheckpointError",
    "DataError",
    "Family",
    "NotBilinearError",
    "QuadraticForm",
    "ResidualModel",
    "Spectrum",
    "TensorSVD",
    "TokenDirection",
    "__version__",
    "bonds",
    "certify",
    "circuit",
    "class_spectra",
    "diff",
    "flow",
    "lens",
    "load",
    "load_graph",
    "register_family",
    "task_directions",
]

if "transformers" in sys.modules:
    # From here on its Auto classes open bilens's models. Imported by bilens first, it would take
    # two seconds of every start.
    import_module("bilens.nn.language")

if "ipykernel" in sys.modules:
    # Without ipywidgets tqdm warns in a notebook, in the first cell that loads a model. It is
    # imported by transformers and the hub.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        import_module("tqdm.auto")

"""bilens reads neural networks from their weights.

model = bilens.load("runs/mnist")
spectrum = model.tensor().along(class_=3).eig(k=10)
spectrum.vectors        # ten pictures
spectrum.activations(x) # what each adds to the logit of 3, for each image
"""

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

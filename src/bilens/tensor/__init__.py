"""The mathematics: bilinear layers as third-order tensors, kept in their factors."""

from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.constant import affine, with_constant
from bilens.tensor.quadratic import QuadraticForm
from bilens.tensor.spectrum import Spectrum
from bilens.tensor.svd import TensorSVD

__all__ = [
    "BilinearTensor",
    "QuadraticForm",
    "Spectrum",
    "TensorSVD",
    "affine",
    "with_constant",
]

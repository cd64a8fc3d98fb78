"""The mathematics: bilinear layers as third-order tensors, kept in their factors."""

from bilens.tensor.bilinear import BilinearTensor
from bilens.tensor.constant import affine, with_constant
from bilens.tensor.graph import tree_to_networkx
from bilens.tensor.paths import Paths
from bilens.tensor.quadratic import QuadraticForm
from bilens.tensor.search import TopPaths, top_paths
from bilens.tensor.spectrum import Spectrum
from bilens.tensor.svd import TensorSVD
from bilens.tensor.tree import decompile

__all__ = [
    "BilinearTensor",
    "Paths",
    "QuadraticForm",
    "Spectrum",
    "TensorSVD",
    "TopPaths",
    "affine",
    "decompile",
    "top_paths",
    "tree_to_networkx",
    "with_constant",
]

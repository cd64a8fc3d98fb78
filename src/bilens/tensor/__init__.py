"""The mathematics: bilinear layers as third-order tensors, kept in their factors."""

from bilens.tensor.bilinear import BilinearTensor, TensorSVD
from bilens.tensor.chain import Cut, Products, TensorChain
from bilens.tensor.chain_bonds import Bonds, bonds
from bilens.tensor.factored import FactoredMatrix
from bilens.tensor.factors import with_constant
from bilens.tensor.features import Dictionary, Features, cluster
from bilens.tensor.jacobian_bonds import Moments, balanced_bonds, function_bonds
from bilens.tensor.quadratic import QuadraticForm, Spectrum
from bilens.tensor.tree import Paths, decompile

__all__ = [
    "BilinearTensor",
    "Bonds",
    "Cut",
    "Dictionary",
    "FactoredMatrix",
    "Features",
    "Moments",
    "Paths",
    "Products",
    "QuadraticForm",
    "Spectrum",
    "TensorChain",
    "TensorSVD",
    "balanced_bonds",
    "bonds",
    "cluster",
    "decompile",
    "function_bonds",
    "with_constant",
]

"""From a model to findings."""

from bilens.read.bottleneck import bottleneck_curve
from bilens.read.classifier import Basis, ClassifierReading, class_spectra, read_classifier
from bilens.read.deep import DeepReading, path_accuracies, read_deep
from bilens.read.explanation import Explanation, LogitExplanation, explain
from bilens.read.inputs import top_inputs
from bilens.read.recovery import SparsityReport, loss_recovered, sparsity
from bilens.read.truncation import TruncationCurve, truncation_curve

__all__ = [
    "Basis",
    "ClassifierReading",
    "DeepReading",
    "Explanation",
    "LogitExplanation",
    "SparsityReport",
    "TruncationCurve",
    "bottleneck_curve",
    "class_spectra",
    "explain",
    "loss_recovered",
    "path_accuracies",
    "read_classifier",
    "read_deep",
    "sparsity",
    "top_inputs",
    "truncation_curve",
]

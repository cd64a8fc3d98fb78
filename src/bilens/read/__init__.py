"""From a model to findings."""

from bilens.read.classifier import Basis, ClassifierReading, class_spectra, read_classifier
from bilens.read.explanation import Explanation, LogitExplanation, explain
from bilens.read.inputs import top_inputs
from bilens.read.truncation import TruncationCurve, truncation_curve

__all__ = [
    "Basis",
    "ClassifierReading",
    "Explanation",
    "LogitExplanation",
    "TruncationCurve",
    "class_spectra",
    "explain",
    "read_classifier",
    "top_inputs",
    "truncation_curve",
]

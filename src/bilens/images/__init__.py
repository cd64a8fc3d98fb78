"""From a model to findings."""

from bilens.images.bonds import classifier_bonds, classifier_function_bonds, read_bonds
from bilens.images.bounds import box_bounds
from bilens.images.classifier import attack, class_mask, class_spectra, read_classifier, top_inputs
from bilens.images.deep import path_accuracies, read_deep
from bilens.images.explanation import explain, shared_by_classes, shared_by_paths
from bilens.images.fidelity import TruncationCurve, accurate_ranks, held_out, truncation_curve
from bilens.images.radii import CertifiedRadii, certify, proved_agreement

__all__ = [
    "CertifiedRadii",
    "TruncationCurve",
    "accurate_ranks",
    "attack",
    "box_bounds",
    "certify",
    "class_mask",
    "class_spectra",
    "classifier_bonds",
    "classifier_function_bonds",
    "explain",
    "held_out",
    "path_accuracies",
    "proved_agreement",
    "read_bonds",
    "read_classifier",
    "read_deep",
    "shared_by_classes",
    "shared_by_paths",
    "top_inputs",
    "truncation_curve",
]

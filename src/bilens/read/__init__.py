"""From a model to findings."""

from bilens.read.adversarial import Attack, MaskReading, attack, class_mask, read_masks
from bilens.read.bonds import (
    BondReading,
    Metric,
    classifier_bonds,
    classifier_function_bonds,
    read_bonds,
)
from bilens.read.classifier import (
    Basis,
    ClassifierReading,
    Order,
    read_classifier,
    spectra,
    top_inputs,
)
from bilens.read.cuts import BondDirection, CutReading, End
from bilens.read.deep import (
    ClassPaths,
    DeepReading,
    class_paths,
    load_paths,
    path_accuracies,
    read_deep,
    save_paths,
)
from bilens.read.explanation import (
    BranchExplanation,
    Explanation,
    LogitExplanation,
    explain,
    explain_deep,
)
from bilens.read.fidelity import (
    SparsityReport,
    TruncationCurve,
    accurate_ranks,
    loss_recovered,
    product_accuracies,
    rank_accuracies,
    sparsity,
    truncation_curve,
)
from bilens.read.fourier import FourierReading, read_fourier
from bilens.read.shared import (
    SharedFeature,
    SharedFeatures,
    Use,
    shared_by_classes,
    shared_by_paths,
)

__all__ = [
    "Attack",
    "Basis",
    "BondDirection",
    "BondReading",
    "BranchExplanation",
    "ClassPaths",
    "ClassifierReading",
    "CutReading",
    "DeepReading",
    "End",
    "Explanation",
    "FourierReading",
    "LogitExplanation",
    "MaskReading",
    "Metric",
    "Order",
    "SharedFeature",
    "SharedFeatures",
    "SparsityReport",
    "TruncationCurve",
    "Use",
    "accurate_ranks",
    "attack",
    "class_mask",
    "class_paths",
    "classifier_bonds",
    "classifier_function_bonds",
    "explain",
    "explain_deep",
    "load_paths",
    "loss_recovered",
    "path_accuracies",
    "product_accuracies",
    "rank_accuracies",
    "read_bonds",
    "read_classifier",
    "read_deep",
    "read_fourier",
    "read_masks",
    "save_paths",
    "shared_by_classes",
    "shared_by_paths",
    "sparsity",
    "spectra",
    "top_inputs",
    "truncation_curve",
]

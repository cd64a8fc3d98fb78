"""Other people's models: opened, their weights processed, made bilinear, and read.

Importing it takes as long as transformers does.
"""

from bilens.convert.opening import open_model, open_tokenizer, save_model
from bilens.convert.process import (
    Processing,
    center_unembed,
    center_writing_weights,
    fold_norms,
    fold_value_biases,
    process,
)

__all__ = [
    "Processing",
    "center_unembed",
    "center_writing_weights",
    "fold_norms",
    "fold_value_biases",
    "open_model",
    "open_tokenizer",
    "process",
    "save_model",
]
